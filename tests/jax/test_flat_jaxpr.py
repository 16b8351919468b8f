"""Jaxprs without calls: each value has one number, wherever it is read."""

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.jax.flat_jaxpr import flatten


@jax.jit
def twice(x):
    return jax.jit(lambda y: y + y)(x)


def names(flat):
    return [equation.primitive.name for equation, *_ in flat.equations]


def test_what_is_called_stands_in_its_callers_place():
    flat = flatten(jax.make_jaxpr(lambda x: jnp.sin(twice(x)) * 3)(np.float32(1)))
    assert names(flat) == ["add", "sin", "mul"]
    (x,), (add, sin, product) = flat.arguments, flat.equations
    assert add.reads == (x, x)
    assert (sin.reads, product.reads[0], flat.results) == (add.makes, *sin.makes, product.makes)
    assert [len(equation.callers) for equation in flat.equations] == [2, 0, 0]


def test_constants_have_numbers_too():
    table = np.arange(4.0, dtype=np.float32)
    flat = flatten(jax.make_jaxpr(lambda x: (x + table, 2.0 * x))(table))
    (added, product), found = flat.equations, flat.constants
    np.testing.assert_array_equal(found[added.reads[1]], table)
    assert found[product.reads[0]] == 2
    assert not {*flat.arguments} & found.keys()


def test_an_argument_may_be_a_result():
    flat = flatten(jax.make_jaxpr(lambda x, y: (y, twice(x), y, 1))(1.0, 2.0))
    assert flat.results[0] == flat.results[2] == flat.arguments[1]
    assert flat.constants[flat.results[3]] == 1
    assert [flat.avals[value].shape for value in flat.results] == [()] * 4
