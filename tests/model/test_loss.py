"""The loss of a micro-batch: its sums, and what is known of it before anything runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.model.loss import loss_sums, trace_loss

Y = jax.ShapeDtypeStruct((4, 3), jnp.float32)


@pytest.mark.parametrize(
    ("loss", "sums"),
    [
        (jnp.float32(2), [2, 1]),
        ((jnp.float32(6), 3), [6, 3]),
        ((jnp.float32(6), 3, {"b": jnp.float32(5), "a": (1, 2)}), [6, 3, 1, 2, 5, 1]),
    ],
)
def test_sums(loss, sums):
    """The loss's and its weight, then those of each metric by name; a mean has weight 1."""
    found = loss_sums(loss)
    np.testing.assert_array_equal(found, sums)
    assert {value.dtype for value in found} == {np.dtype(np.float32)}


def test_weights_of_a_narrow_loss_are_wide():
    loss_sum, weight = loss_sums((jnp.bfloat16(2), jnp.int32(1001)))
    assert (loss_sum.dtype, weight.dtype, int(weight)) == (jnp.bfloat16, jnp.float32, 1001)


@pytest.mark.parametrize(
    ("loss_fn", "follows"),
    [
        (lambda y, b: jnp.mean(y), False),
        (lambda y, b: (jnp.sum(y), jnp.sum(b)), False),
        (lambda y, b: (jnp.sum(y), jnp.sum(y > 0)), True),
        (lambda y, b: (jnp.sum(y), jnp.sum(b), {"accuracy": jnp.mean(y)}), False),
    ],
)
def test_what_the_weight_follows(loss_fn, follows):
    assert trace_loss(loss_fn, Y, Y).weight_follows_outputs is follows


def test_what_is_known_of_it():
    metrics = {"b": jnp.float32(0), "a": (jnp.float32(0), jnp.float32(1))}
    found = trace_loss(lambda y, b: (jnp.sum(y).astype(jnp.bfloat16), 1.0, metrics), Y, Y)
    assert found.metrics == ("a", "b")
    assert found.of_batch == jax.ShapeDtypeStruct((), jnp.float32), "a narrow loss is summed in a wide one"


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda y, b: y, r"loss_fn returned float32\[4,3\]; .* scalar"),
        (lambda y, b: (), r"loss_fn returned \(\)"),
        (lambda y, b: None, "loss_fn returned None"),
        (lambda y, b: {"loss": jnp.sum(y)}, "loss_fn returned {'loss'"),
        (lambda y, b: (jnp.sum(y), y), r"loss_fn returned \(float32\[\], float32\[4,3\]"),
        (lambda y, b: jnp.sum(y > 0), "loss of dtype int32"),
        (lambda y, b: (jnp.sum(y), 1.0, jnp.sum(y)), r"third part, metrics, has to be a dict"),
        (lambda y, b: (jnp.sum(y), 1.0, {"loss": jnp.sum(y)}), "a metric called 'loss', as one of jpipe's own is"),
        (lambda y, b: (jnp.sum(y), 1.0, {"a": y}), r"returned float32\[4,3\] as the metric 'a'"),
        (lambda y, b: b["labels"], r"loss_fn\(outputs, batch\) raised .*; it was called with the outputs float32"),
    ],
)
def test_losses_that_are_none(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        trace_loss(loss_fn, Y, Y)
