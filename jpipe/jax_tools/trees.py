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
    paths = [
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(t)] for t in (given, expected)
    ]
    extra = [path for path in paths[0] if path not in paths[1]]
    missing = [path for path in paths[1] if path not in paths[0]]
    detail = (
        f"it lacks {what}{missing[0]}"
        if missing
        else f"it has {what}{extra[0]} besides"
        if extra
        else "its containers differ"
    )
    raise ValueError(
        f"the {what} has another structure than at init: {detail}; "
        f"expected {_outline(paths[1])}, got {_outline(paths[0])}"
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
