"""Layers that hold programs of their own: the TPU's attention kernels, `nn.remat` and `nn.scan`.

Kernels run on the CPU in interpret mode: a kernel is a loop over its grid, in the types in which it computes on a TPU.
Those are float32, so they are compared to 1e-5 of a leaf's largest element, as everything in float32 is (`helpers`):
micro-batches are added up in another order. What the kernels themselves do is the same in both models, so that it adds
nothing; to plain attention, which takes its softmax in one piece, they are compared to 1e-4. The rest is in float64.
"""

import functools
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
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

import jpipe
import sequential
from cases import Model, assert_close, assert_step_equals, cross_entropy, make_model

K, M = 2, 2


def pipeline(layers: list, loss_fn: Any, remat: Any, **options: Any) -> jpipe.Pipeline:
    """Two stages of equally many layers."""
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


def interpreted() -> Any:
    """A context in which kernels that are traced run on the CPU, as `pallas_call(interpret=True)` does.

    `InterpretParams()` would simulate a TPU by callbacks in order, which `jax.checkpoint` refuses.
    """
    return pltpu.force_tpu_interpret_mode(cast(Any, True))


@functools.cache
def language_model(attention: str) -> Model:
    """A language model; its variables are the same whatever the attention."""
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, VOCABULARY, (2 * M, SEQ)).astype(np.int32) for name in ("inputs", "targets")}
    layers = [nn.Embed(VOCABULARY, WIDTH), *[Block(attention) for _ in range(3)], nn.Dense(VOCABULARY)]
    with interpreted():
        return make_model(layers, cross_entropy, batch)


POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names(SAVED),
}
SLOW = pytest.mark.slow


def test_a_kernel_on_a_mesh_with_a_data_axis(make_mesh):
    """Kernels have no rule: each device runs them on whole micro-batches, and tells. Nor may they keep the mesh."""
    model, mesh = language_model("flash"), make_mesh((K, 2), ("stage", "data"))
    with interpreted(), pytest.warns(UserWarning, match="has to see whole arrays on each device"):
        want, _, gradients = model.truth
        pipe = pipeline(model.layers, model.loss_fn, "layer", mesh=mesh)
        variables = pipe.from_layer_variables(model.trees, model.batch)
        (loss, _), grads = pipe.value_and_grad(variables, model.batch)
    assert_close((loss, list(pipe.layer_variables({"params": grads}))), (want, gradients))


TIMES = {"none": 1, "layer": 2, "stage": 2, "full": 3, "names": 1}
"""How often attention is computed forward, for one backward."""


@pytest.mark.parametrize("remat", TIMES)
def test_a_kernel_runs_as_often_as_the_mode_says(remat):
    """It is in the step once each time, as all blocks are alike; of its backward there are two parts, each once."""
    model = language_model("splash")
    with interpreted():
        pipe = pipeline(model.layers, model.loss_fn, POLICIES.get(remat, remat))
        variables = jax.eval_shape(lambda key: pipe.init(key, model.batch), jax.random.key(0))
        found = kernels(jax.make_jaxpr(pipe.value_and_grad)(variables, model.batch).jaxpr)
    assert sum(name.startswith("splash_mha_fwd") for name in found) == TIMES[remat], found
    assert sum(name.startswith(("splash_mha_dq", "splash_mha_dkv")) for name in found) == 2, found
    assert len(found) == TIMES[remat] + 2, found


def kernels(jaxpr: Any) -> list[str]:
    """The kernels in a program and in those inside of it, but for what nothing needs: no compiler keeps that."""
    found: list[str] = []
    for equation in dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0].eqns:
        if equation.primitive.name == "pallas_call":
            found.append(equation.params["name"])
        for inner in jaxprs_in_params(equation.params):
            found += kernels(inner)
    return found


@pytest.mark.parametrize("attention", ["flash", "splash"])
def test_the_kernels_are_attention(attention):
    """Or else the comparison would be one of mistakes made alike."""
    with interpreted():
        loss, outputs, grads = language_model(attention).truth
    want, logits, gradients = language_model("plain").truth
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(outputs, logits, atol=1e-4)
    for found, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.max(np.abs(expected)))


# --- programs inside of layers ----------------------------------------------------------------------------------------

wide = functools.partial(nn.Dense, param_dtype=jnp.float64, dtype=jnp.float64)


class Cell(nn.Module):
    """Normalises by the batch, and drops."""

    train: bool

    @nn.compact
    def __call__(self, x, _):
        norm = nn.BatchNorm(not self.train, momentum=0.9, param_dtype=jnp.float64, force_float32_reductions=False)
        h = nn.tanh(norm(wide(x.shape[-1], use_bias=False)(x)))  # a bias here would have no gradient but rounding
        return x + nn.Dropout(0.25, deterministic=not self.train)(h), None


class All(nn.Module):
    """Everything in one layer, as each program that is compiled takes its time."""

    @nn.compact
    def __call__(self, x, train: bool):
        rngs = {"params": True, "dropout": True}
        axes = {"params": 0, "batch_stats": 0}
        cells = nn.scan(nn.remat(Cell, prevent_cse=False), variable_axes=axes, split_rngs=rngs, length=2)
        return cells(train)(nn.remat(Cell)(train)(x, None)[0], None)[0]


KEY = 5


def squares(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


@functools.cache
def sequential_model() -> Any:
    """(layers, variables, batch, what plain Flax makes of them)."""
    rng = np.random.default_rng(1)
    layers = [wide(4), *[All() for _ in range(3)], wide(3)]
    batch = {"inputs": rng.normal(size=(4 * M, 5)), "targets": rng.normal(size=(4 * M, 3))}
    items = sequential.random_items(layers, batch, 2)
    return layers, items, batch, sequential.truth(layers, items, squares, batch, key=jax.random.key(KEY), m=M, rate=0.1)


@pytest.mark.parametrize(
    "remat", ["layer", *(pytest.param(remat, marks=SLOW) for remat in ("none", "stage", "full", "dots"))]
)
def test_layers_with_programs_inside_equal_plain_flax(remat):
    with jax.enable_x64(True):
        layers, items, batch, expected = sequential_model()
        pipe = pipeline(layers, squares, POLICIES.get(remat, remat))
        assert_step_equals(pipe, items, batch, jax.random.key(KEY), expected)
