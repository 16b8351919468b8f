"""What is read off jaxprs, against what JAX computes; and changed jaxprs, against the functions that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params

from jpipe.jaxprs.rewriting import (
    changed,
    depends_on,
    uses,
    without_roundings,
    without_stops,
)
from jpipe.seam.inside import scan_counts

X = np.linspace(-1, 1, 6, dtype=np.float32)


def names(jaxpr):
    """The primitives of a jaxpr, and of those inside of it."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from names(inner)


@jax.custom_vjp
def own(x, y):
    return x * 2


own.defvjp(lambda x, y: (own(x, y), None), lambda _, g: (2 * g, jnp.zeros_like(g)))

# Of (x, y, z) to three results: whether each depends on each, row by row.
CALLS = {
    "plain": (lambda x, y, z: (x + y, z * 2, 3.0), [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
    "handed through": (lambda x, y, z: (y, x, z), [[0, 1, 0], [1, 0, 0], [0, 0, 1]]),
    "jit": (lambda x, y, z: jax.jit(lambda a, b: (a, b * 2, 1.0))(x, y), [[1, 0, 0], [0, 1, 0], [0, 0, 0]]),
    "jit in jit": (
        lambda x, y, z: jax.jit(lambda a, b, c: jax.jit(lambda p, q: (p * q, q, q))(a, c))(x, y, z),
        [[1, 0, 1], [0, 0, 1], [0, 0, 1]],
    ),
    "checkpoint": (
        lambda x, y, z: jax.checkpoint(lambda a, b: (a * 2, b * 3, a + b))(x, z),
        [[1, 0, 0], [0, 0, 1], [1, 0, 1]],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_dependence_through_calls(name):
    function, expected = CALLS[name]
    closed = jax.make_jaxpr(function)(X, X, X)
    for column, v in enumerate(closed.jaxpr.invars):
        assert depends_on(closed, [v]) == [bool(row[column]) for row in expected]
    assert depends_on(closed, closed.jaxpr.invars) == [any(row) for row in expected]
    assert depends_on(closed, []) == [False] * 3
    for row, wanted in zip(expected, np.eye(3, dtype=bool).tolist(), strict=True):
        assert uses(closed, wanted) == [bool(entry) for entry in row]


def test_dependence_through_a_custom_derivative():
    closed = jax.make_jaxpr(lambda x, y: (own(x, y), own(y, x)))(X, X)
    x, y = closed.jaxpr.invars
    assert (depends_on(closed, [x]), depends_on(closed, [y])) == ([True, False], [False, True])


def test_dependence_is_that_of_derivatives():
    """Of smooth functions an output depends on an input just where the Jacobian isn't zero."""

    def function(x, y, z):
        a, b = jax.jit(lambda p, q: (jnp.sin(p), p * q))(x, y)
        return a, b + z, jax.checkpoint(jnp.exp)(z), jnp.tanh(y) * a

    closed = jax.make_jaxpr(function)(0.5, 0.6, 0.7)
    jacobian = np.asarray(jax.jacobian(function, (0, 1, 2))(0.5, 0.6, 0.7))
    found = [depends_on(closed, [v]) for v in closed.jaxpr.invars]
    np.testing.assert_array_equal(np.transpose(found), jacobian != 0)


def test_what_depends_and_what_is_used_through_a_loop():
    def run(x, y, unused):
        return jax.lax.scan(lambda c, _: (c * x, c), y, length=3)[0], unused * 0 + 1, x

    closed = jax.make_jaxpr(run)(1.0, 2.0, 3.0)
    x, y, _ = closed.jaxpr.invars
    assert depends_on(closed, [x]) == [True, False, True]
    assert depends_on(closed, [y]) == [True, False, False]
    assert uses(closed, [True, False, False]) == [True, True, False]
    assert uses(closed, [False, False, True]) == [True, False, False]


def test_uses_look_into_loops():
    """Two carries that don't meet: `depends_on` takes a loop as a whole, `uses` follows each."""

    def run(x, y):
        return jax.lax.scan(lambda c, _: ((c[0] + 1, c[1] * 2), None), (x, y), length=3)[0]

    closed = jax.make_jaxpr(run)(1.0, 2.0)
    assert uses(closed, [True, False]) == [True, False]
    assert uses(closed, [False, True]) == [False, True]
    assert uses(closed) == [True, True]
    assert depends_on(closed, closed.jaxpr.invars[:1]) == [True, True]


def stopped(x):
    """Four times a cubed `x` of which one factor has no gradient: in a loop, a branch, a call, and plainly."""
    stop = jax.lax.stop_gradient
    looped = jax.lax.scan(lambda c, _: (c + stop(x) * x * x, None), jnp.zeros_like(x), length=1)[0]
    branch = jax.lax.cond(x[0] < 0, lambda x: stop(x) * x * x, lambda x: x * x * stop(x), x)
    return looped + branch + jax.jit(lambda x: stop(x) * x * x)(x) + stop(x) * x * x


def test_without_stops():
    closed = jax.make_jaxpr(stopped)(X)
    found = without_stops(closed)
    assert "stop_gradient" in names(closed.jaxpr)
    assert "stop_gradient" not in names(found.jaxpr)
    gradient = lambda closed: jax.grad(lambda x: jaxpr_as_fun(closed)(x)[0].sum())(X)
    np.testing.assert_allclose(jaxpr_as_fun(found)(X)[0], 4 * X**3, rtol=1e-6)
    np.testing.assert_allclose(gradient(closed), 8 * X**2, rtol=1e-6)
    np.testing.assert_allclose(gradient(found), 12 * X**2, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "exponent_bits", "mantissa_bits", "stays"),
    [
        (np.float32, 8, 23, False),
        (np.float32, 8, 7, True),
        (np.float32, 5, 23, True),
        (jnp.bfloat16, 8, 7, True),
        (np.float16, 5, 10, True),
    ],
)
def test_without_roundings(dtype, exponent_bits, mantissa_bits, stays):
    """Only those that round nothing go, and of wide numbers alone; results stay what they were, to the bit."""
    values = jnp.asarray([1 / 3, 1e-4, 6e4, -7.1], dtype)
    rounded = lambda x: jax.lax.reduce_precision(x, exponent_bits, mantissa_bits)
    closed = jax.make_jaxpr(lambda x: (rounded(x), jax.jit(lambda x: rounded(x) * 1)(x)))(values)
    found = without_roundings(closed)
    assert list(names(found.jaxpr)).count("reduce_precision") == (2 if stays else 0)
    for got, want in zip(jaxpr_as_fun(found)(values), jaxpr_as_fun(closed)(values), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_roundings_of_checkpoint_go():
    """They are why `without_roundings` is there."""
    weights = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    function = lambda x: jnp.sin(jnp.sin(x) @ weights)
    saving = jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable)
    closed = jax.make_jaxpr(jax.grad(lambda x: saving(x).sum()))(X)
    assert "reduce_precision" in names(closed.jaxpr)
    found = without_roundings(closed)
    assert "reduce_precision" not in names(found.jaxpr)
    expected = np.cos(X) * (weights @ np.cos(np.sin(X) @ weights))
    np.testing.assert_allclose(jaxpr_as_fun(found)(X)[0], expected, rtol=1e-4, atol=1e-5)


NESTED = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(lambda x: jax.jit(f)(x)),
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=1)[0],
    "while": lambda f: lambda x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x))[1],
    "cond": lambda f: lambda x: jax.lax.cond(x[0] < 0, f, lambda x: x, x),
    "vmap": lambda f: jax.vmap(f),
}


