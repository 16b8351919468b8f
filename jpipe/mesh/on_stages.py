"""Makes a program of all devices from a function of one device (`shard_map` over every axis).

Programs are manual over every axis, so that no compiler adds a collective to them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
from jax.sharding import AxisType, Mesh

from jpipe.mesh.axes import AXIS
from jpipe.seam.inside import with_axis_types
from jpipe.types import PyTree


def shapes_only(mesh: Mesh) -> AbstractContextManager:
    """The context in which layers are traced on whole arrays: manual over `stage`, as the programs of `on_stages` are.

    The other axes are Auto, so that a layer that constrains how its activations are split finds the axes that it names.
    """
    types = dict.fromkeys(mesh.axis_names, AxisType.Auto) | {AXIS: AxisType.Manual}
    return jax.sharding.use_abstract_mesh(with_axis_types(mesh.abstract_mesh, types))


def on_stages(
    function: Callable,
    mesh: Mesh,
    in_specs: PyTree,
    out_specs: PyTree,
    before: Callable = lambda *arguments: arguments,
    after: Callable = lambda results: results,
    result_specs: PyTree = None,
) -> Callable:
    """A function of one device's parts as a function of whole arrays, which runs on all devices; call it in `jax.jit`.

    Args:
      function: pytrees of a device's parts of arrays -> pytrees of such parts.
      mesh: the user's mesh.
      in_specs: PartitionSpecs of the arguments of `function`.
      out_specs: PartitionSpecs of its results.
      before: the caller's arguments -> a tuple of the arguments of `function`; all of them whole arrays.
      after: the results of `function` -> those for the caller; all of them whole arrays.
      result_specs: PartitionSpecs of the results for the caller (default: `out_specs`).
    """
    is_explicit = AxisType.Explicit in mesh.axis_types

    def run(*arguments: PyTree) -> PyTree:
        devices = None if is_explicit else mesh  # None is the mesh of the context, whose axes `auto_axes` has made Auto
        # Unchecked, since loop bounds vary from stage to stage, and users' layers know nothing of varying types.
        on_parts = jax.shard_map(function, mesh=devices, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return after(on_parts(*before(*arguments)))

    def call(*arguments: PyTree) -> PyTree:
        specs = out_specs if result_specs is None else result_specs
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.auto_axes(run, axes=mesh.axis_names, out_sharding=specs)(*arguments)

    return call if is_explicit else run
