"""Computes which layers each virtual stage runs, as loop bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jpipe.model.groups import Model


@dataclass(frozen=True, eq=False)
class LayerRanges:
    """The layers of S virtual stages, of G groups of equal layers (`Model.groups`).

    A stage goes through the groups in order and runs a range of positions of each. Where a group comes back after
    another (A, B, A, B), it goes through them in several passes.

    Attributes:
      start: int32 `[S, passes, G]`, the first position of a group that a virtual stage runs in a pass.
      stop: int32 `[S, passes, G]`, one past the last.
    """

    start: np.ndarray
    stop: np.ndarray

    @property
    def passes_of(self) -> np.ndarray:
        """int32 `[S]`: the passes of each virtual stage."""
        used = np.any(self.stop > self.start, axis=-1)
        return used.shape[1] - np.argmax(used[:, ::-1], axis=1).astype(np.int32)

    @property
    def most(self) -> np.ndarray:
        """int32 `[G]`: the most layers of a group that any virtual stage has."""
        return (self.stop - self.start).sum(axis=1).max(axis=0)

    @property
    def always_one(self) -> np.ndarray:
        """bool `[passes, G]`: whether every virtual stage has exactly one layer of a group in a pass."""
        return ((self.stop - self.start) == 1).all(axis=0)


def make_ranges(model: Model, bounds: Sequence[tuple[int, int]]) -> LayerRanges:
    """The ranges of virtual stages; `bounds` has for each the first of its layers and one past the last."""
    position = [model.groups[g].indices.index(i) for i, g in enumerate(model.group_of)]
    by_stage: list[list[dict[int, tuple[int, int]]]] = []
    for first, last in bounds:
        passes: list[dict[int, tuple[int, int]]] = [{}]
        for i in range(first, last):
            g = model.group_of[i]
            if g < max(passes[-1], default=g):
                passes.append({})
            begin, _ = passes[-1].get(g, (position[i], 0))
            passes[-1][g] = (begin, position[i] + 1)
        by_stage.append(passes)
    shape = (len(bounds), max(map(len, by_stage)), len(model.groups))
    start, stop = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for s, passes in enumerate(by_stage):
        for p, ranges in enumerate(passes):
            for g, (a, b) in ranges.items():
                start[s, p, g], stop[s, p, g] = a, b
    return LayerRanges(start, stop)
