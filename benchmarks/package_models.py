"""Models that other people wrote, untouched and small, and those of the examples as one module each; in float64.

The others' come with their packages: `transformers` (before 5), `flaxmodels`, `diffusers`, `jraph`, `mamba2-jax`,
`dm-haiku`, `equinox`, `levanter`, `keras`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe
from whole_models import LENGTH, ROWS, VOCABULARY, Case, cross_entropy, images, tokens

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import amoebanet, transformer_l, unet

FLOAT, SINGLE = jnp.float64, jnp.float32


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


def albert() -> Case:
    """ALBERT, whose blocks share one set of weights, of `transformers`."""
    from transformers import AlbertConfig
    from transformers.models.albert.modeling_flax_albert import FlaxAlbertForMaskedLMModule

    sizes = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = AlbertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, intermediate_size=32, **sizes)
    batch = masked(tokens("input_ids", "targets"))
    batch["token_type_ids"] = batch["input_ids"] % 2
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = lambda batch: (*(batch[name] for name in names), positions(batch["input_ids"]))
    return Case(FlaxAlbertForMaskedLMModule(config, dtype=FLOAT), batch, of_logits, inputs)


def bart() -> Case:
    """BART, an encoder and a decoder, of `transformers`."""
    from transformers import BartConfig
    from transformers.models.bart.modeling_flax_bart import FlaxBartForConditionalGenerationModule

    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16, "dropout": 0.0}
    config = BartConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **heads)
    batch = tokens("input_ids", "decoder_input_ids", "targets")

    def inputs(batch):
        source, target = batch["input_ids"], batch["decoder_input_ids"]
        ones = jnp.ones_like(source)
        return source, ones, target, ones, positions(source), positions(target)

    return Case(FlaxBartForConditionalGenerationModule(config, dtype=FLOAT), batch, of_logits, inputs)


def whisper() -> Case:
    """Whisper, from sound to words, of `transformers`."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_flax_whisper import FlaxWhisperForConditionalGenerationModule

    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 32))}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16, "num_mel_bins": 8}
    lengths = {"max_source_positions": 8, "max_target_positions": LENGTH, "pad_token_id": 0}
    config = WhisperConfig(vocab_size=VOCABULARY, dropout=0.0, **sizes, **lengths)
    batch = tokens("decoder_input_ids", "targets")
    batch["sound"] = np.random.default_rng(2).normal(size=(ROWS, 8, 16))

    def inputs(batch):
        target = batch["decoder_input_ids"]
        return batch["sound"], target, jnp.ones_like(target), positions(target)

    return Case(FlaxWhisperForConditionalGenerationModule(config, dtype=FLOAT), batch, of_logits, inputs)


