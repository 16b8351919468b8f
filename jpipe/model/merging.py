"""Decides by which rule each collection of state is merged over micro-batches (`merge=`), and what a rule computes.

Every micro-batch starts from the state before the step and gives a new one. How these become one is a rule by
collection: the *mean* of floating-point values, their *sum* (of the changes), the *last* micro-batch's value, or
*moments*, for running averages of a mean and a variance, as BatchNorm keeps them (`Merging`). A
micro-batch's new state is that of all its examples already, on whatever devices they are. The default is "moments"
for "batch_stats", and for others the mean of floating-point leaves and the last value of the rest.

Two rules are for collections that a forward only reads. *Keep* leaves them as they are: weights that aren't trained.
*Gradient* makes their gradients their new values, and takes the largest of several micro-batches. It is for Flax's fp8
operations: their gradients in "_overwrite_with_gradient" are the largest amplitudes that they saw, and the largest of
the mini-batch is the maximum over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jpipe.jax.inside import needed_part
from jpipe.jax.tracing import interpret, origins, trace, without
from jpipe.jax.trees import is_float
from jpipe.layers.base import describe
from jpipe.model.groups import DEFAULT_RULES, GRADIENT, KEEP, LayerGroup
from jpipe.model.layer_function import LayerFunction
from jpipe.partitioner.conversions import convert
from jpipe.partitioner.shardings import Axis, Sharding, replicated
from jpipe.partitioner.splits import Splits
from jpipe.types import Leaf

Flag = bool | jax.Array
"""Either known while tracing, or traced."""


class MergeRule(NamedTuple):
    """How the values of one leaf become one.

    Attributes:
      accumulate: (total, old, new, is it micro-batch M - 1, whenever that runs) -> total, zero at first.
      finish: (total, old, M) -> the new value.
    """

    accumulate: Callable[[Leaf, Leaf, Leaf, Flag], Leaf]
    finish: Callable[[Leaf, Leaf, int], Leaf]


MERGE_RULES = {
    # The mean of a leaf's changes, so that one that doesn't move stays the same; of new values if the old isn't finite.
    "mean": MergeRule(
        lambda total, old, new, is_last: total + jnp.where(jnp.isfinite(old), new - old, new),
        lambda total, old, count: jnp.where(jnp.isfinite(old), old + total / count, total / count),
    ),
    "sum": MergeRule(lambda total, old, new, is_last: total + (new - old), lambda total, old, count: old + total),
    "last": MergeRule(lambda total, old, new, is_last: jnp.where(is_last, new, total), lambda total, old, count: total),
}
CHOICES = {
    "mean": "floating-point values",
    "sum": "numbers",
    "last": "any values",
    "moments": 'running averages called "mean" and "var" side by side',
    KEEP: "any values",
    GRADIENT: "floating-point values",
}
"""The rules that users may choose, and what each merges; "moments" is "mean", but with the variance of the
micro-batches' means in variances."""


