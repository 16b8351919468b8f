"""Batches: checked, and cut into micro-batches (GPipe, section 2.2: equal parts along the first dimension)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def default_inputs(batch: Any) -> Any:
    """What the first layer takes: `batch["inputs"]`, the first item of a tuple, or a bare array itself."""
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


def is_bare(batch: Any, expected: Any, read_inputs: Callable[[Any], Any]) -> bool:
    """Whether `apply` was given the bare inputs rather than a batch that holds them.

    Args:
      batch: what it was given.
      expected: the batch seen at init.
      read_inputs: `batch -> inputs`.

    Raises:
      ValueError: it is neither; both structures are shown.
    """
    structure = jax.tree.structure(batch)
    inputs = jax.tree.structure(jax.eval_shape(read_inputs, expected))
    if structure == jax.tree.structure(expected):
        return False
    if structure == inputs:
        return True
    try:  # a batch without what only the loss needs
        found = jax.tree.structure(jax.eval_shape(read_inputs, batch))
    except Exception:
        found = None
    if found is None or found != inputs:  # a PyTreeDef can't be compared with None
        raise ValueError(
            f"the batch has the structure {structure}: neither that of a training batch, "
            f"{jax.tree.structure(expected)}, nor that of the bare inputs, {inputs}"
        )
    return False


def batch_size(batch: Any) -> int:
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
            raise TypeError(f"{name} is a {type(leaf).__name__}, not an array; batches are pytrees of arrays [B, ...]")
        _check_dtype(name, leaf.dtype)
        if not leaf.shape:
            raise ValueError(f"{name} is a scalar; every array of a batch needs the batch size as its first dimension")
        sizes.setdefault(leaf.shape[0], name)
    if len(sizes) > 1:
        parts = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise ValueError(f"the arrays of the batch differ in batch size: {parts}; make their first dimensions equal")
    (size,) = sizes
    if size == 0:
        raise ValueError("batch size 0: the batch holds no examples; pass at least one")
    return size


def microbatch_shapes(batch: Any, num_microbatches: int) -> Any:
    """The shapes of one micro-batch of a batch that passed `batch_size`, a pytree of ShapeDtypeStructs."""
    shape = lambda a: jax.ShapeDtypeStruct(
        (a.shape[0] // num_microbatches, *a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype)
    )
    return jax.tree.map(shape, batch)


def check_divides(size: int, num_microbatches: int, shards: int) -> None:
    """Checks that a batch can be cut into micro-batches for training, and those be split over the data axes.

    Args:
      size: B.
      num_microbatches: M.
      shards: the devices that each micro-batch is split over.

    Raises:
      ValueError: it can't; sizes that can are named.
    """
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


def evaluation_microbatches(size: int, num_microbatches: int, shards: int) -> int:
    """How many equal micro-batches an evaluation batch of any size is cut into: M of them, or the next fewer that fit.

    Those that the data axes can split come first; where there are none, every device computes the whole micro-batch.
    """
    fitting = [m for m in range(1, num_microbatches + 1) if size % m == 0]
    return max(fitting, key=lambda m: (size // m % shards == 0, m))


def _check_dtype(name: str, dtype: Any) -> None:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{name} holds random keys ({dtype}), which a batch can't; pass jax.random.key_data(keys), and call "
            "jax.random.wrap_key_data on it in the layer that reads it"
        )
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(
            f"{name} has the dtype {dtype}, but a batch holds numbers only; leave it out of the batch, or encode it"
        )


def check_no_example(batch: Any, expected: Any) -> None:
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


def on_mesh(tree: Any, mesh: Mesh) -> Any:
    """A batch or a key on all devices of the mesh, as far as it isn't there already or only traced.

    A model may have no parameters that would say where it runs. A process can't put its own array on devices of others,
    and over several every program names the mesh anyway.
    """
    if mesh.is_multi_process:
        return tree
    devices = set(mesh.devices.flat)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        if isinstance(leaf, jax.Array) and (not leaf.is_fully_addressable or leaf.sharding.device_set == devices):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(move, tree)


def on_all(tree: Any, mesh: Mesh) -> Any:
    """Small arrays on all devices of the mesh, those of other processes included."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(on_mesh(tree, mesh))


def _alternatives(size: int) -> str:
    divisors = [str(d) for d in range(1, size + 1) if size % d == 0]
    return " or ".join(filter(None, [", ".join(divisors[:-1]), *divisors[-1:]])) or "at least one example"


def split_microbatches(batch: Any, num_microbatches: int) -> Any:
    """`[B, ...]` to `[M, B/M, ...]`: micro-batch m holds the m-th run of B/M examples."""
    return jax.tree.map(
        lambda a: jnp.reshape(a, (num_microbatches, a.shape[0] // num_microbatches, *a.shape[1:])), batch
    )


def join_microbatches(leaf: Any) -> Any:
    """`[M, B/M, ...]` to `[B, ...]`; one number a micro-batch stays `[M]`."""
    return leaf if leaf.ndim < 2 else jnp.reshape(leaf, (leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]))