def llama() -> Case:
    """Llama, of `transformers`."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_flax_llama import FlaxLlamaForCausalLMModule

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes)  # cuts its angles to so many, too
    batch = masked(tokens("input_ids", "targets"))
    inputs = lambda batch: (batch["input_ids"], batch["attention_mask"], positions(batch["input_ids"]))
    return Case(FlaxLlamaForCausalLMModule(config, dtype=FLOAT), batch, of_logits, inputs)


def clip() -> Case:
    """CLIP, two towers and a loss over all pairs, of `transformers`."""
    from transformers import CLIPConfig
    from transformers.models.clip.modeling_flax_clip import FlaxCLIPModule

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = sizes | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": VOCABULARY - 1}
    config = CLIPConfig(words, sizes | {"image_size": 8, "patch_size": 4}, projection_dim=8)
    batch = tokens("input_ids") | {"pixels": images()["inputs"]}

    def inputs(batch):
        ids = batch["input_ids"]
        return ids, batch["pixels"], jnp.ones_like(ids), positions(ids)

    def loss(outputs, batch):
        return -jnp.mean(jnp.sum(outputs.text_embeds * outputs.image_embeds, -1))

    return Case(FlaxCLIPModule(config, dtype=FLOAT), batch, loss, inputs)


def mamba() -> Case:
    """Mamba 2, of `mamba2-jax`, in nnx."""
    from mamba2_jax.modeling import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 16, "state_size": 8, "head_dim": 8, "chunk_size": LENGTH, "num_hidden_layers": 4}
    model = Mamba2ForCausalLM(Mamba2Config(vocab_size=VOCABULARY, **sizes), rngs=nnx.Rngs(0))
    nnx.update(model, double(nnx.state(model, nnx.Param)))
    return Case(model, tokens("inputs", "targets"), lambda out, batch: cross_entropy(out["logits"], batch))


def haiku() -> Case:
    """A decoder of dm-haiku, as a `jpipe.Layer`."""
    import haiku as hk

    def forward(ids):
        x = hk.Embed(VOCABULARY, 16)(ids)
        for _ in range(4):
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(2, 8, w_init=hk.initializers.VarianceScaling(1.0), model_size=16)(y, y, y)
            x = x + hk.nets.MLP([32, 16])(hk.LayerNorm(-1, True, True)(x))
        return hk.Linear(VOCABULARY)(x)

    net = hk.without_apply_rng(hk.transform(forward))
    model = jpipe.Layer(lambda key, ids: double(net.init(key, ids)), net.apply, name="Haiku")
    return Case(model, tokens("inputs", "targets"), cross_entropy)


def equinox() -> Case:
    """A decoder of equinox, as a `jpipe.Layer`."""
    import equinox as eqx

    class Block(eqx.Module):
        norm: Any
        attention: Any
        mlp: Any

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.norm, self.mlp = eqx.nn.LayerNorm(16), eqx.nn.MLP(16, 16, 32, 1, key=second)
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=first)

        def __call__(self, x):
            y = jax.vmap(self.norm)(x)
            x = x + self.attention(y, y, y)
            return x + jax.vmap(self.mlp)(x)

    class Model(eqx.Module):
        embed: Any
        blocks: list
        head: Any

        def __init__(self, key):
            keys = jax.random.split(key, 6)
            self.embed, self.head = eqx.nn.Embedding(VOCABULARY, 16, key=keys[0]), eqx.nn.Linear(16, 32, key=keys[1])
            self.blocks = [Block(keys[2 + i]) for i in range(4)]

        def __call__(self, ids):
            x = jax.vmap(self.embed)(ids)
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(x)

    init = lambda key, ids: double(eqx.filter(Model(key), eqx.is_inexact_array))
    static = eqx.partition(Model(jax.random.key(0)), eqx.is_inexact_array)[1]
    model = jpipe.Layer(init, lambda params, ids: jax.vmap(eqx.combine(params, static))(ids), name="Equinox")
    return Case(model, tokens("inputs", "targets"), cross_entropy)


def haliax() -> Case:
    """Levanter's GPT-2, whose blocks haliax stacks, as a `jpipe.Layer`."""
    import equinox as eqx
    import haliax as hax

    with mock.patch.object(jnp, "float32", SINGLE):  # Levanter looks types up by it when it is imported
        from levanter.layers.attention import AttentionMask
        from levanter.models.gpt2 import Gpt2Config, Gpt2LMHeadModel

    axis, config = hax.Axis("vocab", VOCABULARY), Gpt2Config(seq_len=LENGTH, num_layers=4, num_heads=2, hidden_dim=16)
    new = lambda key: Gpt2LMHeadModel.init(axis, config, key=key)
    static = eqx.partition(new(jax.random.key(0)), eqx.is_inexact_array)[1]

    def apply(params, ids):
        named = hax.named(ids, ("batch", "position"))
        return eqx.combine(params, static)(named, AttentionMask.causal()).array

    model = jpipe.Layer(lambda key, ids: double(eqx.filter(new(key), eqx.is_inexact_array)), apply, name="Levanter")
    return Case(model, tokens("inputs", "targets"), cross_entropy)


