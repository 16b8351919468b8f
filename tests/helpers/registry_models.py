"""Models that other people wrote, untouched and small, and what each is trained with.

They come with their packages: `transformers` (before 5), `flaxmodels`, `diffusers`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from whole_models import LENGTH, ROWS, VOCABULARY, Case, cross_entropy, images, tokens

FLOAT = jnp.float64


def of_logits(outputs, batch):
    """The mean over all tokens, of outputs with logits."""
    return cross_entropy(outputs.logits, batch)


def gpt2(rate: float = 0.0) -> Case:
    """GPT-2, with tied weights, of `transformers`."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModule

    rates = {f"{name}_pdrop": rate for name in ("attn", "embd", "resid")}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=4, n_head=2, **rates)
    batch = tokens("input_ids", "targets")
    batch["attention_mask"] = np.ones_like(batch["input_ids"])
    batch["attention_mask"][::2, -1] = 0
    inputs = lambda batch: (batch["input_ids"], batch["attention_mask"], positions(batch["input_ids"]))
    return Case(FlaxGPT2LMHeadModule(config, dtype=FLOAT), batch, of_logits, inputs)


def bert(rate: float = 0.0) -> Case:
    """BERT for masked language modelling, of `transformers`."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_flax_bert import FlaxBertForMaskedLMModule

    rates = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **rates)
    batch = tokens("input_ids", "targets")
    batch["attention_mask"] = np.ones_like(batch["input_ids"])
    batch["attention_mask"][::2, -1] = 0
    batch["token_type_ids"] = batch["input_ids"] % 2

    def inputs(batch):
        ids = batch["input_ids"]
        return ids, batch["attention_mask"], batch["token_type_ids"], positions(ids), None

    return Case(FlaxBertForMaskedLMModule(config, dtype=FLOAT), batch, of_logits, inputs)


def t5(rate: float = 0.0, tied: bool = True) -> Case:
    """T5, of `transformers`."""
    from transformers import T5Config
    from transformers.models.t5.modeling_flax_t5 import FlaxT5ForConditionalGenerationModule

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=VOCABULARY, dropout_rate=rate, tie_word_embeddings=tied, **sizes)
    batch = tokens("input_ids", "decoder_input_ids", "targets")
    ones = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
    batch |= {mask: np.ones_like(batch[name]) for mask, name in ones.items()}
    batch["attention_mask"][::2, -1] = 0
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    return Case(
        FlaxT5ForConditionalGenerationModule(config, dtype=FLOAT),
        batch,
        of_logits,
        lambda batch: tuple(batch[name] for name in names),
    )


def resnet() -> Case:
    """ResNet-18 of `flaxmodels`."""
    import flaxmodels

    model = flaxmodels.ResNet18(output="logits", pretrained=None, num_classes=VOCABULARY, dtype=FLOAT)
    return Case(model, images(32), cross_entropy)


def unet() -> Case:
    """The U-Net of Stable Diffusion, of `diffusers`."""
    from diffusers.models.unets.unet_2d_condition_flax import FlaxUNet2DConditionModel

    model = FlaxUNet2DConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_head_dim=2,
        cross_attention_dim=8,
        dtype=FLOAT,
    )
    rng = np.random.default_rng(0)
    batch = {"noisy": rng.normal(size=(ROWS, 4, 8, 8)), "targets": rng.normal(size=(ROWS, 4, 8, 8))}
    batch |= {"times": rng.integers(0, 1000, ROWS), "words": rng.normal(size=(ROWS, 5, 8))}
    loss = lambda outputs, batch: optax.l2_loss(outputs.sample, batch["targets"]).mean()
    return Case(model, batch, loss, lambda batch: (batch["noisy"], batch["times"], batch["words"]))


def positions(ids: jax.Array) -> jax.Array:
    """Of each token in its row, `[b, T]`."""
    return jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)


MODELS: dict[str, tuple[str, Callable[..., Case]]] = {
    "FlaxGPT2": ("transformers", gpt2),
    "FlaxBert": ("transformers", bert),
    "FlaxT5": ("transformers", t5),
    "ResNet": ("flaxmodels", resnet),
    "Flax U-Net": ("diffusers", unet),
}
"""By name, the package of each, and what makes it."""
