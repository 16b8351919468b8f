"""The model in jpipe, and by hand in JAX: one device, two processes of one device each, or one process of two.

Variants are words joined by commas: "hand" with "scanned" or "unrolled", and "accumulated" where it takes
micro-batches; or "two" for two processes, "one" for one process of two devices and "single" for one stage, then remat,
a schedule, and chunks a device, if they are more than one.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax_functions import stepped
from same_model import RATE, Sizes, Tree, make_tokens, make_weights
from turns import parse_variant, serve, take_standard_output

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import Size, make_layers, on_cpu, step_by_hand, transformer_pipeline

import jpipe


def size_of(sizes: Sizes, dtype: str = "float32") -> Size:
    """The same, as the other benchmarks say it."""
    rows = sizes.batch // sizes.microbatches
    return Size(sizes.layers, sizes.width, sizes.heads, sizes.seq, sizes.vocab, rows, dtype)


def layer_trees(weights: Tree, heads: int) -> list[Tree]:
    """The weights as Flax has those of `common.make_layers`."""

    def block(w: Tree) -> Tree:
        width = w["qkv"]["kernel"].shape[0]
        apart, joined = (3, heads, width // heads), (heads, width // heads)
        tree = {"LayerNorm_0": w["norm_attention"], "LayerNorm_1": w["norm_mlp"], "Dense_0": w["up"]}
        tree["DenseGeneral_0"] = {
            "kernel": w["qkv"]["kernel"].reshape(width, *apart),
            "bias": w["qkv"]["bias"].reshape(apart),
        }
        tree["DenseGeneral_1"] = {"kernel": w["out"]["kernel"].reshape(*joined, width), "bias": w["out"]["bias"]}
        return {"params": tree | {"Dense_1": w["down"]}}

    first = {"params": {"embedding": weights["embedding"]}}
    last = {"params": {"LayerNorm_0": weights["head"]["norm"], "Dense_0": weights["head"]["logits"]}}
    return [first, *[block(w) for w in weights["blocks"]], last]


def make_batch(sizes: Sizes) -> Tree:
    return dict(zip(("inputs", "targets"), make_tokens(sizes), strict=True))


def hand_step(sizes: Sizes, words: list[str]) -> Callable[[], float]:
    layers, parts = make_layers(size_of(sizes)), sizes.microbatches if "accumulated" in words else 1
    start, train = step_by_hand(layers, optax.sgd(RATE), parts, scan="scanned" in words)
    state = start(layer_trees(make_weights(sizes), sizes.heads))
    return stepped(train, state, jax.tree.map(jnp.asarray, make_batch(sizes)))


def make_pipeline(sizes: Sizes, words: list[str], mesh: Any = None, stages: int = 2) -> jpipe.Pipeline:
    remat, schedule, *chunks = words
    options = {"remat": remat, "schedule": schedule, "num_chunks": int(*chunks) if chunks else 1}
    return transformer_pipeline(size_of(sizes), stages, sizes.microbatches, mesh=mesh, **options)


def pipelined_step(sizes: Sizes, words: list[str], stages: int) -> Callable[[], float]:
    mesh = jax.make_mesh((stages,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    place = lambda a: jax.make_array_from_process_local_data(everywhere, a, a.shape)
    batch = jax.tree.map(place, make_batch(sizes))
    pipe = make_pipeline(sizes, words, mesh, stages=stages)
    variables = pipe.from_layer_variables(layer_trees(make_weights(sizes), sizes.heads), batch)

    def train(state: Any, batch: Tree) -> Any:
        state, metrics = pipe.train_step(state, batch)
        return state, metrics["loss"]

    return stepped(train, pipe.create_state(jax.random.key(0), batch, optax.sgd(RATE), variables), batch)


def main() -> None:
    options, sizes, (kind, *words) = parse_variant(__doc__)
    answers = take_standard_output()
    on_cpu(2 if kind == "one" else 1)
    if kind == "two":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{options.port}", 2, options.index)
    stages = 1 if kind == "single" else 2
    serve(hand_step(sizes, words) if kind == "hand" else pipelined_step(sizes, words, stages), answers)
    if kind == "two":
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
