"""State: what layers keep besides parameters is that of the whole mini-batch after a step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from cases import assert_close, assert_equal, params_of, take_microbatch


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def batch_of_float64(size=8):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((size, 4)) for name in ("inputs", "targets")}


class Counts(nn.Module):
    """Counts its calls, and keeps the mean of what it saw, of another dtype than its parameters."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        seen = self.variable("counts", "seen", lambda: jnp.zeros((2,), jnp.float32))
        if not self.is_initializing() and self.is_mutable_collection("counts"):
            count.value = count.value + 1
            seen.value = jnp.stack([jnp.mean(x), jnp.max(x)]).astype(jnp.float32)
        return x


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(4, param_dtype=jnp.float64)(x)
        norm = nn.BatchNorm(
            use_running_average=not train, momentum=0.9, param_dtype=jnp.float64, force_float32_reductions=False
        )
        return x + jnp.tanh(norm(x))


def sequential_with_state(layers, trees, batch, m, loss_fn):
    """Loss (mean over micro-batches), new states (one list a micro-batch) in training mode."""

    def run(params, part):
        x, states = part["inputs"], []
        for layer, tree, own in zip(layers, trees, params, strict=True):
            mutable = [name for name in tree if name != "params"]
            mode = {"train": True} if isinstance(layer, Normed) else {}
            x, state = layer.apply(tree | own, x, mutable=mutable, **mode)
            states.append(state)
        return loss_fn(x, part), states

    def total(params):
        results = [run(params, take_microbatch(batch, i, m)) for i in range(m)]
        return sum(loss for loss, _ in results) / m, [states for _, states in results]

    params = [params_of(layer, tree) for layer, tree in zip(layers, trees, strict=True)]
    return jax.jit(jax.value_and_grad(total, has_aux=True))(params)


@pytest.mark.parametrize(
    ("order", "k", "v", "remat"),
    [
        ("1f1b", 2, 1, "layer"),
        pytest.param("gpipe", 3, 1, "none", marks=pytest.mark.slow),
        pytest.param("interleaved", 2, 2, "full", marks=pytest.mark.slow),
        pytest.param("1f1b", 1, 1, "stage", marks=pytest.mark.slow),
    ],
)
def test_state_is_merged_over_micro_batches(x64, order, k, v, remat):
    layers = [Normed(), Counts(), Normed(), Normed(), Counts()]
    batch, m = batch_of_float64(), 4
    loss_fn = lambda y, b: jnp.mean(jnp.square(y - b["targets"]))
    sizes = {"num_stages": k, "num_microbatches": m, "num_chunks": v}
    pipe = jpipe.Pipeline(layers, loss_fn, schedule=order, remat=remat, balance="even", **sizes)
    variables = pipe.init(jax.random.key(0), batch)
    assert set(variables) == {"params", "batch_stats", "counts"}
    trees = jax.device_get(pipe.layer_variables(variables))
    (loss, states), grads = sequential_with_state(layers, trees, batch, m, loss_fn)
    (found, updates), gradients = pipe.value_and_grad(variables, batch)
    assert_close(found, loss, "loss")
    assert_close([{"params": t.get("params", {})} for t in pipe.layer_variables({"params": gradients})],
                 [{"params": g.get("params", {})} for g in grads], "gradients")  # fmt: skip
    assert set(updates) == {"batch_stats", "counts"}
    new = pipe.layer_variables({"params": variables["params"], **updates})
    for index, tree in enumerate(new):
        parts = [state[index] for state in states]
        if isinstance(layers[index], Normed):
            averages = [part["batch_stats"]["BatchNorm_0"] for part in parts]
            found, rate = tree["batch_stats"]["BatchNorm_0"], 0.1
            means = np.asarray([average["mean"] for average in averages])  # from a mean of 0 at the rate
            assert_close(found["mean"], np.mean(means, 0), f"running mean of layer {index}")
            variance = np.mean([average["var"] for average in averages], 0) + rate * np.var(means / rate, 0)
            assert_close(found["var"], variance, f"running variance of layer {index}")
            assert found["var"].dtype == jnp.float64
        else:
            assert tree["counts"]["calls"].dtype == jnp.int32
            assert int(tree["counts"]["calls"]) == 1
            seen = np.mean([part["counts"]["seen"] for part in parts], 0)
            assert_close(tree["counts"]["seen"], seen.astype(np.float32), f"what layer {index} saw")
    # evaluation uses the state and doesn't change it
    outputs = pipe.apply({"params": variables["params"], **updates}, batch)
    x = batch["inputs"]
    for layer, tree in zip(layers, new, strict=True):
        x = layer.apply(tree, x, **({"train": False} if isinstance(layer, Normed) else {}))
    assert_close(outputs, x, "outputs in evaluation")


