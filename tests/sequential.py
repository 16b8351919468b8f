"""The sequential model in plain Flax, for models with skips, side inputs, shared weights, dropout and BatchNorm.

Nothing here runs through the package: layers are called one after the other, and state is pooled by the formulas.
"""

import inspect
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from helpers import mean_loss, take_microbatch
from jpipe.connections import Marked
from jpipe.shared import Shared, Use
from jpipe.stages import layer_key


def parts(layer: Any) -> tuple[Marked, nn.Module, Any, Any]:
    """(connections, module, method, what identifies its parameters) of an item of a list of layers."""
    mark = layer if isinstance(layer, Marked) else Marked(layer)
    use = Use(mark.layer, None) if isinstance(mark.layer, Shared) else mark.layer
    if isinstance(use, Use):
        return mark, use.shared.layer, use.method, id(use.shared)
    return mark, use, None, None


def own_items(layers: list, items: list) -> list:
    """The items with those of shared layers taken from their first use."""
    first: dict[Any, Any] = {}
    result = []
    for layer, item in zip(layers, items, strict=True):
        shared = parts(layer)[-1]
        result.append(item if shared is None else first.setdefault(shared, item))
    return result


def run(layers: list, items: list, batch: Any, *, key: Any, microbatch: int, train: bool) -> tuple[Any, list]:
    """(outputs, each layer's new state) of one micro-batch."""
    x, kept, states = batch["inputs"], {}, []
    for index, (layer, item) in enumerate(zip(layers, own_items(layers, items), strict=True)):
        mark, module, method, _ = parts(layer)
        extra = [kept[mark.pops]] if mark.pops else []
        extra += [mark.read(batch)] if mark.read else []
        arguments = (x, *extra) if extra else x if type(x) is tuple else (x,)
        own = layer_key(key, index, microbatch)
        function = getattr(type(module), method) if method else type(module).__call__
        options = {"train": train} if "train" in inspect.signature(function).parameters else {}
        x, state = module.apply(
            item,
            *arguments,
            rngs={"dropout": own, "params": jax.random.fold_in(own, 1)} if train else None,
            mutable=[name for name in item if name != "params"] if train else [],
            method=method,
            **options,
        )
        states.append(state)
        if mark.stashes:
            kept[mark.stashes] = x
    return x, states


def truth(layers: list, items: list, loss_fn: Any, batch: Any, *, key: Any, m: int, rate: float) -> Any:
    """(loss, gradients by layer, new state by layer) of a mini-batch of m micro-batches.

    Sums of losses and weights are divided once; BatchNorms move at `rate`, 1 - momentum.
    """

    def total(params: list) -> tuple[Any, list]:
        own = [item | {"params": p} if "params" in item else item for item, p in zip(items, params, strict=True)]
        sums, weights, states = 0.0, 0.0, []
        for i in range(m):
            part = take_microbatch(batch, i, m)
            outputs, state = run(layers, own, part, key=key, microbatch=i, train=True)
            loss = loss_fn(outputs, part)
            loss, weight = loss if isinstance(loss, tuple) else (loss, 1.0)
            sums, weights, states = sums + loss, weights + jax.lax.stop_gradient(weight), [*states, state]
        return sums / weights, states

    params = [item.get("params", {}) for item in items]
    (loss, states), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    return loss, grads, [pooled(item, [state[i] for state in states], rate) for i, item in enumerate(items)]


def pooled(item: Any, states: list, rate: float) -> Any:
    """Running averages moved towards the moments of the whole mini-batch."""
    if "batch_stats" not in item:
        return {}
    found = jax.tree.map(
        lambda *leaves: np.mean(np.asarray(leaves, np.float64), 0), *[s["batch_stats"] for s in states]
    )

    def spread(path: Any, old: Any, *new: Any) -> Any:
        means = (np.asarray(new, np.float64) - np.asarray(old, np.float64)) / rate + np.asarray(old, np.float64)
        return rate * np.var(means, 0)

    spreads = jax.tree_util.tree_map_with_path(spread, item["batch_stats"], *[s["batch_stats"] for s in states])

    def add(tree: Any, extra: Any) -> Any:
        if "mean" in tree:
            return {"mean": tree["mean"], "var": tree["var"] + extra["mean"]}
        return {name: add(tree[name], extra[name]) for name in tree}

    return {"batch_stats": add(found, spreads)}


def evaluation(layers: list, items: list, loss_fn: Any, batch: Any) -> tuple[Any, Any]:
    """(outputs, loss) in evaluation mode."""

    def forward(items: list, batch: Any) -> tuple[Any, Any]:
        outputs, _ = run(layers, items, batch, key=jax.random.key(0), microbatch=0, train=False)
        return outputs, mean_loss(loss_fn(outputs, batch))

    return jax.jit(forward)(items, batch)
