"""The truth that pipelines are compared with: models of every kind of layer, run one layer after the other.

Nothing here uses jpipe, except for `jpipe.Layer` as a kind of layer and `jpipe.Schedule` to write one's own schedule.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from jpipe.schedules.orders import SCHEDULES
from published import PUBLISHED

VOCABULARY = 11
WIDTH = 8
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}


# --- comparing --------------------------------------------------------------------------------------------------------


def assert_close(found: Any, expected: Any, what: str = "", tolerances: dict[str, float] = TOLERANCES) -> None:
    """Every leaf has the expected dtype, shape and values; the message names the first one that doesn't.

    The tolerance follows from the dtype: float64 to 1e-12, float32 to 1e-5, of each element or of the leaf's largest
    one; what isn't floating-point is equal.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected), f"{what}: other structures"
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    scale = max([float(np.max(np.abs(e))) for _, e in leaves if np.size(e) and is_float(e)], default=0.0)
    for (path, want), got in zip(leaves, jax.tree.leaves(found), strict=True):
        name = f"{what}{jax.tree_util.keystr(path)}"
        got, want = np.asarray(got), np.asarray(want)
        assert got.dtype == want.dtype, f"{name} has dtype {got.dtype}, not {want.dtype}"
        assert got.shape == want.shape, f"{name} has shape {got.shape}, not {want.shape}"
        if not is_float(want):
            np.testing.assert_array_equal(got, want, err_msg=name)
        elif want.size:
            tolerance = tolerances[want.dtype.name]
            largest = max(float(np.max(np.abs(want))), 1e-3 * scale)
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * largest, err_msg=name)


def assert_equal(found: Any, expected: Any, what: str = "") -> None:
    """Every leaf is the same to the bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected), f"{what}: other structures"
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        assert got.dtype == want.dtype, f"{what}{jax.tree_util.keystr(path)} has dtype {got.dtype}, not {want.dtype}"
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want), f"{what}{jax.tree_util.keystr(path)}")


def is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


# --- running layers one after the other -------------------------------------------------------------------------------


def is_nnx(layer: Any) -> bool:
    if isinstance(layer, nnx.Module):
        return True
    code = getattr(layer, "__code__", None)
    return code is not None and "rngs" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@functools.cache
def nnx_parts(layer: Any) -> tuple:
    """Graph definition and states (parameters, statistics, the rest) of a ready module or a factory."""
    module = layer if isinstance(layer, nnx.Module) else nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(0)))
    return nnx.split(module, nnx.Param, nnx.BatchStat, ...)


def nnx_filled(layer: Any, item: dict[str, Any]) -> nnx.Module:
    """The module with the values of `item`."""
    graphdef, *states = jax.tree.map(lambda x: x, nnx_parts(layer))
    for name, state in zip(("params", "batch_stats"), states[:2], strict=True):
        if name in item:
            nnx.replace_by_pure_dict(state, item[name])
    return nnx.merge(graphdef, *states)


def call(module: Any, method: Any, item: Any, arguments: tuple, key: Any, train: bool) -> tuple[Any, Any]:
    """(outputs, new state) of one layer with its own key."""
    if isinstance(module, nn.Module):
        return module.apply(
            item,
            *arguments,
            rngs={"dropout": key, "params": jax.random.fold_in(key, 1)} if train else None,
            mutable=[name for name in item if name != "params"] if train else [],
            method=method,
            **_mode(getattr(type(module), method) if method else type(module).__call__, train),
        )
    if is_nnx(module):
        return _call_nnx(module, method, item, arguments, key, train)
    function = method or (module.apply if isinstance(module, jpipe.Layer) else module)
    options = _mode(function, train)
    if not isinstance(module, jpipe.Layer):
        return function(*arguments, **options), {}
    if "key" in inspect.signature(function).parameters:
        options["key"] = key if train else None
    return function(item, *arguments, **options), {}


def _mode(function: Any, train: bool) -> dict[str, bool]:
    try:
        return {"train": train} if "train" in inspect.signature(function).parameters else {}
    except ValueError:  # of jax.numpy, some have no signature
        return {}


def _call_nnx(layer: Any, method: Any, item: Any, arguments: tuple, key: Any, train: bool) -> tuple[Any, Any]:
    module = nnx_filled(layer, jax.tree.map(jnp.asarray, item))
    streams = nnx.state(module, nnx.RngState)
    number, filled = 0, []
    for path, variable in nnx.to_flat_state(streams):
        if isinstance(variable, nnx.RngKey):
            filled.append((path, variable.replace(jax.random.fold_in(key, number))))
            number += 1
        else:
            filled.append((path, variable.replace(jnp.zeros((), jnp.uint32))))
    if filled:
        nnx.update(module, nnx.from_flat_state(filled))
    module.train() if train else module.eval()
    outputs = (getattr(module, method) if method else module)(*arguments)
    stats = nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
    return outputs, ({"batch_stats": stats} if stats and train else {})


def shapes_of(module: Any, method: Any, arguments: tuple) -> Any:
    """Shapes of a layer's variables: its own library says them, nothing is compiled."""
    key = jax.random.key(0)
    if isinstance(module, nn.Module):
        options = _mode(getattr(type(module), method) if method else type(module).__call__, False)
        return jax.eval_shape(functools.partial(module.init, method=method, **options), key, *arguments)
    if isinstance(module, jpipe.Layer):
        return jax.eval_shape(module.init, key, *arguments)
    if not is_nnx(module):
        return {}
    _, params, stats, _ = nnx_parts(module)
    states = {"params": nnx.to_pure_dict(params), "batch_stats": nnx.to_pure_dict(stats)}
    return {name: tree for name, tree in states.items() if tree}


