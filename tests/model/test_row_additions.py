"""One number added to each row: the numbers of the scatter, and no scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

from jpipe.jax.tracing import equations_in
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
    "one row": (along(-1), (1, 1, 5), labels((1, 1), 5), 1),
    "with what else it gives": (lambda x, labels: jnp.sin(x) + along(-1)(x, labels), (2, 5), labels((2,), 5), 0),
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


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
@pytest.mark.parametrize("mode", ["clip", "promise_in_bounds"])
def test_indices_of_any_type_are_compared_as_they_are(dtype, mode):
    """Also where numbers of two types are never promoted; an index of 2**31 and more is clipped to the last place."""
    most = 5 if mode == "promise_in_bounds" else min(np.iinfo(dtype).max, 2**32 - 1)
    indices = jnp.asarray([[[0]], [[4]], [[most - 1]]], dtype)
    dims = jax.lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
    add = lambda indices, updates: jax.lax.scatter_add(jnp.zeros((3, 5)), indices, updates, dims, mode=mode)
    arguments = indices, jnp.asarray([[1.0], [2.0], [3.0]])
    before = jax.make_jaxpr(add)(*arguments)
    after = row_additions_by_comparison(before)
    assert (scatters(before), scatters(after)) == (1, 0)
    np.testing.assert_array_equal(*(jaxpr_as_fun(closed)(*arguments)[0] for closed in (after, before)))


def test_what_is_added_to_other_arrays_than_zeros_is_added_in_place():
    add = lambda x, labels: x.at[jnp.arange(3), labels].add(1.0)
    x, indices = jnp.ones((3, 5)), labels((3,), 5)
    rows = jax.make_jaxpr(jax.vmap(lambda x, i: x.at[i].add(1.0)))(x, indices)
    for closed in (rows, jax.make_jaxpr(add)(x, indices)):
        assert str(row_additions_by_comparison(closed)) == str(closed)


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
