"""Names the leaves of pytrees, compares pytrees with expected ones, and decides on the dtypes of leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.types import Leaf, PyTree


def named_leaves(what: str, tree: PyTree) -> list[tuple[str, Leaf]]:
    """The leaves of a pytree, each with its name as a user would write it.

    >>> named_leaves("batch", {"inputs": 0, "targets": 1})
    [("batch['inputs']", 0), ("batch['targets']", 1)]
    """
    return [(what + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def lists_in(what: str, tree: PyTree) -> list[str]:
    """The names of the outermost lists in a pytree.

    >>> lists_in("batch", {"inputs": [[0], [1]], "targets": (2,)})
    ["batch['inputs']"]
    """
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, list))
    return [what + jax.tree_util.keystr(path) for path, node in nodes if isinstance(node, list)]


def check_same_structure(what: str, tree: PyTree, expected: PyTree) -> None:
    """Compares two pytrees' structures.

    Raises:
      ValueError: naming the first leaf that one has and the other lacks.
    """
    if jax.tree.structure(tree) == jax.tree.structure(expected):
        return
    now, then = ([name for name, _ in named_leaves(what, one)] for one in (tree, expected))
    missing, extra = [name for name in then if name not in now], [name for name in now if name not in then]
    lacks = [f"it lacks {_listed(missing)}"] if missing else []
    has = [f"it has {_listed(extra)} besides"] if extra else []
    raise ValueError(
        f"the {what} has another structure than at init: {' and '.join(lacks + has) or 'its containers differ'}; "
        f"expected {outline(what, expected)}, got {outline(what, tree)}"
    )


def outline(what: str, tree: PyTree) -> str:
    """The names of a pytree's leaves as a user would write them, and of the container that holds them.

    >>> outline("batch", {"inputs": 0, "targets": 0}), outline("batch", (0, 0)), outline("batch", 0)
    ("batch['inputs'], batch['targets'] in a dict", 'batch[0], batch[1] in a tuple', 'a bare array')
    """
    names = [name for name, _ in named_leaves(what, tree)]
    return "a bare array" if names == [what] else f"{_listed(names)} in a {type(tree).__name__}"


def _listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def check_same_shapes(what: str, tree: PyTree, expected: PyTree) -> None:
    """Compares two pytrees' structures, and then shapes and dtypes leaf by leaf.

    Raises:
      ValueError: naming the first leaf that differs.
    """
    check_same_structure(what, tree, expected)
    for (name, leaf), want in zip(named_leaves(what, tree), jax.tree.leaves(expected), strict=True):
        shape, dtype = np.shape(leaf), jnp.result_type(leaf)
        if shape != want.shape:
            raise ValueError(f"{name} has the shape {shape}, not {want.shape} as at init")
        if dtype != want.dtype:
            raise ValueError(f"{name} has the dtype {dtype}, not {want.dtype} as at init; cast it back")


def bytes_of(tree: PyTree) -> int:
    """The bytes of a pytree's arrays, or of arrays of such shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# --- dtypes -----------------------------------------------------------------------------------------------------------


def is_float(leaf: Leaf) -> bool:
    """Whether a leaf (an array, or its shape and dtype) is floating-point or complex: then it has gradients."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which values of `dtype` are summed: float32 for narrower floats, `dtype` itself for all others."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32) if narrow else dtype


def nested(paths: Iterable[tuple[tuple[str, ...], Leaf]]) -> PyTree:
    """Nested dicts of values by their paths.

    >>> nested([(("a", "b"), 0), (("a", "c"), 1), (("d",), 2)])
    {'a': {'b': 0, 'c': 1}, 'd': 2}
    """
    tree: PyTree = {}
    for (*folders, name), value in paths:
        reduce(lambda inner, folder: inner.setdefault(folder, {}), folders, tree)[name] = value
    return tree