def call_layer(layer: Any, item: Any, x: Any) -> Any:
    """One layer in evaluation mode."""
    return call(layer, None, item, x if type(x) is tuple else (x,), None, False)[0]


def init_layer(layer: Any, rng: np.random.Generator, x: Any) -> Any:
    """Random variables of one layer."""
    shapes = shapes_of(layer, None, x if type(x) is tuple else (x,))
    return jax.tree.map(lambda a: (rng.standard_normal(a.shape) * 0.4 + 0.1).astype(a.dtype), shapes)


def run_layers(layers: list, trees: list, x: Any) -> Any:
    """The sequential model in evaluation mode."""
    for layer, tree in zip(layers, trees, strict=True):
        x = call_layer(layer, tree, x)
    return x


def take_microbatch(batch: Any, index: int, num_microbatches: int) -> Any:
    """The part of a batch that is micro-batch `index`."""
    part = lambda a: a[index * (len(a) // num_microbatches) : (index + 1) * (len(a) // num_microbatches)]
    return jax.tree.map(part, batch)


def mean_loss(loss: Any) -> Any:
    """The loss that a loss function stands for."""
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Model:
    """A model with its variables, its data, and what the sequential model computes from them."""

    layers: Any
    loss_fn: Callable[[Any, Any], Any]
    batch: Any
    trees: list

    @property
    def sequence(self) -> list:
        return list(self.layers) if isinstance(self.layers, list) else list(self.layers.layers)

    def loss_of(self, trees: list, batch: Any) -> Any:
        """The loss of a whole batch."""
        return mean_loss(self.loss_fn(run_layers(self.sequence, trees, batch["inputs"]), batch))

    @functools.cached_property
    def truth(self) -> tuple[Any, Any, list]:
        """Loss, outputs, and the gradients of each layer's parameters."""

        def run(trees, batch):
            outputs = run_layers(self.sequence, trees, batch["inputs"])
            return mean_loss(self.loss_fn(outputs, batch)), outputs

        (loss, outputs), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(self.trees, self.batch)
        return loss, outputs, [params_of(layer, tree) for layer, tree in zip(self.sequence, grads, strict=True)]


def params_of(layer: Any, tree: Any) -> Any:
    """A layer's item without the collections that aren't parameters."""
    return tree if isinstance(layer, jpipe.Layer) else {name: part for name, part in tree.items() if name == "params"}


def make_model(layers: Any, loss_fn: Callable, batch: Any, seed: int = 1) -> Model:
    """A model with random variables."""
    trees, x, rng = [], batch["inputs"], np.random.default_rng(seed)
    for layer in list(layers) if isinstance(layers, list) else list(layers.layers):
        trees.append(init_layer(layer, rng, x))
        x = jax.eval_shape(functools.partial(call_layer, layer), trees[-1], x)
    return Model(layers, loss_fn, batch, trees)


class Block(nn.Module):
    """A residual block."""

    width: int = WIDTH
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(param_dtype=self.dtype, dtype=self.dtype, force_float32_reductions=False)(x)
        h = nn.tanh(nn.Dense(self.width + 4, param_dtype=self.dtype)(h))
        return x + nn.Dense(self.width, param_dtype=self.dtype, use_bias=False)(h)


class Gate(nn.Module):
    """Another kind of block of the same shapes."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        return x * nn.sigmoid(nn.Dense(x.shape[-1], param_dtype=self.dtype)(x))


class Head(nn.Module):
    """Normalises, and maps to logits."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(param_dtype=self.dtype, dtype=self.dtype, force_float32_reductions=False)(x)
        return nn.Dense(VOCABULARY, param_dtype=self.dtype)(x)


class MaskedBlock(nn.Module):
    """Takes and returns several values, of which one is boolean and one of another dtype."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, mask, scale):
        h = nn.Dense(x.shape[-1], param_dtype=self.dtype)(x) * scale[:, None, None].astype(x.dtype)
        return x + nn.tanh(h) * mask[..., None].astype(x.dtype), ~mask, scale


class NnxBlock(nnx.Module):
    """A residual block."""

    def __init__(self, dtype, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH + 4, param_dtype=dtype, rngs=rngs)
        self.second = nnx.Linear(WIDTH + 4, WIDTH, param_dtype=dtype, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.second(nnx.tanh(self.first(x)))


def tokens(shape: tuple[int, ...] = (12, 5), seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of token ids, targets and weights (which differ from example to example)."""
    rng = np.random.default_rng(seed)
    return {
        "inputs": rng.integers(0, VOCABULARY, shape).astype(np.int32),
        "targets": rng.integers(0, VOCABULARY, shape).astype(np.int32),
        "weights": rng.random(shape) * np.arange(1, shape[0] + 1)[:, None],
    }


def _cross_entropies(logits: Any, batch: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]


def cross_entropy(logits: Any, batch: Any) -> Any:
    """A mean loss."""
    return jnp.mean(_cross_entropies(logits, batch))


def weighted_cross_entropy(logits: Any, batch: Any) -> tuple[Any, Any]:
    """(loss_sum, weight_sum)."""
    weights = batch["weights"].astype(logits.dtype)
    return jnp.sum(_cross_entropies(logits, batch) * weights), jnp.sum(weights)


def linen(dtype: Any, num_blocks: int = 10) -> Model:
    """Ten blocks between an embedding and a head: 4 stages don't divide them."""
    embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=dtype, dtype=dtype)
    layers = [embed, *[Block(dtype=dtype) for _ in range(num_blocks)], Head(dtype)]
    return make_model(layers, weighted_cross_entropy, tokens())


def alternating(dtype: Any) -> Model:
    """A, B, A, B, ...: a stage goes through the kinds several times."""
    embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=dtype, dtype=dtype)
    pairs = [layer for _ in range(4) for layer in (Block(dtype=dtype), Gate(dtype))]
    return make_model([embed, *pairs, Head(dtype)], cross_entropy, tokens())


