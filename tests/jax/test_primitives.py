"""The table of primitives against this version of JAX; and a primitive that isn't in it, fed to all who ask."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad, batching, mlir

import jpipe
from cases import assert_close, assert_equal
from jpipe.jax.primitives import (
    CALLS,
    CHEAP,
    ELEMENTWISE,
    LOOPS_AND_BRANCHES,
    MOVES,
    NUMPY,
    OVER_DEVICES,
    REDUCTIONS,
    SUMS_OVER_DEVICES,
    draws,
)
from jpipe.jax.tracing import depends_on, interpret, replay, trace, uses
from jpipe.model.remat import save_but_elementwise

# --- names of primitives ----------------------------------------------------------------------------------------------


JAXS = {p.name: p for p in vars(primitives).values() if isinstance(p, Primitive)}
TABLE = ELEMENTWISE | MOVES | CALLS | LOOPS_AND_BRANCHES | REDUCTIONS | SUMS_OVER_DEVICES | OVER_DEVICES
OTHERS = """
after_all approx_top_k argmax argmin bitcast_convert_type call cholesky conv_general_dilated create_token cumlogsumexp
cummax cummin cumprod cumsum custom_lin custom_linear_solve device_put dot_general dynamic_slice dynamic_update_slice
eig eigh empty2 fft gather get hessenberg householder_product lu qr ragged_all_to_all reduce reduce_window
reduce_window_max reduce_window_min reduce_window_sum reduce_xor scatter scatter-add scatter-max scatter-min
scatter-mul schur select_and_gather_add select_and_scatter select_and_scatter_add sharding_constraint sort svd swap
top_k triangular_solve tridiagonal tridiagonal_solve
"""


def test_every_primitive_of_jax_was_looked_at():
    """A new one is safe everywhere, as the tests below show; in the table it may be faster."""
    new = {name for name in JAXS if not draws(name)} - TABLE - set(OTHERS.split())
    assert not new, (
        f"JAX {jax.__version__} has new primitives, {sorted(new)}: put each into the table of "
        "jpipe/jax/primitives.py, or into OTHERS here"
    )


SAMPLES = {
    "float": [np.asarray(x, np.float32) for x in ([0.3, 0.6, 0.9], [0.5, 0.25, 0.75])],
    "integer": [np.asarray(x, np.int32) for x in ([5, 6, 7], [3, 2, 9])],
    "complex": [np.asarray(x, np.complex64) for x in ([1 + 2j, 2 - 3j, 0.5 + 1j], [1j, 1, 2])],
}


@pytest.mark.parametrize("name", sorted(NUMPY.keys() & JAXS.keys()))
def test_numpy_does_the_same(name):
    compared = 0
    for values in SAMPLES.values():
        count = getattr(getattr(np, NUMPY[name]), "nin", 1)
        operands = [value + 1 if name == "acosh" else value for value in values[:count]]
        try:
            expected = jaxs(name, operands)
        except TypeError:  # not of this dtype
            continue
        np.testing.assert_allclose(getattr(np, NUMPY[name])(*operands), expected, rtol=2e-6)
        compared += 1
    assert compared, f"{name} takes neither floats, integers nor complex numbers in JAX {jax.__version__}"


def jaxs(name, operands):
    """What a primitive gives, bound by the function of `jax.lax` that is called as it is."""
    function = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not"}.get(name, name)
    function = {"add_any": "add"}.get(function, function)
    closed = jax.make_jaxpr(getattr(jax.lax, function))(*operands)
    assert name == "add_any" or closed.eqns[-1].primitive.name == name
    return jax.jit(getattr(jax.lax, function))(*operands)


@jax.custom_jvp
def with_jvp(x):
    return x


@jax.custom_vjp
def with_vjp(x):
    return x


with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
with_vjp.defvjp(lambda x: (x, None), lambda _, g: (g,))
CALLERS = {
    "jit": jax.jit(jnp.sin),
    "checkpoint": jax.checkpoint(jnp.sin),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
}


@pytest.mark.parametrize("name", CALLERS)
def test_calls_are_called_so(name):
    """An operation behind a call may lie as it does outside of one, and is looked into."""
    (equation,) = jax.make_jaxpr(CALLERS[name])(1.0).eqns
    called = equation.primitive.name
    assert called in CALLS, f"what jax.{name} becomes is called {called!r} in JAX {jax.__version__}: put it into CALLS"


def test_what_is_cheap():
    assert not CHEAP - ELEMENTWISE - MOVES
    assert not CHEAP & {"gt", "is_finite", "lgamma", "name", "dot_general", "random_bits"}


# --- a primitive that nobody has heard of -----------------------------------------------------------------------------

unheard_of = Primitive("unheard_of")
"""`x -> sums of the rows of x up to each`: linear, and it mixes examples."""
_ahead = lambda x: jnp.cumsum(x, 0)
_behind = lambda x: jax.lax.cumsum(x, 0, reverse=True)

unheard_of.def_impl(_ahead)
unheard_of.def_abstract_eval(lambda x: x)
mlir.register_lowering(unheard_of, mlir.lower_fun(_ahead, multiple_results=False))
ad.deflinear2(unheard_of, lambda cotangent, x: [_behind(cotangent)])
batching.primitive_batchers[unheard_of] = lambda operands, dims: (unheard_of.bind(*operands), dims[0])

X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


def test_it_is_traced_replayed_and_left_to_jax():
    """Remat keeps what it gives, and its results depend on all that it takes."""
    assert save_but_elementwise(unheard_of)
    (found,) = interpret(jax.make_jaxpr(lambda x: 2 * unheard_of.bind(x))(X), X)
    assert_close(found, 2 * np.cumsum(X, 0))
    closed = jax.make_jaxpr(lambda x, y: (unheard_of.bind(x), jnp.sin(y)))(X, X)
    assert depends_on(closed, closed.jaxpr.invars[:1]) == uses(closed, [True, False]) == [True, False]
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        closed, shapes = trace(lambda x: unheard_of.bind(jax.lax.psum(x, "data")), X)
    assert_equal(replay(closed, shapes)(X), unheard_of.bind(X))


@pytest.mark.filterwarnings("ignore:.*look.* at several examples")
@pytest.mark.filterwarnings("ignore:nothing is split over the mesh axis 'model'")
@pytest.mark.parametrize(("remat", "axes"), [("none", {"data": 2}), ("full", {"model": 2})], ids=str)
def test_a_layer_of_it(remat, axes):
    """As the same layer of what JAX has: on whole arrays, since nobody knows what it does to shards."""
    batch = np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)

    def gradients(middle):
        mesh = jpipe.make_mesh(stage=2, **axes, devices=jax.devices()[: 4 if axes else 2])
        options = {"num_stages": 2, "num_microbatches": 2, "remat": remat, "balance": "even", "mesh": mesh}
        pipe = jpipe.Pipeline([nn.Dense(4), middle, nn.Dense(4)], lambda y, _: jnp.mean(jnp.square(y)), **options)
        variables = pipe.init(jax.random.key(0), batch)
        return pipe.layer_variables({"params": pipe.value_and_grad(variables, batch)[1]})

    assert_close(gradients(lambda x: jnp.sin(unheard_of.bind(x))), gradients(lambda x: jnp.sin(_ahead(x))))
