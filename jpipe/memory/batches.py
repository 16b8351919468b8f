"""Checks a batch, cuts it into equal micro-batches (GPipe, section 2.2), places its rows on the mesh, joins outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jpipe.jax.tracing import trace
from jpipe.jax.trees import check_same_structure, lists_in, named_leaves, outline
from jpipe.layers.base import describe
from jpipe.layers.calls import signature_of
from jpipe.model.groups import LayerGroup
from jpipe.partitioner.axes import AXIS
from jpipe.partitioner.shardings import REPLICATED, AxisSharding, Partial, Shard
from jpipe.partitioner.splits import Splits
from jpipe.types import Batch, Leaf, PyTree, Shapes, Structure

REPEATED = "repeat it for each example, np.full(batch_size, value), or leave it out of the batch"
"""What to do with a number for all examples."""


def batch_size(batch: Batch, like: Shapes = None) -> int:
    """B, the examples of a batch, a pytree of arrays `[B, ...]`, which is like the one seen at init but for its shapes.

    Raises:
      TypeError: a leaf is no array of numbers.
      ValueError: there are no leaves, one is a scalar, or they differ in batch size; the batch has another structure
        than `like`, or is a single example of it.
    """
    if like is not None:
        check_no_example(batch, like)
        check_same_structure("batch", batch, like)
    sizes: dict[int, str] = {}
    for name, leaf in named_leaves("batch", batch):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            are = "batches are pytrees of arrays [B, ...]" + f"; {_remedy(batch)}" * isinstance(leaf, int | float)
            raise TypeError(f"{name} is a {type(leaf).__name__}, not an array; {are}")
        _check_dtype(name, leaf.dtype)
        if not leaf.shape:
            raise ValueError(f"{name} is a scalar, and has no dimension for the batch size; {_remedy(batch)}")
        sizes.setdefault(leaf.shape[0], name)
    if not sizes:
        raise ValueError("the batch holds no arrays")
    if len(sizes) > 1:
        parts = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise ValueError(f"the arrays of the batch differ in batch size: {parts}; {_remedy(batch, 'make them equal')}")
    (size,) = sizes
    if size == 0:
        raise ValueError("batch size 0: the batch holds no examples; pass at least one")
    return size


def _remedy(batch: Batch, otherwise: str = REPEATED) -> str:
    """The remedy for leaves without a batch size, or with another one: they may be the examples of a list."""
    told = "{0} is a list, whose items are arrays of their own: if they are examples, pass np.stack({0})"
    return next(map(told.format, lists_in("batch", batch)), otherwise)


@dataclass(frozen=True)
class MicroBatch:
    """The shapes of one of the equal micro-batches that a batch is cut into; a model is traced at them.

    Attributes:
      structure: the batch's pytree structure.
      leaves: the shapes `[b, ...]` of the arrays of a micro-batch.
      count: M, how many there are.
      bare: whether they are the model's inputs alone.
    """

    structure: Structure
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    count: int
    bare: bool = False

    @property
    def shapes(self) -> Shapes:
        """The shapes as the user's pytree."""
        return jax.tree.unflatten(self.structure, self.leaves)

    @property
    def size(self) -> int:
        """b, the examples of a micro-batch."""
        return self.leaves[0].shape[0]

    def enlarged(self, factor: int) -> MicroBatch:
        """The micro-batch with `factor` times as many examples."""
        leaves = (leaf.update(shape=(factor * leaf.shape[0], *leaf.shape[1:])) for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))


