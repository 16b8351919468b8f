"""`jpipe.forecast`; programs as text: loops, cycles, transfers, groups of devices, for chips that aren't there."""

import re
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe
from compiled_transfers import transfers
from gpu_program import needs_gpu_compiler
from jpipe.tools.chips import CHIPS, Host, parse_topology
from jpipe.tools.forecaster import Loop, Operation, count_cycles, read
from jpipe.tools.memory_model import predict_memory
from jpipe.tools.time_model import predict_time
from tpu_program import needs_tpu_compiler, num_bytes


def make_pipe(width=8, stages=2, layers=4, **options):
    blocks = [nn.Dense(width) for _ in range(layers)]
    loss = lambda y, batch: jnp.mean(y**2)
    return jpipe.Pipeline(blocks, loss, num_stages=stages, num_microbatches=4, balance="even", **options)


def batch_of(width=8):
    return jax.ShapeDtypeStruct((8, width), jnp.float32)


def test_at_hand_it_knows_bytes_and_flops_and_no_seconds():
    pipe = make_pipe()
    found = jpipe.forecast(pipe, batch_of(), optax.sgd(0.1, momentum=0.9))
    parameters = 2 * (8 * 8 + 8) * 4  # a stage has two layers
    assert found.fits
    assert found.bytes["parameters"] == parameters
    assert found.bytes["optimizer"] == parameters
    assert found.flops > 3 * 2 * 8 * 8 * 8 * 4 / 2 / 2
    assert (found.seconds, found.slices, found.timeline, found.bubble_fraction) == (None,) * 4


def test_wrong_hardware_is_told():
    pipe, batch, tx = make_pipe(), batch_of(), optax.sgd(0.1)
    with pytest.raises(ValueError, match="is unknown; pass a chip and a shape such as one of v2:2x2"):
        jpipe.forecast(pipe, batch, tx, topology="v9:2x2")
    with pytest.raises(ValueError, match="both given"):
        jpipe.forecast(pipe, batch, tx, topology="v5e:2x2", devices=jax.devices())
    with pytest.raises(ValueError, match=r"devices has 1 devices, but the pipeline's mesh .* takes 2"):
        jpipe.forecast(pipe, batch, tx, devices=jax.devices()[:1])


@needs_tpu_compiler
def test_cycles_and_seconds_of_a_slice_that_is_not_there():
    found = jpipe.forecast(make_pipe(128), batch_of(128), optax.sgd(0.1, momentum=0.9), topology="v5e:2x2")
    assert found.fits
    assert found.seconds == pytest.approx(sum(found.slices.values()))
    time_of = lambda kind: next(s.end - s.start for s in found.timeline.of_stages[1] if s.action.kind == kind)
    forward, backward = map(time_of, "FB")
    assert found.timeline.makespan == pytest.approx((4 + 2 - 1) * (forward + backward), rel=0.5)
    assert backward > forward > 0 and found.slices["between layers"] > 0
    assert 0 < found.bubble_fraction < 1
    assert "\nit fits\n" in f"{found}\n"
    assert "<table>" in found._repr_html_()


@needs_gpu_compiler
def test_seconds_on_gpus_are_predicted_and_it_says_so():
    pipe, tx = make_pipe(128), optax.sgd(0.1, momentum=0.9)
    found = jpipe.forecast(pipe, batch_of(128), tx, topology="h100:8")
    assert (found.fits, found.message) == (True, "")
    assert found.bytes["parameters"] == 2 * (128 * 128 + 128) * 4
    assert found.bytes["temporaries"] > found.bytes["parameters"]  # their gradients, and activations
    time = predict_time(pipe.planner, batch_of(128), CHIPS["h100"], tx=tx)
    assert found.slices == time.seconds
    assert found.timeline.makespan == time.timeline.makespan
    assert "seconds are predicted by a roofline" in str(found)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        return x + nn.MultiHeadDotProductAttention(2)(h, h)


@needs_gpu_compiler
def test_a_gpu_program_of_any_number_of_rows_compiles():
    """Of 24 rows an example it was XLA's "INTERNAL: Couldn't find output tile sizes": Triton's are powers of two."""
    pipe = jpipe.Pipeline([Block(), Block()], lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=4)
    batch = jax.ShapeDtypeStruct((8, 24, 16), jnp.float32)
    found = jpipe.forecast(pipe, batch, optax.sgd(0.1), topology="h100:8")
    assert found.fits and found.bytes["temporaries"] > found.bytes["parameters"] > 0
    assert re.search(r"ms: step +0\.0*[1-9]\d\d\b", str(found))  # was 0.003, with one digit that counts


@needs_gpu_compiler
@pytest.mark.parametrize(("layers", "fits"), [(10, True), (20, False)])
def test_what_does_not_fit_on_gpus_is_told_though_their_compiler_compiles_it(layers, fits):
    """Layers of 32768 by 32768: 4 GiB each, with momentum and gradients 12."""
    pipe, tx = make_pipe(32768, layers=layers), optax.sgd(0.1, momentum=0.9)
    found = jpipe.forecast(pipe, batch_of(32768), tx, topology="h100:2")
    said = r"the step takes 1\d\d\.\d GiB, and JAX has at most 71\.2 GiB of a GPU's memory"
    if fits:
        said = r"XLA_PYTHON_CLIENT_MEM_FRACTION=0\.[89]\d or more has to be set; by default it is 0\.75"
    assert found.fits == fits and re.fullmatch(said, found.message)
    assert (found.seconds is None) == ("a training step holds" in str(found)) == (not fits)


@needs_gpu_compiler
def test_bytes_on_the_host_are_apart():
    tx, batch = optax.sgd(0.1, momentum=0.9), batch_of(128)
    gone = jpipe.forecast(make_pipe(128, 4, 8, remat="none", offload="residuals"), batch, tx, topology="h100:4")
    there = jpipe.make_mesh(stage=4, devices=parse_topology("h100:4").stand_ins())
    pipe = make_pipe(128, 4, 8, remat="none", offload="residuals", mesh=there)
    predicted = predict_memory(pipe.planner, batch, tx)[1]
    assert gone.cost.host == {"temporaries": predicted["residuals"]} and predicted["residuals"] > 0
    assert gone.slices["host"] > 0 and "on the host: temporaries" in str(gone)


@needs_gpu_compiler
def test_a_host_without_room_is_told(monkeypatch):
    small = replace(CHIPS["h100"], host=Host(bandwidth=1e9, memory=100))
    monkeypatch.setattr("jpipe.tools.forecaster.chip_of", lambda device: small)
    momentum = 2 * (8 * 8 + 8) * 4
    found = jpipe.forecast(make_pipe(offload="optimizer"), batch_of(), optax.sgd(0.1, momentum=0.9), topology="h100:2")
    assert (found.fits, found.cost.host) == (False, {"optimizer": momentum})
    assert f"{momentum} bytes would lie on the host, which has 100 bytes for each of its devices" in str(found)
    assert "would help: less in offload=, or more devices" in str(found)


# --- compiled programs -----------------------------------------------------------------------------------------------


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
    planner = make_pipe(4, layers=6).planner
    return planner.training_step(planner.for_training(batch_of(4)))


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