@pytest.mark.parametrize("name", NESTED)
def test_changes_reach_jaxprs_in_jaxprs(name):
    """Sines become cosines, and negations are dropped: what they take stands for what they give."""

    (cosine,) = jax.make_jaxpr(jnp.cos)(X).jaxpr.eqns

    def change(equation):
        if equation.primitive.name == "sin":
            return equation.replace(primitive=cosine.primitive, params=cosine.params)
        return None if equation.primitive.name == "neg" else equation

    closed = jax.make_jaxpr(NESTED[name](lambda x: -jnp.sin(-x) * 2))(X)
    assert {"sin", "neg"} <= set(names(closed.jaxpr))
    found = changed(closed.jaxpr, change)
    assert not {"sin", "neg"} & set(names(found))
    (result,) = jax.core.eval_jaxpr(found, closed.consts, X)
    np.testing.assert_allclose(result, np.cos(X) * 2, rtol=1e-6)


def test_dropped_equations_in_a_row_and_at_the_end():
    closed = jax.make_jaxpr(lambda x: (jnp.negative(-x), 2 * -x))(X)
    found = changed(closed.jaxpr, lambda equation: None if equation.primitive.name == "neg" else equation)
    first, second = jax.core.eval_jaxpr(found, closed.consts, X)
    np.testing.assert_array_equal(first, X)
    np.testing.assert_array_equal(second, 2 * X)


@pytest.mark.parametrize(("constants", "carries", "sequences"), [(0, 1, 0), (2, 1, 1), (1, 3, 2), (0, 0, 1)])
def test_operands_of_a_scan(constants, carries, sequences):
    extra = [jnp.full(3, i, jnp.float32) for i in range(constants)]

    def body(carry, xs):
        return tuple(c + sum(extra) for c in carry), [x + sum(extra) for x in xs]

    def run(extra_now, carry, xs):
        extra[:] = extra_now
        return jax.lax.scan(body, carry, xs, length=4)

    carry, xs = (jnp.zeros(3, jnp.float32),) * carries, [jnp.ones((4, 3), jnp.float32)] * sequences
    closed = jax.make_jaxpr(run)(list(extra), carry, xs)
    (scan,) = [equation for equation in closed.jaxpr.eqns if equation.primitive.name == "scan"]
    assert scan_counts(scan) == (constants, carries)
    assert len(scan.invars) == constants + carries + sequences