def cut_batch(batch: Batch, count: int, *, bare: bool = False) -> MicroBatch:
    """One of `count` micro-batches of a batch `[B, ...]` that passed `batch_size`, as shapes."""
    leaves, structure = jax.tree.flatten(batch)
    shape = lambda a: jax.ShapeDtypeStruct((a.shape[0] // count, *a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype))
    return MicroBatch(structure, tuple(map(shape, leaves)), count, bare)


def cut_for_training(batch: Batch, num_microbatches: int, shards: int, like: Shapes = None) -> MicroBatch:
    """One of M micro-batches, which can be split over the data axes.

    Args:
      batch: `[B, ...]`.
      num_microbatches: M.
      shards: the devices that each micro-batch is split over.
      like: the batch that was seen at init, if there was one.

    Raises:
      TypeError, ValueError: it is no such batch (`batch_size`), or can't be cut so; sizes that can are named.
    """
    size = batch_size(batch, like)
    if size % num_microbatches:
        raise ValueError(f"batch size {size} is not divisible by {num_microbatches=}; use {_alternatives(size)}")
    if size % (multiple := num_microbatches * shards):
        raise ValueError(
            f"batch size {size} isn't divisible by {num_microbatches=} * {shards} devices; use a multiple of {multiple}"
        )
    return cut_batch(batch, num_microbatches)


def cut_for_evaluation(
    batch: Batch, num_microbatches: int, shards: int, like: Shapes = None, *, bare: bool = False
) -> MicroBatch:
    """One of equal micro-batches of a batch of any size: M of them, or the next fewer that fit.

    Those that the data axes can split come first; where there are none, every device computes the whole micro-batch.
    """
    size = batch_size(batch, like)
    fitting = [m for m in range(1, num_microbatches + 1) if size % m == 0]
    return cut_batch(batch, max(fitting, key=lambda m: (size // m % shards == 0, m)), bare=bare)


def _check_dtype(name: str, dtype: np.dtype) -> None:
    """Checks that a batch's array holds numbers, and no random keys."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{name} has random keys, {dtype}; pass jax.random.key_data(keys), and call jax.random.wrap_key_data on it"
            ", or let each micro-batch have one: inputs=lambda batch, key: ..."
        )
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(f"{name} has the dtype {dtype}, but a batch holds numbers only; leave it out, or encode it")


def check_no_example(batch: Batch, expected: Shapes) -> None:
    """Checks that a batch isn't a single example of the batch that was seen at init.

    Args:
      batch: pytree of arrays.
      expected: the batch, or its inputs, seen at init, a pytree of ShapeDtypeStructs.

    Raises:
      ValueError: naming the first array that is.
    """
    if jax.tree.structure(batch) != jax.tree.structure(expected):
        return
    for (name, leaf), want in zip(named_leaves("batch", batch), jax.tree.leaves(expected), strict=True):
        if np.shape(leaf) and np.shape(leaf) == want.shape[1:]:
            raise ValueError(f"{name} has the shape {leaf.shape}, that of one example at init; stack examples")


def _alternatives(size: int) -> str:
    """The divisors of a batch size, in words."""
    divisors = [str(d) for d in range(1, size + 1) if size % d == 0]
    return " or ".join(filter(None, [", ".join(divisors[:-1]), *divisors[-1:]]))


def split_microbatches(batch: Batch, num_microbatches: int) -> Batch:
    """`[B, ...]` to `[M, B/M, ...]`: micro-batch m holds the m-th run of B/M examples."""
    split = lambda a: jnp.reshape(a, (num_microbatches, a.shape[0] // num_microbatches, *a.shape[1:]))
    return jax.tree.map(split, batch)


# --- bare inputs ------------------------------------------------------------------------------------------------------


def default_inputs(batch: Batch) -> PyTree:
    """The first layer's inputs: `batch["inputs"]`, the first item of a tuple, or a bare array itself."""
    if isinstance(batch, Mapping):
        if "inputs" not in batch:
            raise ValueError(
                f"the batch is a dict with the keys {sorted(map(str, batch))} and no 'inputs'; name what the first "
                "layer takes 'inputs', or pass inputs=lambda batch: ... (by keyword: jpipe.Arguments(...))"
            )
        return batch["inputs"]
    if isinstance(batch, tuple | list):
        if not batch:
            raise ValueError("the batch is an empty tuple; its first item is what the first layer takes")
        return batch[0]
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(batch)):
        raise ValueError(
            f"the batch is a {type(batch).__name__}, and no dict; pass inputs=lambda batch: batch.... to jpipe.Pipeline"
        )
    return batch


def without_key(read_inputs: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A function of the batch that may be called without the random key that it names, for shapes."""
    if "key" not in signature_of(read_inputs):
        return read_inputs
    return lambda batch, key=None: read_inputs(batch, key=jax.random.key(0) if key is None else key)


def is_bare(
    batch: Batch, expected: Shapes, inputs: Shapes, read_inputs: Callable[[Batch], PyTree], said: bool | None
) -> bool:
    """Whether `apply` was given the bare inputs rather than a batch that holds them.

    Args:
      batch: the argument of `apply`.
      expected: the batch seen at init, as shapes.
      inputs: the inputs that were read from it, as shapes.
      read_inputs: `batch -> inputs`.
      said: the caller's word; None to tell by the structure, and by the shapes behind the batch dimension.

    Raises:
      ValueError: it is neither, or may be both; the structures or shapes are shown.
    """
    structure, of_inputs = jax.tree.structure(batch), jax.tree.structure(inputs)
    like_batch, like_inputs = structure == jax.tree.structure(expected), structure == of_inputs
    if said and not like_inputs:
        raise ValueError(
            f"bare=True, but the batch is {outline('batch', batch)}, not {outline('inputs', inputs)}; leave bare out"
        )
    if said is not None:
        return said
    may_be_both = like_batch and like_inputs and read_inputs is not default_inputs
    reads = trace(read_inputs, expected)[0].jaxpr if may_be_both else None
    if reads is not None and reads.outvars != reads.invars:  # the inputs aren't the whole batch
        features = lambda tree: [leaf.shape[1:] for leaf in jax.tree.leaves(tree)]
        fits_batch, fits_inputs = (features(batch) == features(tree) for tree in (expected, inputs))
        if fits_batch == fits_inputs:
            raise ValueError(
                f"{describe(batch)} may be a batch, {describe(expected)}, or inputs, {describe(inputs)}; say which: "
                "pipe.apply(variables, batch, bare=False), or pipe.apply(variables, inputs, bare=True)"
            )
        return fits_inputs
    if like_batch or like_inputs:
        return not like_batch
    with suppress(Exception):  # a batch that lacks arrays that only the loss reads
        if jax.tree.structure(jax.eval_shape(read_inputs, batch)) == of_inputs:
            return False
    raise ValueError(
        f"the batch is {outline('batch', batch)}: neither a training batch, {outline('batch', expected)}, nor the bare "
        f"inputs, {outline('inputs', inputs)}"
    )


# --- outputs ----------------------------------------------------------------------------------------------------------


_HALVES = "examples"


def in_halves(mesh: Mesh) -> Splits:
    """Splits over two devices, each of which has half of the examples and all weights, for layers of this mesh."""
    return Splits(AbstractMesh((*[1] * len(mesh.axis_names), 2), (*mesh.axis_names, _HALVES)), (_HALVES,))


def lying_by_shapes(
    outputs: Shapes, doubled: LayerGroup, lying: Sequence[AxisSharding], size: int
) -> list[AxisSharding]:
    """How a micro-batch lies in the outputs of all, where a layer couples examples, so that shapes have to confirm it.

    Args:
      outputs: those of a micro-batch of b examples, as shapes.
      doubled: the last layer for a micro-batch of 2b, `in_halves`.
      lying: as the layers' operations say.
      size: b.

    Raises:
      ValueError: several axes of a leaf grow with the batch, or one that isn't twice as long for twice as many
        examples: the model makes pairs of examples, or the like.
    """
    found, twice = list(lying), jax.tree.leaves(doubled.gives)
    for i, (name, leaf) in enumerate(named_leaves("outputs", outputs)):
        growing = [d for d, (n, new) in enumerate(zip(leaf.shape, twice[i].shape, strict=True)) if n != new]
        if len(growing) > 1 or any(twice[i].shape[d] != 2 * leaf.shape[d] for d in growing):
            raise ValueError(
                f"{name} has the shape {leaf.shape}, of which {growing} grow with the batch: the model makes pairs of "
                "the examples of a micro-batch alone, or adds some. Return the embeddings, make pairs of them in the "
                'loss, and pass loss_over="batch" to jpipe.Pipeline'
            )
        if not (isinstance(at := lying[i], Shard) and [at.dim] == growing):
            by_halves = doubled.gives_at[i][:1]
            own = Shard(growing[0]) if growing and leaf.shape[growing[0]] == size else REPLICATED
            found[i] = own if not by_halves or not isinstance(by_halves[0], Shard) else by_halves[0]
    return found


def joining(outputs: Shapes, lying: Sequence[AxisSharding], size: int) -> tuple[AxisSharding, ...]:
    """How a micro-batch lies in each leaf of a model's outputs of all, which are joined along the batch axis.

    If it holds examples and more, such as their places, `[b * T]`, the rows of an example have to lie together. A leaf
    without a batch axis may begin with an axis of 1, and then gives one row for each micro-batch.

    Args:
      outputs: those of a micro-batch of b examples, as shapes.
      lying: how examples lie in each leaf.
      size: b.

    Raises:
      ValueError: a leaf has no batch axis and is no sum or mean, or examples lie apart in it; both are named, and what
        to return.
    """
    places = list[AxisSharding]()
    for (name, leaf), at in zip(named_leaves("outputs", outputs), lying, strict=True):
        if at.outer > 1 if isinstance(at, Shard) else not isinstance(at, Partial) and leaf.shape[:1] != (1,):
            raise ValueError(
                f"{name} has the shape {leaf.shape} for micro-batches of {size} examples, in which no axis is the "
                "batch alone. Give it an axis of its own, return means as the loss's metrics, or x[None] for a row of "
                "each micro-batch"
            )
        places.append(at if isinstance(at, Shard) or leaf.shape[:1] != (1,) else Shard(0))
    return tuple(places)


# --- rows on the mesh -------------------------------------------------------------------------------------------------


def data_shard(mesh: Mesh, batch_axes: Sequence[str]) -> tuple[int, int]:
    """`(index, count)`: this process feeds the part `index` of `count` equal parts of each batch, counted from 0.

    Processes that have the same part of the data axes, such as those that differ in their stages, feed the same rows.

    Args:
      mesh: the devices.
      batch_axes: the mesh's data axes.

    Raises:
      ValueError: this process has no device in the mesh, or parts of processes overlap or have gaps.
    """
    process_of = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    data_axes = [mesh.axis_names.index(name) for name in batch_axes]
    process_of = np.moveaxis(process_of, data_axes, range(len(data_axes)))
    processes = [set(row) for row in process_of.reshape(math.prod(process_of.shape[: len(data_axes)]), -1)]
    parts_of = {p: [i for i, part in enumerate(processes) if p in part] for p in set().union(*processes)}
    this = jax.process_index()
    if this not in parts_of:
        raise ValueError(f"process {this} has none of {mesh.size} devices; use all devices: jpipe.make_mesh(...)")
    size = len(parts_of[this])
    for p, parts in sorted(parts_of.items()):
        if len(parts) != size or parts[0] % size or parts[-1] - parts[0] != size - 1:
            raise ValueError(
                f"process {p} has the parts {parts} of {len(processes)}, process {this} has {parts_of[this]}, not "
                f"equal runs of them; order devices as jpipe.make_mesh({AXIS}=..., data=...) does"
            )
    return parts_of[this][0] // size, len(processes) // size


def place_rows(batch: Batch, mesh: Mesh, batch_axes: Sequence[str]) -> Batch:
    """Global arrays `[B, ...]`, split over the data axes, from this process's rows; see `Pipeline.place`."""
    count = data_shard(mesh, batch_axes)[1]
    for name, leaf in named_leaves("batch", batch):
        if isinstance(leaf, Tracer) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            what = "being traced" if isinstance(leaf, Tracer) else "spread over processes already"
            raise ValueError(f"{name} is {what}; place takes the rows of this process, outside of jax.jit")
    rows, shards = batch_size(batch), math.prod(mesh.shape[name] for name in batch_axes)
    if rows * count % shards:
        raise ValueError(
            f"{rows} rows of {count} parts don't fit {shards} devices; place a multiple of {shards // count} rows"
        )
    sharding, join = NamedSharding(mesh, PartitionSpec(tuple(batch_axes))), jax.make_array_from_process_local_data
    return jax.tree.map(lambda leaf: join(sharding, np.asarray(leaf), (rows * count, *leaf.shape[1:])), batch)


def placed(tree: PyTree, shardings: PyTree, mesh: Mesh, *, between_memories: bool = False) -> PyTree:
    """Puts arrays and numbers where `shardings` say; those that lie on all devices already, or are traced, stay.

    Args:
      tree: on the host, on one device or on the mesh. Each process passes the same.
      shardings: a tree like it, or one sharding for all.
      mesh: the devices.
      between_memories: whether those that lie on all devices move to their hosts, or back, as `shardings` say.
    """
    devices = set(mesh.devices.flat)

    def move(leaf: Leaf, sharding: NamedSharding) -> Leaf:
        if isinstance(leaf, Tracer):
            return leaf
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices:
            moves = between_memories and leaf.sharding.memory_kind != sharding.memory_kind
            return jax.device_put(leaf, sharding) if moves else leaf
        if isinstance(leaf, np.ndarray) or not mesh.is_multi_process:
            return jax.device_put(leaf, sharding)
        return jax.jit(lambda x: x, out_shardings=sharding)(leaf)  # an array of this process alone goes to others too

    return jax.tree.map(move, tree, jax.tree.broadcast(shardings, tree))


def on_mesh(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts a batch or a key on all devices of the mesh, unless it lies there already or is traced.

    A model may have no parameters that would say where it runs. With several processes it does nothing: a process can't
    put its own array on devices of others, and every program names the mesh anyway.
    """
    return tree if mesh.is_multi_process else placed(tree, NamedSharding(mesh, PartitionSpec()), mesh)


def on_all(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts small arrays on all devices of the mesh, also on those of other processes."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(on_mesh(tree, mesh))
