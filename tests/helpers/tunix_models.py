"""What `test_tunix_models` runs in a worker: models of google-tunix, each handed over as the one module that it is.

As in `tunix_llama`, tunix is imported in functions only.
"""

import contextlib
import importlib
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jpipe
from timed import alive
from tunix_llama import SIZE, STEPS, Instead

WORDS = 32
SIZES = {"num_layers": 4, "embed_dim": 16, "hidden_dim": 24, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
WIDE = {"dtype": jnp.float64, "param_dtype": jnp.float64}


def qwen3_with_experts(module: Any) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config = module.ModelConfig(vocab_size=WORDS, rope_theta=10_000, norm_eps=1e-6, **experts, **WIDE, **SIZES)
    return partial(module.Qwen3, config)


def gemma(module: Any) -> Any:
    """Gemma 2: every second block looks at a window alone, and logits are capped."""
    kinds = (module.AttentionType.LOCAL_SLIDING, module.AttentionType.GLOBAL) * 2
    capped = {"final_logit_softcap": 30.0, "attn_logits_soft_cap": 50.0, "sliding_window_size": 4}
    norms = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
    return partial(module.Gemma, module.ModelConfig(num_embed=WORDS, attention_types=kinds, **capped, **norms, **SIZES))


def gemma3(module: Any) -> Any:
    sizes = SIZES | {"num_layers": 7}  # the sixth block is another one
    config = module.ModelConfig(num_embed=WORDS, sliding_window_size=4, param_dtype=jnp.float64, **sizes)
    return partial(module.Gemma3, config)


MODELS = {"qwen3": qwen3_with_experts, "gemma": gemma, "gemma3": gemma3}


@contextlib.contextmanager
def wide(module: Any):
    """The module's code as it is, but computing in float64; see `tunix_llama.wide`."""
    linear = partial(nnx.Linear, param_dtype=jnp.float64)
    with (
        jax.enable_x64(True),
        mock.patch.object(module, "jnp", Instead(jnp, float32=jnp.float64)),
        mock.patch.object(module, "nnx", Instead(nnx, Linear=linear)),
    ):
        yield


def check(name: str, shape: list[int], chosen: dict[str, Any]) -> int:
    """Loss and every gradient on a mesh (stage, fsdp, tp) against the model's own; how many leaves there are."""
    from tunix.sft.peft_trainer import _default_loss_fn as tunix_loss
    from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

    module = importlib.import_module(f"tunix.models.{name}.model")
    with wide(module):
        make = MODELS[name](module)
        random = np.random.default_rng(0)
        mask = np.arange(STEPS) < random.integers(4, STEPS + 1, SIZE)[:, None]
        made = {"positions": build_positions_from_mask(mask), "attention_mask": make_causal_attn_mask(mask)}
        tokens = random.integers(0, WORDS, mask.shape).astype(np.int32)
        batch = {"input_tokens": tokens, "input_mask": mask, **jax.device_get(made)}

        alive("tunix's model")
        model = make(rngs=nnx.Rngs(0))
        moved = lambda x: x + 0.1 * random.normal(size=x.shape)  # its feed-forwards begin with zeros
        nnx.update(model, jax.tree.map(moved, nnx.state(model)))
        loss, grads = jax.device_get(nnx.value_and_grad(tunix_loss)(model, **batch))
        exact = 1 + 1e-8 / mask[:, 1:].sum()  # tunix divides by a little more
        wanted = jax.tree.map(lambda x: x * exact, (loss, nnx.to_pure_dict(grads)))

        def loss_fn(outputs: Any, batch: dict[str, Any]) -> Any:
            count = jnp.sum(batch["input_mask"][:, 1:])
            return tunix_loss(lambda *_: outputs, **batch) * (count + 1e-8), count

        alive("the pipeline")
        inputs = lambda batch: (batch["input_tokens"], batch["positions"], None, batch["attention_mask"])
        mesh = Mesh(np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape), ("stage", "fsdp", "tp"))
        chosen = {"num_stages": shape[0], "num_microbatches": 4, "mesh": mesh, **chosen}
        pipe = jpipe.Pipeline(lambda rngs: make(rngs=rngs), loss_fn, inputs=inputs, **chosen)
        variables = pipe.from_model_variables({"params": nnx.to_pure_dict(nnx.state(model))}, batch)
        (loss, _), grads = pipe.value_and_grad(variables, batch)
        found = jax.device_get((loss, pipe.model_variables({"params": grads})["params"]))
        for (path, a), b in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-12 * np.abs(a).max(), err_msg=jax.tree_util.keystr(path))
        return len(jax.tree.leaves(wanted))
