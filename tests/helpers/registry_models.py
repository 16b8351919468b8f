"""Models that other people wrote, untouched and small, and those of the examples as one module each; in float64.

The others' come with their packages: `transformers` (before 5), `flaxmodels`, `diffusers`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

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


def sincos(h: int, w: int, width: int, dtype: Any) -> jax.Array:
    """Positions in two dimensions, `[1, h * w, width]`, as in MoCo v3."""
    y, x = jnp.mgrid[:h, :w]
    omega = 1.0 / 10_000.0 ** (jnp.arange(width // 4) / (width // 4 - 1))
    y, x = (jnp.einsum("m,d->md", grid.flatten(), omega) for grid in (y, x))
    return jnp.asarray(jnp.concatenate([jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)], axis=1), dtype)[None]


class MlpBlock(nn.Module):
    """A feed-forward."""

    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x, deterministic=True):
        init = nn.with_partitioning(nn.initializers.xavier_uniform(), (None, "model"))
        dense = lambda width, **options: nn.Dense(width, param_dtype=self.dtype, **options)
        y = nn.gelu(dense(4 * x.shape[-1], kernel_init=init)(x))
        y = nn.Dropout(rate=self.dropout)(y, deterministic)
        return dense(x.shape[-1])(y)


class Encoder1DBlock(nn.Module):
    """Attention and a feed-forward."""

    num_heads: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x, deterministic=True):
        out = {}
        y = nn.LayerNorm(param_dtype=self.dtype)(x)
        y = out["sa"] = nn.MultiHeadDotProductAttention(
            self.num_heads, kernel_init=nn.initializers.xavier_uniform(), param_dtype=self.dtype
        )(y, y, deterministic=deterministic)
        y = nn.Dropout(rate=self.dropout)(y, deterministic)
        x = out["+sa"] = x + y
        y = nn.LayerNorm(param_dtype=self.dtype)(x)
        y = out["mlp"] = MlpBlock(self.dropout, self.dtype)(y, deterministic)
        y = nn.Dropout(rate=self.dropout)(y, deterministic)
        x = out["+mlp"] = x + y
        return x, out


class Encoder(nn.Module):
    """A scan over blocks that are computed again."""

    depth: int
    num_heads: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x, deterministic=True):
        out = {}
        block = nn.remat(
            Encoder1DBlock, prevent_cse=False, static_argnums=(2,), policy=jax.checkpoint_policies.nothing_saveable
        )
        x, scan_out = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.depth,
            metadata_params={nn.PARTITION_NAME: None},
        )(name="encoderblock", num_heads=self.num_heads, dropout=self.dropout, dtype=self.dtype)(x, deterministic)
        for i in range(self.depth):
            out[f"block{i:02d}"] = jax.tree.map(lambda o, i=i: o[i], scan_out)
        out["pre_ln"] = x
        return nn.LayerNorm(name="encoder_norm", param_dtype=self.dtype)(x), out


class VisionTransformer(nn.Module):
    """Images `[B, H, W, C]` to `(logits [B, num_classes], out)`, as big_vision (models/vit.py there) writes it.

    Every module returns what it computed on its way besides, and the scan stacks what the blocks return.
    """

    num_classes: int
    patch_size: tuple[int, int] = (2, 2)
    width: int = 16
    depth: int = 3
    num_heads: int = 2
    dropout: float = 0.0
    dtype: Any = jnp.float64

    @nn.compact
    def __call__(self, image, *, train=False):
        out = {}
        conv = nn.Conv(self.width, self.patch_size, self.patch_size, "VALID", name="embedding", param_dtype=self.dtype)
        x = out["stem"] = conv(image)
        n, h, w, c = x.shape
        x = jnp.reshape(x, [n, h * w, c])
        x = out["with_posemb"] = x + sincos(h, w, c, x.dtype)
        x = nn.Dropout(rate=self.dropout)(x, not train)
        x, out["encoder"] = Encoder(self.depth, self.num_heads, self.dropout, self.dtype, name="Transformer")(
            x, deterministic=not train
        )
        x = out["head_input"] = jnp.mean(x, axis=1)
        x = out["logits"] = nn.Dense(self.num_classes, name="head", param_dtype=self.dtype)(x)
        return x, out


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
