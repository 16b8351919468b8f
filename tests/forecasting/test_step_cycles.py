import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jpipe
from jpipe.forecasting.compiled_program import Loop, Operation
from jpipe.forecasting.step_cycles import count_cycles


def operations(cycles):
    return [Operation("a", "fusion", "f32[]", (), cycles, "", "")]


def loop(scope, cycles, *inner, trips=None):
    return Loop(scope, operations(cycles), list(inner), {}, trips)


@pytest.fixture
def step():
    pipe = jpipe.Pipeline(
        [nn.Dense(4) for _ in range(6)],
        lambda y, _: jnp.mean(y**2),
        num_stages=2,
        num_microbatches=4,
        balance="even",
    )
    batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    return pipe.planner.training_step(pipe.planner.for_training(batch))


def test_loops_count_as_often_as_they_turn(step):
    names = [f"{group.layer.name}.{g}" for g, group in enumerate(step.model.groups)]
    assert [group.indices for group in step.model.groups] == [(0,), (1, 2, 3, 4), (5,)]
    ticks = "jit(step)/ticks/while"

    def action(kind, cycles, *others):
        inside = f"{ticks}/body/{kind}/while"
        layers = [loop(f"{inside}/body/{name}/while", cycles, *others) for name in names]
        return loop(inside, 1, *layers)

    scan = loop("of/its/own/while", 1, trips=7)
    program = loop("", 1000, loop(ticks, 5, action("F", 10), action("B", 20, scan)))
    found = count_cycles(step, program)
    assert found.actions == {"F": (31.0, 31.0), "B": (1 + 3 * 27, 1 + 3 * 27)}
    assert (found.ticks, found.update) == (5 * step.table.num_ticks, 1000)
    assert found.timeline.makespan == (4 + 1) * (31 + 82)
    assert found.total == found.timeline.makespan + found.ticks + found.update


def test_a_program_without_ticks_is_no_step(step):
    with pytest.raises(ValueError, match="0 loops over ticks"):
        count_cycles(step, loop("", 1))