def pooled(x, momentum):
    """The running statistics of a BatchNorm after one step from new, with those of the whole mini-batch."""
    axes = tuple(range(np.ndim(x) - 1))
    mean, variance = np.mean(x, axes), np.var(x, axes)
    return {"mean": (1 - momentum) * mean, "var": momentum + (1 - momentum) * variance}


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_moments_are_those_of_the_mini_batch(x64, order):
    """Batches whose micro-batches differ in their means; two BatchNorms that move at different rates, one unmoved."""
    rates = (0.9, 0.25, 1.0)
    norm = lambda momentum: nn.BatchNorm(momentum=momentum, param_dtype=jnp.float64, force_float32_reductions=False)
    layers = [norm(rates[0]), norm(rates[1]), norm(rates[2])]
    x = batch_of_float64(12)["inputs"] + np.arange(12.0)[:, None]
    pipe = jpipe.Pipeline(
        layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=3, schedule=order, balance="even"
    )
    variables = pipe.init(jax.random.key(0), x)
    trees = pipe.layer_variables({**variables, **pipe.value_and_grad(variables, x)[0][1]})
    assert_close(trees[0]["batch_stats"], pooled(x, rates[0]), "the first layer, whose inputs are the batch")
    parts = x.reshape(3, 4, 4)
    seen = (parts - parts.mean(1, keepdims=True)) / np.sqrt(parts.var(1, keepdims=True) + 1e-5)
    assert_close(trees[1]["batch_stats"], pooled(seen.reshape(12, 4), rates[1]), "the second layer")
    assert_equal(trees[2]["batch_stats"], {"mean": np.zeros(4), "var": np.ones(4)}, "a layer at rest")


def test_moments_of_nnx_modules():
    layers = [lambda rngs: nnx.BatchNorm(4, momentum=0.5, rngs=rngs), lambda rngs: nnx.Linear(4, 4, rngs=rngs)]
    x = batch_of_float64(8)["inputs"].astype(np.float32) + np.float32(np.arange(8)[:, None])
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=2, balance="even")
    state = pipe.create_state(jax.random.key(0), x, optax.sgd(0.0))
    assert set(state.variables) == {"params", "batch_stats"}
    state, _ = pipe.train_step(state, x)
    after = pipe.layer_variables(state.variables)
    assert_close(after[0]["batch_stats"], pooled(x, np.float32(0.5)), "running moments")


