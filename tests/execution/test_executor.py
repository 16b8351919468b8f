"""The scan over ticks: what crosses when, and that nothing is branched over."""

import itertools
import json
import re
from functools import partial, reduce

import jax
import jax.numpy as jnp
import pytest

import jpipe
from cases import check_by_hand, names
from jpipe.execution.executor import _flows
from jpipe.schedules.actions import FLOWS
from jpipe.schedules.ticks import lower


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_in_each_run_all_is_sent_that_an_action_left(num_chunks):
    for name in names(chunks=num_chunks, split=None):
        schedule = jpipe.make_schedule(name, num_stages=3, num_microbatches=6, num_chunks=num_chunks)
        table = lower(schedule, idle_work=True)
        run_of = [run for run in table.runs for _ in range(run.start, run.stop)]
        for tick, (i, slot) in itertools.product(range(table.num_ticks - 1), enumerate(table.slots)):
            kinds = {slot.kinds[code - 1] for code in slot.kind[tick] if code}
            following = (tick, i + 1) if i + 1 < len(table.slots) else (tick + 1, 0)
            for flow in (flow for flow, sending in FLOWS.items() if kinds & {*sending}):
                assert flow in _flows(table.slots, run_of[tick], i)
                assert flow in _flows(table.slots, run_of[following[0]], following[1] - 1)


@pytest.mark.parametrize(("num_stages", "permutes"), [(1, 0), (2, 2)])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_actions_are_loops_and_two_permutes_cross(num_stages, permutes, remat):
    layer = jpipe.Layer(lambda key, x: jnp.ones((4, 4)), lambda w, x: jnp.tanh(x @ w))
    options = {"num_stages": num_stages, "num_microbatches": 4, "balance": "even", "remat": remat}
    pipe = jpipe.Pipeline([layer] * 6, lambda y, _: jnp.mean(y), **options)
    batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    variables = jax.eval_shape(pipe.init, jax.random.key(0), batch)
    program = jax.jit(pipe.value_and_grad).lower(variables, batch).as_text()
    assert "stablehlo.while" in program
    assert "stablehlo.case" not in program
    assert program.count("stablehlo.collective_permute") == permutes


@pytest.mark.parametrize("schedule", ["interleaved", "v"])
def test_no_permute_has_a_ring_on_gpus(make_mesh, monkeypatch, schedule):
    """XLA splits rings itself under some flags, and then gave zeros to devices at which they close.

    A permute whose pairs all go up, or all go down, has none. The values that arrive are the same.
    """
    layer = jpipe.Layer(lambda key, x: jax.random.normal(key, (4, 4)), lambda w, x: jnp.tanh(x @ w))
    mesh, sizes = make_mesh((4, 2), ("stage", "data")), {"num_stages": 4, "num_microbatches": 4, "num_chunks": 2}
    make = partial(jpipe.Pipeline, [layer] * 8, lambda y, _: jnp.mean(y**2), schedule=schedule, mesh=mesh, **sizes)
    batch = jax.random.normal(jax.random.key(1), (8, 4))
    sequential = lambda trees: jnp.mean(reduce(lambda x, w: jnp.tanh(x @ w), trees, batch) ** 2)

    def has_rings(pipe, platform):
        traced = jax.jit(pipe.value_and_grad).trace(variables, batch)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        pairs = re.findall(r"source_target_pairs = dense<(\[\[.*?\]\])>", text)
        directions = [{sender < receiver for sender, receiver in json.loads(one)} for one in pairs]
        assert directions
        return any(len(found) > 1 for found in directions)

    pipe = make()
    variables = pipe.init(jax.random.key(0), batch)
    rings = {platform: has_rings(pipe, platform) for platform in ("cpu", "tpu", "cuda")}
    assert rings == {"cpu": schedule == "interleaved", "tpu": schedule == "interleaved", "cuda": False}

    monkeypatch.setattr(jax.lax, "platform_dependent", lambda leaf, *, default, cuda, rocm: cuda(leaf))
    pipe = make()  # its program on a CPU is now that for GPUs
    assert not has_rings(pipe, "cpu")
    check_by_hand(pipe, batch, sequential, variables)


def test_in_a_v_what_turns_may_wait(make_mesh):
    """On the last stage other actions come between, so that activations and cotangents wait there for their turn."""
    orders = [
        ["F0", "F1", "F2", "F0.1", "F1.1", "F2.1", "B0.1", "B1.1", "B2.1", "B0", "B1", "B2"],
        ["F0", "F1", "F0.1", "F2", "F1.1", "F2.1", "B0.1", "B1.1", "B0", "B2.1", "B1", "B2"],
    ]
    schedule = jpipe.Schedule(orders, slots=("F", "B"), style="v")
    assert all(len(waiting[-1]) == 2 for waiting in schedule.ticks.waiting.values()), "two wait for their turn"
    layer = jpipe.Layer(lambda key, x: jax.random.normal(key, (4, 4)), lambda w, x: jnp.tanh(x @ w))
    mesh, sizes = make_mesh((2,), ("stage",)), {"num_stages": 2, "num_microbatches": 3, "num_chunks": 2}
    pipe = jpipe.Pipeline([layer] * 4, lambda y, _: jnp.mean(y**2), schedule=schedule, mesh=mesh, **sizes)
    batch = jax.random.normal(jax.random.key(1), (6, 4))
    check_by_hand(pipe, batch, lambda trees: jnp.mean(reduce(lambda x, w: jnp.tanh(x @ w), trees, batch) ** 2))
