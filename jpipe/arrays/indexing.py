"""Reads and writes slices and rows of arrays, and reads tables, at indices that are Python integers or traced.

Indices are never negative here, and JAX is told so: to handle negative ones would be half of a small jaxpr. Of an array
that lies on the host, what is read is brought to the device, and what is written is brought to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.arrays.host import is_on_host, to_device, to_host

Index = int | jax.Array
"""One index, a Python integer or traced."""


def look_up(table: Sequence[int], index: Index) -> Index:
    """`table[index]`; a Python integer if `index` is one, or if all entries are equal."""
    if isinstance(index, int):
        return int(table[index])
    first = int(table[0])
    if len(set(table)) == 1:
        return first
    # Tables that differ by a constant are looked up once.
    return first + take_row(jnp.asarray(np.asarray(table, np.int32) - np.int32(first)), index)


def look_up_once(table: Sequence[int], index: Index) -> Index:
    """As `look_up`, but all its readers share one value.

    A GPU's compiler computes an index that is a slice of a table anew in each kernel that reads it. Where an array is
    read, added to and written at such an index, it then doesn't see that this is one place, and copies the slice by
    kernels of its own. A sum is computed once. (A barrier would do, but not all of this compiler's passes know it.)
    """
    if isinstance(index, int) or len(set(table)) == 1:
        return look_up(table, index)
    first = int(table[0])
    steps = np.asarray(table, np.int32) - np.int32(first)
    return first + jnp.sum(jnp.where(np.arange(len(table), dtype=np.int32) == index, steps, 0), dtype=jnp.int32)


def take_slice(array: jax.Array, index: Sequence[Index], shape: Sequence[int]) -> jax.Array:
    """The slice of `shape` that begins at `index`, which may leave out dimensions at the end: they begin at 0."""
    part = jax.lax.dynamic_slice(array, _start(array, index), shape, allow_negative_indices=False)
    return to_device(part) if is_on_host(array) else part


def put_slice(array: jax.Array, update: jax.Array, index: Sequence[Index]) -> jax.Array:
    """The array with the slice that begins at `index` replaced by `update`; in a loop this copies nothing else."""
    update = to_host(update) if is_on_host(array) else update
    return jax.lax.dynamic_update_slice(array, update, _start(array, index), allow_negative_indices=False)


def take_row(array: jax.Array, row: Index) -> jax.Array:
    """`array[row]`."""
    part = jax.lax.dynamic_index_in_dim(array, row, 0, keepdims=False, allow_negative_indices=False)
    return to_device(part) if is_on_host(array) else part


def put_row(array: jax.Array, value: jax.Array, row: Index) -> jax.Array:
    """The array with `array[row]` replaced by `value`; in a loop this copies nothing else."""
    value = to_host(value) if is_on_host(array) else value
    return jax.lax.dynamic_update_index_in_dim(array, value, row, 0, allow_negative_indices=False)


def _start(array: jax.Array, index: Sequence[Index]) -> list[jax.Array]:
    """One start index a dimension, all of one type: 64-bit mode would mix them."""
    return [jnp.asarray(i, jnp.int32) for i in (*index, *([0] * (array.ndim - len(index))))]
