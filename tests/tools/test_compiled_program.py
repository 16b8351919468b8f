"""Programs as text: loops by their scopes, cycles of a step, and what runs beside a transfer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jpipe
from compiled_transfers import transfers
from jpipe.tools.compiled_program import Loop, Operation, count_cycles, read
from tpu_program import num_bytes

PROGRAM = """HloModule step

%work (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %dot = bf16[8,128]{1,0} fusion(%p), calls=%inner, backend_config={"estimated_cycles":"100"}
}

%body (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  %start = bf16[8,128]{1,0} collective-permute-start(%p)
  %inside = bf16[8,128]{1,0} while(%p), condition=%c, body=%work, metadata={op_name="ticks/while/body/F/while"}
  %done = bf16[8,128]{1,0} collective-permute-done(%start)
  ROOT %copy = bf16[8,128]{0,1} copy(%done), backend_config={"estimated_cycles":"7"}
}

ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %loop = bf16[8,128]{1,0} while(%p), condition=%c, body=%body, metadata={op_name="ticks/while"}
}

%inner (p: bf16[8,128]) -> bf16[8,128] {
  ROOT %p = bf16[8,128]{1,0} parameter(0)
}
"""


def test_loops_are_found_by_their_scopes_with_their_own_cycles():
    (ticks,) = read(PROGRAM).find("ticks")
    (forward,) = ticks.find("F")
    assert (ticks.own, forward.own) == (7, 100)


def test_a_permute_knows_what_runs_between_its_start_and_its_end():
    (ticks,) = read(PROGRAM).inner
    (permute,) = transfers(ticks)
    assert [loop.name for loop in permute.loops] == ["F"]
    assert num_bytes(permute.operation) == 2048


# --- cycles of a step ----------------------------------------------------------------------------------------------


def operations(cycles):
    return [Operation("a", "fusion", "f32[]", (), cycles, "", "")]


def loop(scope, cycles, *inner, trips=None):
    return Loop(scope, operations(cycles), list(inner), {}, trips)


@pytest.fixture
def step():
    pipe = jpipe.Pipeline(
        [nn.Dense(4) for _ in range(6)], lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=4, balance="even"
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
    work, cost = count_cycles(step, program)
    assert work.times == {"F": [31.0, 31.0], "B": [1 + 3 * 27, 1 + 3 * 27]}
    assert (cost.seconds["between layers"], cost.seconds["update"]) == (5 * step.table.num_ticks, 1000)
    assert cost.timeline.makespan == cost.seconds["computation"] + cost.seconds["bubble"] == (4 + 1) * (31 + 82)
    assert count_cycles(step, program, clock=2.0)[1].seconds == {n: s / 2 for n, s in cost.seconds.items()}


def test_a_program_without_ticks_is_no_step(step):
    with pytest.raises(ValueError, match="has no ticks"):
        count_cycles(step, loop("", 1))
