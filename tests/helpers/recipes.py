"""Small models by name, one for each thing that layers do, and what the compiler makes of them on meshes.

A recipe is how a model begins and the words of its layers: functions of `fuzz_layers`, "to time" and its like,
"put aux", "stash dense", "pop", "use_beside", "use_shared"; "attend" at the end ties the head to the table.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import collectives
import fuzz
import fuzz_layers as kinds
import jpipe
from timed import alive

WIDTH = 64
MESHES = {
    "data": ((2, 2), ("stage", "data")),
    "model": ((2, 2), ("stage", "model")),
    "fsdp and tp": ((2, 2, 2), ("stage", "fsdp", "tp")),
}
MODELS: dict[str, tuple[str, str, str]] = {
    "scalar": ("features", "put zero, dense, use_beside, activation, dense, norm", "mean"),
    "unbatched leaf in a flat buffer": ("features", "put bias, dense, reshapes, use_beside, dense", "mean"),
    "time-major, folded": ("tokens", "to time, dense, to time folded, dense, norm, to time, dense", "weighted"),
    "attention": ("tokens", "attention, norm, dense, attention, norm, dense", "mean"),
    "fused attention": ("tokens", "fused_attention, norm, fused_attention, split_block", "mean"),
    "masked attention": ("tokens", "masked, dense, masked, norm, dense", "weighted"),
    "convolution": ("image", "convolution, activation, convolution, to features, dense", "mean"),
    "pools": ("image", "pool, convolution, pool, activation, to features, dense", "mean"),
    "BatchNorm": ("image", "batch_norm, convolution, batch_norm, activation, to features, batch_norm", "mean"),
    "BatchNorm over data": ("features", "batch_norm_over_data, dense, batch_norm_over_data, dense", "mean"),
    "dropout": ("tokens", "dropout, attention, dropout, dense, dropout", "mean"),
    "skip with a scalar": ("features", "put aux, stash dense, activation, dense, pop, dense", "mean"),
    "shared": ("features", "use_shared, activation, use_shared, dense, use_shared", "mean"),
    "tied": ("tokens", "attention, norm, dense, attend", "mean"),
    "contrastive layer": ("features", "dense, contrasted, dense, contrasted, dense", "mean"),
    "load balance": ("tokens", "put aux, dense, use_beside, attention, dense", "balance"),
    "split": ("features", "split_block, norm, split_block, split_block", "mean"),
    "constrained": ("tokens", "split_block, constrained, attention, constrained, split_block", "mean"),
    "plain layers": ("features", "plain_layer, nnx_ready, plain_layer, nnx_factory, narrow_dense", "mean"),
}


def make_model(name: str, axes: tuple[str, ...]) -> tuple[list, Any, dict[str, np.ndarray]]:
    """(layers, loss function, a batch of four micro-batches of four examples) of a recipe.

    Args:
      name: of `MODELS`.
      axes: of the mesh, which metadata may name.
    """
    start, words, loss = MODELS[name]
    s = kinds.Scope(np.random.default_rng(1), axes, False, WIDTH, "features")
    b, inputs, _ = fuzz.begin(s, start)
    b.stash_rate, table = 0.0, None
    words = words.split(", ")
    if words[-1] == "attend":
        table = b.layers[0] = jpipe.Shared(b.layers[0].layer if name_of(b.layers[0]) == "Shared" else b.layers[0])
    elif name_of(b.layers[0]) == "Shared":
        b.layers[0] = b.layers[0].layer
    for word in [word for word in words if word != "attend"]:
        add(b, word)
    b.end(table)
    return b.layers, fuzz.random_loss(loss), fuzz.random_batch(s.rng, inputs, 16)


def name_of(layer: Any) -> str:
    return type(layer).__name__


def add(b: fuzz.Builder, word: str) -> None:
    """The layer of a word."""
    first, _, rest = word.partition(" ")
    if first == "put":
        b.put_beside(rest)
    elif first == "to":
        b.change_to(*next(change for change in kinds.CHANGES[b.s.layout] if change[0] == rest))
    elif word in ("pop", "use_beside", "use_shared", "reshapes"):
        getattr(b, word)()
    else:
        b.stash_rate = float(first == "stash")
        make = getattr(kinds, rest or first)
        b.add_over(make(b.s), make.__name__)
        b.stash_rate = 0.0


def compiled_text(name: str, mesh_name: str) -> tuple[str, Mesh, int]:
    """The compiled `value_and_grad` of a model; its mesh; a device's bytes of the least gradient of a matrix."""
    shape, axes = MESHES[mesh_name]
    mesh = Mesh(np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape), axes)
    layers, loss_fn, batch = make_model(name, axes)
    sizes = {"num_stages": 2, "num_microbatches": 4}
    pipe = jpipe.Pipeline(layers, loss_fn, **sizes, mesh=mesh, balance="even", loss_over="microbatch")
    state = pipe.abstract_state(batch, optax.sgd(0.1))
    key = jax.random.key(0)
    text = jax.jit(pipe.value_and_grad).lower(state.variables, batch, key).compile().as_text()
    size = WIDTH * WIDTH * jnp.dtype(kinds.WIDE).itemsize
    return text, mesh, size * shape[0] // mesh.size


def inspect(name: str, mesh_name: str) -> dict[str, Any]:
    """For a worker of `timed`: what is in loops of a compiled model that shouldn't be.

    Returns:
      "intruders", collectives that could wait for ever, as text; "largest", bytes of the largest in a loop but for
      the executor's; "sent", how many the executor's are; "gradient", bytes of a matrix's gradient on one device, which
      the largest should be less than.
    """
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        alive("compile")
        text, mesh, gradient = compiled_text(name, mesh_name)
    jax.clear_caches()
    found = [str(c) for c in collectives.intruders(text, mesh)]
    sent = sum(collectives.by_the_executor(c, mesh) for c in collectives.read(text))
    return {"intruders": found, "largest": collectives.largest_in_loops(text, mesh), "gradient": gradient, "sent": sent}
