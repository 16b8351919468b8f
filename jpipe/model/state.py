"""State: what layers keep besides parameters, merged over micro-batches as if over the whole mini-batch.

Every micro-batch starts from the state before the step and gives a new one. How these become one is a rule by
collection: the *mean* of floating-point values, their *sum* (of the changes), the *last* micro-batch's value, or
*moments*, for running averages of a mean and a variance, as BatchNorm keeps them (GPipe, section 2.3).

The moments of a mini-batch of micro-batches with means m_i and variances v_i are mean(m_i) and mean(v_i) + var(m_i). A
running average moves towards them at a rate r (Flax: 1 - momentum), and shows only its new values: of the mean
a + r (m_i - a), of the variance likewise. With u_i = r (m_i - a), what the mean of the latter lacks is r var(m_i), or
mean(u_i^2) / r - mean(u_i)^2 / r: a sum over micro-batches, so that only the averages themselves are accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.jax_tools.dtypes import is_float
from jpipe.layers.base import describe
from jpipe.model.groups import Kind

DEFAULTS = {"batch_stats": "moments"}
"""Rules by collection; of any other, the mean of floating-point leaves and the last value of others."""


class Rule(NamedTuple):
    """How the values of one leaf become one.

    Attributes:
      accumulate: (total, old, new, is it the last micro-batch) -> total, zero at first.
      finish: (total, old, M) -> the new value.
    """

    accumulate: Callable[[Any, Any, Any, Any], Any]
    finish: Callable[[Any, Any, Any], Any]


def _change(old: Any, new: Any) -> Any:
    """What a leaf gains: so that what doesn't move stays as it is, to the last bit. From infinity it starts anew."""
    return jnp.where(jnp.isfinite(old), new - old, new)


def _changed(old: Any, change: Any) -> Any:
    return jnp.where(jnp.isfinite(old), old + change, change)


RULES = {
    "mean": Rule(
        lambda total, old, new, is_last: total + _change(old, new),
        lambda total, old, count: _changed(old, total / count),
    ),
    "sum": Rule(lambda total, old, new, is_last: total + (new - old), lambda total, old, count: old + total),
    "last": Rule(lambda total, old, new, is_last: jnp.where(is_last, new, total), lambda total, old, count: total),
}
CHOICES = (*RULES, "moments")
"""What users may choose; "moments" is the mean, with the spread of the means in the variances."""


@dataclass(frozen=True)
class Merging:
    """The rules of one kind's state.

    Attributes:
      rules: "mean", "sum" or "last", for each leaf of its collections, in order.
      moments: the leaves that are a running mean and its variance, as pairs of indices.
    """

    rules: tuple[str, ...]
    moments: tuple[tuple[int, int], ...]

    def accumulate(
        self, totals: Sequence[Any], old: Sequence[Any], new: Sequence[Any], rates: Sequence[Any], is_last: Any
    ) -> list[Any]:
        """Totals with one more micro-batch's new state.

        Args:
          totals: so far, in accumulator dtypes, first zeros.
          old: the state before the step.
          new: what the micro-batch gave.
          rates: for each pair of `moments` how fast its mean moves, r.
          is_last: whether it is the last micro-batch.
        """
        new = [leaf.astype(total.dtype) for leaf, total in zip(new, totals, strict=True)]
        old = [leaf.astype(total.dtype) for leaf, total in zip(old, totals, strict=True)]
        for (mean, variance), rate in zip(self.moments, rates, strict=True):
            new[variance] = new[variance] + _square_over(new[mean] - old[mean], rate)
        leaves = zip(self.rules, totals, old, new, strict=True)
        return [RULES[rule].accumulate(total, a, b, is_last) for rule, total, a, b in leaves]

    def finish(
        self, totals: Sequence[Any], old: Sequence[Any], rates: Sequence[Any], num_microbatches: int
    ) -> list[Any]:
        """The new state of the mini-batch."""
        wide = [a.astype(total.dtype) for a, total in zip(old, totals, strict=True)]
        leaves = zip(self.rules, totals, wide, strict=True)
        merged = [RULES[rule].finish(total, a, num_microbatches) for rule, total, a in leaves]
        for (mean, variance), rate in zip(self.moments, rates, strict=True):
            merged[variance] = merged[variance] - _square_over(merged[mean] - wide[mean], rate)
        return [leaf.astype(a.dtype) for leaf, a in zip(merged, old, strict=True)]


