"""`benchmarks/axes.py`: that it counts what is sent, and that its rows compute the same in jpipe and in plain JAX.

The rows that jpipe computes are compared with plain JAX in float64 on eight simulated devices, each with a time limit.
"""

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

from collectives import COLLECTIVES
from compiled_transfers import transfers
from gpu_program import needs_gpu_compiler
from jpipe.tools.chips import ABSENT, parse_topology
from jpipe.tools.forecaster import compile_with_text, read
from timed import Worker
from tpu_program import needs_tpu_compiler, tpu_devices

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import axes
from axes_models import ROWS, Sizes
from axes_programs import Case, lower_pipeline

QUICK = "experts"
"""The row whose values are compared in every run of the tests."""
NEEDS_TUNIX = pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="google-tunix isn't installed")


@pytest.fixture(scope="module")
def worker():
    with Worker(limit=300) as worker:
        yield worker


def marks_of(name):
    return [*[pytest.mark.slow] * (name != QUICK), *[NEEDS_TUNIX] * (name == "qwen3")]


@pytest.mark.parametrize("name", [pytest.param(row.name, marks=marks_of(row.name)) for row in ROWS])
def test_values_and_gradients_are_plain_jax(worker, name):
    assert worker.value("axes_values", "check", name) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "fsdp-step", "fsdp-use", "fsdp-model"])
def test_no_more_is_sent_than_in_plain_jax(worker, name):
    found = worker.value("axes_values", "compiled", name)
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


@pytest.mark.slow
@needs_gpu_compiler
def test_stages_of_gpus_send_beside_work_if_a_flag_lets_two_collectives_be_on_their_way():
    lowered = lower_row("dense", parse_topology("h100:8").devices())
    flags = ABSENT | {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
    check_transfers(read(lowered.compile(flags).as_text()), 2)


def lower_row(name, devices, **options):
    (row,) = [row for row in ROWS if row.name == name]
    width, seq = (1024, 512) if name == "sequence" else (2048, 1024)
    sizes = Sizes(width=width, heads=width // 128, kv_heads=width // 128, hidden=4 * width, seq=seq)
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
