"""`benchmarks/axes.py`: that it counts what is sent, and that its rows compute the same in jpipe and in plain JAX.

The rows that jpipe computes are compared with plain JAX in float64 on eight simulated devices, each with a time limit.
"""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collectives import COLLECTIVES
from compiled_transfers import transfers, turn_in_time
from gpu_program import needs_gpu_compiler
from jpipe.tools.chips import ABSENT, CHIPS, parse_topology
from jpipe.tools.forecaster import compile_with_text, read
from timed import Worker
from tpu_program import needs_tpu_compiler, tpu_devices

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import axes
from axes_models import ROWS, Sizes
from axes_programs import Case, lower_pipeline
from axes_traffic import PLACES, Program, Sent, per_step, total

TURNS = 3  # of a loop inside of a layer
QUICK = ["experts"]
"""The row whose values are compared in every run of the tests."""
NEEDS_TUNIX = pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="google-tunix isn't installed")


@pytest.fixture(scope="module")
def worker():
    with Worker(limit=300) as worker:
        yield worker


def result_of(worker, function, name):
    return worker.value("axes_values", function, name)


def written_by_hand(x):
    """A step of two micro-batches and two layers; `x` `[8, 8]` is one device's."""
    turn = lambda x, _: (jnp.sin(lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)])), None)
    forward = lambda x, _: (lax.scan(turn, jnp.cos(lax.psum(x, "model")), length=TURNS)[0], None)

    def backward(x, _):
        wide = jnp.sin(lax.all_gather(x, "model", axis=0, tiled=True))
        x = jnp.cos(lax.psum_scatter(wide, "model", scatter_dimension=0, tiled=True))
        return lax.all_to_all(x, "model", 0, 1, tiled=True).reshape(x.shape), None

    def microbatch(x, _):
        with jax.named_scope("F"):
            x = lax.scan(forward, x, length=2)[0]
        with jax.named_scope("B"):
            x = lax.scan(backward, x, length=2)[0]
        return jnp.tanh(lax.psum(x, "model")), None

    return lax.psum(jnp.cos(lax.scan(microbatch, x, length=2)[0]), "data")


@pytest.fixture(scope="module")
def counted():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"in_specs": P("data", "model"), "out_specs": P(None, "model")}
    run = jax.shard_map(written_by_hand, mesh=mesh, check_vma=False, **specs)
    compiled = jax.jit(run).lower(jax.ShapeDtypeStruct((16, 32), jnp.float32)).compile()
    return Program(None, 1, TURNS, mesh).sent(compiled.as_text())


def test_every_collective_is_counted_where_it_stands(counted):
    n = 8 * 8 * 4  # bytes that a device has
    found = {(sent.place, sent.kind): (sent.bytes, sent.moved, count) for sent, count in counted.items()}
    assert found == {
        ("forward", "all-reduce"): (n, 2 * n * 3 / 4, 1),
        ("forward", "collective-permute"): (n, n, TURNS),
        ("backward", "all-gather"): (4 * n, 4 * n * 3 / 4, 1),
        ("backward", "reduce-scatter"): (4 * n, 4 * n * 3 / 4, 1),
        ("backward", "all-to-all"): (n, n * 3 / 4, 1),
        ("micro-batch", "all-reduce"): (n, 2 * n * 3 / 4, 1),
        ("step", "all-reduce"): (n, 2 * n * 1 / 2, 1),
    }


def test_totals(counted):
    n = 8 * 8 * 4
    assert total(counted, "forward") == 1.5 * n + TURNS * n
    assert total(counted, "backward") == 6 * n + 0.75 * n
    assert per_step(counted, blocks=2, microbatches=2) == 2 * (2 * (4.5 + 6.75) * n + 1.5 * n) + n


WAITING = """
%fused (x: f32[8]) -> f32[8] {
  ROOT %sum = f32[8] all-reduce(%x)
}

%turn (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8] parameter(0)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %up-start = f32[8] collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %again-start = f32[8] collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %down-start = f32[8] collective-permute-start(%x), source_target_pairs={{1,0},{0,1}}
  %product = f32[8] fusion(%x), backend_config={"estimated_cycles":"3000"}
  %down = f32[8] collective-permute-done(%down-start)
  %up = f32[8] collective-permute-done(%up-start)
  %again = f32[8] collective-permute-done(%again-start)
  %scattered = f32[8] fusion(%x), calls=%fused
  %while = f32[8] while(%x), body=%turn, condition=%test
  ROOT %late = f32[8] all-gather(%x)
}
"""


