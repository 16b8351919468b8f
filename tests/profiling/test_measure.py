"""The step's program, of which only some actions run."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jpipe
from cases import assert_equal
from jpipe.profiling.measure import Program, memory_of, noise_of
from wide import make


def counted(calls, index, x):
    """x, and a note for each call of a layer that it was called."""
    jax.debug.callback(lambda _: calls.append(index), x[0, 0])
    return x


def test_a_program_runs_the_actions_that_it_is_told_to():
    """Each layer tells when it is called; the backward's `jax.checkpoint` calls those again that move something."""
    calls = []
    layers = [lambda x, i=i: counted(calls, i, x) for i in range(4)]
    batch = {"inputs": np.ones((6, 3), np.float32)}
    pipe = jpipe.Pipeline(
        layers, lambda y, b: y.mean(), num_stages=2, num_microbatches=3, balance=[1, 3], remat="none", schedule="gpipe"
    )
    program = Program(pipe, pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1)), batch)

    def called(run, *only):
        calls.clear()
        jax.block_until_ready(run(*only))
        jax.effects_barrier()
        return {index: calls.count(index) for index in set(calls)}

    assert called(program.run, program.only("FB")) == {0: 3, 1: 6, 2: 6, 3: 6}
    assert called(program.run, program.only("")) == called(program.set_up) == {}
    assert called(program.run, program.only("F", 0)) == {0: 3}
    assert called(program.run, program.only("F", 1)) == {1: 3, 2: 3, 3: 3}
    assert called(program.run, program.only("B", 0)) == {}
    assert called(program.run, program.only("B", 1)) == {1: 3, 2: 3, 3: 3}


def test_a_program_of_all_actions_computes_what_the_pipeline_does():
    pipe, state, batch = make()
    program = Program(pipe, state, batch)
    (loss, updates, _), grads = program.run(program.only("FB"))
    key = jax.random.fold_in(state.key, state.step)
    (expected, other_updates), other = pipe.value_and_grad(state.variables, batch, key)
    assert_equal((loss, updates, grads), (expected, other_updates, other))


def test_noise_is_of_the_middle_half():
    assert noise_of([2.0] * 5) == 0.0
    assert noise_of([10.0, 8.0, 9.0, 11.0, 300.0]) == 0.2


def test_parts_are_those_of_the_fullest_device(make_mesh):
    mesh = make_mesh((2,), ("stage",))
    split = jax.device_put(jnp.zeros(8), NamedSharding(mesh, PartitionSpec("stage")))
    alone = jax.device_put(jnp.zeros(3), mesh.devices[1])
    state = SimpleNamespace(variables={"params": {"w": split}, "batch_stats": [split, alone]}, opt_state=(split, split))
    found = memory_of(SimpleNamespace(temporary_bytes=5), state)
    assert found == {"parameters": 16, "other_variables": 16 + 12, "optimizer": 32, "gradients": 16, "temporaries": 5}
    assert found.total == 97
