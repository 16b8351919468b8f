"""What a tick of generation takes on TPUs that aren't there, beyond its layers, by the compiler's own estimate.

    python benchmarks/decoding.py --chip v5e

A decoder of equal blocks with Flax attention and caches is compiled for K=4. Every tick of a stage runs its layers for
one token of each prompt of a micro-batch; the rest of a tick is reading tables, choosing a token and sending. Needs
`pip install libtpu`, and no TPU. Beside it a block in plain JAX, scanned over blocks and tokens.
"""

from __future__ import annotations

import argparse
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from common import on_cpu, show, stage_mesh, tpu_devices, versions
from jax.sharding import SingleDeviceSharding

import jpipe
from jpipe.tools.forecaster import Loop, compile_with_text, read

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
VOCABULARY, K = 32000, 4


class Block(nn.Module):
    heads: int
    decode: bool = False

    @nn.compact
    def __call__(self, x):
        width, types = x.shape[-1], {"dtype": jnp.bfloat16}
        mask = None if self.decode else nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(self.heads, decode=self.decode, **types)
        x = x + attention(nn.LayerNorm(**types)(x), mask=mask)
        return x + nn.Dense(width, **types)(nn.gelu(nn.Dense(4 * width, **types)(nn.LayerNorm(**types)(x))))


def loss_fn(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"]).mean()


def turned(loop: Loop) -> float:
    """Cycles of one trip with those of the loops inside; a loop whose trips aren't known turns once."""
    return loop.own + sum((inner.trips or 1) * turned(inner) for inner in loop.inner)


def compiled_ticks(options: argparse.Namespace) -> Loop:
    """The loop over ticks of `pipe.generate`, compiled for the chips."""
    blocks = [Block(options.heads) for _ in range(options.layers)]
    layers = [
        nn.Embed(VOCABULARY, options.width, dtype=jnp.bfloat16),
        *blocks,
        nn.Dense(VOCABULARY, dtype=jnp.bfloat16),
    ]
    mesh = stage_mesh(tpu_devices(TOPOLOGIES[options.chip]), K)
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=K, num_microbatches=K, mesh=mesh, balance="even")
    tokens = jax.ShapeDtypeStruct((K, options.prompt), jnp.int32)
    variables = pipe.abstract_state({"inputs": tokens, "targets": tokens}, optax.sgd(0.1)).variables
    prompts = jax.ShapeDtypeStruct((K * options.size, options.prompt), jnp.int32)
    generate = jax.jit(lambda variables, prompts: pipe.generate(variables, prompts, options.tokens))
    _, text = compile_with_text(generate.lower(variables, prompts))
    (ticks,) = read(text).find("ticks")
    return ticks


def compiled_plain(options: argparse.Namespace) -> float:
    """Cycles of one block and token in plain JAX: a scan over tokens of a scan over a stage's blocks, on one chip."""
    chip = SingleDeviceSharding(tpu_devices(TOPOLOGIES[options.chip])[0])
    block, count = Block(options.heads, decode=True), options.layers // K
    shape = (options.size, options.prompt + options.tokens - 1, options.width)
    made = jax.eval_shape(lambda: block.init(jax.random.key(0), jnp.zeros(shape, jnp.bfloat16)))
    stacked = lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype, sharding=chip)
    x = jax.ShapeDtypeStruct((options.size, 1, options.width), jnp.bfloat16, sharding=chip)

    def layer(x, found):
        x, new = block.apply({"params": found[0], "cache": found[1]}, x, mutable=["cache"])
        return x, new["cache"]

    def token(carry, _, params):
        return jax.lax.scan(layer, carry[0], (params, carry[1])), None

    def run(variables, x):
        step = partial(token, params=variables["params"])
        return jax.lax.scan(step, (x, variables["cache"]), None, length=shape[1])[0][0]

    _, text = compile_with_text(jax.jit(run).lower(jax.tree.map(stacked, made), x))
    (tokens,) = [loop for loop in read(text).walk() if loop.trips == shape[1]]
    return turned(tokens) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", default="v5e", choices=list(TOPOLOGIES), help="(default %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="blocks (default %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="(default %(default)s)")
    parser.add_argument("--heads", type=int, default=16, help="(default %(default)s)")
    parser.add_argument("--size", type=int, default=16, help="prompts of a micro-batch (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="to add (default %(default)s)")
    options = parser.parse_args()
    on_cpu()
    ticks = compiled_ticks(options)
    (action,) = ticks.inner
    cycles = {loop.name.partition(".")[0]: turned(loop) for loop in action.inner}
    beyond, layers = ticks.own + action.own, cycles["Block"] * options.layers / K
    kilo = lambda number: f"{number / 1e3:,.1f}"
    rows = [
        ("a block and token, plain JAX", kilo(compiled_plain(options))),
        ("a block and token, jpipe", kilo(cycles["Block"])),
        ("embedding", kilo(cycles["Embed"])),
        ("head and choice", kilo(cycles["Dense"])),
        ("a tick beyond its layers", f"{kilo(beyond)} ({beyond / layers:.2%} of a stage's blocks)"),
    ]
    sizes = f"width {options.width}, {options.size} prompts, {options.prompt} + {options.tokens} tokens"
    show("Generation with K=4", ("", "kcycles"), rows, f"{options.chip}, {sizes}, {versions(tpu=True)}")


if __name__ == "__main__":
    main()
