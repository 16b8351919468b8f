"""What devices compute faster: the same numbers, no operand turned in a CPU's program, and no scatter."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

from cases import assert_close
from jpipe.jax.rewrites import row_additions_by_comparison, weight_products_as_they_lie
from jpipe.jax.tracing import equations_in

NARROW, WIDE = (3, 5), (5, 3)


def gradient_of(function, w, x):
    """The jaxpr from x and the cotangent of function(w, x) to the gradient of w, and arguments for it."""
    rng = np.random.default_rng(0)
    array = lambda shape: jnp.asarray(rng.standard_normal(shape))
    w, x = array(w), array(x)
    dy = array(jax.eval_shape(function, w, x).shape)
    return jax.make_jaxpr(lambda x, dy: jax.vjp(lambda w: function(w, x), w)[1](dy)[0])(x, dy), (x, dy)


def scanned(w, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0]


# By name: a function of (w, x), their shapes, whether it has a gradient that is computed otherwise.
FUNCTIONS = {
    "one dimension of examples": (lambda w, x: x @ w, NARROW, (8, 3), True),
    "more columns on the left": (lambda w, x: x @ w, WIDE, (2, 8, 5), True),
    "features in two dimensions": (lambda w, x: jnp.einsum("btd,dhk->bthk", x, w), (3, 2, 4), (2, 8, 3), True),
    "summed over two": (lambda w, x: jnp.einsum("bthk,hkd->btd", x, w), (2, 4, 3), (2, 8, 2, 4), True),
    "checkpoint": (jax.checkpoint(lambda w, x: jnp.sin(x @ w)), NARROW, (2, 8, 3), True),
    "in a loop": (scanned, (4, 4), (2, 8, 4), True),
    "no elements": (lambda w, x: x @ w + (x[:, :0] @ w).sum(1, keepdims=True), NARROW, (2, 8, 3), True),
    "a weight for each head": (lambda w, x: jnp.einsum("bthd,hdk->bthk", x, w), (2, 3, 4), (2, 8, 2, 3), False),
    "by examples": (lambda w, x: jnp.einsum("btd,bdk->btk", x, w), (2, 3, 4), (2, 8, 3), False),
    "a vector": (lambda w, x: x @ w, (3,), (2, 8, 3), False),
}


def products_in(jaxpr):
    """The dimensions that products are summed over, those inside of calls and loops too."""
    products = [e for e in equations_in(jaxpr.eqns) if e.primitive.name == "dot_general"]
    return [product.params["dimension_numbers"][0] for product in products]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_the_same(name):
    function, w, x, changes = FUNCTIONS[name]
    with jax.enable_x64(True):
        closed, arguments = gradient_of(function, w, x)
        found = weight_products_as_they_lie(closed)
        assert_close(jaxpr_as_fun(found)(*arguments), jaxpr_as_fun(closed)(*arguments))
    assert (str(found) != str(closed)) == changes
    if changes:
        assert ((0,), (0,)) in products_in(found.jaxpr)


@pytest.mark.parametrize("precision", [None, "highest", ("highest", "highest"), ("highest", "default")])
def test_what_is_asked_of_each_operand_stays_with_it(precision):
    function = lambda w, x: jnp.matmul(x, w, precision=precision, preferred_element_type=jnp.float32)
    closed, _ = gradient_of(function, NARROW, (2, 8, 3))
    found = weight_products_as_they_lie(closed)
    asked = {str(e.params["precision"]) for e in found.jaxpr.eqns if e.primitive.name == "dot_general"}
    assert asked == {str(e.params["precision"]) for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"}
    assert (str(found) == str(closed)) == (precision == ("highest", "default"))


@pytest.mark.parametrize("sizes", [(64, 256), (256, 64)])
def test_compiled_for_a_cpu_operands_are_not_turned(sizes):
    """JAX's own derivative has all cotangents turned, and is multiplied by both operands the wrong way."""
    closed, arguments = gradient_of(lambda w, x: x @ w, sizes, (4, 32, sizes[0]))

    def summed_over(closed):
        """The dimension of the first and the second operand of the one product in the compiled program."""
        text = jax.jit(jaxpr_as_fun(closed)).lower(*arguments).compile().as_text()
        return re.findall(r" dot\(.*lhs_contracting_dims={(\d)}, rhs_contracting_dims={(\d)}", text)

    assert summed_over(weight_products_as_they_lie(closed)) == [("0", "0")]
    assert summed_over(closed) == [("0", "1")], "XLA does it by itself now: what jpipe does for it can go"


# --- sums of rows ---


def scatters(closed):
    return sum(equation.primitive.name == "scatter-add" for equation in equations_in(closed.jaxpr.eqns))


def gradient_by(taken, shape, labels):
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
    "the first": (along(0), (5, 8), labels((8,), 5), 0),
    "one row": (along(-1), (1, 1, 5), labels((1, 1), 5), 1),
    "with what else it gives": (lambda x, labels: jnp.sin(x) + along(-1)(x, labels), (2, 5), labels((2,), 5), 0),
    "from the end": (along(-1), (2, 8, 5), labels((2, 8), 5) - 5, 0),
    "some out of bounds": (along(-1, mode="fill", fill_value=0), (2, 8, 5), labels((2, 8), 9), 0),
    "clipped": (along(-1, mode="clip"), (2, 8, 5), labels((2, 8), 9) - 2, 0),
    "a cross-entropy": (optax.softmax_cross_entropy_with_integer_labels, (2, 8, 5), labels((2, 8), 5), 1),
    "in a loop": (
        lambda x, labels: jax.lax.scan(lambda _, now: (None, along(-1)(*now)), None, (x, labels))[1],
        (3, 8, 5),
        labels((3, 8), 5),
        0,
    ),
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
        before, arguments = gradient_by(taken, shape, indices)
        after = row_additions_by_comparison(before)
        expected, found = (jax.jit(jaxpr_as_fun(closed))(*arguments) for closed in (before, after))
    assert scatters(before) > 0
    assert scatters(after) == left
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
