"""Transfer: a state to the hosts and back in portions, each told to who shows the progress."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from cases import assert_equal
from jpipe.checkpoints import files
from jpipe.checkpoints.contents import Contents
from jpipe.checkpoints.refreezing import Origin
from jpipe.checkpoints.transfer import AT_ONCE, _portions, read_all, take_all


@pytest.fixture(scope="module")
def state():
    """A pipeline of sixteen equal layers and its state."""
    batch = np.ones((4, 8), np.float32)
    layers = [nn.Dense(8) for _ in range(16)]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=4, num_microbatches=2, balance="even")
    return pipe, batch, pipe.create_state(jax.random.key(0), batch, optax.adam(1e-3, mu_dtype=jnp.bfloat16))


def test_portions_are_of_an_eighth_and_all_of_it(state):
    pipe, _, own = state
    contents = Contents(pipe.plan.model, own)
    portions = _portions(contents.each_record)
    assert [record for portion in portions for record in portion] == contents.each_record
    assert [len(portion) for portion in portions] == [2] * 8
    assert all(sum(r.num_bytes for r in portion) <= AT_ONCE * contents.num_bytes for portion in portions)


def test_what_is_taken_and_written_is_read_into_the_same_state(state, tmp_path):
    pipe, batch, own = state
    contents, told = Contents(pipe.plan.model, own), []
    named = take_all(contents, told.append)
    assert sum(told) == contents.num_bytes
    assert set(named) == set(contents.shapes())
    directory = files.as_path(tmp_path)
    manager = files.make_manager(directory, keep=None)
    files.write(manager, 0, named, contents.description())
    manager.close()
    shapes = Contents(pipe.plan.model, pipe.abstract_state(batch, own.tx))
    arrays, named = read_all(directory / "0", shapes, Origin({}, frozenset(), frozenset()))
    found = shapes.filled(arrays, named | {("step",): own.step, ("key",): own.key})
    assert_equal(found.variables, own.variables)
    assert_equal(found.opt_state, own.opt_state)
    for leaf, want in zip(jax.tree.leaves(found), jax.tree.leaves(shapes.state), strict=True):
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
