"""What a training step sends along each axis of a mesh, for a Transformer: read from the compiled program.

Inside of loops a row counts what is sent each time; how often depends on micro-batches and layers. Sizes are the larger
of what a collective takes and gives, on one device. On simulated CPU devices, or with `--topology v5e:2x4` for TPUs
that need not be there.
"""

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Size, batch_shapes, compiled_step, console, loss_fn, mib, on_cpu, settings, show, tpu_devices
from jax.sharding import Mesh

import jpipe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from collectives import Collective, axes_of, in_loop, read

MESHES = ("stage=2,data=2", "stage=2,model=2", "stage=2,fsdp=2", "stage=2,fsdp=2,tp=2")


class SplitBlock(nn.Module):
    """A pre-norm Transformer block whose matrices are split: heads and the hidden layer over `many`.

    Attributes:
      heads: of attention.
      across: the axis that the width is split over, in parameters.
      many: the axis that heads and hidden units are split over.
    """

    heads: int
    across: str | None
    many: str | None

    @nn.compact
    def __call__(self, x):
        matrix, width = nn.initializers.lecun_normal(), x.shape[-1]
        into = nn.with_partitioning(matrix, (self.across, self.many))
        out = nn.with_partitioning(matrix, (self.many, self.across))
        h = nn.LayerNorm()(x)
        q, k, v = (nn.Dense(width, use_bias=False, kernel_init=into)(h) for _ in range(3))
        heads = lambda a: a.reshape(*a.shape[:-1], self.heads, width // self.heads)
        h = jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=True).reshape(x.shape)
        x = x + nn.Dense(width, use_bias=False, kernel_init=out)(h)
        h = nn.gelu(nn.Dense(4 * width, use_bias=False, kernel_init=into)(nn.LayerNorm()(x)))
        return x + nn.Dense(width, use_bias=False, kernel_init=out)(h)


def make_layers(size: Size, axes: tuple[str, ...]) -> list[nn.Module]:
    """Embedding, blocks and head, split over those of the axes `fsdp`, and `tp` or `model`."""
    across = "fsdp" if "fsdp" in axes else None
    many = next((name for name in ("tp", "model") if name in axes), None)
    table = nn.with_partitioning(nn.initializers.normal(0.02), (many, across))
    head = nn.with_partitioning(nn.initializers.lecun_normal(), (across, many))
    blocks = [SplitBlock(size.heads, across, many) for _ in range(size.layers)]
    embed = nn.Embed(size.vocab, size.width, embedding_init=table)
    return [embed, *blocks, nn.Dense(size.vocab, use_bias=False, kernel_init=head)]


def make_mesh(text: str, devices: list[Any]) -> Mesh:
    """The mesh of "stage=2,data=2"."""
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}
    shape = tuple(sizes.values())
    return Mesh(np.asarray(devices[: int(np.prod(shape))]).reshape(shape), tuple(sizes))


def rows(collectives: list[Collective], mesh: Mesh) -> list[tuple[str, ...]]:
    """For each axis, kind and place: how many collectives, and their bytes a device."""
    count, size = Counter(), Counter()
    for c in collectives:
        row = "+".join(axes_of(c, mesh)) or "none", c.kind, "in a loop" if in_loop(c) else "once a step"
        count[row] += 1
        size[row] += c.bytes
    return [(*row, str(count[row]), f"{size[row] / 1024:,.1f}") for row in sorted(count)]


def parameter_bytes(size: Size) -> int:
    """Of the whole model."""
    x, total = jax.ShapeDtypeStruct((1, size.seq), "int32"), 0
    for layer in make_layers(size, ()):
        x, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), x)
        total += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(variables))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    Size.add_arguments(parser, Size(layers=8, width=256, heads=8, seq=64, vocab=1024, microbatch=4))
    parser.add_argument("--mesh", nargs="+", default=MESHES, help="(default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="M (default %(default)s)")
    parser.add_argument("--topology", help="of TPUs to compile for, such as v5e:2x4")
    parser.add_argument("--gather", nargs="+", default=["step"], help="of step, use (default %(default)s)")
    options = parser.parse_args()
    on_cpu(8)
    devices = tpu_devices(options.topology) if options.topology else jax.devices()
    size, found, held = Size.of(options), [], []
    for text, gather in itertools.product(options.mesh, options.gather):
        mesh = make_mesh(text, devices)
        sizes = {"num_stages": mesh.shape["stage"], "num_microbatches": options.microbatches}
        layers = make_layers(size, mesh.axis_names)
        pipe = jpipe.Pipeline(layers, loss_fn, **sizes, mesh=mesh, balance="even", gather=gather)
        name = f"{text}, gathered a {gather}" if "fsdp" in mesh.axis_names else text
        compiled = compiled_step(pipe, optax.adam(1e-3), batch_shapes(size, options.microbatches))
        found += [(name, *row) for row in rows(read(compiled.as_text()), mesh)]
        memory = compiled.memory_analysis()
        held.append((name, mib(memory.argument_size_in_bytes), mib(memory.temp_size_in_bytes)))
    activations = size.microbatch * size.seq * size.width * jnp.dtype("float32").itemsize
    notes = f"M={options.microbatches}", f"activations of a micro-batch {activations / 1024:,.0f} KiB", str(size)
    heads = ("mesh", "along", "what", "when", "number", "KiB a device")
    show("What a step sends", heads, found, settings(devices[0], *notes))
    show("What a device holds, MiB", ("mesh", "arguments", "temporaries"), held, settings(devices[0], "adam", *notes))
    console.print(f"parameters: {parameter_bytes(size) / 1024:,.0f} KiB in all")


if __name__ == "__main__":
    main()
