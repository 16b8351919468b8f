"""The loss of a micro-batch: its sums, and what is known of it before anything runs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import assert_close, check_by_hand
from jpipe.model.loss import trace_loss
from sequential import layer_key

Y = jax.ShapeDtypeStruct((4, 3), jnp.float32)


def noisy(outputs, batch, key=None):
    """Label noise, in training alone."""
    noise = 0.0 if key is None else jax.random.normal(key, outputs.shape, outputs.dtype)
    return jnp.mean((outputs - batch["targets"] - noise) ** 2)


def test_a_loss_with_a_key(x64):
    """It draws by (key, micro-batch) alone: the last layer's key, folded."""
    rng = np.random.default_rng(0)
    batch = {"inputs": rng.standard_normal((8, 3)), "targets": rng.standard_normal((8, 3))}
    layers = [nn.Dense(3, param_dtype=jnp.float64) for _ in range(3)]
    pipe = jpipe.Pipeline(layers, noisy, num_stages=2, num_microbatches=4, remat="none", schedule="gpipe")
    variables = pipe.init(jax.random.key(0), batch)
    trees = jax.device_get(pipe.layer_variables(variables))

    def plain(trees, train=True):
        total = 0.0
        for m in range(4):
            micro = {name: rows[2 * m : 2 * m + 2] for name, rows in batch.items()}
            x, key = micro["inputs"], jax.random.fold_in(layer_key(jax.random.key(5), 2, m), 0x1055)
            for layer, tree in zip(layers, trees, strict=True):
                x = layer.apply(tree, x)
            total += noisy(x, micro, key if train else None) / 4
        return total

    expected, wanted = jax.jit(jax.value_and_grad(plain))(trees)
    (loss, _), grads = pipe.value_and_grad(variables, batch, jax.random.key(5))
    assert_close(loss, expected, "loss")
    assert_close(jax.device_get(pipe.layer_variables({"params": grads})), wanted, "gradients")
    assert_close(pipe.evaluate(variables, batch), plain(trees, train=False), "evaluation")
    with pytest.raises(ValueError, match=r"loss_fn noisy draws random numbers, but key=None"):
        pipe.value_and_grad(variables, batch)


