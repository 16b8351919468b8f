"""Fixes the order of dimensions in memory for arrays that one loop hands to another.

A compiler chooses the layout of a loop's carry for the operations inside. Where the loops of forward and backward
disagree, it copies whole buffers from one layout to the other in every tick. So the arrays that they hand to each other
are held to one order: boundaries with their last dimension innermost, residuals as the layer's forward gives them. The
backward then reads a row in the order that it wants, and copies that row at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.jaxprs.tracing import no_mesh
from jpipe.seam.inside import held_to, orders_chosen
from jpipe.seam.primitives import ClosedJaxpr, shapes_of
from jpipe.terminal.progress import task

Order = tuple[int, ...]
"""The dimensions of an array, the outermost first."""


def in_order(array: jax.Array, order: Order | None) -> jax.Array:
    """Holds an array to an order; if that is None, the compiler chooses."""
    return array if order is None or array.ndim < 2 else held_to(array, order)


def result_orders(jaxpr: ClosedJaxpr, results: Sequence[int], mesh: Mesh) -> list[Order | None]:
    """The order in which a layer's forward gives some of its results, by compiling it alone for the mesh's devices.

    Only TPUs' compilers choose: elsewhere, and where all of these results are inputs or have one dimension, nothing is
    compiled.

    Args:
      jaxpr: the forward, as one device runs it.
      results: indices of results.
      mesh: the devices.

    Returns:
      For each of the results its order; None where there is no choice.
    """
    inputs, outputs = set(jaxpr.jaxpr.invars), jaxpr.jaxpr.outvars
    shapes = [shape.shape for shape in shapes_of(outputs)]
    chosen = [i for i in results if len(shapes[i]) > 1 and outputs[i] not in inputs]
    orders: dict[int, Order | None] = {i: tuple(range(n)) if (n := len(shapes[i])) > 1 else None for i in results}
    device = mesh.devices.flat[0]
    if device.platform == "tpu" and isinstance(device, jax.Device) and chosen:  # not one that stands in for a TPU
        orders |= _compiled_orders(jaxpr, chosen, mesh)
    return [orders[i] for i in results]


def compact_order(shape: Sequence[int], mesh: Mesh) -> Order | None:
    """The order in which a TPU, which pads the innermost dimension to 128, holds an array in little memory.

    Args:
      shape: an array's shape, such as that of images, `[b, 224, 224, 3]`.
      mesh: the devices.

    Returns:
      The two largest dimensions innermost, `(0, 3, 1, 2)` for these; None where the last is one of them, or the devices
      aren't TPUs.
    """
    by_size = sorted(range(len(shape)), key=lambda d: (shape[d], d))
    if len(shape) < 3 or len(shape) - 1 in by_size[-2:] or mesh.devices.flat[0].platform != "tpu":
        return None
    return (*sorted(by_size[:-2]), *by_size[-2:])


def _compiled_orders(jaxpr: ClosedJaxpr, results: Sequence[int], mesh: Mesh) -> dict[int, Order]:
    """The orders of some results, by index, of a layer that is compiled alone; empty if JAX can't tell them."""
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    everywhere = NamedSharding(mesh, PartitionSpec())
    run = jaxpr_as_fun(jaxpr)
    shapes = [shape.update(sharding=everywhere) for shape in shapes_of(jaxpr.jaxpr.invars)]

    def with_results_first(*arguments: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        outputs = run(*arguments)
        return [outputs[i] for i in results], outputs

    with no_mesh(), task("compiling a layer alone, for the order of its residuals"):
        whole = PartitionSpec()
        on_devices = jax.shard_map(with_results_first, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        shardings = [everywhere] * len(results), [everywhere] * len(jaxpr.jaxpr.outvars)
        return dict(zip(results, orders_chosen(on_devices, shapes, shardings) or (), strict=False))
