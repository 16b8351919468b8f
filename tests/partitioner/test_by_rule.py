"""One equation along several axes, by its rule."""

import jax
import jax.numpy as jnp
import pytest

from jpipe.partitioner.by_rule import way_by_rule
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard

AXES = Axis(("data",), (2,), is_data=True), Axis(("model",), (2,))


def equation_of(function, *shapes, dtype=jnp.bfloat16):
    equation, *_ = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]).jaxpr.eqns
    return equation


def test_each_axis_has_its_own_answer():
    product = equation_of(jnp.dot, (8, 16), (16, 4))
    way = way_by_rule(product, [(Shard(0), Shard(1)), (REPLICATED, REPLICATED)], AXES)
    assert way.operands == ((Shard(0), Shard(1)), (REPLICATED, Shard(0)))
    assert way.results == ((Shard(0), PARTIAL),) and not way.sends


def test_an_axis_that_cannot_split_besides_another_sees_whole_arrays():
    """Two of each axis would need four rows; there are six, of which each axis alone could have three."""
    sine = equation_of(jnp.sin, (6, 3))
    assert way_by_rule(sine, [(Shard(0), Shard(0))], AXES).operands == ((Shard(0), REPLICATED),)


def test_an_operation_without_a_rule_sees_whole_arrays():
    factors = equation_of(lambda x: jax.lax.linalg.cholesky(x, symmetrize_input=False), (4, 4), dtype=jnp.float32)
    assert way_by_rule(factors, [(Shard(0), PARTIAL)], AXES).operands == ((REPLICATED, REPLICATED),)


@pytest.mark.parametrize(("is_last", "sharding"), [(False, REPLICATED), (True, PARTIAL)])
def test_a_cast_that_nothing_else_reads_is_summed_late(is_last, sharding):
    """Along an axis that isn't of data; to a wider type."""
    cast = equation_of(lambda x: x.astype(jnp.float32), (4,))
    assert way_by_rule(cast, [(REPLICATED, PARTIAL)], AXES, is_last=is_last).results == ((REPLICATED, sharding),)