def of_keras(make: Callable, batch: dict, inputs: Callable | None = None) -> Case:
    """A Keras model as a `jpipe.Layer`; `make` gets Keras and makes it."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    keras.config.set_floatx("float64")
    built = make(keras)
    keras.config.set_floatx("float32")
    start = {v.path: np.asarray(v.value) for v in built.trainable_variables}
    rest = [v.value for v in built.non_trainable_variables]

    def apply(params, *arrays, training=True):
        trained = [params[v.path] for v in built.trainable_variables]
        return built.stateless_call(trained, rest, arrays[0] if len(arrays) == 1 else arrays, training=training)[0]

    init = lambda key, *arrays: {name: jax.random.normal(key, leaf.shape) / 4 for name, leaf in start.items()}
    return Case(jpipe.Layer(init, apply, name="Keras"), batch, cross_entropy, inputs)


def keras_decoder() -> Case:
    """Blocks of attention, of Keras."""

    def make(keras):
        layers, ids = keras.layers, keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(VOCABULARY, 16)(ids)
        for _ in range(4):
            y = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(2, 8, flash_attention=False)(y, y)
            x = x + layers.Dense(16)(layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x)))
        return keras.Model(ids, layers.Dense(VOCABULARY)(x))

    return of_keras(make, tokens("inputs", "targets"))


def recommender() -> Case:
    """A recommender: tables of users and items, of Keras, their products in pairs, and a feed-forward (as DLRM)."""

    def make(keras):
        layers, ids, numbers = keras.layers, keras.Input((4,), dtype="int32"), keras.Input((8,))
        parts = [layers.Embedding(VOCABULARY, 16)(ids[:, i]) for i in range(4)]
        x = layers.Dense(16, activation="relu")(layers.Dense(32, activation="relu")(numbers))
        pairs = [layers.Dot(1)([a, b]) for i, a in enumerate([x, *parts]) for b in parts[i:]]
        x = layers.Concatenate()([x, *pairs])
        for _ in range(3):
            x = layers.Dense(32, activation="relu")(x)
        return keras.Model([ids, numbers], layers.Dense(VOCABULARY)(x))

    rng = np.random.default_rng(0)
    batch = {"ids": rng.integers(0, VOCABULARY, (ROWS, 4)), "numbers": rng.normal(size=(ROWS, 8))}
    batch["targets"] = rng.integers(0, VOCABULARY, ROWS)
    return of_keras(make, batch, lambda batch: (batch["ids"], batch["numbers"]))


class Graphs(nn.Module):
    """Graphs `[B, nodes, width]` and their edges `[B, edges]` through jraph's network, one graph after the other."""

    @nn.compact
    def __call__(self, nodes, senders, receivers):
        import jraph

        dense = lambda width: nn.Dense(width, param_dtype=FLOAT)
        one = lambda a: jnp.full((len(nodes),), a.shape[1])
        flat = lambda a: a.reshape(-1, *a.shape[2:])
        start = jnp.arange(len(nodes))[:, None] * nodes.shape[1]
        graph = jraph.GraphsTuple(
            nodes=dense(16)(flat(nodes)),
            edges=None,
            senders=flat(senders + start),
            receivers=flat(receivers + start),
            n_node=one(nodes),
            n_edge=one(senders),
            globals=None,
        )
        for _ in range(4):
            layer = dense(16)
            graph = jraph.GraphConvolution(lambda x, layer=layer: nn.relu(layer(x)), add_self_edges=False)(graph)
        return dense(VOCABULARY)(graph.nodes.reshape(*nodes.shape[:2], -1).mean(1))


def graphs() -> Case:
    """Graph convolutions, of `jraph`."""
    rng = np.random.default_rng(0)
    batch = {"nodes": rng.normal(size=(ROWS, 5, 8)), "targets": rng.integers(0, VOCABULARY, ROWS)}
    batch |= {name: rng.integers(0, 5, (ROWS, 12)) for name in ("senders", "receivers")}
    return Case(Graphs(), batch, cross_entropy, lambda batch: (batch["nodes"], batch["senders"], batch["receivers"]))


def masked(batch: dict) -> dict:
    """The batch with an attention mask: every second row ends one token earlier."""
    mask = np.ones_like(batch["input_ids"])
    mask[::2, -1] = 0
    return batch | {"attention_mask": mask}


def double(tree: Any) -> Any:
    """The tree in float64."""
    return jax.tree.map(lambda leaf: leaf.astype(FLOAT), tree)


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
    "FlaxLlama": ("transformers", llama),
    "FlaxAlbert": ("transformers", albert),
    "FlaxBart": ("transformers", bart),
    "FlaxWhisper": ("transformers", whisper),
    "FlaxCLIP": ("transformers", clip),
    "ResNet": ("flaxmodels", resnet),
    "Flax U-Net": ("diffusers", diffusion_unet),
    "Mamba 2": ("mamba2_jax", mamba),
    "jraph": ("jraph", graphs),
    "Haiku": ("haiku", haiku),
    "Equinox": ("equinox", equinox),
    "Levanter GPT-2": ("levanter", haliax),
    "Keras decoder": ("keras", keras_decoder),
    "Keras recommender": ("keras", recommender),
    "big_vision ViT": ("", vision_transformer),
    "Transformer-L": ("", lambda: Case(TransformerL(), tokens("inputs", "targets"), transformer_l.loss_fn)),
    "AmoebaNet-D": ("", lambda: Case(AmoebaNet(), images(), amoebanet.loss_fn)),
    "U-Net": ("", segmentation),
}
"""By name, the package of each, and what makes it."""
