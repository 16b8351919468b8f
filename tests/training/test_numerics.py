"""Numerical trouble: it shows in the metrics, a step that the optimiser skips changes nothing, losses can be scaled."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import assert_close, assert_equal, take_microbatch
from updates import one_by_one
from updates import standard_promotion as standard_promotion


class Block(nn.Module):
    """Keeps running averages, and counts its calls."""

    @nn.compact
    def __call__(self, x, train: bool):
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += int(train)
        h = nn.Dense(4, use_bias=False, param_dtype=jnp.float64)(x)
        norm = nn.BatchNorm(not train, momentum=0.9, param_dtype=jnp.float64, force_float32_reductions=False)
        return x + jnp.tanh(norm(h))


def loss_fn(y, batch):
    """Where weights are zero, the derivative of the norm is 0/0, though the loss is finite."""
    return jnp.mean(jnp.square(y - batch["targets"])) + jnp.linalg.norm(y * batch["weights"][:, None])


def batch_of(fault: str, seed: int) -> dict[str, np.ndarray]:
    """Sixteen examples, of which the last has a fault."""
    rng = np.random.default_rng(seed)
    batch = {"inputs": rng.standard_normal((16, 4)), "targets": rng.standard_normal((16, 4)), "weights": np.ones(16)}
    if fault == "input":
        batch["inputs"][-1, 0] = np.nan
    elif fault == "target":
        batch["targets"][-1, 0] = np.inf
    elif fault == "gradient":
        batch["weights"][-8:] = 0
    return batch


FAULTS = ["none", "input", "none", "gradient", "target", "none"]


# --- a skipped step ---------------------------------------------------------------------------------------------------


def accumulated(tx, **options):
    return optax.MultiSteps(tx, 2, **options).gradient_transformation()


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(0.1), optax.apply_if_finite(tx, 5))


OPTIMIZERS = {
    "behind a clipped norm": lambda per_layer: clipped(per_layer(optax.lamb(1e-2))),
    "accumulated": lambda per_layer: optax.apply_if_finite(accumulated(per_layer(optax.lars(1e-2))), 5),
    "by MultiSteps": lambda _: accumulated(optax.adam(1e-2), should_skip_update_fn=optax.skip_not_finite),
}


def sequential_step(layers, tx, m):
    """One step of plain Flax and optax: parameters, collections and `opt_state` with the batch's loss and norm."""

    def total(params, states, batch):
        losses, news = [], []
        for part in (take_microbatch(batch, i, m) for i in range(m)):
            x, new = part["inputs"], []
            for layer, own, state in zip(layers, params, states, strict=True):
                x, changed = layer.apply({"params": own, **state}, x, train=True, mutable=["batch_stats", "counts"])
                new.append(changed)
            losses.append(loss_fn(x, part))
            news.append(new)
        mean = lambda *leaves: sum(leaves) / m if leaves[0].dtype == jnp.float64 else leaves[-1]
        return sum(losses) / m, jax.tree.map(mean, *news)

    @jax.jit
    def step(params, states, opt_state, batch):
        (loss, new), grads = jax.value_and_grad(total, has_aux=True)(params, states, batch)
        finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]).all()
        changes, opt_state = tx.update(grads, opt_state, params)
        states = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, states)
        return optax.apply_updates(params, changes), states, opt_state, loss, optax.tree.norm(grads)

    return step


@pytest.mark.parametrize(
    ("name", "k", "m", "mesh", "explicit"),
    [
        pytest.param("behind a clipped norm", 3, 2, (3,), False, marks=pytest.mark.slow),
        pytest.param("accumulated", 2, 2, (2, 2), True, marks=pytest.mark.slow),
        ("by MultiSteps", 1, 2, (1,), False),
    ],
)
def test_a_skipped_step_leaves_all_as_it_was(make_mesh, name, k, m, mesh, explicit):
    with jax.enable_x64(True):
        layers = [Block() for _ in range(max(k, 2))]
        pipe = jpipe.Pipeline(
            layers,
            loss_fn,
            num_stages=k,
            num_microbatches=m,
            balance="even",
            merge={"batch_stats": "mean"},
            loss_over="microbatch",  # a norm is of all examples together
            mesh=make_mesh(mesh, ("stage", "data")[: len(mesh)], explicit=explicit),
        )
        state = pipe.create_state(jax.random.key(0), batch_of("none", 0), OPTIMIZERS[name](jpipe.per_layer))
        trees = jax.device_get(pipe.layer_variables(state.variables))
        params = [tree.pop("params") for tree in trees]
        tx = OPTIMIZERS[name](one_by_one)
        opt_state, step = tx.init(params), sequential_step(layers, tx, m)
        for number, fault in enumerate(FAULTS):
            before = trees
            params, trees, opt_state, loss, norm = step(params, trees, opt_state, batch_of(fault, number))
            state, metrics = pipe.train_step(state, batch_of(fault, number))
            found = pipe.layer_variables(state.variables)
            assert_close([tree.pop("params") for tree in found], params, f"parameters after step {number}")
            assert_close(found, trees, f"state after step {number}")
            assert bool(metrics["finite"]) == (fault == "none"), number
            assert np.isfinite(metrics["loss"]) == np.isfinite(loss) == (fault in ("none", "gradient")), number
            if fault == "none":
                assert_close((metrics["loss"], metrics["grad_norm"]), (loss, norm), f"metrics of step {number}")
            else:
                assert not np.isfinite(metrics["grad_norm"])
                assert_equal(trees, before)
        assert int(state.step) == len(FAULTS)
        counters = lambda tree: [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if not leaf.ndim]
        assert len(counters(opt_state)) >= 2
        for got, want in zip(counters(state.opt_state)[:3], counters(opt_state)[:3], strict=True):
            np.testing.assert_array_equal(got, want)


