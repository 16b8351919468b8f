"""Jaxprs carried out equation by equation: what is converted when, and once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jpipe.partitioner.control_flow import CONTROL_FLOW
from jpipe.partitioner.parts_interpreter import PartsInterpreter
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard, settled

AXES = (Axis(("model",), (2,)),)
cholesky = partial(lax.linalg.cholesky, symmetrize_input=False)  # has no rule


def collectives(function, shardings, *arguments):
    """The names of the collectives of a function on parts, in order."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    program = jaxpr_per_device(jaxpr, AXES, shardings, [settled] * len(jaxpr.jaxpr.outvars))
    names = [equation.primitive.name for equation in program.jaxpr.jaxpr.eqns]
    return [n for n in names if n in ("psum", "all_gather", "all_to_all", "reduce_scatter")], program.shardings


def test_a_value_is_converted_once():
    """It is wanted as a whole by two operations without a rule."""
    x = np.eye(4, dtype=np.float32)
    found = collectives(lambda x: cholesky(x) + cholesky(x), [(Shard(0),)], x)
    assert found == (["all_gather"], [(REPLICATED,)])


def test_what_was_added_up_is_not_added_up_again():
    """By itself the product is partial; the sine needs the sum, and the addition after it takes it then."""
    x, w = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)
    found = collectives(lambda x, w: ((y := x @ w), jnp.sin(y) + y)[1], [(Shard(1),), (REPLICATED,)], x, w)
    assert found == (["psum"], [(REPLICATED,)])


def test_an_operation_without_a_rule_sees_whole_arrays():
    found = collectives(lambda x: cholesky(x * 2), [(Shard(0),)], np.eye(4, dtype=np.float32))
    assert found == (["all_gather"], [(REPLICATED,)])


def test_shardings_of_results_without_computing_them():
    x, w = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)
    jaxpr = jax.make_jaxpr(lambda x, w: (x @ w, jnp.tanh(x)))(x, w)
    found = []

    def run(x, w):
        interpreter = PartsInterpreter(AXES, CONTROL_FLOW)
        found.extend(interpreter.shardings_of(jaxpr, [(Shard(1),), (Shard(0),)]))
        return interpreter.agreed(jnp.asarray(True), [(Shard(0),)]), interpreter.agreed(jnp.asarray(3), [])

    mesh, specs = Mesh(jax.devices()[:2], ("model",)), PartitionSpec()
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    assert [bool(x) for x in jax.jit(run)(x, w)] == [True, True]
    assert found == [(PARTIAL,), (Shard(1),)]
