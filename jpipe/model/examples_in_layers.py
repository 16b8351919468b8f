"""Follows the examples of a micro-batch through a model: where they lie in its outputs, and what couples them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import jax
import numpy as np

from jpipe.model.groups import LayerGroup, Model
from jpipe.partitioner.examples import CouplesError, Coupling, Examples, Why
from jpipe.partitioner.shardings import REPLICATED, AxisSharding, Shard


@dataclass(frozen=True, eq=False)
class ExamplesInLayers:
    """Says what layers do to the examples of a micro-batch, in training.

    Attributes:
      outputs: how each example lies in each leaf of the model's outputs; replicated or partial where it doesn't.
      follows: for each leaf, whether it follows from examples.
      layers: what is known of each layer, in order.
      couplings: by index of a group of layers, what surely looks at several examples in it.
      is_certain: whether examples were followed through operations that are all known, and that couple none of them
        but by BatchNorm's statistics. Else an output may have examples elsewhere too.
    """

    outputs: list[AxisSharding]
    follows: list[bool]
    layers: list[Examples]
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

    def is_sum(self, whole: ExamplesInLayers, count: int, leaf: int) -> bool | None:
        """Whether a leaf without an axis of examples is their sum (True) or their mean (False); None if it is neither.

        It is neither if layers take examples by their places; of a micro-batch a slice may have all of them, so that is
        looked at in the mini-batch too. Its scales are those of a micro-batch, or of a mean `count` times smaller. What
        examples are multiplied by themselves is the same.

        Args:
          whole: of all `count` micro-batches together.
          count: M.
          leaf: the index of the leaf.
        """
        unlike = [layer.numbers for layer in self.layers] != [layer.numbers for layer in whole.layers]
        both = [one for one in (*self.layers, *whole.layers) if not any(c.is_sure for c in one.couplings)]  # not marked
        if unlike or any(one.why is Why.IN_ORDER for layer in both for one in layer.couplings):
            return None
        for layer in both:
            with suppress(CouplesError):  # not known of one that may couple examples
                if layer.reads_places(list(zip(layer.flat.results, layer.results, strict=True))):
                    return None
        once, of_all = sorted(self.scales()[leaf]), sorted(whole.scales()[leaf])
        same = lambda factor: len(once) == len(of_all) and np.allclose(np.multiply(of_all, factor), once, 1e-6, 0)
        return True if same(1) else False if same(count) else None

    def scales(self) -> list[frozenset[float]]:
        """For each leaf of the outputs, what parts of sums are multiplied by on the ways to it, through all layers."""
        scales = list[frozenset[float]]()
        for layer in self.layers:
            scales = layer.scales(scales)
        return scales


def follow_examples(model: Model) -> ExamplesInLayers:
    """Follows examples through all layers of a model."""
    size, certain = jax.tree.leaves(model.batch)[0].shape[0], True
    at, follows, layers = list[AxisSharding](), list[bool](), list[Examples]()
    seen: dict[tuple[object, ...], Examples] = {}
    couplings: dict[int, Coupling] = {}
    for g in model.group_of:
        group, place = model.groups[g], (g, *at, *follows)
        if place not in seen:
            seen[place] = _follow(group, at, follows, size)
        found, count = seen[place], len(jax.tree.leaves(group.gives))
        at, follows = found.results[:count], found.late[:count]
        layers.append(found)
        certain &= all(one.is_statistic for one in found.couplings)
        if sure := sorted((one for one in found.couplings if one.is_sure), key=lambda one: one.is_statistic):
            couplings.setdefault(g, sure[0])
    return ExamplesInLayers(at, follows, layers, couplings, certain)


def _follow(group: LayerGroup, takes: Sequence[AxisSharding], follows: Sequence[bool], size: int) -> Examples:
    """Follows `size` examples through one layer, which has them in its inputs as `takes` and `follows` say."""
    assert group.trace is not None
    closed, updated = group.trace.jaxpr, group.trace.updated
    num_variables = len(group.leaves(list(group.variables)))
    rest = len(closed.in_avals) - num_variables - len(takes)
    lying = [*[REPLICATED] * num_variables, *takes, *[Shard(0)] * (rest - 1), REPLICATED]
    # A running average's new value is made of the statistic that examples are normalised by.
    state = range(len(closed.out_avals) - len(updated), len(closed.out_avals))
    late = [*[False] * num_variables, *follows, *[True] * (rest - 1), False]
    found = Examples(closed, size, lying, late, strict=False, statistics=state)
    found.takes = found.flat.arguments[num_variables : num_variables + len(takes)]
    return found
