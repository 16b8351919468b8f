import jax
import jax.numpy as jnp

from jpipe.seam.jaxpr_types import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, shapes_of


def test_what_make_jaxpr_gives_unpacks_in_every_version():
    closed = jax.make_jaxpr(lambda x: (x @ x.T + 1.0, x.astype(jnp.bfloat16)))(jnp.ones((2, 3), jnp.float32))
    assert isinstance(closed, ClosedJaxpr)
    assert isinstance(closed.jaxpr, Jaxpr)
    assert not closed.consts
    assert all(isinstance(equation, JaxprEqn) for equation in closed.jaxpr.eqns)
    operands = [v for equation in closed.jaxpr.eqns for v in equation.invars]
    assert {type(v) for v in operands} == {Var, Literal}
    expected = [jax.ShapeDtypeStruct((2, 2), jnp.float32), jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)]
    assert shapes_of(closed.jaxpr.outvars) == expected


def test_shapes_of_random_keys():
    closed = jax.make_jaxpr(jax.random.clone)(jax.random.key(0))
    assert shapes_of(closed.jaxpr.outvars)[0].dtype == jax.random.key(0).dtype