def nnx_factories(dtype: Any) -> Model:
    """Every layer a factory."""
    layers = [
        lambda rngs: nnx.Embed(VOCABULARY, WIDTH, param_dtype=dtype, dtype=dtype, rngs=rngs),
        *[lambda rngs: NnxBlock(dtype, rngs) for _ in range(5)],
        lambda rngs: nnx.Linear(WIDTH, VOCABULARY, param_dtype=dtype, rngs=rngs),
    ]
    return make_model(layers, weighted_cross_entropy, tokens())


def nnx_modules(dtype: Any) -> Model:
    """Ready modules in an `nnx.Sequential`, with bare functions between them."""
    rngs = nnx.Rngs(3)
    layers = nnx.Sequential(
        nnx.Embed(VOCABULARY, WIDTH, param_dtype=dtype, dtype=dtype, rngs=rngs),
        *[NnxBlock(dtype, rngs) for _ in range(4)],
        jnp.tanh,
        nnx.Linear(WIDTH, VOCABULARY, param_dtype=dtype, rngs=rngs),
    )
    return make_model(layers, cross_entropy, tokens())


def linen_sequential(dtype: Any) -> Model:
    """An `nn.Sequential` with bare functions between its layers."""
    dense = lambda width: nn.Dense(width, param_dtype=dtype)
    embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=dtype, dtype=dtype)
    layers = nn.Sequential([embed, dense(16), nn.relu, dense(16), nn.relu, dense(WIDTH), nn.tanh, dense(VOCABULARY)])
    return make_model(layers, cross_entropy, tokens())


