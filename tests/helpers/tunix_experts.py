"""What `test_tunix_experts` runs in a worker: blocks of google-tunix's Qwen3 with its mixture of experts.

Its expert-parallel path is a `jax.shard_map` over the mesh of a `with mesh:`, without `axis_names`. tunix takes it on
TPUs alone; here it is told that there are some, and of what CPUs lack, it is given the same in other words.
"""

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jpipe
from collectives import intruders, read
from timed import alive
from tpu_program import compile_with_text, tpu_devices
from tunix_llama import Instead

SIZE, STEPS, BLOCKS, WORDS = 8, 6, 4, 32


def ragged_exchange(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name, **_):
    """`jax.lax.ragged_all_to_all` by gathers: the part that each device sends here, in its place."""
    here = jax.lax.axis_index(axis_name)
    given = jax.lax.all_gather(operand, axis_name)
    starts, sizes, places = (
        jax.lax.all_gather(a, axis_name)[:, here] for a in (input_offsets, send_sizes, output_offsets)
    )
    row = jnp.arange(output.shape[0])[:, None]
    own = (row >= places) & (row < places + sizes)  # [rows, devices]
    device = jnp.argmax(own, 1)
    found = given[device, jnp.clip(starts[device] + row[:, 0] - places[device], 0, operand.shape[0] - 1)]
    return jnp.where(own.any(1)[:, None], found, output)


def grouped_product(x, w, group_sizes, **_):
    return jax.lax.ragged_dot(x, w, group_sizes)


@contextlib.contextmanager
def on_tpus(module: Any, *, simulated: bool):
    """tunix's module told that there are TPUs; `simulated`: and what they have. Yields what then exchanges tokens."""
    exchange = mock.Mock(side_effect=ragged_exchange)
    names: dict[str, Any] = {"devices": lambda: [SimpleNamespace(platform="tpu")]}
    with contextlib.ExitStack() as stack:
        if simulated:
            zeros = lambda shape, dtype: jnp.zeros(shape, dtype)
            names["lax"] = Instead(jax.lax, ragged_all_to_all=exchange, empty=zeros)
            stack.enter_context(mock.patch.object(module, "megablox", SimpleNamespace(gmm=grouped_product)))
        stack.enter_context(mock.patch.object(module, "jax", Instead(jax, **names)))
        yield exchange


def make_layers(qwen3: Any, config: Any) -> list[Any]:
    class Embed(qwen3.Embedder):
        def __call__(self, tokens):
            return self.encode(tokens)

    class Block(qwen3.DecoderLayer):
        def __call__(self, x):
            positions = jnp.broadcast_to(jnp.arange(STEPS), x.shape[:2])
            return super().__call__(x, positions, None, jnp.tril(jnp.ones((*x.shape[:1], STEPS, STEPS), bool)))[1]

    types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
    split = {"shd_config": config.shd_config, **types}
    embed = lambda rngs: Embed(WORDS, config.embed_dim, rngs=rngs, **split)
    block = lambda rngs: Block(config, rngs=rngs)
    norm = lambda rngs: qwen3.RMSNorm(config.embed_dim, norm_eps=1e-6, rngs=rngs, **split)
    head = lambda rngs: nnx.Linear(config.embed_dim, WORDS, rngs=rngs, **types)
    return [embed, *[block] * BLOCKS, norm, head]


def loss_fn(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def sequential(factories: list[Any], trees: list[Any], batch: Any) -> jax.Array:
    """The loss of the layers, one after the other."""
    x = batch["inputs"]
    for factory, tree in zip(factories, trees, strict=True):
        graph, state = nnx.split(nnx.eval_shape(lambda factory=factory: factory(nnx.Rngs(0))))
        nnx.replace_by_pure_dict(state, tree["params"])
        x = nnx.merge(graph, state)(x)
    return loss_fn(x, batch)


def config_of(qwen3: Any, **sizes: int) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_heads": 4, "num_kv_heads": 2, "num_layers": BLOCKS}
    return qwen3.ModelConfig(vocab_size=WORDS, rope_theta=10_000, norm_eps=1e-6, **experts, **sizes)


def check(gather: str) -> int:
    """Loss and every gradient leaf, by the expert-parallel path, against tunix's own layers by the dense one."""
    from tunix.models.qwen3 import model as qwen3

    layers = make_layers(qwen3, config_of(qwen3, embed_dim=16, hidden_dim=8, head_dim=8))
    random = np.random.default_rng(0)
    batch = {name: random.integers(0, WORDS, (SIZE, STEPS)).astype(np.int32) for name in ("inputs", "targets")}
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("stage", "fsdp", "tp"))
    alive("the pipeline")
    with on_tpus(qwen3, simulated=True) as exchange, mesh:
        options = {"num_stages": 2, "num_microbatches": 2, "mesh": mesh, "gather": gather, "balance": "even"}
        pipe = jpipe.Pipeline(layers, loss_fn, **options)
        variables = pipe.init(jax.random.key(0), batch)
        (loss, _), grads = jax.device_get(pipe.value_and_grad(variables, batch))
    assert exchange.called, "the dense path was taken"
    trees = jax.device_get(pipe.layer_variables(variables))
    alive("tunix's layers")
    expected, wanted = jax.value_and_grad(partial(sequential, layers, batch=batch))(trees)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    found = jax.device_get(pipe.layer_variables({"params": grads}))
    pairs = zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True)
    for (path, a), b in pairs:
        np.testing.assert_allclose(b, a, atol=2e-6 * np.abs(a).max(), rtol=2e-5, err_msg=jax.tree_util.keystr(path))
    return len(jax.tree.leaves(wanted))


def compiled() -> list[str]:
    """Compiles the path for TPUs that aren't there; the kinds of collectives, none of which may wait in vain."""
    from tunix.models.qwen3 import model as qwen3

    layers = make_layers(qwen3, config_of(qwen3, embed_dim=256, hidden_dim=128, head_dim=64))
    mesh = Mesh(np.asarray(tpu_devices("v5e:2x4")).reshape(2, 2, 2), ("stage", "fsdp", "tp"))
    batch = {name: jax.ShapeDtypeStruct((SIZE, STEPS), jnp.int32) for name in ("inputs", "targets")}
    with on_tpus(qwen3, simulated=False), mesh:
        pipe = jpipe.Pipeline(layers, loss_fn, num_stages=2, num_microbatches=2, mesh=mesh, balance="even")
        variables = pipe.abstract_state(batch, optax.sgd(0.1)).variables
        alive("compiling")
        _, text = compile_with_text(jax.jit(pipe.value_and_grad).lower(variables, batch))
    assert not intruders(text, mesh)
    return sorted({one.kind for one in read(text)})
