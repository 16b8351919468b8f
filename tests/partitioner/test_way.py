"""Plans carried out: what is converted when, and once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard, summed
from jpipe.partitioner.way import way_by_rule

AXES = (Axis(("model",), (2,)),)
cholesky = partial(lax.linalg.cholesky, symmetrize_input=False)  # has no rule


def collectives(function, shardings, *arguments):
    """The names of the collectives of a function on parts, in order, and how its results lie."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    program = jaxpr_per_device(jaxpr, AXES, shardings, [summed] * len(jaxpr.jaxpr.outvars))
    names = [equation.primitive.name for equation in program.jaxpr.jaxpr.eqns]
    return [n for n in names if n in ("psum", "all_gather", "all_to_all", "reduce_scatter")], program.shardings


EYE, X, W = np.eye(4, dtype=np.float32), np.ones((4, 8), np.float32), np.ones((8, 4), np.float32)
ONCE = {
    "wanted as a whole by two operations without a rule": (lambda x: cholesky(x) + cholesky(x), [(Shard(0),)], (EYE,)),
    "without a rule": (lambda x: cholesky(x * 2), [(Shard(0),)], (EYE,)),
    # By itself the product is partial; the factorisation needs the sum, and the addition after it takes it then.
    "a sum": (lambda x, w: ((y := x @ w), cholesky(y) + y)[1], [(Shard(1),), (REPLICATED,)], (X, W)),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_value_is_converted_once(name):
    function, shardings, arguments = ONCE[name]
    kind = "psum" if name == "a sum" else "all_gather"
    assert collectives(function, shardings, *arguments) == ([kind], [(REPLICATED,)])


MESH_AXES = Axis(("data",), (2,), is_data=True), Axis(("model",), (2,))


def equation_of(function, *shapes, dtype=jnp.bfloat16):
    equation, *_ = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]).jaxpr.eqns
    return equation


def test_each_axis_has_its_own_answer():
    product = equation_of(jnp.dot, (8, 16), (16, 4))
    way = way_by_rule(product, [(Shard(0), Shard(1)), (REPLICATED, REPLICATED)], MESH_AXES)
    assert way.operands == ((Shard(0), Shard(1)), (REPLICATED, Shard(0)))
    assert way.results == ((Shard(0), PARTIAL),) and not way.sends


def test_an_axis_that_cannot_split_besides_another_sees_whole_arrays():
    """Two of each axis would need four rows; there are six, of which each axis alone could have three."""
    sine = equation_of(jnp.sin, (6, 3))
    assert way_by_rule(sine, [(Shard(0), Shard(0))], MESH_AXES).operands == ((Shard(0), REPLICATED),)


@pytest.mark.parametrize(("is_last", "sharding"), [(False, REPLICATED), (True, PARTIAL)])
def test_a_cast_that_nothing_else_reads_is_summed_late(is_last, sharding):
    """Along an axis that isn't of data; to a wider type."""
    cast = equation_of(lambda x: x.astype(jnp.float32), (4,))
    assert way_by_rule(cast, [(REPLICATED, PARTIAL)], MESH_AXES, is_last=is_last).results == ((REPLICATED, sharding),)