class Drops(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return nn.BatchNorm(not train)(nn.Dense(4)(nn.Dropout(0.5)(x, deterministic=not train)))


def test_steps_and_keys_go_on_past_a_skipped_step():
    """What follows a skipped first step is what a second step is: with its own random numbers."""
    sizes = {"num_stages": 2, "num_microbatches": 2, "balance": "even"}
    pipe = jpipe.Pipeline([Drops(), Drops()], lambda y, batch: jnp.mean(jnp.square(y - batch["targets"])), **sizes)
    tx, narrow = optax.apply_if_finite(optax.adam(1e-2), 1), lambda fault: jax.tree.map(np.float32, batch_of(fault, 0))
    make_state = lambda: pipe.create_state(jax.random.key(0), narrow("none"), tx)
    state, _ = pipe.train_step(make_state(), narrow("target"))
    first, expected = make_state(), make_state()
    assert_equal((state.variables, jax.random.key_data(state.key)), (first.variables, jax.random.key_data(first.key)))
    assert int(state.step) == 1
    second = expected.replace(step=expected.step + 1)
    assert_equal(*(pipe.train_step(s, narrow("none"))[0].variables for s in (state, second)))


# --- a scaled loss ----------------------------------------------------------------------------------------------------

TINY = 1e-9
"""What float16 can't hold: its smallest number is 6e-8."""


def dense(dtype):
    return [nn.Dense(8, dtype=dtype), nn.tanh, nn.Dense(8, dtype=dtype), nn.tanh, nn.Dense(2, dtype=dtype)]


def scaled_loss(y, batch):
    """What comes back is scaled, as in plain JAX."""
    losses = TINY * jnp.mean(jnp.square(y.astype(jnp.float32) - batch["targets"]), -1)
    return jnp.sum(losses * batch["scale"]), 1.0 * len(losses), {"unscaled": jnp.mean(losses)}


def scaled(batch, scale):
    return batch | {"scale": jnp.full(len(batch["targets"]), scale)}


def regression() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 6)).astype(np.float32)
    return {"inputs": x, "targets": np.tanh(x @ rng.standard_normal((6, 2)).astype(np.float32))}


def in_float32(trees, batch):
    """Gradients of plain Flax in float32 without a scale."""

    def loss_of(params):
        x = batch["inputs"]
        for layer, tree in zip(dense(jnp.float32), params, strict=True):
            x = layer.apply(tree, x) if isinstance(layer, nn.Module) else layer(x)
        return scaled_loss(x, scaled(batch, 1.0))[0] / len(x)

    return jax.jit(jax.grad(loss_of))(trees)


@pytest.mark.parametrize("explicit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_scaled_loss_comes_back_scaled(make_mesh, explicit):
    """In float16 gradients that are too small come out by a scale, as docs/howto/numerics.md trains."""
    mesh = make_mesh((2, 2), ("stage", "data"), explicit=explicit)
    sizes = {"num_stages": 2, "num_microbatches": 4, "balance": "even"}
    pipe = jpipe.Pipeline(dense(jnp.float16), scaled_loss, **sizes, mesh=mesh)
    batch = regression()
    variables = pipe.init(jax.random.key(0), scaled(batch, 1.0))
    gradients = lambda scale: pipe.value_and_grad(variables, scaled(batch, scale))[1]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients(1.0))), "all are too small for float16"
    found = pipe.layer_variables({"params": gradients(2.0**36)})
    expected = in_float32(pipe.layer_variables(variables), batch)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        tolerance = 4e-3 * np.max(np.abs(want))
        np.testing.assert_allclose(got / 2.0**36, want, rtol=0, atol=tolerance, err_msg=jax.tree_util.keystr(path))
