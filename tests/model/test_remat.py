"""Rematerialisation: how often each layer is computed, and what waits in memory for the backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe.model.remat import MODES

LAYERS, M = 6, 3
EXECUTED: list[int] = []


def _count(x):
    EXECUTED.append(1)
    return np.asarray(x)


@jax.custom_jvp
def counted(x):
    """`x`; whenever a program really computes it, that is counted."""
    return jax.pure_callback(_count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@counted.defjvp
def _(primals, tangents):
    return counted(*primals), tangents[0]


def init(key, x):
    return jax.random.normal(key, (4, 4), jnp.float32) / 2


layer = jpipe.Layer(init, lambda w, x: jnp.sin(counted(x @ w)), name="counted")


def executed(run) -> int:
    EXECUTED.clear()
    jax.block_until_ready(run())
    jax.effects_barrier()
    return len(EXECUTED)


@pytest.mark.parametrize(
    ("remat", "order", "k", "v", "times"),
    [("none", "1f1b", 2, 1, 1), ("layer", "1f1b", 3, 1, 2), ("stage", "gpipe", 2, 1, 2), ("full", "naive", 1, 1, 3)],
)
def test_every_layer_runs_as_often_as_its_mode_says_and_never_in_an_idle_tick(remat, order, k, v, times):
    """But for the last one: what it gives is never needed again, so under "full" it isn't computed a third time."""
    batch = {"inputs": np.ones((6, 4), np.float32)}
    sizes = {"num_stages": k, "num_microbatches": M, "num_chunks": v}
    pipe = jpipe.Pipeline(
        [*[layer] * LAYERS, lambda y: y], lambda y, _: jnp.sum(y), schedule=order, remat=remat, balance="even", **sizes
    )
    variables = pipe.init(jax.random.key(0), batch)
    assert executed(lambda: pipe.value_and_grad(variables, batch)) == times * LAYERS * M
    if remat == "none":
        assert executed(lambda: pipe.apply(variables, batch)) == LAYERS * M
        assert executed(lambda: pipe.evaluate(variables, batch)) == LAYERS * M


def temporary_bytes(order: str, remat, num_microbatches: int, *, examples: int = 32, train: bool = True) -> int:
    """Bytes a device of a step's temporaries, or of an evaluation's, for micro-batches of that many examples."""

    def wide(params, x):
        return jnp.tanh(jnp.tanh(x @ params["up"]) @ params["down"])

    shapes = {"up": (16, 256), "down": (256, 16)}
    block = jpipe.Layer(lambda key, x: {n: jnp.ones(s, jnp.float32) / 64 for n, s in shapes.items()}, wide)
    sizes = {"num_stages": 2, "num_microbatches": num_microbatches, "balance": "even"}
    pipe = jpipe.Pipeline([block] * 8, lambda y, _: jnp.mean(y), schedule=order, remat=remat, **sizes)
    batch = jax.ShapeDtypeStruct((examples * num_microbatches, 16), jnp.float32)
    variables = jax.eval_shape(pipe.init, jax.random.key(0), batch)
    run = pipe.value_and_grad if train else pipe.evaluate
    return jax.jit(run).lower(variables, batch).compile().memory_analysis().temp_size_in_bytes


def test_evaluation_has_room_for_larger_batches():
    """No gradients, no residuals: four times the batch takes less than training without remat does."""
    training = temporary_bytes("1f1b", "none", 4)
    assert temporary_bytes("1f1b", "none", 4, examples=4 * 32, train=False) < training


@pytest.mark.slow
def test_memory_of_the_modes():
    sizes = {remat: temporary_bytes("gpipe", remat, 16) for remat in MODES}
    hidden = 8 // 2 * 16 * 32 * 256 * 4  # layers of a stage * micro-batches * examples * width * bytes
    assert sizes["none"] > hidden
    assert sizes["layer"] < sizes["none"] / 4
    assert sizes["stage"] < sizes["none"] / 4
    assert sizes["full"] < sizes["stage"]
    assert sizes["full"] < sizes["layer"]


def test_memory_of_1f1b_does_not_grow_with_the_number_of_micro_batches():
    few, many = (temporary_bytes("1f1b", "none", m) for m in (4, 16))
    assert many < 1.02 * few
    few, many = (temporary_bytes("gpipe", "none", m) for m in (4, 16))
    assert many > 3 * few
