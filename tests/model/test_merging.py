"""State: what layers keep besides parameters is that of the whole mini-batch after a step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
import sequential
from cases import assert_close, assert_equal, assert_step_equals


def batch_of_float64(size=8):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((size, 4)) for name in ("inputs", "targets")}


def pooled(x, momentum):
    """The running statistics of a BatchNorm after one step from new, with those of the whole mini-batch."""
    axes = tuple(range(np.ndim(x) - 1))
    mean, variance = np.mean(x, axes), np.var(x, axes)
    return {"mean": (1 - momentum) * mean, "var": momentum + (1 - momentum) * variance}


def test_moments_are_those_of_the_mini_batch(x64):
    """Batches whose micro-batches differ in their means; two BatchNorms that move at different rates, one unmoved."""
    rates = (0.9, 0.25, 1.0)
    norm = lambda momentum: nn.BatchNorm(momentum=momentum, param_dtype=jnp.float64, force_float32_reductions=False)
    layers = [norm(rates[0]), norm(rates[1]), norm(rates[2])]
    x = batch_of_float64(12)["inputs"] + np.arange(12.0)[:, None]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=3, balance="even")
    variables = pipe.init(jax.random.key(0), x)
    trees = pipe.layer_variables({**variables, **pipe.value_and_grad(variables, x)[0][1]})
    assert_close(trees[0]["batch_stats"], pooled(x, rates[0]), "the first layer, whose inputs are the batch")
    parts = x.reshape(3, 4, 4)
    seen = (parts - parts.mean(1, keepdims=True)) / np.sqrt(parts.var(1, keepdims=True) + 1e-5)
    assert_close(trees[1]["batch_stats"], pooled(seen.reshape(12, 4), rates[1]), "the second layer")
    assert_equal(trees[2]["batch_stats"], {"mean": np.zeros(4), "var": np.ones(4)}, "a layer at rest")


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return nn.BatchNorm(not train, momentum=0.9, param_dtype=jnp.float64, force_float32_reductions=False)(x)


@pytest.mark.parametrize("explicit", [False, True])
def test_moments_over_a_data_axis_are_those_of_the_global_batch(x64, make_mesh, explicit):
    layers, batch, key = [Norm(), nn.Dense(4, param_dtype=jnp.float64)], batch_of_float64(), jax.random.key(0)
    batch["inputs"] += np.arange(8.0)[:, None]
    items = sequential.random_items(layers, batch, 1)
    expected = sequential.truth(layers, items, mean_of_squares, batch, key=key, m=2, rate=0.1)
    mesh = make_mesh((2, 2), ("stage", "data"), explicit=explicit)
    pipe = jpipe.Pipeline(layers, mean_of_squares, num_stages=2, num_microbatches=2, balance="even", mesh=mesh)
    assert_step_equals(pipe, items, batch, key, expected)


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


IN_TURN, MIXED = ["F0", "F1", "F2", "B0", "B1", "B2"], ["F2", "F0", "F1", "B1", "B2", "B0"]


@pytest.mark.parametrize(
    ("rule", "total", "count", "order"),
    [(None, 10 / 3, 7, IN_TURN), ("mean", 10 / 3, 7, MIXED), ("sum", 10, 11, IN_TURN), ("last", 7, 7, MIXED)],
)
def test_rules_by_collection(rule, total, count, order):
    """Micro-batches [1, 0], [1, 1] and [4, 3]; the last one is the last in the batch, not in time."""
    x = np.asarray([1, 0, 1, 1, 4, 3], np.float32)[:, None]
    options = {"balance": "even"} if rule is None else {"balance": "even", "merge": {"kept": rule}}
    sizes = {"num_stages": 2, "num_microbatches": 3, "schedule": jpipe.Schedule([order, order])}
    pipe = jpipe.Pipeline([Keeps(), nn.Dense(1)], lambda y, _: jnp.mean(y), **sizes, **options)
    variables = pipe.init(jax.random.key(0), x)
    (_, updates), _ = pipe.value_and_grad(variables, x)
    kept = pipe.layer_variables({**variables, **updates})[0]["kept"]
    assert_close(kept["total"], np.float32(total), "a float")
    assert int(kept["count"]) == count, "an integer"
    assert not kept["flag"]
    assert {name: leaf.dtype.name for name, leaf in kept.items()} == {
        "total": "float32",
        "count": "int32",
        "flag": "bool",
    }


class KeepsAFlag(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("flags", "seen", lambda: jnp.asarray(False))
        return x


@pytest.mark.parametrize(
    ("layer", "merge", "error", "message"),
    [
        (Keeps(), {"kept": "median"}, ValueError, r"merge\['kept'\]='median' is unknown; use one of \['mean'"),
        (Keeps(), "mean", TypeError, "merge='mean' is no dict"),
        (Keeps(), {"params": "mean"}, ValueError, "merge has a rule for 'params', which have gradients"),
        (Keeps(), {"stats": "mean"}, ValueError, r"a rule for 'stats', a collection that no layer has.*\['kept'\]"),
        (nn.Dense(3), {"frozen": "mean"}, ValueError, r"\['frozen'\]='mean': jpipe\.freeze keeps that collection as"),
        (Keeps(), {"kept": "moments"}, ValueError, r"='moments' merges running averages called \"mean\" and"),
        # A regression: a rule that applies to nothing was ignored.
        (KeepsAFlag(), {"flags": "sum"}, ValueError, r"\['flags'\]='sum' merges numbers, not .*'seen': bool\[\]"),
        (KeepsAFlag(), {"flags": "mean"}, ValueError, r"='mean' merges floating-point values, not .*'seen': bool\[\]"),
    ],
)
def test_wrong_rules(layer, merge, error, message):
    with pytest.raises(error, match=message):
        pipe = jpipe.Pipeline([layer], lambda y, _: jnp.mean(y), num_stages=1, num_microbatches=1, merge=merge)
        pipe.init(jax.random.key(0), np.ones((2, 1), np.float32))


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


def test_fp8_trains_as_the_plain_model():
    """Two steps, so that the second one scales by what the first one saw: of M micro-batches the largest of each.

    The plain model sees the whole batch at once. In float8 and float32, to rounding, of which the largest error is that
    of float32 sums.
    """
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((16, 16)).astype(np.float32) for name in ("inputs", "targets")}
    layers = [nn.Dense(16), Fp8(), Fp8(), nn.Dense(16)]
    mesh = jpipe.make_mesh(stage=2, data=2, devices=jax.devices()[:4])
    pipe = jpipe.Pipeline(layers, mean_of_squares, num_stages=2, num_microbatches=2, mesh=mesh, remat="full")

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