def plain(dtype: Any) -> Model:
    """Plain functions, with parameters that are nested in tuples and lists."""

    def init_embed(key, ids):
        return (jax.random.normal(key, (VOCABULARY, WIDTH), dtype),)

    def init_block(key, x):
        return {
            "w": [jax.random.normal(key, (WIDTH, WIDTH), dtype) / 3, jnp.ones(WIDTH, dtype)],
            "b": jnp.ones((), dtype),
        }

    def block(params, x):
        return x + jnp.tanh(x @ params["w"][0] * params["w"][1] + params["b"])

    def init_head(key, x):
        return jax.random.normal(key, (WIDTH, VOCABULARY), dtype)

    layers = [
        jpipe.Layer(init_embed, lambda params, ids: params[0][ids], name="embed"),
        *[jpipe.Layer(init_block, block, name="block") for _ in range(5)],
        jpipe.Layer(init_head, lambda params, x: x @ params, name="head"),
    ]
    return make_model(layers, weighted_cross_entropy, tokens())


def mixed(dtype: Any) -> Model:
    """All kinds in one list; shapes, dtypes and structures change from layer to layer, integers among them."""

    def embed(params, inputs):
        return {"x": params["table"][inputs["ids"]], "ids": inputs["ids"], "scale": inputs["scale"] * params["scale"]}

    def init_embed(key, inputs):
        return {"table": jax.random.normal(key, (VOCABULARY, WIDTH), dtype), "scale": jnp.full((), 0.5, jnp.float32)}

    def split(values):
        return values["x"], values["ids"] > 3, values["scale"]

    def merge(x, mask, scale):
        return x * jnp.where(mask, 1, 2)[..., None].astype(x.dtype) + scale[:, None, None].astype(x.dtype)

    def with_count(x):
        return {"logits": x, "count": jnp.sum(x > 0, -1, dtype=jnp.int32)}

    layers = [
        jpipe.Layer(init_embed, embed, name="embed"),
        split,
        *[MaskedBlock(dtype) for _ in range(3)],
        merge,
        *[lambda rngs: NnxBlock(dtype, rngs) for _ in range(3)],
        nnx.Linear(WIDTH, 12, param_dtype=dtype, rngs=nnx.Rngs(1)),
        nn.relu,
        nn.Dense(VOCABULARY, param_dtype=dtype),
        with_count,
    ]
    batch = tokens()
    scales = np.linspace(0.5, 2, len(batch["inputs"])).astype(np.float32)
    batch["inputs"] = {"ids": batch["inputs"], "scale": scales}
    return make_model(layers, lambda outputs, batch: weighted_cross_entropy(outputs["logits"], batch), batch)


