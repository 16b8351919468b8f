"""A language model with the TPU's attention kernels, compiled for TPUs that aren't there, under every remat mode.

Flash and splash attention of `jax.experimental.pallas.ops.tpu`, and plain attention beside them. The policy is one of
`jax.checkpoint` that keeps what attention gives, and makes the rest again. Needs `pip install libtpu`, and no TPU.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from common import (
    Head,
    Size,
    batch_shapes,
    compiled_step,
    feed_forward,
    loss_fn,
    mib,
    on_cpu,
    settings,
    show,
    stage_mesh,
    tpu_devices,
)
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import flash_attention as flash_ops
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_ops
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

import jpipe
from jpipe.model.remat import MODES

DEFAULT = Size(layers=8, width=1024, heads=8, seq=2048, vocab=8192, microbatch=1, dtype="bfloat16")
SAVED = "attention"
REMATS: dict[str, Any] = {**dict.fromkeys(MODES), "policy": jax.checkpoint_policies.save_only_these_names(SAVED)}
COLUMNS = ("attention, remat", "arguments", "temporaries", "compile, s", "compiled")


# --- the model ---


def flash(q: Any, k: Any, v: Any) -> Any:
    """`[B, heads, T, head]` each, as for the others."""
    block = min(512, q.shape[2])
    names = [field.name for field in dataclasses.fields(flash_ops.BlockSizes) if field.name != "block_b"]
    sizes = flash_ops.BlockSizes(block_b=1, **dict.fromkeys(names, block))
    out = flash_ops.flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5, block_sizes=sizes)
    return checkpoint_name(out, SAVED)


def splash(q: Any, k: Any, v: Any) -> Any:
    length, block = q.shape[2], min(512, q.shape[2])
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = splash_ops.BlockSizes(**dict.fromkeys(names, block))
    kernel = splash_ops.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * q.shape[1]),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
    )
    return jax.vmap(kernel)(q * q.shape[-1] ** -0.5, k, v)


def plain(q: Any, k: Any, v: Any) -> Any:
    out = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), is_causal=True).swapaxes(1, 2)
    return checkpoint_name(out, SAVED)


ATTENTION: dict[str, Callable[[Any, Any, Any], Any]] = {"flash": flash, "splash": splash, "plain": plain}


class Block(nn.Module):
    """A pre-norm Transformer block, `[B, T, width]` to the same."""

    attention: str
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        h = nn.LayerNorm(dtype=self.dtype)(x)
        heads = [nn.DenseGeneral((self.heads, width // self.heads), dtype=self.dtype)(h) for _ in range(3)]
        h = ATTENTION[self.attention](*(y.swapaxes(1, 2) for y in heads)).swapaxes(1, 2)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype)(h)
        return feed_forward(x, self.dtype)


def make_layers(size: Size, attention: str) -> list[nn.Module]:
    dtype = jnp.dtype(size.dtype)
    blocks = [Block(attention, size.heads, dtype) for _ in range(size.layers)]
    return [nn.Embed(size.vocab, size.width, dtype=dtype), *blocks, Head(size.vocab, dtype)]


# --- compiling ---


def row(size: Size, attention: str, remat: str, mesh: Any, num_microbatches: int) -> tuple[str, ...]:
    """MiB a chip and seconds; of what doesn't compile, the first line of the error."""
    name, begin = f"{attention}, {remat}", time.perf_counter()
    try:
        pipe = jpipe.Pipeline(
            make_layers(size, attention),
            loss_fn,
            num_stages=mesh.size,
            num_microbatches=num_microbatches,
            remat=REMATS[remat] or remat,
            mesh=mesh,
        )
        memory = compiled_step(pipe, optax.adamw(1e-4), batch_shapes(size, num_microbatches)).memory_analysis()
    except Exception as error:  # a row, so that the others are compiled
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        return name, "-", "-", f"{time.perf_counter() - begin:.0f}", first
    found = mib(memory.argument_size_in_bytes), mib(memory.temp_size_in_bytes)
    return name, *found, f"{time.perf_counter() - begin:.0f}", "yes"


def table(size: Size, topology: str, options: argparse.Namespace) -> None:
    mesh = stage_mesh(tpu_devices(topology), options.stages)
    rows = [
        row(size, attention, remat, mesh, options.microbatches)
        for attention in options.attention
        for remat in options.remat
    ]
    caption = settings(
        mesh.devices.flat[0], topology, f"K={options.stages}", f"M={options.microbatches}", size, "adamw"
    )
    show(f"Attention kernels on {topology}, MiB a chip", COLUMNS, rows, caption)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("topology", nargs="*", default=["v5e:2x2", "v5p:2x2x1"], help="(default %(default)s)")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--attention", nargs="+", choices=ATTENTION, default=list(ATTENTION))
    parser.add_argument("--remat", nargs="+", choices=REMATS, default=list(REMATS))
    Size.add_arguments(parser, DEFAULT)
    options = parser.parse_args()
    on_cpu()
    for topology in options.topology:
        table(Size.of(options), topology, options)


if __name__ == "__main__":
    main()
