"""Writes pytrees of plain containers as JSON, and builds them again: layers' trees, positions in the data."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.types import Leaf, PyTree

Json: TypeAlias = Any
"""Any value that `json.dumps` takes."""
PathKey: TypeAlias = Any
"""A key of a pytree's path, such as `jax.tree_util.DictKey`; JAX's are no classes to type checkers."""


def containers_to_json(tree: PyTree, leaf_to_json: Callable[[tuple[str, ...], Leaf], Json]) -> Json:
    """Writes a pytree of dicts, lists and tuples as JSON.

    Args:
      tree: the pytree. Other containers become dicts by the names of their fields.
      leaf_to_json: `(path, leaf) -> JSON`; a path is the names of the keys that lead to the leaf.

    Raises:
      TypeError: a dict's key is no string or number.
    """

    def convert(path: tuple[str, ...], node: PyTree) -> Json:
        """Writes a part of the tree, and all below it; `path` leads to it."""
        if node is None:
            return {"none": True}
        children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
        if len(children) == 1 and not children[0][0]:
            return {"leaf": leaf_to_json(path, node)}
        keys = [key for (key,), _ in children]
        items = [convert((*path, name_of(key)), child) for key, (_, child) in zip(keys, children, strict=True)]
        if isinstance(node, list) or type(node) is tuple:
            return {"list" if isinstance(node, list) else "tuple": items}
        return {"dict": [[_key_to_json(path, key), child] for key, child in zip(keys, items, strict=True)]}

    return convert((), tree)


def _key_to_json(path: tuple[str, ...], key: PathKey) -> str | int | float | bool:
    """Returns a dict's key itself, and for another container the field's name; `path` leads to the container."""
    value = key.key if isinstance(key, jax.tree_util.DictKey) else name_of(key)
    if type(value) not in (str, int, float, bool):
        raise TypeError(f"a dict at {'/'.join(path) or 'the root'} has the key {value!r}; use strings or numbers")
    return value


def containers_from_json(encoded: Json, leaf_from_json: Callable[[Json], Leaf]) -> PyTree:
    """The inverse of `containers_to_json`; `leaf_from_json` is the inverse of its `leaf_to_json`."""
    ((kind, value),) = encoded.items()
    read = lambda child: containers_from_json(child, leaf_from_json)
    if kind == "dict":
        return {key: read(child) for key, child in value}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(read, value))
    return None if kind == "none" else leaf_from_json(value)


def name_of(key: PathKey) -> str:
    """A key of a pytree's path as text: `kernel`, `0`."""
    return jax.tree_util.keystr((key,), simple=True)


def value_to_json(path: tuple[str, ...], value: object) -> Json:
    """Writes a number, string, bytes or array as JSON.

    Raises:
      TypeError: the value is none of these.
    """
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    array = np.asarray(value) if isinstance(value, np.ndarray | np.generic | jax.Array) and not is_key else None
    if array is None or array.dtype.kind not in "biufc":
        what = type(value).__name__ if array is None else f"array of {array.dtype}"
        raise TypeError(
            f"the position holds a {what} at {'/'.join(path) or 'its root'}; pass numbers, strings, bytes and arrays"
        )
    return {"array": [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}


def value_from_json(encoded: Json) -> Leaf:
    """The inverse of `value_to_json`."""
    ((kind, value),) = encoded.items()
    if kind == "value":
        return value
    if kind == "bytes":
        return base64.b64decode(value)
    dtype, shape, data = value
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
