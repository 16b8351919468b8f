"""Merges BatchNorm's running averages of micro-batches as if over the whole mini-batch.

The moments of a mini-batch of micro-batches with means m_i and variances v_i are mean(m_i) and mean(v_i) + var(m_i)
(GPipe, section 2.3). A running average a moves towards them at a rate r (Flax: 1 - momentum), and shows only its new
values: of the mean a + r (m_i - a), of the variance likewise. With u_i = r (m_i - a), what the mean over micro-batches
of the new variances lacks is r var(m_i), or mean(u_i^2) / r - mean(u_i)^2 / r. The first term is added to each
micro-batch's new variance, the second is subtracted once at the end, so that only the averages are summed up.

Nothing in a layer says its rate. When a step is laid out, it is found by differentiating the layer's new state by the
old one: it is 1 - d(new)/d(old), a number of the layer's code alone, and a constant in the step. Two updates in one
step (a BatchNorm that is called for two views) have such a rate too, but their variance lacks the variance of each
one's means, and the new state shows the two together. So updates are counted in the layer's trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jpipe.jax.inside import needed_part
from jpipe.jax.tracing import interpret, on_this_host, origins, trace, without_stops
from jpipe.jax.trees import is_float
from jpipe.model.layer_function import LayerFunction
from jpipe.partitioner.conversions import convert
from jpipe.partitioner.shardings import Axis, Sharding, replicated
from jpipe.types import Leaf

PathsAndLeaves = Sequence[tuple[tuple[Hashable, ...], Leaf]]
"""The result of `jax.tree_util.tree_leaves_with_path`."""


@dataclass(frozen=True, eq=False)
class RunningAverages:
    """The running means and variances among the leaves of a layer's state.

    Attributes:
      pairs: for each running average the indices of its mean and its variance among the leaves.
      rates: for each of them the rate at which it moves, whole, of the mean's shape.
      lying: for each of them how its mean lies on the devices of a stage.
      axes: what arrays are split over.
    """

    pairs: tuple[tuple[int, int], ...] = ()
    rates: tuple[np.ndarray, ...] = ()
    lying: tuple[Sharding, ...] = ()
    axes: tuple[Axis, ...] = ()

    def spread(self, old: Sequence[Leaf], new: Sequence[Leaf], sign: int) -> list[Leaf]:
        """Adds to the variances of the new state, or subtracts from them; `old` is the state before the step.

        u_i^2 / r is added for a micro-batch (`sign` 1), and mean(u_i)^2 / r is subtracted from the mean over
        micro-batches (-1), which gives the mini-batch's new state.
        """
        changed = list(new)
        for i, (mean, variance) in enumerate(self.pairs):
            changed[variance] = new[variance] + sign * self._square_over_rate(new[mean] - old[mean], i)
        return changed

    def _square_over_rate(self, change: jax.Array, i: int) -> jax.Array:
        """Computes change^2 / rate of a device's part; 0 for an average that doesn't move."""
        whole = self.rates[i]
        if np.all(whole == whole.flat[0]):
            rate = jnp.asarray(whole.flat[0], change.dtype)
        else:
            rate = convert(jnp.asarray(whole, change.dtype), self.axes, replicated(self.axes), self.lying[i])
        return jnp.where(rate == 0, 0, jnp.square(change) / jnp.where(rate == 0, 1, rate))


def mean_variance_pairs(paths_and_leaves: PathsAndLeaves) -> list[tuple[int, int]]:
    """Finds the pairs of leaves called "mean" and "var" that lie side by side in a collection."""
    index = {(path[:-1], getattr(path[-1], "key", None)): i for i, (path, _) in enumerate(paths_and_leaves) if path}
    pairs = [(i, index.get((parent, "var"))) for (parent, name), i in index.items() if name == "mean"]
    leaves = [leaf for _, leaf in paths_and_leaves]
    return [(i, j) for i, j in pairs if j is not None and leaves[i].shape == leaves[j].shape and is_float(leaves[i])]


def find_rates(function: LayerFunction, leaves: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Finds the rates at which state moves towards a micro-batch's values: 1 - d(new)/d(old), of each leaf's shape.

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
    run = jaxpr_as_fun(without_stops(moved))
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
        fault = f"layer {function.group.indices[0]} ({function.group.layer.name}) {depends if any(used) else several}"
        raise ValueError(f"{fault}; {remedy}")
    with on_this_host():
        return tuple(map(np.asarray, interpret(alone)))
