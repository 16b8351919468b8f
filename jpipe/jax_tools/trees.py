"""Comparing pytrees with what they should be: an error names the first leaf that differs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.types import PyTree


def check_same_structure(what: str, given: PyTree, expected: PyTree) -> None:
    """Compares two pytrees' structures.

    Raises:
      ValueError: naming the first leaf that one has and the other lacks.
    """
    if jax.tree.structure(given) == jax.tree.structure(expected):
        return
    paths_of = lambda tree: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    now, then = paths_of(given), paths_of(expected)
    missing = [f"it lacks {what}{path}" for path in then if path not in now]
    extra = [f"it has {what}{path} besides" for path in now if path not in then]
    detail, *_ = [*missing, *extra, "its containers differ"]
    raise ValueError(
        f"the {what} has another structure than at init: {detail}; expected {_outline(then)}, got {_outline(now)}"
    )


def _outline(paths: list[str]) -> str:
    return "[" + ", ".join(path or "a bare array" for path in paths[:8]) + (", ..." if len(paths) > 8 else "") + "]"


def check_same_shapes(what: str, tree: PyTree, expected: PyTree) -> None:
    """Compares shapes and dtypes, leaf by leaf, of pytrees of the same structure.

    Raises:
      ValueError: naming the first leaf that differs.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), want in zip(leaves, jax.tree.leaves(expected), strict=True):
        name, shape, dtype = f"{what}{jax.tree_util.keystr(path)}", np.shape(leaf), jnp.result_type(leaf)
        if shape != want.shape:
            raise ValueError(f"{name} has the shape {shape}, not {want.shape} as at init")
        if dtype != want.dtype:
            raise ValueError(f"{name} has the dtype {dtype}, not {want.dtype} as at init; cast it back")
