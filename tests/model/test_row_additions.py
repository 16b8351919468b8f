"""One number added to each row: the numbers of the scatter, and no scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

from jpipe.jaxprs.rewriting import equations_in
from jpipe.model.row_additions import row_additions_by_comparison


def scatters(closed):
    return sum(equation.primitive.name == "scatter-add" for equation in equations_in(closed.jaxpr.eqns))


def gradient_of(taken, shape, labels):
    """The jaxpr of a gradient by `x` of this shape, and arguments for it."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape))
    weights = jnp.asarray(rng.standard_normal(jax.eval_shape(taken, x, labels).shape))
    gradient = jax.make_jaxpr(jax.grad(lambda x, labels: (weights * taken(x, labels)).sum()))
    return gradient(x, labels), (x, labels)


def along(axis, **options):
    return lambda x, labels: jnp.take_along_axis(x, jnp.expand_dims(labels, axis), axis, **options)


def labels(shape, below, dtype=np.int32):
    return jnp.asarray(np.random.default_rng(1).integers(0, below, shape), dtype)


# By name: what is taken, the shape of x, labels; how many scatters are left. That of the cross-entropy's is from [2, 8]
# into [2, 8, 1], which is no sum.
CASES = {
    "the last dimension": (along(-1), (2, 8, 5), labels((2, 8), 5), 0),
    "another": (along(1), (2, 5, 8), labels((2, 8), 5), 0),
    "the first": (along(0), (5, 8), labels((8,), 5), 0),
    "one example": (along(-1), (1, 8, 5), labels((1, 8), 5), 0),
    "one token of one example": (along(-1), (1, 1, 5), labels((1, 1), 5), 0),
    "from the end": (along(-1), (2, 8, 5), labels((2, 8), 5) - 5, 0),
    "some out of bounds": (along(-1, mode="fill", fill_value=0), (2, 8, 5), labels((2, 8), 9), 0),
    "clipped": (along(-1, mode="clip"), (2, 8, 5), labels((2, 8), 9) - 2, 0),
    "bytes": (along(-1), (3, 300), labels((3,), 128, np.int8), 0),
    "a cross-entropy": (
        optax.softmax_cross_entropy_with_integer_labels,
        (2, 8, 5),
        labels((2, 8), 5),
        1,
    ),  # into [2, 8, 1]
    "in a loop": (
        lambda x, labels: jax.lax.scan(lambda _, now: (None, along(-1)(*now)), None, (x, labels))[1],
        (3, 8, 5),
        labels((3, 8), 5),
        0,
    ),
    "checkpointed": (jax.checkpoint(along(-1)), (2, 8, 5), labels((2, 8), 5), 0),
    "several of a row": (along(-1), (2, 5), labels((), 5) + jnp.zeros((2,), int), 0),
    "two numbers of each row": (lambda x, labels: jnp.take_along_axis(x, labels, -1), (2, 5), labels((2, 2), 5), 1),
    "whole rows": (lambda x, labels: x[labels], (5, 8), labels((3,), 5), 1),
    "one row for all": (lambda x, labels: x[labels], (5,), labels((3,), 5), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_scatter(name):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        taken, shape, indices, left = CASES[name]
        before, arguments = gradient_of(taken, shape, indices)
        after = row_additions_by_comparison(before)
        expected, found = (jax.jit(jaxpr_as_fun(closed))(*arguments) for closed in (before, after))
    assert scatters(before) > 0
    assert scatters(after) == left
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
