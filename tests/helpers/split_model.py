"""A model whose weights are split over the mesh axis `model` by Flax's metadata."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jpipe
from cases import VOCABULARY, WIDTH, Model, make_model, pipeline, tokens, weighted_cross_entropy


class SplitBlock(nn.Module):
    """A residual block with weights split over `model` by Flax's metadata."""

    dtype: object = jnp.float32
    width: int = WIDTH

    @nn.compact
    def __call__(self, x):
        init, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros_init()
        up = nn.Dense(
            2 * self.width,
            param_dtype=self.dtype,
            kernel_init=nn.with_partitioning(init, (None, "model")),
            bias_init=nn.with_partitioning(zeros, ("model",)),
        )
        down = nn.Dense(self.width, param_dtype=self.dtype, kernel_init=nn.with_partitioning(init, ("model", None)))
        return x + down(nn.tanh(up(x)))


def split_model() -> Model:
    """The model in float64, with its truth."""
    embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64, dtype=jnp.float64)
    blocks = [SplitBlock(jnp.float64) for _ in range(5)]
    layers = [embed, *blocks, nn.Dense(VOCABULARY, param_dtype=jnp.float64)]
    return make_model(layers, weighted_cross_entropy, tokens())


SPLIT_STEPS = {
    "1f1b": {},
    "zero_bubble": {"schedule": "zero_bubble", "remat": "none"},
    "v": {"schedule": "v", "num_chunks": 2},
    "interleaved": {"schedule": "interleaved", "num_chunks": 2},
    "unequal stages": {"balance": [4, 3]},
    "fsdp": {"gather": "use", "shard_over": ("data",)},
}
"""Steps in which layers send: over `model`, or over `data` what they gather at each use."""


def lowered_split_step(words: str, devices: np.ndarray):
    """A step of `SPLIT_STEPS`, lowered for four devices."""
    options = SPLIT_STEPS[words]
    mesh, chunks = (
        Mesh(devices.reshape(2, 2), ("stage", "data" if words == "fsdp" else "model")),
        options.get("num_chunks", 1),
    )
    counts = options.get("balance", [3] + [2] * (2 * chunks - 2) + [3])
    # As wide as it takes for weights to be split over `data`, and for the ends to be small beside the blocks.
    layers = [jnp.tanh, *[SplitBlock(width=256) for _ in range(sum(counts) - 2)], jnp.tanh]
    options = {"num_stages": 2, "num_microbatches": 4} | options | {"balance": counts}
    pipe = jpipe.Pipeline(layers, lambda y, batch: jnp.mean((y - batch["targets"]) ** 2), mesh=mesh, **options)
    batch = {name: jax.ShapeDtypeStruct((64, 256), jnp.float32) for name in ("inputs", "targets")}
    return jax.jit(pipe.train_step).lower(pipe.abstract_state(batch, optax.sgd(1e-3)), batch)


def leaves_that_differ(shape: list[int]) -> list[str]:
    """The paths of variables that have other initial values on a mesh of this shape than on one of stages alone."""
    jax.config.update("jax_enable_x64", True)
    model, values = split_model(), []
    devices = np.asarray(jax.devices()).reshape(shape)
    for mesh in (None, Mesh(devices, ("stage", "data", "model"))):
        pipe = pipeline(model, "1f1b", 2, 3, balance="even", mesh=mesh)
        values.append(jax.device_get(pipe.layer_variables(pipe.init(jax.random.key(5), model.batch))))
    pairs = zip(jax.tree_util.tree_leaves_with_path(values[0]), jax.tree.leaves(values[1]), strict=True)
    return [jax.tree_util.keystr(path) for (path, a), b in pairs if not np.array_equal(a, b)]
