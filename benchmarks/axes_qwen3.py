"""The row `qwen3` of `axes.py`: a block of google-tunix's Qwen3 with experts over `fsdp`, as tunix has it.

Two of each token's experts compute it. A `jax.lax.ragged_all_to_all` in tunix's own `shard_map` takes tokens to them,
another takes them back; tunix does so only where JAX has TPUs, and is told here that it has. Without them, on simulated
devices, it gets the exchange by gathers, and its kernel's products by `ragged_dot`. Needs `pip install -e '.[llama]'`.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from tunix_experts import on_tpus

EXPERTS_PER_TOKEN = 2


@functools.cache
def _block(sizes: Any) -> tuple[Any, Any]:
    """(graph, state of shapes) of tunix's module."""
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=1,
        vocab_size=sizes.vocab,
        embed_dim=sizes.width,
        hidden_dim=sizes.hidden,
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        num_kv_heads=sizes.kv_heads,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        num_experts=sizes.experts,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        dtype=jnp.dtype(sizes.dtype),
        param_dtype=jnp.dtype(sizes.param_dtype),
    )
    return nnx.split(nnx.eval_shape(lambda: qwen3.DecoderLayer(config, rngs=nnx.Rngs(0))))


def block(sizes: Any, weights: dict[str, Any], x: Any) -> Any:
    """The block on `x` `[b, t, width]`, called as tunix's model does without a cache; the same shape."""
    graph, state = _block(sizes)
    own = nnx.from_flat_state(
        (path, leaf.replace(weights[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)
    )
    positions = jnp.broadcast_to(jnp.arange(sizes.seq), x.shape[:2])
    mask = jnp.tril(jnp.ones((x.shape[0], sizes.seq, sizes.seq), bool))
    return nnx.merge(graph, own)(x, positions, None, mask)[1]


def specs(sizes: Any) -> dict[str, Any]:
    """The name of a weight -> its shape, and how tunix says that it is split."""
    state = _block(sizes)[1]
    pairs = zip(nnx.to_flat_state(state), nnx.to_flat_state(nnx.get_partition_spec(state)), strict=True)
    return {".".join(map(str, path)): (leaf.shape, spec.get_value()) for (path, leaf), (_, spec) in pairs}


@contextlib.contextmanager
def within(mesh: Mesh) -> Iterator[None]:
    """What tunix is traced in: the mesh as `with mesh:` gives it, on TPUs."""
    from tunix.models.qwen3 import model as qwen3

    with on_tpus(qwen3, simulated=mesh.devices.flat[0].platform == "cpu"), mesh:
        yield
