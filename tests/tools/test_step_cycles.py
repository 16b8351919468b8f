from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import collectives
import jpipe
from jpipe.tools.chips import CHIPS
from jpipe.tools.compiled_program import Loop, Operation, read
from jpipe.tools.step_cycles import (
    axes_along,
    count_cycles,
    groups_of,
    transfer_seconds,
    turn_in_time,
    type_bytes,
    with_waits,
)
from jpipe.tools.time_model import Network
from tpu_program import needs_tpu_compiler


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
    with pytest.raises(ValueError, match="has no ticks"):
        count_cycles(step, loop("", 1))


# --- waits ------------------------------------------------------------------------------------------------------------


MESH = Mesh(np.full((2, 4), jax.devices()[0]), ("stage", "model"))
CHIP = replace(CHIPS["v5p"], clock=1.0, link_bandwidth=1.0)  # a byte takes a cycle, which is a second
NETWORK = Network(CHIP, (("stage", 2), ("model", 4)))  # two links along `model`, one along `stage`

PROGRAM = """HloModule step

%body (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  %ring = (bf16[8,128], bf16[8,128], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %back = (bf16[8,128], bf16[8,128], u32[]) collective-permute-start(%p), source_target_pairs={{1,0},{2,1},{3,2},{0,3}}
  %same = (bf16[8,128], bf16[8,128], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %work = bf16[8,128]{1,0} fusion(%p), calls=%inner, backend_config={"estimated_cycles":"1500"}
  %ring.done = bf16[8,128]{1,0} collective-permute-done(%ring)
  %back.done = bf16[8,128]{1,0} collective-permute-done(%back)
  %same.done = bf16[8,128]{1,0} collective-permute-done(%same)
  ROOT %sum = bf16[8,128]{1,0} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%inner
}

ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  %hop = (bf16[8,128], bf16[8,128], u32[]) collective-permute-start(%p), source_target_pairs={{0,4},{4,0}}
  %loop = bf16[8,128]{1,0} while(%p), condition=%c, body=%body
  ROOT %hop.done = bf16[8,128]{1,0} collective-permute-done(%hop)
}

%inner (p: bf16[8,128]) -> bf16[8,128] {
  ROOT %p = bf16[8,128]{1,0} parameter(0)
}
"""
SIZE = 8 * 128 * 2


def test_a_transfer_takes_the_time_of_its_bytes_on_its_links():
    permutes = dict.fromkeys(["ring", "back", "same", "hop"], float(SIZE))
    reduced = {"sum": 2 * SIZE * 3 / 4 / 2}
    assert transfer_seconds(read(PROGRAM), NETWORK, MESH) == permutes | reduced
    within = transfer_seconds(read(PROGRAM), NETWORK, MESH, beside=("stage",))
    assert "hop" not in within and len(within) == 4


def test_what_work_leaves_of_a_transfer_is_waited_for():
    """Two go at once, each its way; the third goes after the one before it; a sum has no start."""
    program = read(PROGRAM)
    takes = transfer_seconds(program, NETWORK, MESH)
    begun, transfers = turn_in_time(program.inner[0], takes, CHIP)
    found = {one.name: (one.begin, one.end, one.waited, one.at) for one in transfers}
    assert found == {
        "ring": (0, SIZE, SIZE - 1500, "ring.done"),
        "back": (0, SIZE, 0, "back.done"),
        "same": (SIZE, 2 * SIZE, SIZE, "same.done"),
        "sum": (2 * SIZE, 3.5 * SIZE - SIZE * 0.75, 0.75 * SIZE, "sum"),
    }
    assert next(at for at, operation in begun if operation.name == "work") == 0


def test_a_loop_hides_what_is_under_way():
    (hop,) = turn_in_time(read(PROGRAM), transfer_seconds(read(PROGRAM), NETWORK, MESH), CHIP)[1]
    assert hop.waited == 0


def test_a_gather_in_steps_beside_products_is_under_way_from_its_first_step_to_its_last():
    """As a v5e's compiler has it: each step is a fusion that holds the whole gather."""
    gather = (
        "  ROOT %gather{} = bf16[8,128]{{1,0}} all-gather(%p), channel_id=3, "
        'replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}'
    )
    names = ("first", "async_collective_fusion.1", "last")
    steps = [f"%{name} (p: bf16[2,128]) -> bf16[8,128] {{\n{gather.format(i)}\n}}" for i, name in enumerate(names)]
    program = """ENTRY %main (p: bf16[2,128]) -> bf16[8,128] {
  %p = bf16[2,128]{1,0} parameter(0)
  %async-collective-start = bf16[8,128]{1,0} fusion(%p), calls=%first
  %work = bf16[8,128]{1,0} fusion(%p), calls=%async_collective_fusion.1, backend_config={"estimated_cycles":"500"}
  ROOT %async-collective-done = bf16[8,128]{1,0} fusion(%work), calls=%last
}"""
    text = "\n\n".join(["HloModule step", *steps, program])
    takes = transfer_seconds(read(text), NETWORK, MESH)
    (one,) = turn_in_time(read(text), takes, CHIP)[1]
    assert (one.begin, one.end) == (0, SIZE * 3 / 4 / 2)
    assert (one.waited, one.at) == (SIZE * 3 / 4 / 2 - 500, "async-collective-done")
    (counted,) = collectives.read(text)
    assert counted.name == one.name and counted.beside_work