@dataclass(frozen=True, eq=False)
class Merging:
    """How the state of a group's layers is merged: leaf by leaf, but running averages as if over the whole mini-batch.

    The moments of a mini-batch of micro-batches with means m_i and variances v_i are mean(m_i) and mean(v_i) + var(m_i)
    (GPipe, section 2.3). A running average a moves towards them at a rate r (Flax: 1 - momentum), and shows only its
    new values: of the mean a + r (m_i - a), of the variance likewise. With u_i = r (m_i - a), what the mean over
    micro-batches of the new variances lacks is r var(m_i), or mean(u_i^2) / r - mean(u_i)^2 / r. The first term is
    added to each micro-batch's new variance, the second is subtracted once at the end, so that only the averages are
    summed up.

    Attributes:
      rules: "mean", "sum" or "last", for each leaf of its collections, in order.
      pairs: for each running average the indices of its mean and its variance among the leaves.
      rates: for each of them the rate at which it moves, whole, of the mean's shape.
      lying: for each of them how its mean lies on the devices of a stage.
      axes: what arrays are split over.
    """

    rules: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    rates: tuple[np.ndarray, ...]
    lying: tuple[Sharding, ...]
    axes: tuple[Axis, ...] = ()

    def accumulate(self, totals: Sequence[Leaf], old: Sequence[Leaf], new: Sequence[Leaf], is_last: Flag) -> list[Leaf]:
        """Adds one more micro-batch's new state to the totals.

        `spread` adds to each new variance the square of its mean's change over the rate, and `finish` takes away
        the square of the average change over the rate, so that the variance of the means is counted.

        Args:
          totals: so far, first zeros; in float32 for narrower floating-point leaves, else in the leaf's own dtype.
          old: the state before the step.
          new: what the micro-batch gave.
          is_last: whether it is the last micro-batch.
        """
        new = [leaf.astype(total.dtype) for leaf, total in zip(new, totals, strict=True)]
        old = [leaf.astype(total.dtype) for leaf, total in zip(old, totals, strict=True)]
        leaves = zip(self.rules, totals, old, self.spread(old, new, 1), strict=True)
        return [MERGE_RULES[rule].accumulate(total, a, b, is_last) for rule, total, a, b in leaves]

    def finish(self, totals: Sequence[Leaf], old: Sequence[Leaf], num_microbatches: int) -> list[Leaf]:
        """Computes the new state of the mini-batch, in the dtypes of the old one."""
        wide = [a.astype(total.dtype) for a, total in zip(old, totals, strict=True)]
        leaves = zip(self.rules, totals, wide, strict=True)
        merged = [MERGE_RULES[rule].finish(total, a, num_microbatches) for rule, total, a in leaves]
        return [leaf.astype(a.dtype) for leaf, a in zip(self.spread(wide, merged, -1), old, strict=True)]

    def spread(self, old: Sequence[Leaf], new: Sequence[Leaf], sign: int) -> list[Leaf]:
        """Adds to the variances of the new state, or subtracts from them; `old` is the state before the step.

        u_i^2 / r is added for a micro-batch (`sign` 1), and mean(u_i)^2 / r is subtracted from the mean over
        micro-batches (-1), which gives the mini-batch's new state.
        """
        changed = list(new)
        for i, (mean, variance) in enumerate(self.pairs):
            change, whole = new[mean] - old[mean], self.rates[i]
            if np.all(whole == whole.flat[0]):
                rate = jnp.asarray(whole.flat[0], change.dtype)
            else:
                rate = convert(jnp.asarray(whole, change.dtype), self.axes, replicated(self.axes), self.lying[i])
            # 0 for an average that doesn't move.
            square_over_rate = jnp.where(rate == 0, 0, jnp.square(change) / jnp.where(rate == 0, 1, rate))
            changed[variance] = new[variance] + sign * square_over_rate
        return changed


def make_merging(function: LayerFunction, num_microbatches: int, splits: Splits) -> Merging:
    """Decides how the state of a layer is merged.

    Args:
      function: the layer in training.
      num_microbatches: M; the state of a single one is the mini-batch's as it is.
      splits: what arrays are split over.

    Raises:
      ValueError: running averages move at a rate that depends on what the layer is called with, or several times.
    """
    group = function.group
    leaf_rules: list[str] = []
    pairs: list[tuple[int, int]] = []
    for name in group.state_names:
        paths_and_leaves = jax.tree_util.tree_leaves_with_path(group.variables[name])
        rule = group.rules.get(name)
        if rule == "moments" and num_microbatches > 1:
            first = len(leaf_rules)
            pairs += [(first + i, first + j) for i, j in mean_variance_pairs(paths_and_leaves)]
        leaf_rules += [_rule_of(leaf, rule) for _, leaf in paths_and_leaves]
    means, state_at = [mean for mean, _ in pairs], function.shardings(splits).state
    lying = tuple(state_at[i] for i in means)
    return Merging(tuple(leaf_rules), tuple(pairs), find_rates(function, means), lying, splits.axes)


def _rule_of(leaf: Leaf, rule: str | None) -> str:
    """Returns the rule of a leaf: only numbers can be added up, and only floating-point ones averaged."""
    if rule in ("last", "sum") and leaf.dtype != jnp.bool_:
        return rule
    return "mean" if is_float(leaf) else "last"


def check_rules(rules: object) -> dict[str, str]:
    """Checks the user's rules by collection.

    Raises:
      TypeError: no mapping of strings.
      ValueError: an unknown rule, or one for the parameters.
    """
    if rules is None:
        return {}
    if not isinstance(rules, Mapping):
        raise TypeError(f"merge={rules!r} is no dict; pass rules by collection, such as {{'cache': 'last'}}")
    for name, rule in rules.items():
        if name == "params":
            raise ValueError("merge has a rule for 'params', which have gradients; give rules for other collections")
        if rule not in CHOICES:
            raise ValueError(f"merge[{name!r}]={rule!r} is unknown; use one of {list(CHOICES)}")
        if DEFAULT_RULES.get(name) == KEEP != rule:
            raise ValueError(f"merge[{name!r}]={rule!r}: jpipe.freeze keeps that collection as it is; leave it out")
    return dict(rules)


