"""Models that other people wrote, untouched and small, and those of the examples as one module each; in float64.

The others' come with their packages: `transformers` (before 5), `flaxmodels`, `diffusers`.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from vision_transformer import VisionTransformer
from whole_models import LENGTH, ROWS, VOCABULARY, Case, cross_entropy, images, tokens

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from models import amoebanet, transformer_l, unet

FLOAT = jnp.float64


# --- those of packages ------------------------------------------------------------------------------------------------


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
    """T5, of `transformers`, which calls `jnp.clip` by a name that JAX took out of it."""
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


def diffusion_unet() -> Case:
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


# --- ours, as one module each -----------------------------------------------------------------------------------------


class TransformerL(nn.Module):
    """The paper's language model."""

    @nn.compact
    def __call__(self, tokens):
        x = transformer_l.Embedding(VOCABULARY, 16, FLOAT)(tokens)
        for _ in range(4):
            x = transformer_l.Block(64, 2, FLOAT)(x)
        return transformer_l.Head(VOCABULARY, FLOAT)(x)


class AmoebaNet(nn.Module):
    """The paper's image model: cells that take what the last two gave."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        stem, *cells, classifier = amoebanet.amoebanet(3, 8, VOCABULARY, stem="small", decay=0.9, dtype=FLOAT)
        pair = (stem(x, train),)
        for cell in cells:
            pair = cell(*pair, train=train)
        return classifier(*pair, train=train)


class UNet(nn.Module):
    """The U-Net of the examples, with its skips as variables of Python."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        skips = []
        for level in range(2):
            x = unet.Encoder(4 * 2**level, level > 0, dtype=FLOAT)(x, train)
            skips.append(x)
        x = unet.Encoder(16, True, dtype=FLOAT)(x, train)
        for level in reversed(range(2)):
            x = unet.Decoder(4 * 2**level, dtype=FLOAT)(x, skips.pop(), train)
        return nn.Conv(VOCABULARY, (1, 1), dtype=FLOAT)(x)


def vision_transformer(rate: float = 0.0) -> Case:
    """A scanned ViT as big_vision writes it."""
    loss = lambda outputs, batch: cross_entropy(outputs[0], batch)
    return Case(VisionTransformer(VOCABULARY, dropout=rate), images(), loss)


def segmentation() -> Case:
    """The examples' U-Net."""
    batch = images(8)
    batch["targets"] = np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, 8, 8))
    return Case(UNet(), batch, cross_entropy)


MODELS: dict[str, tuple[str, Callable[..., Case]]] = {
    "FlaxGPT2": ("transformers", gpt2),
    "FlaxBert": ("transformers", bert),
    "FlaxT5": ("transformers", t5),
    "ResNet": ("flaxmodels", resnet),
    "Flax U-Net": ("diffusers", diffusion_unet),
    "big_vision ViT": ("", vision_transformer),
    "Transformer-L": ("", lambda: Case(TransformerL(), tokens("inputs", "targets"), transformer_l.loss_fn)),
    "AmoebaNet-D": ("", lambda: Case(AmoebaNet(), images(), amoebanet.loss_fn)),
    "U-Net": ("", segmentation),
}
"""By name, the package of each, and what makes it."""
