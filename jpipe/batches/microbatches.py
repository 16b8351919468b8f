"""Checks a batch, and cuts it into micro-batches: equal parts along the first dimension (GPipe, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.arrays.trees import outline
from jpipe.jaxprs.tracing import trace
from jpipe.layers.base import describe
from jpipe.types import Batch, Leaf, PyTree, Shapes, Structure

REPEATED = "repeat it for each example, np.full(batch_size, value), or leave it out of the batch"
"""What to do with a number for all examples."""


def default_inputs(batch: Batch) -> PyTree:
    """The first layer's inputs: `batch["inputs"]`, the first item of a tuple, or a bare array itself."""
    if isinstance(batch, Mapping):
        if "inputs" not in batch:
            raise ValueError(
                f"the batch is a dict with the keys {sorted(map(str, batch))} and no 'inputs'; name what the first "
                "layer takes 'inputs', or pass inputs=lambda batch: ... to jpipe.Pipeline"
            )
        return batch["inputs"]
    if isinstance(batch, tuple | list):
        if not batch:
            raise ValueError("the batch is an empty tuple; its first item is what the first layer takes")
        return batch[0]
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(batch)):
        raise ValueError(
            f"the batch is a {type(batch).__name__}, in which nothing says what the first layer takes; pass "
            "inputs=lambda batch: batch.... to jpipe.Pipeline"
        )
    return batch


def is_bare(
    batch: Batch, expected: Shapes, inputs: Shapes, read_inputs: Callable[[Batch], PyTree], said: bool | None
) -> bool:
    """Whether `apply` was given the bare inputs rather than a batch that holds them.

    Args:
      batch: what it was given.
      expected: the batch seen at init.
      inputs: what was read from it.
      read_inputs: `batch -> inputs`.
      said: what the caller says; None to tell by the structure, and by the shapes behind the batch dimension.

    Raises:
      ValueError: it is neither, or may be both; the structures or shapes are shown.
    """
    structure, wanted = jax.tree.structure(batch), jax.tree.structure(inputs)
    like_batch, like_inputs = structure == jax.tree.structure(expected), structure == wanted
    if said and not like_inputs:
        raise ValueError(
            f"bare=True, but the batch is {outline('batch', batch)}, and not the model's inputs, "
            f"{outline('inputs', inputs)}; leave bare out"
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
                f"{describe(batch)} may be a batch, which had micro-batches of {describe(expected)} at init, or the "
                f"model's inputs, which had {describe(inputs)}; say which: pipe.apply(variables, batch, bare=False), "
                "or pipe.apply(variables, inputs, bare=True)"
            )
        return fits_inputs
    if like_batch or like_inputs:
        return not like_batch
    with suppress(Exception):  # a batch without what only the loss needs
        if jax.tree.structure(jax.eval_shape(read_inputs, batch)) == wanted:
            return False
    raise ValueError(
        f"the batch is {outline('batch', batch)}: neither a training batch, {outline('batch', expected)}, nor the bare "
        f"inputs, {outline('inputs', inputs)}"
    )


def batch_size(batch: Batch) -> int:
    """B, of a pytree of arrays `[B, ...]`.

    Raises:
      TypeError: a leaf is no array of numbers.
      ValueError: there are no leaves, one is a scalar, or they differ in batch size.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError("the batch holds no arrays")
    sizes: dict[int, str] = {}
    for path, leaf in leaves:
        name = "batch" + jax.tree_util.keystr(path)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            instead = f"; {REPEATED}" if isinstance(leaf, int | float) else ""
            raise TypeError(
                f"{name} is a {type(leaf).__name__}, not an array; batches are pytrees of arrays [B, ...]{instead}"
            )
        _check_dtype(name, leaf.dtype)
        if not leaf.shape:
            raise ValueError(
                f"{name} is a scalar; every array of a batch needs the batch size as its first dimension: {REPEATED}"
            )
        sizes.setdefault(leaf.shape[0], name)
    if len(sizes) > 1:
        parts = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise ValueError(f"the arrays of the batch differ in batch size: {parts}; make their first dimensions equal")
    (size,) = sizes
    if size == 0:
        raise ValueError("batch size 0: the batch holds no examples; pass at least one")
    return size


@dataclass(frozen=True)
class MicroBatch:
    """The shapes of one of the equal micro-batches that a batch is cut into: what a model is traced at.

    Attributes:
      structure: of the batch.
      leaves: its arrays `[b, ...]`.
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

    @property
    def doubled(self) -> MicroBatch:
        """A micro-batch of twice as many examples."""
        twice = (leaf.update(shape=(2 * leaf.shape[0], *leaf.shape[1:])) for leaf in self.leaves)
        return replace(self, leaves=tuple(twice))


