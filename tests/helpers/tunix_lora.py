"""What `test_lora_example` runs in a worker: `examples/lora.py` beside google-tunix's own model and trainer.

As in `tunix_llama`, tunix is imported in functions only.
"""

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import tunix_llama
from timed import alive
from tunix_llama import SIZE, STEPS, TOLERANCES, load_example, wide

LORA = {"rank": 3, "alpha": 5.0}
TRAINED_STEPS = 3


def small(example: Any) -> tuple[Any, Any, list[Any]]:
    """Its configuration with few features, tunix's model with LoRA, all of it random, and some batches."""
    config = replace(example.llama.TINY, embed_dim=16, hidden_dim=32, head_dim=8, vocab_size=32)
    random = np.random.default_rng(0)
    model = example.with_lora(example.llama.make_model(config), nnx.Rngs(0), **LORA)
    moved = lambda x: x + 0.1 * random.normal(size=x.shape).astype(x.dtype)
    nnx.update(model, jax.tree.map(moved, nnx.state(model)))  # unlike initial values, in B too
    masks = [np.arange(STEPS) < random.integers(4, STEPS + 1, SIZE)[:, None] for _ in range(TRAINED_STEPS)]
    tokens = [random.integers(0, config.vocab_size, mask.shape).astype(np.int32) for mask in masks]
    return config, model, [example.llama.make_batch(*both) for both in zip(tokens, masks, strict=True)]


def of_lora(tree: Any) -> dict[str, Any]:
    """The LoRA parameters by path."""
    return {path: leaf for path, leaf in by_path(tree).items() if "lora" in path}


def by_path(tree: Any) -> dict[str, Any]:
    """A tree's parameters by path."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree["params"]))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def exactly(batch: dict[str, Any]) -> float:
    """What tunix's loss is short of the mean, as it divides by a little more than the number of tokens."""
    tokens = batch["input_mask"][:, 1:].sum()
    return (tokens + 1e-8) / tokens


def make_pipeline(example: Any, config: Any, shape: list[int], chosen: dict[str, Any]) -> Any:
    mesh = Mesh(np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape), ("stage", "fsdp", "tp"))
    return example.make_pipeline(config, **LORA, num_stages=shape[0], num_microbatches=4, mesh=mesh, **chosen)


def assert_close(example: Any, got: Any, wanted: Any, tolerance: float) -> int:
    """Compares every leaf; how many there are."""
    differences = jax.tree_util.tree_leaves_with_path(jax.tree.map(example.llama.difference, got, wanted))
    wrong = {jax.tree_util.keystr(path): d for path, d in differences if not d <= tolerance}
    assert not wrong, wrong
    return len(differences)


def check(shape: list[int], dtype: str, chosen: dict[str, Any]) -> int:
    """Loss and every gradient of LoRA on a mesh (stage, fsdp, tp) against those of tunix's whole model."""
    example = load_example("lora")
    with wide(example.llama) if dtype == "float64" else contextlib.nullcontext():
        alive("tunix's model")
        config, model, (batch, *_) = small(example)
        tree = example.llama.tree_of(model)
        of_tunix = nnx.value_and_grad(example.llama.tunix_loss, argnums=nnx.DiffState(0, nnx.LoRAParam))
        loss, grads = of_tunix(model, **batch)
        both = loss, of_lora({"params": nnx.to_pure_dict(grads)})
        wanted = jax.tree.map(lambda x: np.asarray(x) * exactly(batch), both)

        alive("the pipeline")
        pipe = make_pipeline(example, config, shape, chosen)
        (loss, _), grads = pipe.value_and_grad(pipe.from_model_variables(tree, batch), batch)
        found = by_path(pipe.model_variables({"params": grads}))
        assert {str(leaf.dtype) for leaf in found.values()} == {dtype}
        return assert_close(example, (loss, found), wanted, TOLERANCES[dtype])


def trained() -> int:
    """Losses and weights of some steps beside those of tunix's trainer in float64; base weights don't move by a bit."""
    example = load_example("lora")
    with wide(example.llama):
        config, model, batches = small(example)
        tree = jax.device_get(example.llama.tree_of(model))
        tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
        pipe = make_pipeline(example, config, [4, 1, 1], {})
        variables = pipe.from_model_variables(tree, batches[0])
        state, losses = pipe.create_state(jax.random.key(0), batches[0], tx, variables), []
        for batch in batches:
            state, metrics = pipe.train_step(state, batch)
            losses.append(np.asarray(metrics["loss"]))
        after = jax.device_get(pipe.model_variables(state.variables))
        jax.tree.map(np.testing.assert_array_equal, plain(after), plain(tree))

        alive("tunix's trainer")
        of_tunix = example.tunix_losses(model, tx, batches)
        exact = [loss * exactly(batch) for loss, batch in zip(of_tunix, batches, strict=True)]
        wanted = of_lora(example.llama.tree_of(model))
        return assert_close(example, (losses, of_lora(after)), (exact, wanted), 1e-12)


def merged() -> int:
    """What tunix merges and reads against W + A B alpha / rank, and its logits against the pipeline's, in float64."""
    example = load_example("lora")
    with wide(example.llama), tempfile.TemporaryDirectory() as folder:
        config, model, (batch, *_) = small(example)
        tree = jax.device_get(example.llama.tree_of(model))
        base = example.llama.make_model(config)
        example.llama.put_back(plain(tree), base)
        example.save_base(base, Path(folder) / "base")
        read = example.export(model, Path(folder), **LORA)
        got, wanted = by_path(example.llama.tree_of(read)), by_hand(by_path(tree))
        pipe = make_pipeline(example, config, [4, 1, 1], {})
        logits, _ = pipe.apply(pipe.from_model_variables(tree, batch), batch)
        of_tunix, _ = read(batch["input_tokens"], batch["positions"], None, batch["attention_mask"])
        return assert_close(example, (got, of_tunix), (wanted, np.asarray(logits)), 1e-12)


def plain(tree: Any) -> Any:
    """The tree without LoRA parameters."""
    if not isinstance(tree, dict):
        return tree
    return {name: plain(part) for name, part in tree.items() if "lora" not in str(name)}


def by_hand(flat: dict[str, Any]) -> dict[str, Any]:
    """Weights by path with the changes in them."""
    found = {}
    for path in (path for path in flat if "lora" not in path):
        found[path] = flat[path]
        if f"{path}_lora_a" in flat:
            change = np.tensordot(flat[f"{path}_lora_a"], flat[f"{path}_lora_b"], 1)
            found[path] = flat[path] + change * (LORA["alpha"] / LORA["rank"])
    return found


def printed(*arguments: str) -> str:
    """What the example prints, called with these arguments."""
    return tunix_llama.printed(*arguments, name="lora")