RAGGED = """HloModule step

%exchange (p: bf16[8,128], room: bf16[32,128], to: s32[4]) -> bf16[32,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  %room = bf16[32,128]{1,0} parameter(1)
  %to = s32[4]{0} parameter(2)
  ROOT %sent = bf16[32,128]{1,0} ragged-all-to-all(%p, %room, %to, %to, %to, %to), replica_groups={{0,1,2,3},{4,5,6,7}}
}

ENTRY %main (p: bf16[8,128], room: bf16[32,128], to: s32[4]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  %room = bf16[32,128]{1,0} parameter(1)
  %to = s32[4]{0} parameter(2)
  %go = ((bf16[8,128], bf16[32,128], s32[4]), bf16[32,128], u32[]) async-start(%p, %room, %to), calls=%exchange
  %work = bf16[8,128]{1,0} fusion(%p), calls=%inner, backend_config={"estimated_cycles":"300"}
  %gone = bf16[32,128]{1,0} async-done(%go)
  ROOT %back = bf16[8,128]{1,0} ragged-all-to-all(%gone, %p, %to, %to, %to, %to), replica_groups={{0,1,2,3},{4,5,6,7}}
}

%inner (p: bf16[8,128]) -> bf16[8,128] {
  ROOT %p = bf16[8,128]{1,0} parameter(0)
}
"""


def test_of_a_ragged_exchange_the_rows_that_there_are_are_sent_not_the_room_for_all():
    program = read(RAGGED)
    each = SIZE * 3 / 4 / 2
    takes = transfer_seconds(program, NETWORK, MESH)
    assert takes == {"sent": each, "back": each}
    assert {one.name: one.waited for one in turn_in_time(program, takes, CHIP)[1]} == {"sent": each - 300, "back": each}
    assert {one.name: (one.bytes, one.beside_work) for one in collectives.read(RAGGED)} == {
        "sent": (SIZE, True),
        "back": (SIZE, False),
    }


def test_operations_that_wait_take_longer():
    program, waiting = read(PROGRAM), with_waits(read(PROGRAM), NETWORK, MESH)
    waited = (SIZE - 1500) + SIZE + 0.75 * SIZE
    assert waiting.own == program.own == 0
    assert waiting.inner[0].own == program.inner[0].own + waited == 1500 + waited


def test_bytes_of_types():
    assert type_bytes("f8e4m3fn[16]{0}") == 16
    assert type_bytes("(s32[], pred[3]{0})") == 7


@needs_tpu_compiler
def test_a_forecast_says_which_part_of_a_step_waits_for_links():
    """Tensor-parallel layers whose sums nothing is beside: what they take is what bytes and links say."""
    split = lambda *names: nn.with_partitioning(nn.initializers.lecun_normal(), names)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.gelu(nn.Dense(8192, use_bias=False, kernel_init=split(None, "model"), dtype=jnp.bfloat16)(x))
            return x + nn.Dense(1024, use_bias=False, kernel_init=split("model", None), dtype=jnp.bfloat16)(h)

    batch = {"inputs": jax.ShapeDtypeStruct((4 * 2048, 1024), jnp.bfloat16)}
    seconds = {}
    for rings in (False, True):
        mesh = jpipe.make_mesh(stage=2, model=4, devices=jax.devices()[:8])
        layers, loss_fn = [Block() for _ in range(4)], lambda y, _: jnp.mean(y.astype(jnp.float32) ** 2)
        pipe = jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=4, mesh=mesh, rings=rings)
        found = jpipe.forecast(pipe, batch, optax.sgd(0.1), topology="v5p:2x2x2")
        seconds[rings] = found.slices["links"]
        assert "waits for links" in str(found)
    # Without rings each layer sums its result and its input's cotangent, [2048, 1024] each, by 2 n 3/4 on two links.
    each = 2 * 2048 * 1024 * 2 * 3 / 4 / (2 * CHIPS["v5p"].link_bandwidth)
    assert seconds[False] == pytest.approx(4 * 2 * 2 * each, rel=0.3)
    assert seconds[True] <= seconds[False]


# --- device groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups={}", ()),
        ("no group is named", ()),
    ],
)
def test_groups_in_each_way_in_which_they_are_written(text, groups):
    assert groups_of(f"%a = f32[] all-reduce(%b), {text}, to_apply=%add") == groups


def test_another_way_is_refused():
    with pytest.raises(ValueError, match="written in an unknown way"):
        groups_of("%a = f32[] all-reduce(%b), replica_groups=everyone")


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("model",)),
        (((0, 4),), ("stage",)),
        (((0, 5),), ("stage", "model")),
        (((3,),), ()),
    ],
)
def test_a_group_lies_along_the_axes_in_which_its_devices_differ(groups, axes):
    assert axes_along(groups, MESH) == axes
