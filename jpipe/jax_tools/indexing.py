"""Slices and rows of arrays, and entries of tables, at indices that are known or traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def look_up(table: Sequence[int], index: Any) -> Any:
    """`table[index]` for a Python or traced index; a constant where all entries are equal."""
    if isinstance(index, int):
        return int(table[index])
    first = int(table[0])
    if len(set(table)) == 1:
        return first
    # Tables that differ by a constant are looked up once.
    return first + take_row(jnp.asarray(np.asarray(table, np.int32) - np.int32(first)), index)


# Indices are never negative here, and JAX needn't ask whether they are: that is half of a small program.


def take_slice(array: Any, index: tuple, shape: tuple[int, ...]) -> Any:
    """The slice of a shape that begins at an index, of as many dimensions as are given."""
    return jax.lax.dynamic_slice(array, _start(array, index), shape, allow_negative_indices=False)


def put_slice(array: Any, update: Any, index: tuple) -> Any:
    """The array with a slice replaced (in place, in a loop)."""
    return jax.lax.dynamic_update_slice(array, update, _start(array, index), allow_negative_indices=False)


def take_row(array: Any, row: Any) -> Any:
    """`array[row]`."""
    return jax.lax.dynamic_index_in_dim(array, row, 0, keepdims=False, allow_negative_indices=False)


def put_row(array: Any, value: Any, row: Any) -> Any:
    """The array with a row replaced (in place, in a loop)."""
    return jax.lax.dynamic_update_index_in_dim(array, value, row, 0, allow_negative_indices=False)


def _start(array: Any, index: tuple) -> list:
    """Start indices for a slice of `array`, of one type whatever the index is (64-bit mode mixes them)."""
    return [jnp.asarray(i, jnp.int32) for i in (*index, *([0] * (array.ndim - len(index))))]