MODELS: dict[str, Callable[[Any], Model]] = {
    "linen": linen,
    "alternating": alternating,
    "nnx factories": nnx_factories,
    "nnx modules": nnx_modules,
    "nn.Sequential": linen_sequential,
    "plain": plain,
    "mixed": mixed,
}


@functools.cache
def model(kind: str, dtype: str = "float64") -> Model:
    """A model of `MODELS`, made once. Call it under `jax.enable_x64(True)` for float64."""
    return MODELS[kind](jnp.dtype(dtype))


def assert_step_equals(pipe: jpipe.Pipeline, items: list, batch: Any, key: Any, expected: tuple) -> None:
    """A step has the expected loss, gradients and states: `(loss, gradients, states)`, a tree for each layer."""
    loss, gradients, states = expected
    variables = pipe.from_layer_variables(items, batch)
    (found, updates), grads = pipe.value_and_grad(variables, batch, key)
    assert_close(found, loss, "loss")
    trees = pipe.layer_variables({"params": grads, **updates})
    for i, (tree, gradient, state) in enumerate(zip(trees, gradients, states, strict=True)):
        assert_close(tree["params"], gradient, f"gradients of layer {i}")
        assert_close({name: t for name, t in tree.items() if name != "params"}, state, f"state of layer {i}")


class NnxDrops(nnx.Module):
    """Half of the values, as nnx drops them."""

    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


# --- schedules --------------------------------------------------------------------------------------------------------


def one_slot(num_stages: int, num_microbatches: int) -> jpipe.Schedule:
    """1F1B in ticks of one slot that admits forwards and backwards alike: a schedule of one's own."""
    order = jpipe.make_schedule("1f1b", num_stages=num_stages, num_microbatches=num_microbatches).actions
    return jpipe.Schedule(order, slots=("FB",), name="one slot")


def ahead(num_stages: int, num_microbatches: int) -> jpipe.Schedule:
    """1F1B whose stages recompute ahead where they have no forward left while later ones still do.

    stage 0 |F0 .  |F1 .  |F2 .  |F3 .  |F4 B0 |F5 B1 |R4 B2 |R5 B3 |.  B4 |.  B5 |
    stage 1 |.  .  |F0 .  |F1 .  |F2 B0 |F3 B1 |F4 B2 |F5 B3 |R5 B4 |.  B5 |.  .  |
    stage 2 |.  .  |.  .  |F0 B0 |F1 B1 |F2 B2 |F3 B3 |F4 B4 |F5 B5 |.  .  |.  .  |
    """
    base = jpipe.make_schedule("1f1b", num_stages=num_stages, num_microbatches=num_microbatches)
    orders = [[*order] for order in base.actions]
    for stage, order in enumerate(orders):
        early = num_stages - 1 - stage
        for m in range(max(early, num_microbatches - early), num_microbatches):
            order.insert(order.index(jpipe.Action("B", m - early)), jpipe.Action("R", m))
    return jpipe.Schedule(orders, slots=("FR", "B"), name="ahead")


ORDERS_OF_OUR_OWN = {"one slot": one_slot, "ahead": ahead, **PUBLISHED}


def names(*, chunks: int | None = None, train: bool | None = None, split: bool | None = False) -> list[str]:
    """The schedules that have names: all, or those that may have so many chunks a stage, or that train (or don't).

    None of both kinds; `split`: whether backwards are in two parts.
    """

    def has_chunks(name: str) -> bool:
        try:
            jpipe.make_schedule(name, num_stages=1, num_microbatches=1, num_chunks=chunks)
        except ValueError:
            return False
        return True

    made = {name: SCHEDULES[name](1, 1, 2) for name in SCHEDULES if chunks is None or has_chunks(name)}
    return [name for name, made in made.items() if train in (None, made.trains) and split in (None, made.splits)]


