"""Names the mesh axes (`stage`, those that split a batch, all others), reads specs, and makes programs over all.

At each index along the axis `stage` are the layers of one stage. The other axes split the arrays of a stage: the data
axes (`replica`, `data` and `fsdp`, unless the user names others) split the examples of a micro-batch, and any of them
split weights as the layers' metadata asks. What a device does with its parts of arrays is decided by
`jpipe.partitioner`. A mesh and its data axes together are `jpipe.partitioner.splits.Splits`.

Programs are manual over every axis (`on_stages`), so that no compiler adds a collective to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jpipe.jax.inside import with_axis_types
from jpipe.partitioner.shardings import Axis, names_in
from jpipe.types import PyTree

AXIS = "stage"
"""The mesh axis of pipeline stages."""
BATCH_AXES = ("replica", "data", "fsdp")
"""The data axes of users who name none: a micro-batch is split over those of them that the mesh has, in this order."""


def check_batch_axes(mesh: Mesh, names: object) -> tuple[str, ...]:
    """The user's `batch_axes` (a name or several names), as the mesh's data axes in the order in which they are given.

    Raises:
      TypeError: they are no names in an order.
      ValueError: they name `stage`, an axis twice, or an axis that the mesh lacks (the default's may be lacking).
    """
    axes = (names,) if isinstance(names, str) else names
    if not isinstance(axes, Sequence) or not all(isinstance(name, str) for name in axes):
        raise TypeError(f"batch_axes={names!r} aren't names of mesh axes; pass a tuple, such as ('data', 'fsdp')")
    axes, others = tuple(axes), [name for name in mesh.axis_names if name != AXIS]
    if AXIS in axes:
        raise ValueError(f"batch_axes={names!r} names {AXIS!r}, which splits no examples; name some of {others}")
    for name in axes:
        if axes.count(name) > 1:
            raise ValueError(f"batch_axes={names!r} names {name!r} {axes.count(name)} times; name it once")
        if name not in mesh.axis_names and axes != BATCH_AXES:
            raise ValueError(
                f"batch_axes={names!r} names {name!r}, which the mesh {dict(mesh.shape)} lacks; name some of {others}"
            )
    return tuple(name for name in axes if name in mesh.axis_names)


def stage_axes(
    mesh: Mesh | AbstractMesh, batch_axes: Sequence[str], *, jointly: bool = True, over_stages: bool = False
) -> tuple[Axis, ...]:
    """The axes that a stage's arrays are split over: the data axes, and each of the others.

    Mesh axes of one device are left out. At rest, where no axis is told from another, there are no data axes.

    Args:
      mesh: all devices.
      batch_axes: its data axes.
      jointly: whether the data axes are one.
      over_stages: `stage` is one of the others, the last.
    """
    of_several_devices = lambda names: tuple(name for name in names if mesh.shape[name] > 1)
    data = of_several_devices(batch_axes)
    others = [name for name in mesh.axis_names if name not in (AXIS, *batch_axes)] + [AXIS] * over_stages
    together = [data] * bool(data) if jointly else [(name,) for name in data]
    along = [*((names, True) for names in together), *(((name,), False) for name in of_several_devices(others))]
    sizes = lambda names: tuple(mesh.shape[name] for name in names)
    return tuple(Axis(names, sizes(names), is_data) for names, is_data in along)


def spec_of(entries: Sequence[Sequence[str]]) -> PartitionSpec:
    """The PartitionSpec that names these mesh axes for each dimension, without empty entries at the end."""
    joined = list(map(tuple, entries))
    while joined and not joined[-1]:
        joined.pop()
    return PartitionSpec(*joined)


def split_by(spec: PartitionSpec, over: Callable[[str], bool]) -> PartitionSpec:
    """A spec with only those mesh axes for which `over` is true."""
    return spec_of([list(filter(over, names_in(entry))) for entry in spec])


def on_all_stages(spec: PartitionSpec) -> bool:
    """Whether an array is split over `stage`, so that each stage has a part of it."""
    return any(AXIS in names_in(entry) for entry in spec)


def within_stage(spec: PartitionSpec) -> PartitionSpec:
    """How an array is split over other mesh axes than `stage`."""
    return split_by(spec, lambda name: name != AXIS)


def gather_axes(part: jax.Array, spec: PartitionSpec, over: Collection[str]) -> jax.Array:
    """A device's part of an array that is split by `spec`, gathered along the axes `over`; others still split it."""
    for dim, entry in enumerate(split_by(spec, lambda name: name in over)):
        if entry is not None:
            part = lax.all_gather(part, entry, axis=dim, tiled=True)
    return part


def scatter_axes(part: jax.Array, spec: PartitionSpec, over: Collection[str]) -> jax.Array:
    """The inverse of `gather_axes` for partial sums: adds them up, and each device keeps its own part of the sum."""
    for dim, entry in enumerate(split_by(spec, lambda name: name in over)):
        if entry is not None:
            part = lax.psum_scatter(part, entry, scatter_dimension=dim, tiled=True)
    return part


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
