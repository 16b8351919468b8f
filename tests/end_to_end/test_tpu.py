"""The compiled step of TPUs that aren't there: in place, its transfers hidden, nothing reduced in a loop.

A CPU shows none of this: its layouts are all alike and its collectives block. The programs are compiled for a named
topology by the TPU's own compiler (libtpu, for Linux on x86-64), which needs no TPU.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jpipe
from compiled_transfers import FETCH, HOST_MOVES, SEND
from split_model import SPLIT_STEPS, lowered_split_step
from tpu_program import Loop, compile_with_text, large_moves, needs_tpu_compiler, read, skipped, tpu_devices, transfers

pytestmark = needs_tpu_compiler

STAGES, MICROBATCHES, EXAMPLES, LENGTH, WIDTH, HEADS = 4, 8, 4, 256, 256, 4
ROW = EXAMPLES * LENGTH * WIDTH * 2
"""Bytes of a boundary's activations of one micro-batch."""

LARGEST = {"layer": ROW, "none": 4 * ROW, "stage": 4 * ROW}
"""Bytes of the largest array that one micro-batch leaves in a layer: its input, or the hidden activations."""


@pytest.fixture(autouse=True)
def usual_promotion():
    """Flax's modules mix their parameters with what they compute in."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Block(nn.Module):
    """A Transformer block in bfloat16."""

    @nn.compact
    def __call__(self, x):
        dense = lambda size, h: nn.Dense(size, dtype=jnp.bfloat16)(h)
        h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        q, k, v = (dense(WIDTH, h).reshape(*x.shape[:-1], HEADS, WIDTH // HEADS) for _ in range(3))
        x = x + dense(WIDTH, jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + dense(WIDTH, nn.gelu(dense(4 * WIDTH, nn.LayerNorm(dtype=jnp.bfloat16)(x))))


def loss_fn(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"]).mean()


def compiled_step(topology: str, axes=("stage",), blocks=2, examples=EXAMPLES, length=LENGTH, **options: Any) -> Loop:
    """The training step of a language model on four stages."""
    devices = tpu_devices(topology)[: STAGES if len(axes) == 1 else None]  # a chip of v4 has two
    mesh = Mesh(np.asarray(devices).reshape(STAGES, *[-1] * (len(axes) - 1)), axes)
    v = options.get("num_chunks", 1)
    counts = [blocks // v] * STAGES * v
    counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
    blocks_of_all = [Block() for _ in range(blocks * STAGES)]
    layers = [nn.Embed(256, WIDTH, dtype=jnp.bfloat16), *blocks_of_all, nn.Dense(256)]
    pipe = jpipe.Pipeline(
        layers, loss_fn, num_stages=STAGES, num_microbatches=MICROBATCHES, balance=counts, mesh=mesh, **options
    )
    shape = (MICROBATCHES * examples * (mesh.size // STAGES), length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
    state = pipe.abstract_state(batch, optax.adam(1e-3))
    return read(compile_with_text(jax.jit(pipe.train_step, donate_argnums=0).lower(state, batch))[1])


def check(step: Loop, remat: str, num_transfers: int = 2) -> None:
    """In place, and each transfer beside a loop."""
    assert large_moves(step, 0) and large_moves(step, LARGEST[remat]) == []
    (ticks,) = step.find("ticks")
    found = transfers(ticks)
    assert len(found) == num_transfers
    assert [transfer.operation.line for transfer in found if not transfer.loops] == []


def test_a_step_is_in_place_and_its_transfers_are_hidden():
    """Sparse cores keep nothing from being sent beside a backward: JAX's own derivative of a cross-entropy has a
    scatter, which the compiler would give to them."""
    step = compiled_step("v5p:2x2x1", remat="none", blocks=1, examples=1, length=1024)
    check(step, "none")
    (ticks,) = step.find("ticks")
    assert [[loop.name for loop in transfer.loops] for transfer in transfers(ticks)] == [["F"], ["B"]]


SLOW = {*SPLIT_STEPS} - {"1f1b", "fsdp"}
"""`test_gpu` has zero bubble by default."""


@pytest.mark.parametrize("words", [pytest.param(w, marks=pytest.mark.slow) if w in SLOW else w for w in SPLIT_STEPS])
def test_nothing_is_sent_in_a_loop_that_other_stages_skip(words):
    """If a device waited there for more than its stage's devices, the step would hang."""
    program = read(compile_with_text(lowered_split_step(words, np.asarray(tpu_devices("v5e:2x2"))))[1])
    assert [loop.trips for loop in program.find("ticks")] and skipped(program) == []


@pytest.mark.slow
def test_residuals_go_to_the_host_and_come_back_beside_work():
    """Each buffer of them has one fetch and one send in a tick, beside the loops of a backward and a forward."""
    step = compiled_step("v5e:2x2", remat="none", offload="residuals")
    (ticks,) = step.find("ticks")
    moves = {kind: transfers(ticks, (kind,)) for kind in HOST_MOVES}
    assert len(moves[FETCH]) == len(moves[SEND]) > 3
    assert [move.operation.line for each in moves.values() for move in each if not move.beside_products] == []
    assert len(transfers(ticks)) == 2
    operations = (each for loop in step.walk() for each in loop.operations)
    assert [each.line for each in operations if "S(5)" in each.type and each.opcode == "copy"] == []


def test_images_are_padded_one_micro_batch_at_a_time():
    """In tiles of 128 channels all 32 take 128 MiB in bfloat16; they were turned so before the ticks, and took 292."""
    layers = [nn.Conv(32, (3, 3), dtype=jnp.bfloat16), nn.relu, lambda x: x.mean((1, 2)), nn.Dense(256)]
    mesh = Mesh(np.asarray(tpu_devices("v2:1x1")), ("stage",))
    sizes = {"num_stages": 2, "num_microbatches": 32, "balance": [2, 2]}
    pipe = jpipe.Pipeline(layers, loss_fn, mesh=mesh, **sizes)
    shapes = {"inputs": jax.ShapeDtypeStruct((128, 64, 64, 3), jnp.float32)}
    batch = shapes | {"targets": jax.ShapeDtypeStruct((128,), jnp.int32)}
    state = pipe.abstract_state(batch, optax.sgd(1e-3))
    compiled = jax.jit(pipe.train_step, donate_argnums=0).lower(state, batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20


TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "v4:2x2x1"]
OPTIONS = {"1f1b": {}, "gpipe": {"schedule": "gpipe"}, "interleaved": {"schedule": "interleaved", "num_chunks": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["layer", "none", "stage"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_step_is_in_place_and_its_transfers_are_hidden(topology, options, remat):
    check(compiled_step(topology, remat=remat, **OPTIONS[options]), remat)


@pytest.mark.slow
def test_in_a_v_all_four_transfers_leave_what_they_bring_where_it_waits():
    """A tick has no loop beside its two actions, so that nothing is copied where values arrive."""
    step = compiled_step("v5e:2x2", remat="none", schedule="v", num_chunks=2)
    check(step, "none", num_transfers=4)
    (ticks,) = step.find("ticks")
    assert [loop.name for loop in ticks.inner] == ["F", "B"]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2"])
def test_nothing_is_reduced_over_data_in_a_loop(topology):
    step = compiled_step(topology, ("stage", "data"))
    names = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
    found = [o for loop in step.walk() for o in loop.operations if o.opcode.removesuffix("-start") in names]
    inside = [o.line for loop in step.walk() if loop.scope for o in loop.operations if o in found]
    assert found
    assert inside == []
    check(step, "layer")
