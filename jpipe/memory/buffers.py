"""The two kinds of buffers, stacked and flat: arrays in which leaves of many layers lie one after the other.

- A stacked buffer, `[size, *shape]`, holds leaves of one type (a shape, dtype and split over other mesh axes), as many
  as the fullest stage has of them: the kernels of a run of equal layers, whatever stages they are on.
- A flat buffer, `[size]`, holds leaves of one dtype end to end, as many elements as the fullest stage needs: it suits
  types that few stages have. Flattening copies a leaf on an accelerator.

Variables that few stages have may lie turned in a stacked buffer, the largest dimension first: so the table `[V, D]` of
a first stage and the head `[D, V]` of a last one are of one type. A compiler takes a transposed leaf as it lies.

Which leaf lies where is written in a `Storage` (`jpipe.memory.storage`).

A compiler chooses the layout of a loop's carry for the operations inside. Where the loops of forward and backward
disagree, it copies whole buffers from one layout to the other in every tick. So the arrays that they hand to each other
are held to one order of dimensions: boundaries with their last dimension innermost, residuals as the layer's forward
gives them (`result_orders`). The backward then reads a row in the order that it wants, and copies that row at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.jax.in_place import Index, put_slice, take_slice
from jpipe.jax.inside import held_to, orders_chosen
from jpipe.jax.primitives import ClosedJaxpr, shapes_of
from jpipe.jax.tracing import no_mesh
from jpipe.partitioner.axes import spec_of
from jpipe.partitioner.shardings import names_in
from jpipe.processes.progress import task

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


def largest_first(shape: Sequence[int]) -> Order:
    """The order of dimensions by size; of equal ones, the first first."""
    return tuple(sorted(range(len(shape)), key=lambda d: -shape[d]))


class LeafType(NamedTuple):
    """The properties that leaves in one stacked buffer have in common.

    Attributes:
      shape, dtype: those of a whole leaf, before `spec` splits it.
      spec: how the leaves are split over mesh axes besides `stage`.
      order: their dimensions in memory, the outermost first; None if the compiler chooses.
      label: numbers that tell their buffer from others of the same shape and dtype, if there are such others.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec = PartitionSpec()
    order: Order | None = None
    label: tuple[int, ...] | None = None

    @property
    def turned(self) -> LeafType:
        """The type with its dimensions by size, the largest first: a table and its transpose have it in common."""
        order, entries = largest_first(self.shape), [*self.spec, *[None] * len(self.shape)]
        spec = spec_of([names_in(entries[d]) for d in order])
        return self._replace(shape=tuple(self.shape[d] for d in order), spec=spec)

    @property
    def elements(self) -> int:
        """The number of a leaf's elements."""
        return int(np.prod(self.shape))

    @property
    def num_bytes(self) -> int:
        """The number of a leaf's bytes."""
        return self.elements * jnp.dtype(self.dtype).itemsize

    @property
    def name(self) -> str:
        """The buffer's name: `float32_256x128`; behind it mesh axes, an order that isn't row-major, and a label."""
        axes = ["none" if entry is None else str(entry) for entry in self.spec] if any(self.spec) else []
        is_row_major = self.order in (None, tuple(range(len(self.shape))))
        order = [] if is_row_major else ["by", *map(str, self.order or ())]
        label = ["of", *map(str, self.label)] if self.label else []
        return "_".join([self.dtype, "x".join(map(str, self.shape)) or "scalar", *axes, *order, *label])


@dataclass(frozen=True)
class StackedBuffer:
    """A buffer of leaves of one type, `[size, *shape]`; an entry is a leaf.

    Attributes:
      type: the type of the leaves.
      strides: `[K]`, by device along `stage`, the entries between one row and the next.
      size: the entries of the array.
    """

    type: LeafType
    strides: tuple[int, ...]
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape on one stage."""
        return (self.size, *self.type.shape)

    @property
    def spec(self) -> PartitionSpec:
        """How the array is split over mesh axes besides `stage`."""
        return PartitionSpec(None, *self.type.spec)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its leaves."""
        return jnp.dtype(self.type.dtype)

    def take(self, array: jax.Array, entry: Index, shape: tuple[int, ...]) -> jax.Array:
        """The leaf at an entry. `array` may be a device's part; then so is the leaf."""
        array = in_order(array, self.array_order)
        leaf = take_slice(array, (entry,), (1, *array.shape[1:])).reshape(array.shape[1:])
        return in_order(leaf, self.type.order)

    def put(self, array: jax.Array, entry: Index, leaf: jax.Array) -> jax.Array:
        """The array with the leaf at an entry replaced (in place, in a loop)."""
        leaf = in_order(leaf.astype(array.dtype), self.type.order)
        return in_order(put_slice(in_order(array, self.array_order), leaf[None], (entry,)), self.array_order)

    def add(self, array: jax.Array, entry: Index, leaf: jax.Array) -> jax.Array:
        """The array with a leaf added to that at an entry (in place, in a loop)."""
        if array.shape[0] == 1:  # one leaf: add in the array's own shape, without slicing
            return array + leaf.astype(array.dtype)[None]
        return self.put(array, entry, self.take(array, entry, leaf.shape) + leaf.astype(array.dtype))

    def add_to_slice(self, array: jax.Array, entry: Index, leaf: jax.Array) -> jax.Array:
        """As `add`, in the shape of the slice: so a GPU's compiler makes one kernel of reading, adding and writing.

        A TPU's compiler may copy the whole array into its vector memory for that.
        """
        added, array = in_order(leaf.astype(array.dtype), self.type.order)[None], in_order(array, self.array_order)
        return in_order(put_slice(array, take_slice(array, (entry,), added.shape) + added, (entry,)), self.array_order)

    @property
    def array_order(self) -> Order | None:
        """The order of the array's dimensions: the entries outermost."""
        return None if self.type.order is None else (0, *(d + 1 for d in self.type.order))


@dataclass(frozen=True)
class FlatBuffer:
    """A buffer of flattened leaves of one dtype, end to end, `[size]`; an entry is an element.

    Attributes:
      dtype: the dtype of the leaves.
      strides: `[K]`, by device along `stage`, the elements between one row and the next.
      size: the elements of the array.
    """

    dtype: np.dtype
    strides: tuple[int, ...]
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape on one stage."""
        return (self.size,)

    @property
    def spec(self) -> PartitionSpec:
        """How the array is split over mesh axes besides `stage`: not at all."""
        return PartitionSpec()

    def take(self, array: jax.Array, entry: Index, shape: tuple[int, ...]) -> jax.Array:
        """The leaf of a shape that begins at an entry."""
        return take_slice(array, (entry,), (int(np.prod(shape)),)).reshape(shape)

    def put(self, array: jax.Array, entry: Index, leaf: jax.Array) -> jax.Array:
        """The array with the leaf that begins at an entry replaced (in place, in a loop)."""
        return put_slice(array, leaf.reshape(-1).astype(array.dtype), (entry,))

    def add(self, array: jax.Array, entry: Index, leaf: jax.Array) -> jax.Array:
        """The array with a leaf added to that which begins at an entry (in place, in a loop)."""
        return self.put(array, entry, self.take(array, entry, leaf.shape) + leaf.astype(array.dtype))

    def add_to_slice(self, array: jax.Array, entry: Index, leaf: jax.Array) -> jax.Array:
        """As `add`, in the shape of the slice."""
        added = leaf.reshape(-1).astype(array.dtype)
        return put_slice(array, take_slice(array, (entry,), added.shape) + added, (entry,))


Buffer = StackedBuffer | FlatBuffer
