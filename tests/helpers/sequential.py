"""The sequential model in plain Flax, for models with skips, side inputs, shared weights, dropout and BatchNorm.

Nothing here runs through the package: layers are called one after the other, and state is pooled by the formulas.
Layers are linen modules, nnx modules and factories, `jpipe.Layer` and functions.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jpipe
from cases import call, params_of, shapes_of, take_microbatch
from jpipe.layers.base import Shared, Use
from jpipe.layers.connections import Marked

# Numbers that keep apart what one key is used for: initial values, and what layers draw in a training step.
FOR_INITIAL_VALUES, FOR_A_STEP = 0x1217, 0x57E9


def init_key(key: Any, layer: int) -> Any:
    """The key of a layer's initial values; `layer` counts the user's layers from 0."""
    return jax.random.fold_in(jax.random.fold_in(key, FOR_INITIAL_VALUES), layer)


def layer_key(key: Any, layer: int, microbatch: Any) -> Any:
    """The key from which a layer draws in a step for one micro-batch: it follows from these three alone.

    This states the rule anew, so that pipelines that draw other numbers than before are noticed.
    """
    of_layer = jax.random.fold_in(jax.random.fold_in(key, FOR_A_STEP), layer)
    return jax.random.fold_in(of_layer, microbatch)


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


def called_with(mark: Marked, x: Any, kept: dict, batch: Any) -> tuple:
    """The positional arguments of a layer; takes what it pops from `kept`."""
    extra = [kept.pop(mark.pops)] if mark.pops else []
    extra += [mark.read(batch)] if mark.read else []
    return (x, *extra) if extra else x if type(x) is tuple else (x,)


def run(layers: list, items: list, batch: Any, *, key: Any, microbatch: int, train: bool) -> tuple[Any, list]:
    """(outputs, each layer's new state) of one micro-batch."""
    x, kept, states = batch["inputs"], {}, []
    for index, (layer, item) in enumerate(zip(layers, own_items(layers, items), strict=True)):
        mark, module, method, _ = parts(layer)
        arguments = called_with(mark, x, kept, batch)
        x, state = call(module, method, item, arguments, layer_key(key, index, microbatch), train)
        states.append(state)
        if mark.stashes:
            kept[mark.stashes] = x
    return x, states


def random_items(layers: list, batch: Any, seed: int) -> list:
    """Random variables of each layer, shaped as its own library says for a micro-batch; nothing is compiled.

    Matrices are about as large as initialisers make them, vectors around 1, so that variances are positive.
    """
    rng, items, kept, x = np.random.default_rng(seed), [], {}, batch["inputs"]
    value = lambda a: np.asarray(
        rng.normal(size=a.shape) / max(1, a.size / a.shape[-1]) ** 0.5
        if a.ndim > 1
        else 1 + 0.1 * rng.uniform(-1, 1, a.shape)
    ).astype(a.dtype)
    for layer in layers:
        mark, module, method, _ = parts(layer)
        arguments = called_with(mark, x, kept, batch)
        items.append(jax.tree.map(value, shapes_of(module, method, arguments)))
        of_first_use = own_items(layers[: len(items)], items)[-1]
        forward = functools.partial(call, module, method, key=jax.random.key(0), train=False)
        x = jax.eval_shape(lambda item, arguments, f=forward: f(item, arguments)[0], of_first_use, arguments)
        if mark.stashes:
            kept[mark.stashes] = x
    return items


def truth(layers: list, items: list, loss_fn: Any, batch: Any, *, key: Any, m: int, rate: float) -> Any:
    """(loss, gradients by layer, new state by layer) of a mini-batch of m micro-batches.

    Sums of losses and weights are divided once, weights being constants; BatchNorms move at `rate`, 1 - momentum.
    """
    modules = [parts(layer)[1] for layer in layers]

    def loss_sum(params: list, part: Any, i: Any) -> Any:
        own = [_with_params(*triple) for triple in zip(modules, items, params, strict=True)]
        outputs, states = run(layers, own, part, key=key, microbatch=i, train=True)
        loss = loss_fn(outputs, part)
        loss, weight = loss if isinstance(loss, tuple) else (loss, 1.0)
        return loss, (weight, states)

    compiled = jax.jit(jax.value_and_grad(loss_sum, has_aux=True))
    params = [_params(module, item) for module, item in zip(modules, items, strict=True)]
    found = [compiled(params, take_microbatch(batch, i, m), i) for i in range(m)]
    total = sum(weight for (_, (weight, _)), _ in found)
    loss = sum(loss for (loss, _), _ in found) / total
    grads = jax.tree.map(lambda *leaves: (sum(leaves) / total).astype(leaves[0].dtype), *[grads for _, grads in found])
    states = [states for (_, (_, states)), _ in found]
    return loss, grads, [pooled(item, [state[i] for state in states], rate) for i, item in enumerate(items)]


def _params(module: Any, item: Any) -> Any:
    own = params_of(module, item)
    return own if isinstance(module, jpipe.Layer) else own.get("params", {})


def _with_params(module: Any, item: Any, params: Any) -> Any:
    if isinstance(module, jpipe.Layer):
        return params
    return item | {"params": params} if "params" in item else item


def pooled(item: Any, states: list, rate: float) -> Any:
    """Running averages moved towards the moments of the whole mini-batch."""
    if not isinstance(item, dict) or "batch_stats" not in item:
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
    return evaluation_by_microbatch(layers, items, loss_fn, batch, 1)


def evaluation_by_microbatch(layers: list, items: list, loss_fn: Any, batch: Any, m: int) -> tuple[Any, Any]:
    """(outputs, loss) in evaluation mode, each micro-batch by itself: for layers that look across examples.

    Outputs are those of all examples, along their first axis.
    """

    def forward(items: list, part: Any) -> tuple[Any, Any, Any]:
        outputs, _ = run(layers, items, part, key=jax.random.key(0), microbatch=0, train=False)
        loss = loss_fn(outputs, part)
        return outputs, *(loss if isinstance(loss, tuple) else (loss, 1.0))

    compiled = jax.jit(forward)
    found = [compiled(items, take_microbatch(batch, i, m)) for i in range(m)]
    outputs = jax.tree.map(
        lambda *leaves: np.concatenate(leaves), *[jax.device_get(outputs) for outputs, _, _ in found]
    )
    return outputs, sum(loss for _, loss, _ in found) / sum(weight for _, _, weight in found)


def parts_of_item(layer: Any, item: Any) -> tuple[Any, Any]:
    """(parameters, state) of what `layer_variables` gives for a layer."""
    module = parts(layer)[1]
    if isinstance(module, jpipe.Layer):
        return item, {}
    if not isinstance(item, dict):
        return {}, {}
    return item.get("params", {}), {name: tree for name, tree in item.items() if name != "params"}


def typed_like(state: Any, item: Any) -> Any:
    """New state in the dtypes in which it is kept."""
    return {
        name: jax.tree.map(lambda a, old: np.asarray(a, old.dtype), tree, item[name]) for name, tree in state.items()
    }


# --- a model with state and random numbers ----------------------------------------------------------------------------

CELLS_KEY = 2
_wide = functools.partial(nn.Dense, param_dtype=jnp.float64)


class Cell(nn.Module):
    """Has state, and draws random numbers."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        h = _wide(x.shape[-1], use_bias=False)(x)  # BatchNorm takes a bias away
        norm = nn.BatchNorm(not train, momentum=0.9, param_dtype=jnp.float64, force_float32_reductions=False)
        return x + nn.Dropout(0.25, deterministic=not train)(nn.tanh(norm(h)))


def squares(outputs: Any, batch: Any) -> Any:
    return jnp.mean((outputs - batch["targets"]) ** 2)


@functools.cache
def cells(m: int) -> tuple:
    """(layers, variables, batch, what plain Flax makes of them in m micro-batches with the key `CELLS_KEY`)."""
    rng = np.random.default_rng(0)
    layers = [_wide(4), *[Cell() for _ in range(4)], _wide(3)]
    batch = {"inputs": rng.normal(size=(24, 5)), "targets": rng.normal(size=(24, 3))}
    items = random_items(layers, batch, 1)
    return layers, items, batch, truth(layers, items, squares, batch, key=jax.random.key(CELLS_KEY), m=m, rate=0.1)
