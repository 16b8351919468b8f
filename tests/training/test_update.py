"""An optimiser's update: the loss where it asks for it, whether it was skipped, the norm of all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cases import model, pipeline
from jpipe.training.optimizers import global_norm, skips, update_with_loss
from updates import standard_promotion as standard_promotion


def test_a_norm_of_narrow_floats_is_summed_in_float32():
    """In bfloat16 256 + 1 is 256."""
    grads = {"a": jnp.full(257, 1, jnp.bfloat16), "b": [jnp.full(68, 1.0), jnp.full((), 6j, jnp.complex64)]}
    norm = global_norm(grads)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, 19, rtol=1e-6)  # 257 + 68 + 36


def test_the_loss_goes_to_those_that_ask_for_it():
    def takes(updates, state, params=None, *, value):
        return jax.tree.map(lambda u: u * value, updates), state

    def takes_anything(updates, state, params=None, **extra):
        return takes(updates, state, params, **extra)

    for update in (takes, takes_anything):
        tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
        assert float(update_with_loss(tx, jnp.float32(2), (), None, jnp.float32(3))[0]) == 6
    assert float(update_with_loss(optax.sgd(1.0), jnp.float32(2), optax.sgd(1.0).init(None), None, None)[0]) == -2


@pytest.mark.parametrize("value, skipped", [(1.0, False), (np.nan, True)])
def test_a_skipped_update_is_told_by_what_skips_wherever_it_is(value, skipped):
    inner = optax.apply_if_finite(optax.adam(0.1), 5)
    tx = optax.chain(optax.scale(2.0), optax.MultiSteps(inner, 1).gradient_transformation())
    params = jnp.ones(3)
    before = tx.init(params)
    _, after = tx.update(jnp.full(3, value), before, params)
    assert [bool(found) for found in skips(before, after)] == [skipped]
    other = optax.MultiSteps(optax.sgd(0.1), 1, should_skip_update_fn=optax.skip_not_finite).gradient_transformation()
    before = other.init(params)
    _, after = other.update(jnp.full(3, value), before, params)
    assert [bool(found) for found in skips(before, after)] == [skipped]
    assert skips(*[optax.adam(0.1).init(params)] * 2) == [], "it never skips"


def test_a_transformation_that_takes_no_loss():
    """A regression: sharpness-aware minimisation was given `value`, which it doesn't take, and failed in the step."""
    truth = model("plain", "float32")
    pipe = pipeline(truth, "1f1b", 2, 3, balance="even")
    tx = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))
    state = pipe.create_state(jax.random.key(0), truth.batch, tx)
    losses = []
    for _ in range(6):
        state, metrics = pipe.train_step(state, truth.batch)
        losses.append(float(metrics["loss"]))
    assert losses[-2] < losses[0]