def test_a_loss_that_can_not_do_without_a_key():
    """In evaluation there is none: it was an error of JAX's about keys, which named no loss."""
    always = lambda y, b, key: jnp.mean(y + jax.random.normal(key, y.shape))
    pipe = jpipe.Pipeline([nn.Dense(3), nn.Dense(3)], always, num_stages=2, num_microbatches=2)
    batch = np.ones((4, 3), np.float32)
    variables = pipe.init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match=r"loss_fn\(outputs, batch\) raised TypeError: .*key=None, as in evaluation"):
        pipe.evaluate(variables, batch)

    def more_with_a_key(y, b, key):
        return jnp.sum(y), 1.0 * len(y), {} if key is None else {"noise": jax.random.normal(key)}

    pipe = jpipe.Pipeline([nn.Dense(3), nn.Dense(3)], more_with_a_key, num_stages=2, num_microbatches=2)
    variables = pipe.init(jax.random.key(0), batch)
    assert_close(pipe.evaluate(variables, batch), pipe.apply(variables, batch).sum(-1).mean(), "without its metric")


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda y, b: y, r"loss_fn returned float32\[4,3\]; .* scalar"),
        (lambda y, b: None, "loss_fn returned None"),
        (lambda y, b: {"loss": jnp.sum(y)}, "a loss as 'loss', as one of jpipe's own metrics is called"),
        (lambda y, b: {"a": (jnp.sum(y), 1.0, 1.0)}, "loss_fn returned {'a'"),
        (lambda y, b: ({"a": jnp.sum(y)}, {"a": jnp.sum(y)}), "a metric called 'a', as a term or one of jpipe's is"),
        (lambda y, b: {"a": jnp.sum(y), "b": (jnp.sum(y), jnp.sum(y > 0))}, "term 'b' with a weight that depends on"),
        (lambda y, b: jnp.sum(y > 0), "loss of dtype int32"),
        (lambda y, b: (jnp.sum(y), 1.0, jnp.sum(y)), r"last part, metrics, has to be a dict"),
        (lambda y, b: (jnp.sum(y), 1.0, {"a": y}), r"gave float32\[4,3\] as the metric 'a'"),
        # `return loss, accuracy` came out as infinite, with a warning.
        (lambda y, b: (jnp.sum(y), jnp.sum(y > 0)), r"the model's outputs.* or \(loss, 1.0, {'accuracy': accuracy}\)"),
        (lambda y, b: b["labels"], r"loss_fn\(outputs, batch\) raised .*; it was called with the outputs float32"),
    ],
)
def test_losses_that_are_none(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        trace_loss(loss_fn, Y, Y)


def several_means(outputs, batch):
    """Masked tokens, next sentences, and a mean: three weights, one of which differs by micro-batch."""
    tokens = (outputs - batch["targets"]) ** 2 * batch["mask"][:, None]
    sentences = jnp.tanh(outputs[:, 0]) * batch["is_next"]
    terms = {
        "mlm": (jnp.sum(tokens), jnp.sum(batch["mask"])),
        "nsp": (jnp.sum(sentences), 1.0 * len(sentences)),
        "mean": jnp.mean(outputs**4),
    }
    return terms, {"largest": jnp.max(outputs)}


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ({"num_stages": 2, "num_microbatches": 2, "num_chunks": 2, "schedule": "interleaved", "remat": "none"}, {}),
        pytest.param({"num_stages": 2, "num_microbatches": 2}, {"data": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_several_means_are_each_divided_by_their_own_weight(sizes, mesh, x64):
    """Over the mini-batch, of which the micro-batches have unequal weights: in float64 as the sequential model's."""
    rng = np.random.default_rng(0)
    batch = {"inputs": rng.standard_normal((8, 3)), "targets": rng.standard_normal((8, 3))}
    batch |= {"mask": np.float64([1, 1, 1, 0, 0, 1, 0, 0]), "is_next": np.float64(rng.integers(0, 2, 8))}
    layers = [nn.Dense(3, param_dtype=jnp.float64) for _ in range(4)]
    grid = jpipe.make_mesh(stage=2, **mesh, devices=jax.devices()[:4]) if mesh else None
    pipe = jpipe.Pipeline(layers, several_means, mesh=grid, **sizes)
    state = pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1))
    trees = jax.device_get(pipe.layer_variables(state.variables))

    def means(trees):
        x = batch["inputs"]
        for layer, tree in zip(layers, trees, strict=True):
            x = layer.apply(tree, x)
        terms, _ = several_means(x, batch)
        return {name: value[0] / value[1] if isinstance(value, tuple) else value for name, value in terms.items()}

    check_by_hand(pipe, batch, lambda trees: sum(means(trees).values()), state.variables)
    metrics = pipe.train_step(state, batch)[1]
    assert set(metrics) == {"loss", "grad_norm", "finite", "mlm", "nsp", "mean", "largest"}
    for name, mean in means(trees).items():
        assert_close(metrics[name], mean, name)


def test_a_term_that_has_no_weight_spoils_only_what_it_touches():
    """As in plain JAX, whatever the names; prints of outputs are no dependence."""

    def terms(y, b):
        jax.debug.print("{}", y[0, 0])
        return {"a": (jax.lax.stop_gradient(jnp.sum(y)), 0.0 * len(y)), "b": jnp.mean(y**2)}

    batch = np.ones((4, 3), np.float32)
    pipe = jpipe.Pipeline([nn.Dense(3)], terms, num_stages=1, num_microbatches=2)
    variables = pipe.init(jax.random.key(0), batch)
    (loss, _), grads = pipe.value_and_grad(variables, batch)
    assert not np.isfinite(loss) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