class CheckpointedNorm(nnx.Module):
    """A BatchNorm inside `nnx.remat`, whose statistics nnx keeps out of gradients."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, momentum=0.75, rngs=rngs)

    def __call__(self, x):
        return nnx.remat(lambda norm, x: norm(x))(self.norm, x)


@pytest.mark.parametrize(
    "layer",
    [lambda rngs: CheckpointedNorm(rngs), nn.remat(nn.BatchNorm)(use_running_average=False, momentum=0.75)],
    ids=["nnx", "linen"],
)
def test_moments_of_checkpointed_modules(layer):
    """A regression: how fast an average moves was not seen inside a checkpoint."""
    x = batch_of_float64(8)["inputs"].astype(np.float32) + np.float32(np.arange(8)[:, None])
    pipe = jpipe.Pipeline([layer, jnp.sin], lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=4, balance="even")
    variables = pipe.init(jax.random.key(0), x)
    (_, updates), _ = pipe.value_and_grad(variables, x)
    found = pipe.layer_variables(updates)[0]["batch_stats"]
    assert_close(found.get("norm", found), pooled(x, np.float32(0.75)), "running moments")


def test_state_at_rest_stays_as_it_is_to_the_last_bit():
    """A regression: a mean of equal numbers is not always that number."""
    layers = [nn.BatchNorm(use_running_average=True), nn.BatchNorm(use_running_average=False, momentum=1.0)]
    x = batch_of_float64(12)["inputs"].astype(np.float32)
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=6, balance="even")
    trees = jax.device_get(pipe.layer_variables(pipe.init(jax.random.key(0), x)))
    rng = np.random.default_rng(0)
    for tree in trees:
        tree["batch_stats"] = jax.tree.map(lambda a: rng.uniform(0.5, 2, a.shape).astype(a.dtype), tree["batch_stats"])
    (_, updates), _ = pipe.value_and_grad(pipe.from_layer_variables(trees), x)
    assert_equal(pipe.layer_variables(updates), [{"batch_stats": tree["batch_stats"]} for tree in trees])


@pytest.mark.parametrize("explicit", [False, True])
def test_moments_over_a_data_axis_are_those_of_the_global_batch(x64, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(kind, kind))
    layers = [
        nn.BatchNorm(momentum=0.9, param_dtype=jnp.float64, force_float32_reductions=False),
        nn.Dense(4, param_dtype=jnp.float64),
    ]
    x = batch_of_float64(8)["inputs"] + np.arange(8.0)[:, None]
    sizes = {"num_stages": 2, "num_microbatches": 2, "balance": "even"}
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(jnp.square(y)), mesh=mesh, **sizes)
    alone = jpipe.Pipeline(layers, lambda y, _: jnp.mean(jnp.square(y)), **sizes)
    variables = alone.init(jax.random.key(0), x)
    (loss, updates), grads = alone.value_and_grad(variables, x)
    trees = alone.layer_variables({"params": grads, **updates})
    variables = pipe.from_layer_variables(alone.layer_variables(variables), x)
    (found, updates), grads = pipe.value_and_grad(variables, x)
    again = pipe.layer_variables({"params": grads, **updates})
    assert_close(found, loss, "loss")
    assert_close(again, trees, "gradients and state")
    assert_close(again[0]["batch_stats"], pooled(x, 0.9), "running moments")


class Keeps(nn.Module):
    """Keeps sums and extremes of what it sees, each kind of number in its way."""

    @nn.compact
    def __call__(self, x):
        values = {
            "total": (jnp.zeros((), jnp.float32), lambda old: old + jnp.sum(x)),
            "count": (jnp.full((), 5, jnp.int32), lambda old: old + x.shape[0]),
            "flag": (jnp.zeros((), jnp.bool_), lambda old: jnp.any(x > 10)),
        }
        for name, (start, change) in values.items():
            kept = self.variable("kept", name, lambda start=start: start)
            if not self.is_initializing() and self.is_mutable_collection("kept"):
                kept.value = change(kept.value)
        return x * 1.0


@pytest.mark.parametrize(
    ("rule", "total", "count"),
    [(None, 10 / 3, 7), ("mean", 10 / 3, 7), ("sum", 10, 11), ("last", 7, 7)],
)
@pytest.mark.parametrize("order", [["F0", "F1", "F2", "B0", "B1", "B2"], ["F2", "F0", "F1", "B1", "B2", "B0"]])
def test_rules_by_collection(rule, total, count, order):
    """Micro-batches [1, 0], [1, 1] and [4, 3]; the last one is the last in the batch, not in time."""
    x = np.asarray([1, 0, 1, 1, 4, 3], np.float32)[:, None]
    options = {} if rule is None else {"merge": {"kept": rule}}
    pipe = jpipe.Pipeline(
        [Keeps(), nn.Dense(1)],
        lambda y, _: jnp.mean(y),
        num_stages=2,
        num_microbatches=3,
        balance="even",
        schedule=jpipe.Schedule([order, order]),
        **options,
    )
    variables = pipe.init(jax.random.key(0), x)
    (_, updates), _ = pipe.value_and_grad(variables, x)
    kept = pipe.layer_variables({**variables, **updates})[0]["kept"]
    assert_close(kept["total"], np.float32(total), "a float")
    assert int(kept["count"]) == count, "an integer"
    assert not kept["flag"]
    assert {name: leaf.dtype for name, leaf in kept.items()} == {
        "total": jnp.float32,
        "count": jnp.int32,
        "flag": jnp.bool_,
    }


@pytest.mark.parametrize(
    ("merge", "error", "message"),
    [
        ({"kept": "median"}, ValueError, r"merge\['kept'\]='median' is unknown; use one of \['mean'"),
        ("mean", TypeError, "merge='mean' is no dict"),
        ({"params": "mean"}, ValueError, "merge has a rule for 'params', which have gradients"),
        ({"stats": "mean"}, ValueError, r"merge has a rule for 'stats', a collection that no layer has.*\['kept'\]"),
        ({"kept": "moments"}, ValueError, r"merge\['kept'\]='moments' merges running averages called \"mean\" and"),
    ],
)
def test_wrong_rules(merge, error, message):
    x = np.ones((2, 1), np.float32)
    with pytest.raises(error, match=message):
        pipe = jpipe.Pipeline([Keeps()], lambda y, _: jnp.mean(y), num_stages=1, num_microbatches=1, merge=merge)
        pipe.init(jax.random.key(0), x)


class KeepsAFlag(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("flags", "seen", lambda: jnp.asarray(False))
        return x


@pytest.mark.parametrize(("rule", "merges"), [("sum", "numbers"), ("mean", "floating-point values")])
def test_rules_that_apply_to_nothing(rule, merges):
    """A regression: such a rule was ignored."""
    pipe = lambda rule: jpipe.Pipeline(
        [KeepsAFlag()], lambda y, _: jnp.mean(y), num_stages=1, num_microbatches=1, merge={"flags": rule}
    )
    x = np.ones((2, 1), np.float32)
    with pytest.raises(ValueError, match=rf"merge\['flags'\]='{rule}' merges {merges}, not .*'seen': bool\[\]"):
        pipe(rule).init(jax.random.key(0), x)
    pipe("last").init(jax.random.key(0), x)


# --- what a forward only reads ----------------------------------------------------------------------------------------

OVERWRITTEN = "_overwrite_with_gradient"


class Fp8(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x))


def parameters(*trees):
    """The parameters of each layer in each of some lists of trees."""
    return zip(*([own["params"] for own in layers] for layers in trees), strict=True)


def mean_of_squares(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


@pytest.mark.parametrize(
    ("m", "options", "data"),
    [
        (1, {}, 1),
        pytest.param(4, {"remat": "none"}, 1, marks=pytest.mark.slow),
        pytest.param(2, {"remat": "full"}, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fp8_trains_as_the_plain_model(m, options, data):
    """Two steps, so that the second one scales by what the first one saw: of M micro-batches the largest of each.

    The plain model sees the whole batch at once. In float8 and float32, to rounding, of which the largest error is that
    of float32 sums.
    """
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((16, 16)).astype(np.float32) for name in ("inputs", "targets")}
    layers = [nn.Dense(16), Fp8(), Fp8(), nn.Dense(16)]
    mesh = jpipe.make_mesh(stage=2, data=data, devices=jax.devices()[: 2 * data])
    pipe = jpipe.Pipeline(layers, mean_of_squares, num_stages=2, num_microbatches=m, mesh=mesh, **options)

    @jax.jit
    def plain(trees):
        def loss(trees):
            x = batch["inputs"]
            for layer, tree in zip(layers, trees, strict=True):
                x = layer.apply(tree, x)
            return mean_of_squares(x, batch)

        return jax.grad(loss)(trees)

    with jax.numpy_dtype_promotion("standard"):
        state = pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1))
        trees = jax.device_get(pipe.layer_variables(state.variables))
        for _ in range(2):
            grads = plain(trees)
            new = [own.get(OVERWRITTEN, {}) for own in grads]
            moved = [jax.tree.map(lambda a, g: a - 0.1 * g, *pair) for pair in parameters(trees, grads)]
            trees = [{"params": a} | ({OVERWRITTEN: b} if b else {}) for a, b in zip(moved, new, strict=True)]
            state, _ = pipe.train_step(state, batch)
            found = jax.device_get(pipe.layer_variables(state.variables))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, trees)
    assert max(np.max(leaf) for leaf in jax.tree.leaves(new)) > 0, "amplitudes were seen"


def test_a_gradient_that_is_a_new_value_may_be_negative(x64):
    """The largest of micro-batches, whatever its sign; places of a stage that no layer owns hold zeros all the same."""

    @jax.custom_vjp
    def record(x, seen):
        return x

    record.defvjp(lambda x, seen: (x, x), lambda x, dy: (dy, -jnp.abs(x).max(keepdims=True)[0] - 1))

    class Records(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, param_dtype=jnp.float64)(x)
            return record(x, self.variable("seen", "lowest", lambda: jnp.zeros(1, jnp.float64)).value)

    batch = batch_of_float64()
    layers, rules = [nn.Dense(4, param_dtype=jnp.float64), Records(), Records()], {"seen": "gradient"}
    pipe = jpipe.Pipeline(layers, mean_of_squares, num_stages=2, num_microbatches=4, merge=rules, balance=[2, 1])
    variables = pipe.init(jax.random.key(0), batch)
    (_, updates), _ = pipe.value_and_grad(variables, batch)
    trees, x, expected = jax.device_get(pipe.layer_variables(variables)), batch["inputs"], []
    x = layers[0].apply(trees[0], x)
    for tree in trees[1:]:
        x = nn.Dense(4, param_dtype=jnp.float64).apply({"params": tree["params"]["Dense_0"]}, x)
        expected.append(max(-np.abs(x[2 * i : 2 * i + 2]).max() - 1 for i in range(4)))
    found = jax.device_get(pipe.layer_variables(updates))
    assert_close([own["seen"]["lowest"][0] for own in found[1:]], expected, "the largest")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(updates)))