def cut(batch: Batch, count: int, *, bare: bool = False) -> MicroBatch:
    """One of `count` micro-batches of a batch `[B, ...]` that passed `batch_size`, as shapes."""
    leaves, structure = jax.tree.flatten(batch)
    shape = lambda a: jax.ShapeDtypeStruct((a.shape[0] // count, *a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype))
    return MicroBatch(structure, tuple(map(shape, leaves)), count, bare)


def cut_for_training(batch: Batch, num_microbatches: int, shards: int) -> MicroBatch:
    """One of M micro-batches, which can be split over the data axes.

    Args:
      batch: `[B, ...]`.
      num_microbatches: M.
      shards: the devices that each micro-batch is split over.

    Raises:
      TypeError, ValueError: it is no batch (`batch_size`), or can't be cut so; sizes that can are named.
    """
    size = batch_size(batch)
    if size % num_microbatches:
        raise ValueError(
            f"batch size {size} is not divisible by num_microbatches={num_microbatches}; use {_alternatives(size)}"
        )
    micro = size // num_microbatches
    if micro % shards:
        raise ValueError(
            f"micro-batches of {micro} ({size} / num_microbatches={num_microbatches}) can't be split over the {shards} "
            f"devices of the mesh's data axes; use a batch size divisible by {num_microbatches * shards}"
        )
    return cut(batch, num_microbatches)


def cut_for_evaluation(batch: Batch, num_microbatches: int, shards: int, *, bare: bool = False) -> MicroBatch:
    """One of equal micro-batches of a batch of any size: M of them, or the next fewer that fit.

    Those that the data axes can split come first; where there are none, every device computes the whole micro-batch.
    """
    size = batch_size(batch)
    fitting = [m for m in range(1, num_microbatches + 1) if size % m == 0]
    return cut(batch, max(fitting, key=lambda m: (size // m % shards == 0, m)), bare=bare)


def _check_dtype(name: str, dtype: np.dtype) -> None:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{name} holds random keys ({dtype}), which a batch can't; pass jax.random.key_data(keys), and call "
            "jax.random.wrap_key_data on it in the layer that reads it"
        )
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(
            f"{name} has the dtype {dtype}, but a batch holds numbers only; leave it out of the batch, or encode it"
        )


def check_no_example(batch: Batch, expected: Shapes) -> None:
    """Checks that a batch isn't a single example of what was seen at init.

    Args:
      batch: pytree of arrays.
      expected: the batch, or its inputs, seen at init, a pytree of ShapeDtypeStructs.

    Raises:
      ValueError: naming the first array that is.
    """
    if jax.tree.structure(batch) != jax.tree.structure(expected):
        return
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    for (path, leaf), want in zip(leaves, jax.tree.leaves(expected), strict=True):
        if np.shape(leaf) and np.shape(leaf) == want.shape[1:]:
            name = "batch" + jax.tree_util.keystr(path)
            raise ValueError(
                f"{name} has the shape {leaf.shape}, that of one example at init; the first dimension of every array "
                f"is the batch: stack examples, as many as num_microbatches divides"
            )


def on_mesh(tree: PyTree, mesh: Mesh) -> PyTree:
    """A batch or a key on all devices of the mesh, as far as it isn't there already or only traced.

    A model may have no parameters that would say where it runs. A process can't put its own array on devices of others,
    and over several every program names the mesh anyway.
    """
    if mesh.is_multi_process:
        return tree
    devices = set(mesh.devices.flat)

    def move(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        if isinstance(leaf, jax.Array) and (not leaf.is_fully_addressable or leaf.sharding.device_set == devices):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(move, tree)


def on_all(tree: PyTree, mesh: Mesh) -> PyTree:
    """Small arrays on all devices of the mesh, those of other processes included."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(on_mesh(tree, mesh))


def placed(tree: PyTree, shardings: PyTree, mesh: Mesh) -> PyTree:
    """Arrays and numbers where `shardings` say, but for those that lie on all devices of the mesh already."""
    devices = set(mesh.devices.flat)

    def move(leaf: Leaf, sharding: NamedSharding) -> Leaf:
        if isinstance(leaf, Tracer) or (isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices):
            return leaf
        if isinstance(leaf, np.ndarray) or not mesh.is_multi_process:
            return jax.device_put(leaf, sharding)
        return jax.jit(lambda x: x, out_shardings=sharding)(leaf)  # this process's own array, on those of others too

    return jax.tree.map(move, tree, shardings)


def _alternatives(size: int) -> str:
    divisors = [str(d) for d in range(1, size + 1) if size % d == 0]
    return " or ".join(filter(None, [", ".join(divisors[:-1]), *divisors[-1:]]))


def split_microbatches(batch: Batch, num_microbatches: int) -> Batch:
    """`[B, ...]` to `[M, B/M, ...]`: micro-batch m holds the m-th run of B/M examples."""
    split = lambda a: jnp.reshape(a, (num_microbatches, a.shape[0] // num_microbatches, *a.shape[1:]))
    return jax.tree.map(split, batch)