def one_slot_from_k(num_stages: int, num_microbatches: int) -> jpipe.Schedule:
    """1F1B as papers draw it: one slot for both kinds; stage k starts with K-k forwards, then B and F alternate."""
    orders = []
    for stage in range(num_stages):
        ahead = min(num_microbatches, num_stages - stage)
        order = [f"F{m}" for m in range(ahead)]
        for m in range(num_microbatches):
            order += [f"B{m}"] + [f"F{m + ahead}"] * (m + ahead < num_microbatches)
        orders.append(order)
    return jpipe.Schedule(orders, slots=("FB",), name="one slot, from K")


def pipeline(model: Model, schedule: str, K: int, M: int, V: int = 1, **options: Any) -> jpipe.Pipeline:
    """A pipeline of a model; `schedule` is a name, or one of `ORDERS_OF_OUR_OWN`."""
    order = ORDERS_OF_OUR_OWN[schedule](K, M) if schedule in ORDERS_OF_OUR_OWN else schedule
    sizes = {"num_stages": K, "num_microbatches": M, "num_chunks": V}
    return jpipe.Pipeline(model.layers, model.loss_fn, **sizes, schedule=order, **options)


def check_step(pipe: jpipe.Pipeline, model: Model) -> tuple[Any, Any]:
    """Loss, gradients and outputs are the model's truth, leaf by leaf; (variables, gradients) of the pipeline."""
    variables = pipe.from_layer_variables(model.trees, model.batch)
    (loss, _), gradients = pipe.value_and_grad(variables, model.batch)
    assert_close(loss, model.truth[0], "loss")
    assert_close(pipe.layer_variables({"params": gradients}), model.truth[2], "gradients")
    assert_close(pipe.apply(variables, model.batch), model.truth[1], "outputs")
    return variables, gradients


def check_by_hand(pipe: jpipe.Pipeline, batch: Any, by_hand: Callable, variables: Any = None) -> list:
    """Loss, every gradient and evaluation are those of `by_hand(trees of the layers)`; returns the gradients."""
    variables = pipe.init(jax.random.key(0), batch) if variables is None else variables
    trees = jax.device_get(pipe.layer_variables(variables))
    expected, gradients = jax.jit(jax.value_and_grad(by_hand))(trees)
    (loss, _), grads = pipe.value_and_grad(variables, batch)
    assert_close(loss, expected, "loss")
    assert_close(jax.device_get(pipe.layer_variables({"params": grads})), gradients, "gradients")
    assert_close(pipe.evaluate(variables, batch), expected, "evaluation")
    return gradients


CUTS = [
    (1, 2, "1f1b", 1, "layer"),
    (4, 4, "1f1b", 1, "none"),
    (3, 4, "gpipe", 1, "layer"),
    (2, 4, "interleaved", 2, "stage"),
    (4, 2, "1f1b", 1, "full"),
]
"""K, M, schedule, V and remat, one of each kind: for models that are more than a chain of layers."""


CUT_BY_DEFAULT = (2, 4, "interleaved", 2, "stage")


def some_slow(cases: list) -> list:
    """Some of `CUTS`, all but `CUT_BY_DEFAULT` marked as slow."""
    return [case if case == CUT_BY_DEFAULT else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def cut(layers: list, loss_fn: Callable, case: tuple) -> jpipe.Pipeline:
    """The pipeline of one of `CUTS`, with even counts of layers."""
    k, m, schedule, v, remat = case
    sizes = {"num_stages": k, "num_microbatches": m, "num_chunks": v}
    return jpipe.Pipeline(layers, loss_fn, **sizes, schedule=schedule, remat=remat, balance="even")


# --- compilations -----------------------------------------------------------------------------------------------------

_OF_KEYS = ("jit(stage)", "jit(_threefry_seed)")  # what jax.random.key compiles
_compilations = [0]


def _count(event: str, duration: float, *, fun_name: str = "", **_: Any) -> None:
    del duration
    if event == "/jax/core/compile/backend_compile_duration" and fun_name not in _OF_KEYS:
        _compilations[0] += 1


jax.monitoring.register_event_duration_secs_listener(_count)


@contextlib.contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """`with compilations() as count: ...; count()`: the programs that were compiled since, but for those of keys."""
    before = _compilations[0]
    yield lambda: _compilations[0] - before
