"""Names the pieces of a model as the model names its parameters: `h_3/attention`, `blocks/4/up+down`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import takewhile

from jpipe.cutting.straight import Part
from jpipe.types import PyTree

MOST = 0.8
"""A piece is named after the largest of its modules that together have so much of its weights."""

Path = tuple[str, ...]


def piece_names(pieces: Sequence[Sequence[Part]], paths: Sequence[Path], sizes: Sequence[int]) -> list[str]:
    """A name for each piece.

    Args:
      pieces: the variables of each.
      paths: of each leaf of the variables, its path in the model.
      sizes: of each leaf, its elements.
    """
    own = paths_of(pieces, paths)
    everything = {path for of_piece in own for path in of_piece}
    weights = [[sizes[part.leaf] for part in parts] for parts in pieces]
    names = [_name(list(zip(*pair, strict=True)), everything) for pair in zip(own, weights, strict=True)]
    for i, name in enumerate(names):
        names[i] = name or (f"behind {names[i - 1]}" if i else "start")
    return names


def paths_of(pieces: Sequence[Sequence[Part]], paths: Sequence[Path]) -> list[list[Path]]:
    """For each piece the paths of its variables; slices have their indices behind what is stacked."""
    stack = _common([paths[part.leaf][:-1] for parts in pieces for part in parts if part.indices])
    return [[_path(part, paths, stack) for part in parts] for parts in pieces]


def paths_below(pieces: Sequence[Sequence[Path]], kinds: Sequence[Sequence[object]]) -> list[list[Path]]:
    """For each piece the paths of its variables below what they have in common.

    Pieces that differ in the numbers of their names alone, such as `Dense_1` and `Dense_4`, get those of the first.

    Args:
      pieces: the paths of each piece's variables.
      kinds: of each variable, what has to be the same (its collection, its shape).
    """
    below = [[path[len(_common([p[:-1] for p in paths])) :] for path in paths] for paths in pieces]
    first: dict[object, list[Path]] = {}
    without_digits = lambda path: tuple(re.sub(r"\d+", "", name) for name in path)
    keys = [(tuple(map(without_digits, paths)), tuple(kind)) for paths, kind in zip(below, kinds, strict=True)]
    return [first.setdefault(key, paths) for key, paths in zip(keys, below, strict=True)]


def nested(paths: Sequence[tuple[Path, int]]) -> PyTree:
    """Nested dicts of values by their paths.

    >>> nested([(("a", "b"), 0), (("a", "c"), 1), (("d",), 2)])
    {'a': {'b': 0, 'c': 1}, 'd': 2}
    """
    tree: PyTree = {}
    for path, value in paths:
        inner = tree
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return tree


def _common(paths: Sequence[Path]) -> Path:
    """The beginning that all paths have."""
    columns = zip(*paths, strict=False)
    return tuple(names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns))


def _path(part: Part, paths: Sequence[Path], stack: Path) -> Path:
    """The path of a part; slices have their indices behind what is stacked."""
    path, at = paths[part.leaf], len(stack)
    return (*path[:at], *map(str, part.indices), *path[at:]) if part.indices else path


def _name(leaves: Sequence[tuple[Path, int]], everything: Collection[Path]) -> str:
    """The module of which these are all variables; else those that most of the weights are in, below a common one.

    Variables that are in no module give their own names.
    """
    modules = [path[:-1] for path, _ in leaves]
    common = _common(modules)
    if common and sum(path[: len(common)] == common for path in everything) == len(leaves):
        return "/".join(common)
    sizes: dict[str, int] = {}
    for (_, size), module in zip(leaves, modules, strict=True):
        if len(module) > len(common):
            sizes[module[len(common)]] = sizes.get(module[len(common)], 0) + size
    if not common and not sizes:
        return "+".join(path[-1] for path, _ in leaves)
    largest: list[str] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sum(sizes[n] for n in largest) < MOST * sum(sizes.values()):
            largest.append(name)
    return "/".join([*common, *(["+".join(largest)] if largest else [])])