def check_collections(rules: Mapping[str, str], groups: Sequence[LayerGroup]) -> None:
    """Checks that the rules are for collections that layers have, and for values that they can merge.

    Raises:
      ValueError: naming the first that isn't.
    """
    collections = sorted({name for group in groups for name in group.variables} - {"params"})
    for name, rule in rules.items():
        if name not in collections:
            raise ValueError(f"merge has a rule for {name!r}, a collection that no layer has; they have {collections}")
        trees = [group.variables[name] for group in groups if name in group.variables]
        if not any(_applies(rule, jax.tree_util.tree_leaves_with_path(tree)) for tree in trees):
            fault = f"merge[{name!r}]={rule!r} merges {CHOICES[rule]}, not {describe(trees[0])}"
            raise ValueError(f"{fault}; use another rule, or leave it out")


def _applies(rule: str, paths_and_leaves: PathsAndLeaves) -> bool:
    """Whether a rule does anything for a collection of these leaves."""
    if rule == "moments":
        return bool(mean_variance_pairs(paths_and_leaves))
    if rule in (KEEP, GRADIENT):
        return rule == KEEP or all(is_float(leaf) for _, leaf in paths_and_leaves)
    return any(_rule_of(leaf, rule) == rule for _, leaf in paths_and_leaves)


PathsAndLeaves = Sequence[tuple[tuple[Hashable, ...], Leaf]]
"""The result of `jax.tree_util.tree_leaves_with_path`."""


# --- BatchNorm's running averages -------------------------------------------------------------------------------------


def mean_variance_pairs(paths_and_leaves: PathsAndLeaves) -> list[tuple[int, int]]:
    """Finds the pairs of leaves called "mean" and "var" that lie side by side in a collection."""
    index = {(path[:-1], getattr(path[-1], "key", None)): i for i, (path, _) in enumerate(paths_and_leaves) if path}
    pairs = [(i, index.get((parent, "var"))) for (parent, name), i in index.items() if name == "mean"]
    leaves = [leaf for _, leaf in paths_and_leaves]
    return [(i, j) for i, j in pairs if j is not None and leaves[i].shape == leaves[j].shape and is_float(leaves[i])]


def find_rates(function: LayerFunction, leaves: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Finds the rates at which state moves towards a micro-batch's values: 1 - d(new)/d(old), of each leaf's shape.

    Nothing in a layer says its rate. When a step is laid out, it is found by differentiating the layer's new state by
    the old one: a number of the layer's code alone, and a constant in the step. Two updates in one step (a BatchNorm
    that is called for two views) have such a rate too, but their variance lacks the variance of each one's means, and
    the new state shows the two together. So updates are counted in the layer's trace.

    Args:
      function: the layer in training.
      leaves: indices of leaves of its state, running averages.

    Raises:
      ValueError: a rate isn't a number of the layer's code, but depends on what the layer is called with; or the state
        moves several times.
    """
    if not leaves:
        return ()
    shapes, activation = function.arguments, jax.tree.leaves(function.group.takes)
    new_state = trace(lambda arguments, x: function.forward(arguments, x).state, shapes, activation)[0]
    # First all other results are dropped: they may have no derivative. And nnx stops gradients of what it keeps.
    moved = needed_part(new_state, [i in leaves for i in range(len(new_state.jaxpr.outvars))], keep=True)[0]
    run = jaxpr_as_fun(without(moved, lambda equation: equation.primitive.name == "stop_gradient"))
    places = [len(shapes.params) + i for i in leaves]
    # 0 for an average that stays as it is, whatever else follows from it; 1 where the new one doesn't follow from it.
    moved_by = origins(moved, {place: {place: frozenset()} for place in places})
    updates = [len(new[place]) if place in new else 1 for place, new in zip(places, moved_by, strict=True)]
    moving = [place for place, count in zip(places, updates, strict=True) if count]

    def rates(*inputs: Leaf) -> list[jax.Array]:
        def new_averages(*averages: jax.Array) -> list[Leaf]:
            replaced = dict(zip(moving, averages, strict=True))
            return run(*(replaced.get(i, leaf) for i, leaf in enumerate(inputs)))

        averages = [inputs[i] for i in moving]
        slopes = jax.jvp(new_averages, averages, list(map(jnp.ones_like, averages)))[1]
        return [1 - slope if count else slope for slope, count in zip(slopes, updates, strict=True)]

    traced = trace(rates, *jax.tree.leaves((shapes, activation)))[0]
    alone, used = needed_part(traced, [True] * len(leaves))
    if any(used) or max(updates) > 1:
        depends = "keeps a running mean and variance at a rate that depends on a count, a parameter or its inputs"
        several = "updates a running mean and variance several times in a step, and its new state shows all at once"
        remedy = 'pass merge={"batch_stats": "mean"} (the collection\'s name), or let each move once, at a fixed rate'
        raise ValueError(f"{function.group.in_words} {depends if any(used) else several}; {remedy}")
    return tuple(map(np.asarray, interpret(alone)))