def _square_over(change: Any, rate: Any) -> Any:
    """change^2 / rate; 0 for an average that doesn't move."""
    rate = rate.astype(change.dtype)
    return jnp.where(rate == 0, 0, jnp.square(change) / jnp.where(rate == 0, 1, rate))


def make_merging(kind: Kind, rules: Mapping[str, str]) -> Merging:
    """The rules of a kind's leaves.

    Args:
      kind: the layers.
      rules: by collection, where they differ from the defaults.
    """
    found: list[str] = []
    moments: list[tuple[int, int]] = []
    for name in kind.state_names:
        paths_and_leaves = jax.tree_util.tree_leaves_with_path(kind.variables[name])
        rule = (DEFAULTS | dict(rules)).get(name)
        if rule == "moments":
            moments += [(len(found) + i, len(found) + j) for i, j in _moments(paths_and_leaves)]
        found += [_rule_of(leaf, rule) for _, leaf in paths_and_leaves]
    return Merging(tuple(found), tuple(moments))


def _rule_of(leaf: Any, rule: str | None) -> str:
    """The rule of a leaf in a collection: only numbers can be added up, and only floating-point ones averaged."""
    if leaf.dtype == jnp.bool_:
        return "last"
    if rule in ("last", "sum"):
        return rule
    return "mean" if is_float(leaf) else "last"


def _moments(paths_and_leaves: Sequence[tuple[Any, Any]]) -> list[tuple[int, int]]:
    """The pairs of leaves called "mean" and "var" that lie side by side."""
    index = {(path[:-1], getattr(path[-1], "key", None)): i for i, (path, _) in enumerate(paths_and_leaves) if path}
    pairs = [(i, index.get((parent, "var"))) for (parent, name), i in index.items() if name == "mean"]
    leaves = [leaf for _, leaf in paths_and_leaves]
    return [(i, j) for i, j in pairs if j is not None and leaves[i].shape == leaves[j].shape and is_float(leaves[i])]


def check_rules(rules: Any) -> dict[str, str]:
    """The user's rules by collection.

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
    return dict(rules)


def check_collections(rules: Mapping[str, str], kinds: Sequence[Kind]) -> None:
    """Checks that the rules are for collections that layers have, and for values that they can merge.

    Raises:
      ValueError: naming the first that isn't.
    """
    known = sorted({name for kind in kinds for name in kind.state_names})
    unknown = [name for name in rules if name not in known]
    if unknown:
        raise ValueError(f"merge has a rule for {unknown[0]!r}, a collection that no layer has; they have {known}")
    for name, rule in rules.items():
        trees = [kind.variables[name] for kind in kinds if name in kind.state_names]
        if not any(_applies(rule, jax.tree_util.tree_leaves_with_path(tree)) for tree in trees):
            raise ValueError(
                f"merge[{name!r}]={rule!r} merges {_MERGES[rule]}, of which the collection has none: "
                f"{describe(trees[0])}; use another rule, or leave it out"
            )


_MERGES = {
    "mean": "floating-point values",
    "sum": "numbers",
    "last": "any values",
    "moments": 'running averages called "mean" and "var" side by side',
}


def _applies(rule: str, paths_and_leaves: Sequence[tuple[Any, Any]]) -> bool:
    """Whether a rule does anything for a collection of these leaves."""
    if rule == "moments":
        return bool(_moments(paths_and_leaves))
    return any(_rule_of(leaf, rule) == rule for _, leaf in paths_and_leaves)
