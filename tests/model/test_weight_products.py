"""Gradients of weights as CPUs compute them fast: the same numbers, and no operand turned in the compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from cases import assert_close
from jpipe.mesh.splits import WHOLE, Splits
from jpipe.model.weight_products import weight_products_as_they_lie

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
    "two": (lambda w, x: x @ w, NARROW, (2, 8, 3), True),
    "more columns on the left": (lambda w, x: x @ w, WIDE, (2, 8, 5), True),
    "features in two dimensions": (lambda w, x: jnp.einsum("btd,dhk->bthk", x, w), (3, 2, 4), (2, 8, 3), True),
    "summed over two": (lambda w, x: jnp.einsum("bthk,hkd->btd", x, w), (2, 4, 3), (2, 8, 2, 4), True),
    "weight turned": (lambda w, x: x @ w.T, WIDE, (2, 8, 3), True),
    "checkpoint": (jax.checkpoint(lambda w, x: jnp.sin(x @ w)), NARROW, (2, 8, 3), True),
    "in a loop": (scanned, (4, 4), (2, 8, 4), True),
    "no elements": (lambda w, x: x @ w + (x[:, :0] @ w).sum(1, keepdims=True), NARROW, (2, 8, 3), True),
    "jit": (jax.jit(lambda w, x: x @ w), NARROW, (2, 8, 3), True),
    "a weight for each head": (lambda w, x: jnp.einsum("bthd,hdk->bthk", x, w), (2, 3, 4), (2, 8, 2, 3), False),
    "by examples": (lambda w, x: jnp.einsum("btd,bdk->btk", x, w), (2, 3, 4), (2, 8, 3), False),
    "a vector": (lambda w, x: x @ w, (3,), (2, 8, 3), False),
    "outer": (lambda w, x: jnp.einsum("d,k->dk", x, w), (3,), (4,), False),
}


def products_in(jaxpr):
    """The dimensions that products are summed over, those inside of calls and loops too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["dimension_numbers"][0]
        for inner in jaxprs_in_params(equation.params):
            yield from products_in(inner)


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


def test_a_product_that_is_used_twice_is_left_turned():
    x, dy = jnp.ones((8, 3)), jnp.ones((8, 5))
    closed = jax.make_jaxpr(lambda x, dy: (p := jax.lax.dot_general(dy, x, (((0,), (0,)), ((), ()))), p.T))(x, dy)
    found = jaxpr_as_fun(weight_products_as_they_lie(closed))(x, dy)
    assert_close(found, [dy.T @ x, x.T @ dy])


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


def test_devices_that_are_not_there_are_no_cpus():
    cpus = Splits(jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("stage",)), ())
    assert cpus.on_cpu and not WHOLE.on_cpu
