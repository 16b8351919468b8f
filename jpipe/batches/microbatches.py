"""Checks a batch, and cuts it into equal micro-batches that the data axes can split (GPipe, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.arrays.trees import check_same_structure, lists_in, named_leaves
from jpipe.types import Batch, Shapes, Structure

REPEATED = "repeat it for each example, np.full(batch_size, value), or leave it out of the batch"
"""What to do with a number for all examples."""


def batch_size(batch: Batch) -> int:
    """B, the examples of a batch, a pytree of arrays `[B, ...]`.

    Raises:
      TypeError: a leaf is no array of numbers.
      ValueError: there are no leaves, one is a scalar, or they differ in batch size.
    """
    sizes: dict[int, str] = {}
    for name, leaf in named_leaves("batch", batch):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            instead = f"; {_remedy(batch)}" if isinstance(leaf, int | float) else ""
            raise TypeError(
                f"{name} is a {type(leaf).__name__}, not an array; batches are pytrees of arrays [B, ...]{instead}"
            )
        _check_dtype(name, leaf.dtype)
        if not leaf.shape:
            fault = "is a scalar; every array of a batch needs the batch size as its first dimension"
            raise ValueError(f"{name} {fault}: {_remedy(batch)}")
        sizes.setdefault(leaf.shape[0], name)
    if not sizes:
        raise ValueError("the batch holds no arrays")
    if len(sizes) > 1:
        parts = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        instead = _remedy(batch, "make their first dimensions equal")
        raise ValueError(f"the arrays of the batch differ in batch size: {parts}; {instead}")
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

    @property
    def doubled(self) -> MicroBatch:
        """A micro-batch of twice as many examples."""
        twice = (leaf.update(shape=(2 * leaf.shape[0], *leaf.shape[1:])) for leaf in self.leaves)
        return replace(self, leaves=tuple(twice))


def cut_batch(batch: Batch, count: int, *, bare: bool = False) -> MicroBatch:
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
    return cut_batch(batch, num_microbatches)


def cut_for_evaluation(batch: Batch, num_microbatches: int, shards: int, *, bare: bool = False) -> MicroBatch:
    """One of equal micro-batches of a batch of any size: M of them, or the next fewer that fit.

    Those that the data axes can split come first; where there are none, every device computes the whole micro-batch.
    """
    size = batch_size(batch)
    fitting = [m for m in range(1, num_microbatches + 1) if size % m == 0]
    return cut_batch(batch, max(fitting, key=lambda m: (size // m % shards == 0, m)), bare=bare)


def _check_dtype(name: str, dtype: np.dtype) -> None:
    """Checks that a batch's array holds numbers, and no random keys."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{name} holds random keys ({dtype}), which a batch can't; pass jax.random.key_data(keys), and call "
            "jax.random.wrap_key_data on it in the layer that reads it"
        )
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(
            f"{name} has the dtype {dtype}, but a batch holds numbers only; leave it out of the batch, or encode it"
        )


def check_like(batch: Batch, expected: Shapes) -> None:
    """Checks that a batch `[B, ...]` is like the one seen at init, but for its shapes.

    Raises:
      ValueError: it has another structure, or is a single example.
    """
    check_same_structure("batch", batch, expected)
    check_no_example(batch, expected)


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
            raise ValueError(
                f"{name} has the shape {leaf.shape}, that of one example at init; the first dimension of every array "
                "is the batch: stack examples, as many as num_microbatches divides"
            )


def _alternatives(size: int) -> str:
    """The divisors of a batch size, in words."""
    divisors = [str(d) for d in range(1, size + 1) if size % d == 0]
    return " or ".join(filter(None, [", ".join(divisors[:-1]), *divisors[-1:]]))


def split_microbatches(batch: Batch, num_microbatches: int) -> Batch:
    """`[B, ...]` to `[M, B/M, ...]`: micro-batch m holds the m-th run of B/M examples."""
    split = lambda a: jnp.reshape(a, (num_microbatches, a.shape[0] // num_microbatches, *a.shape[1:]))
    return jax.tree.map(split, batch)
