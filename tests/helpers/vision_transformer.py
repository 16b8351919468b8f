"""A vision transformer in the style of big_vision (models/vit.py there): scanned blocks, outputs in pairs `(x, out)`.

Every module returns what it computed on its way besides its result, and the scan stacks what the blocks return.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


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
    """Images `[B, H, W, C]` to `(logits [B, num_classes], out)`."""

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
