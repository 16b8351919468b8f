"""Follows the examples of a micro-batch through a model: where they lie in its outputs, and what couples them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jpipe.model.groups import LayerGroup, Model
from jpipe.partitioner.examples import Coupling, Examples
from jpipe.partitioner.shardings import REPLICATED, AxisSharding, Shard


@dataclass(frozen=True, eq=False)
class ExamplesInLayers:
    """Says what layers do to the examples of a micro-batch, in training.

    Attributes:
      outputs: how each example lies in each leaf of the model's outputs; replicated or partial where it doesn't.
      couplings: by index of a group of layers, what looks at several examples in it, but for unknown operations.
      is_certain: whether examples were followed through operations that are all known, and that couple none of them
        but by BatchNorm's statistics. Else an output may have examples elsewhere too.
    """

    outputs: list[AxisSharding]
    couplings: dict[int, Coupling]
    is_certain: bool

    def in_words(self, model: Model, *, statistics: bool = True) -> list[str]:
        """A line for each group that couples examples; `statistics`: also those that do by BatchNorm's alone."""
        lines = []
        for g, one in self.couplings.items():
            indices = model.groups[g].indices
            several, names = len(indices) > 1, ", ".join(map(str, indices))
            what = "BatchNorm's statistics" if one.is_statistic else str(one)
            if statistics or not one.is_statistic:
                which = f"layer{'s' * several} {names} ({model.groups[g].layer.name}) look{'s' * (not several)}"
                lines.append(f"{which} at several examples of a micro-batch: {what}")
        return lines


def follow_examples(model: Model) -> ExamplesInLayers:
    """Follows examples through all layers of a model."""
    size, at, certain = jax.tree.leaves(model.batch)[0].shape[0], list[AxisSharding](), True
    seen: dict[tuple[object, ...], Examples] = {}
    couplings: dict[int, Coupling] = {}
    for g in model.group_of:
        group, place = model.groups[g], (g, *at)
        if place not in seen:
            seen[place] = _follow(group, at, size)
        found, at = seen[place].couplings, seen[place].results[: len(jax.tree.leaves(group.gives))]
        certain &= all(one.is_statistic for one in found)
        if known := sorted((one for one in found if one.is_known), key=lambda one: one.is_statistic):
            couplings.setdefault(g, known[0])
    return ExamplesInLayers(at, couplings, certain)


def _follow(group: LayerGroup, takes: Sequence[AxisSharding], size: int) -> Examples:
    """Follows `size` examples through one layer, which has them in its inputs as `takes` says."""
    assert group.trace is not None
    closed, updated = group.trace.jaxpr, group.trace.updated
    num_variables = len(group.leaves(list(group.variables)))
    rest = len(closed.in_avals) - num_variables - len(takes)
    lying = [*[REPLICATED] * num_variables, *takes, *[Shard(0)] * (rest - 1), REPLICATED]
    # A running average's new value is made of the statistic that examples are normalised by.
    state = range(len(closed.out_avals) - len(updated), len(closed.out_avals))
    return Examples(closed, size, lying, [True] * len(lying), strict=False, statistics=state)
