"""Layers that hold programs of their own: the TPU's attention kernels, `custom_vjp`, `nn.remat` and `nn.scan`.

Kernels run on the CPU in interpret mode: a kernel is a loop over its grid, in the types in which it computes on a TPU.
Those are float32, so they are compared to 1e-5 of a leaf's largest element, as everything in float32 is (`helpers`):
micro-batches are added up in another order. What the kernels themselves do is the same in both models, so that it adds
nothing; to plain attention, which takes its softmax in one piece, they are compared to 1e-4. The rest is in float64.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import jpipe
import sequential
from helpers import Model, assert_close, cross_entropy, make_model

K, M = 2, 2
MODES = ["none", "layer", "stage", "full"]


def pipeline(layers: list, loss_fn: Any, remat: Any, **options: Any) -> jpipe.Pipeline:
    """Two stages of equally many layers: the warning of kernels that can't be counted is not the matter here."""
    return jpipe.Pipeline(layers, loss_fn, num_stages=K, num_microbatches=M, remat=remat, balance="even", **options)


# --- attention kernels ------------------------------------------------------------------------------------------------

VOCABULARY, WIDTH, HEADS, SEQ = 11, 16, 2, 256  # twice the kernels' smallest blocks, so that they add up over several
SAVED = "attention"


def plain(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, `[B, heads, T, head]`."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


def flash(q: Any, k: Any, v: Any) -> Any:
    return checkpoint_name(flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5), SAVED)


def splash(q: Any, k: Any, v: Any) -> Any:
    """The kernel is of one example, and its mask a tree of constants."""
    mask = splash_attention_mask.CausalMask((q.shape[2], q.shape[2]))
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * q.shape[1]),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
    )
    return jax.vmap(kernel)(q / q.shape[-1] ** 0.5, k, v)


ATTENTION = {"plain": plain, "flash": flash, "splash": splash}


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    attention: str

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        heads = functools.partial(nn.DenseGeneral, (HEADS, WIDTH // HEADS), use_bias=False)  # that of k changes nothing
        q, k, v = (heads(name=name)(h).swapaxes(1, 2) for name in "qkv")
        h = ATTENTION[self.attention](q, k, v).swapaxes(1, 2)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1))(h)
        return x + nn.Dense(WIDTH)(nn.tanh(nn.Dense(2 * WIDTH)(x)))


@contextlib.contextmanager
def interpreted(mode: Any = True) -> Iterator[None]:
    """Kernels traced in here run on the CPU: as loops of its own operations, or on simulated TPUs (`InterpretParams`)."""
    with pltpu.force_tpu_interpret_mode(cast(Any, mode)):
        yield


@functools.cache
def language_model(attention: str) -> Model:
    """A language model, with its loss and gradients by plain JAX; the same variables whatever the attention."""
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, VOCABULARY, (2 * M, SEQ)).astype(np.int32) for name in ("inputs", "targets")}
    layers = [nn.Embed(VOCABULARY, WIDTH), *[Block(attention) for _ in range(3)], nn.Dense(VOCABULARY)]
    with interpreted():
        model = make_model(layers, cross_entropy, batch)
        assert model.truth
    return model


POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names(SAVED),
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("attention", "remat"),
    [
        *[("flash", remat) for remat in MODES],
        ("flash", "dots"),
        pytest.param("flash", "names", marks=SLOW),
        *[pytest.param("splash", remat, marks=SLOW if remat in ("layer", "stage") else ()) for remat in MODES],
        pytest.param("splash", "dots", marks=SLOW),
        ("splash", "names"),
    ],
)
def test_a_language_model_with_a_kernel_has_the_sequential_gradients(attention, remat):
    model = language_model(attention)
    with interpreted():
        pipe = pipeline(model.layers, model.loss_fn, POLICIES.get(remat, remat))
        variables = pipe.from_layer_variables(model.trees, model.batch)
        (loss, _), grads = pipe.value_and_grad(variables, model.batch)
    want, _, gradients = model.truth
    found = pipe.layer_variables({"params": grads})
    assert_close(loss, want, "loss")
    for i, (tree, expected) in enumerate(zip(found, gradients, strict=True)):
        assert_close(tree, expected, f"layer {i}")


@pytest.mark.parametrize("attention", ["flash", "splash"])
def test_the_kernels_are_attention(attention):
    """Or else the comparison would be one of mistakes made alike."""
    (loss, outputs, grads), (want, logits, gradients) = language_model(attention).truth, language_model("plain").truth
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(outputs, logits, atol=1e-4)
    for found, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.max(np.abs(expected)))


@pytest.mark.slow
def test_a_kernel_on_simulated_tpus():
    model = language_model("flash")
    with interpreted(pltpu.InterpretParams()):
        pipe = pipeline(model.layers, model.loss_fn, "layer")
        (loss, _), grads = pipe.value_and_grad(pipe.from_layer_variables(model.trees, model.batch), model.batch)
    assert_close(loss, model.truth[0], "loss")
    assert_close([tree for tree in pipe.layer_variables({"params": grads}) if tree], model.truth[2], "gradients")


@pytest.mark.slow
def test_a_kernel_on_a_mesh_with_a_data_axis(make_mesh):
    model = language_model("flash")
    with interpreted():
        pipe = pipeline(model.layers, model.loss_fn, "layer", mesh=make_mesh((K, 2), ("stage", "data")))
        (loss, _), grads = pipe.value_and_grad(pipe.from_layer_variables(model.trees, model.batch), model.batch)
    assert_close(loss, model.truth[0], "loss")
    assert_close([tree for tree in pipe.layer_variables({"params": grads}) if tree], model.truth[2], "gradients")