def test_chips_wait_for_what_nothing_is_done_beside():
    """Of 2 ms each, two permutes the same way follow each other, and a third goes the other way; work takes 3 ms."""
    takes = dict.fromkeys(("up-start", "again-start", "down-start", "sum", "late"), 2e-3)
    found = {one.name: one.waited for one in turn_in_time(read(WAITING), takes, replace(CHIPS["v5p"], clock=1e6))[1]}
    expected = {"up-start": 0.0, "again-start": 1e-3, "down-start": 0.0, "sum": 2e-3, "late": 2e-3}
    assert found == pytest.approx(expected)


def test_alike_collectives_are_one_row(counted):
    nothing = dict.fromkeys(PLACES, 0.0)
    side = axes.Side(counted, nothing, nothing, 0.0, 0)
    rows = axes.collective_rows(side, side)
    assert len(rows) == 7
    assert all(row[5] == row[6] for row in rows)
    assert axes.is_at_most(side, side)
    more = counted + type(counted)([Sent("forward", "all-gather", "f32[8]", 1024, 768.0, True)])
    assert not axes.is_at_most(side, replace(side, sent=more))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(row.name, marks=NEEDS_TUNIX if row.name == "qwen3" else ()) for row in ROWS if row.name not in QUICK],
)
def test_values_and_gradients_are_plain_jax(worker, name):
    assert result_of(worker, "check", name) > 1


@pytest.mark.parametrize("name", QUICK)
def test_values_and_gradients_of_one_row_are_plain_jax(worker, name):
    assert result_of(worker, "check", name) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "fsdp-step", "fsdp-use", "fsdp-model"])
def test_no_more_is_sent_than_in_plain_jax(worker, name):
    found = result_of(worker, "compiled", name)
    assert 0 < found["jpipe"]["step"] <= axes.SLACK * found["plain"]["step"]


CHUNKS = {"num_chunks": 2, "balance": [2, 1, 1, 2]}


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("topology", "name", "options"),
    [
        ("v5p:2x2x2", "sequence", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("v5p:2x2x2", "fsdp-use", {}),
                ("v5p:2x2x2", "dense", CHUNKS | {"schedule": "interleaved"}),
                ("v5p:2x2x2", "dense", {"schedule": "zero_bubble"}),
                ("v5e:2x4", "dense", CHUNKS | {"schedule": "v"}),
                ("v6e:2x4", "sequence", {}),
            ]
        ),
    ],
)
def test_stages_send_beside_work_where_layers_send_too(topology, name, options):
    """A regression: activations had arrived before a backward began that sends itself."""
    lowered = lower_row(name, tpu_devices(topology), **options)
    check_transfers(read(compile_with_text(lowered)[1]), 4 if options.get("schedule") == "v" else 2)


@needs_gpu_compiler
def test_stages_of_gpus_send_beside_work_if_a_flag_lets_two_collectives_be_on_their_way():
    lowered = lower_row("dense", parse_topology("h100:8").devices())
    flags = ABSENT | {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
    check_transfers(read(lowered.compile(flags).as_text()), 2)


def lower_row(name, devices, **options):
    (row,) = [row for row in ROWS if row.name == name]
    width = 1024 if name == "sequence" else 2048
    sizes = Sizes(width=width, heads=width // 128, kv_heads=width // 128, hidden=4 * width, seq=1024)
    with jax.numpy_dtype_promotion("standard"):
        return lower_pipeline(Case.of(row, sizes, devices), **options)


def check_transfers(program, count):
    """A steady tick sends between stages so often, always beside products, and so do layers besides."""
    ticks = max(program.find("ticks"), key=lambda loop: loop.trips)
    sending = [each for loop in ticks.walk() for each in loop.operations if is_collective(each)]
    between = [each for each in transfers(ticks) if "/slot" not in each.operation.op_name]
    assert len(between) == count < len(sending)
    assert [one.operation.line for one in between if not one.beside_products] == []


def is_collective(operation):
    return operation.opcode.removesuffix("-start") in COLLECTIVES
