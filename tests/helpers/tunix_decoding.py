"""What `test_llama_decoding` runs in a worker: `examples/llama_decoding.py` beside google-tunix's own sampler.

As in `tunix_llama`, tunix is imported in functions only.
"""

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jpipe
import tunix_llama
from timed import alive
from tunix_llama import SIZE, STEPS, Instead, load_example, wide

LENGTH, NEW = 5, 9


@contextlib.contextmanager
def decoding_wide(example: Any):
    """`wide`, and its indices of caches of one type, which they aren't by themselves where integers are wide too."""

    def update(operand: Any, change: Any, starts: Any) -> Any:
        return jax.lax.dynamic_update_slice(operand, change, [jnp.asarray(start, jnp.int32) for start in starts])

    lax = Instead(jax.lax, dynamic_update_slice=update)
    with wide(example.llama), mock.patch.object(example.llama.llama, "jax", Instead(jax, lax=lax)):
        yield


def small(example: Any, *, tied: bool) -> tuple[Any, Any]:
    """Its configuration with few features, and tunix's model with random weights, large enough to tell tokens apart."""
    sizes = {"embed_dim": 16, "hidden_dim": 32, "head_dim": 8, "vocab_size": 32}
    config = replace(example.llama.TINY, weight_tying=tied, **sizes)
    return config, scattered(example.llama.make_model(config))


def scattered(model: Any) -> Any:
    random = np.random.default_rng(0)
    moved = lambda x: x + 0.3 * random.normal(size=x.shape).astype(x.dtype)
    nnx.update(model, jax.tree.map(moved, nnx.state(model)))
    return model


def prompts_of(config: Any, rows: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, config.vocab_size, (rows, LENGTH)).astype(np.int32)


def batch_of(example: Any, config: Any) -> dict[str, Any]:
    return example.llama.make_batch(np.zeros((SIZE, STEPS), np.int32))


def compare(example: Any, pipe: jpipe.Pipeline, model: Any, config: Any, rows: int) -> int:
    """The pipeline's tokens against those of tunix's sampler with this model; how many answers differ."""
    trees = example.to_layers(example.llama.tree_of(model), config)
    variables = pipe.from_layer_variables(trees, batch_of(example, config))
    prompts = prompts_of(config, rows)
    alive("tunix's sampler")
    wanted = example.by_tunix(model, prompts, NEW)
    for prefill in (1, LENGTH):  # prompts a token at a time, and whole
        alive("the pipeline")
        found = np.asarray(pipe.generate(variables, prompts, NEW, prefill=prefill))
        np.testing.assert_array_equal(found, wanted)
    return len({tuple(row[LENGTH:]) for row in found.tolist()})


def check(shape: list[int], tied: bool, rows: int, chosen: dict[str, Any]) -> int:
    """Tokens on a mesh (stage, fsdp, tp)."""
    example = load_example("llama_decoding")
    with decoding_wide(example):
        config, model = small(example, tied=tied)
        mesh = Mesh(np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape), ("stage", "fsdp", "tp"))
        chosen = {"num_stages": shape[0], "num_microbatches": 4, "mesh": mesh, **chosen}
        return compare(example, example.make_pipeline(config, **chosen), model, config, rows)


def printed(*arguments: str) -> str:
    """What the example prints, called with these arguments."""
    return tunix_llama.printed(*arguments, name="llama_decoding")
