"""Llama-3.1-8B of google-tunix, its own modules and shardings, compiled for TPUs that aren't there.

Needs `pip install libtpu jaxtyping` and `pip install --no-deps google-tunix`, or `--tunix` with its unpacked wheel.
"""

import argparse
import importlib
import importlib.util
import sys
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import compiled_step, mib, on_cpu, settings, show, tpu_devices
from flax import nnx
from jax.sharding import Mesh

import jpipe


def tunix_llama(folder: str | None) -> Any:
    """tunix's module of the model, without the trainers that importing all of tunix brings along."""
    sys.path[:0] = [folder] if folder else []
    for name in ("tunix", "tunix.models", "tunix.models.llama3", "tunix.generate"):
        spec = importlib.util.find_spec(name)
        assert spec is not None, "pip install --no-deps google-tunix"
        package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations or [])
        sys.modules[name] = package
    return importlib.import_module("tunix.models.llama3.model")


def make_layers(llama: Any, config: Any) -> list[Any]:
    """tunix's embedder, decoder layers and head as layers; positions and mask are side inputs."""

    class Embed(nnx.Module):
        def __init__(self, rngs):
            self.embedder = llama.Embedder(config.vocab_size, config.embed_dim, rngs=rngs, shd_config=config.shd_config)

        def __call__(self, ids):
            return self.embedder.encode(ids)

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.layer = llama.DecoderLayer(config, rngs=rngs)

        def __call__(self, x, side):
            return self.layer(x, side["positions"], None, side["mask"])[1]

    class Head(nnx.Module):
        def __init__(self, rngs):
            shape, split = (config.embed_dim, config.vocab_size), config.shd_config
            self.norm = llama.RMSNorm(config.embed_dim, norm_eps=config.norm_eps, rngs=rngs, shd_config=split)
            self.head = llama.Einsum("BTD,DV->BTV", shape, rngs=rngs, sharding=split.emb_dv)

        def __call__(self, x):
            return self.head(self.norm(x))

    side = lambda batch: {"positions": batch["positions"], "mask": batch["mask"]}
    blocks = [jpipe.reads(lambda rngs: Block(rngs), side) for _ in range(config.num_layers)]
    return [lambda rngs: Embed(rngs), *blocks, lambda rngs: Head(rngs)]


def loss_fn(logits: Any, batch: Any) -> tuple[Any, Any]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"])
    return jnp.sum(losses), losses.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tunix", help="a folder that holds tunix")
    parser.add_argument("--topology", default="v5p:2x2x2", help="(default %(default)s)")
    parser.add_argument(
        "--mesh", nargs="+", default=["4,2,1", "2,2,2", "2,1,4"], help="stage,fsdp,tp (default %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=32, help="(default %(default)s)")
    parser.add_argument("--sequence", type=int, default=2048, help="(default %(default)s)")
    parser.add_argument("--microbatch", type=int, default=2, help="sequences (default %(default)s)")
    parser.add_argument("--gather", nargs="+", default=["step"], help="of %(default)s, use")
    options = parser.parse_args()
    llama = tunix_llama(options.tunix)
    on_cpu(8)
    config = llama.ModelConfig.llama3p1_8b()
    config = type(config)(**{**vars(config), "num_layers": options.layers})
    devices, m, rows = tpu_devices(options.topology), 8, []
    for gather in options.gather:
        for shape in options.mesh:
            sizes = tuple(map(int, shape.split(",")))
            mesh = Mesh(np.asarray(devices[: int(np.prod(sizes))]).reshape(sizes), ("stage", "fsdp", "tp"))
            size, length = m * options.microbatch, options.sequence
            integers = lambda *dims: jax.ShapeDtypeStruct(dims, "int32")
            batch = {name: integers(size, length) for name in ("inputs", "targets", "positions")}
            batch["mask"] = jax.ShapeDtypeStruct((size, length, length), "bool")
            begin = time.perf_counter()
            chosen = {"num_stages": sizes[0], "num_microbatches": m, "mesh": mesh, "gather": gather}
            pipe = jpipe.Pipeline(make_layers(llama, config), loss_fn, **chosen)
            memory = compiled_step(pipe, optax.adamw(1e-4), batch).memory_analysis()
            arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
            rows.append((shape, gather, mib(arguments), mib(temporaries), f"{time.perf_counter() - begin:.0f}"))
    heads = ("stage, fsdp, tp", "gather", "arguments", "temporaries", "compile, s")
    what = (
        f"{options.layers} layers",
        f"M={m}",
        f"micro-batch {options.microbatch}x{options.sequence}",
        "adamw, float32",
    )
    show("tunix Llama-3.1-8B, MiB a chip", heads, rows, settings(devices[0], *what))


if __name__ == "__main__":
    main()
