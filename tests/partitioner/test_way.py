"""Plans carried out: what is converted when, and once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import REPLICATED, Axis, Shard, summed

AXES = (Axis(("model",), (2,)),)
cholesky = partial(lax.linalg.cholesky, symmetrize_input=False)  # has no rule


def collectives(function, shardings, *arguments):
    """The names of the collectives of a function on parts, in order, and how its results lie."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    program = jaxpr_per_device(jaxpr, AXES, shardings, [summed] * len(jaxpr.jaxpr.outvars))
    names = [equation.primitive.name for equation in program.jaxpr.jaxpr.eqns]
    return [n for n in names if n in ("psum", "all_gather", "all_to_all", "reduce_scatter")], program.shardings


def test_a_value_is_converted_once():
    """It is wanted as a whole by two operations without a rule."""
    x = np.eye(4, dtype=np.float32)
    found = collectives(lambda x: cholesky(x) + cholesky(x), [(Shard(0),)], x)
    assert found == (["all_gather"], [(REPLICATED,)])


def test_also_where_it_is_read_by_what_is_called():
    x = np.eye(4, dtype=np.float32)
    found = collectives(lambda x: jax.jit(cholesky)(x) + jax.jit(lambda x: cholesky(x))(x), [(Shard(0),)], x)
    assert found == (["all_gather"], [(REPLICATED,)])


def test_what_was_added_up_is_not_added_up_again():
    """By itself the product is partial; the factorisation needs the sum, and the addition after it takes it then."""
    x, w = np.ones((4, 8), np.float32), np.ones((8, 4), np.float32)
    found = collectives(lambda x, w: ((y := x @ w), cholesky(y) + y)[1], [(Shard(1),), (REPLICATED,)], x, w)
    assert found == (["psum"], [(REPLICATED,)])


def test_an_operation_without_a_rule_sees_whole_arrays():
    found = collectives(lambda x: cholesky(x * 2), [(Shard(0),)], np.eye(4, dtype=np.float32))
    assert found == (["all_gather"], [(REPLICATED,)])


def test_names_of_scopes_stay_within_calls():
    def function(x):
        with jax.named_scope("outside"):
            return jax.jit(lambda x: jax.named_scope("inside")(jnp.sin)(x))(x)

    jaxpr = jax.make_jaxpr(function)(np.ones(4, np.float32))
    (sine,) = jaxpr_per_device(jaxpr, AXES, [(Shard(0),)], [summed]).jaxpr.jaxpr.eqns
    assert str(sine.source_info.name_stack) == "outside/inside"
