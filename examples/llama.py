"""Llama 3 of google-tunix, a model that nobody here wrote, in pipeline stages: `python examples/llama.py`, or `--help`.

The module is handed over as it is, with its shardings; the loss is tunix's own too. A tiny model is compared with
tunix's, trained on a CPU and put back into it; `--compile` compiles the 8B for TPUs that needn't be there. Needs
`pip install -e '.[llama]'`.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cluster import WHOLE, simulate_devices
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh
from lm import VOCABULARY, batches, read_text
from rich.console import Console
from rich.table import Table

import jpipe

try:
    from tunix.models.llama3 import model as llama
    from tunix.sft.peft_trainer import _default_loss_fn as tunix_loss  # what tunix trains by unless told otherwise
    from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; google-tunix is wanted: pip install -e '.[llama]'") from error

console = Console()
Batch = dict[str, Any]


# --- tunix's module as it is, its loss, its weights ---


def inputs_of(batch: Batch) -> tuple[Any, ...]:
    """What tunix's model is called with: tokens, positions, no cache, mask."""
    return batch["input_tokens"], batch["positions"], None, batch["attention_mask"]


def loss_fn(outputs: Any, batch: Batch) -> tuple[Any, Any]:
    """Tunix's loss of a micro-batch, which is a mean over its tokens, as their sum and their number."""
    tokens = jnp.sum(batch["input_mask"][:, 1:])
    return tunix_loss(lambda *_: outputs, **batch) * (tokens + 1e-8), tokens  # as tunix divides


def make_pipeline(config: llama.ModelConfig, **chosen: Any) -> jpipe.Pipeline:
    return jpipe.Pipeline(lambda rngs: llama.Llama3(config, rngs=rngs), loss_fn, inputs=inputs_of, **chosen)


def tree_of(model: llama.Llama3) -> Any:
    """A model's variables, as the pipeline takes and gives them."""
    return {"params": nnx.to_pure_dict(nnx.state(model))}


def put_back(tree: Any, model: llama.Llama3) -> None:
    """Puts variables into a model."""
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, tree["params"])
    nnx.update(model, state)


# --- a tiny one, trained ---

TINY = llama.ModelConfig(
    num_layers=6,
    vocab_size=VOCABULARY,
    embed_dim=64,
    hidden_dim=192,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=500_000,
    norm_eps=1e-5,
)
TOLERANCE = 1e-5


def make_model(config: llama.ModelConfig, seed: int = 0) -> llama.Llama3:
    """Tunix's model with values to start from.

    It is made to be loaded: tunix's feed-forward kernels are all zeros, and so would their gradients be, for ever.
    (`tunix.models.llama3.params.create_model_from_safe_tensors` makes one with a checkpoint's weights.)
    """
    rngs = nnx.Rngs(seed)
    model = llama.Llama3(config, rngs=rngs)
    for layer in model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.kernel[...] = nnx.initializers.lecun_normal()(rngs.params(), linear.kernel.shape)
    return model


def make_batch(tokens: np.ndarray, mask: np.ndarray | None = None) -> Batch:
    """What tunix's loss takes, of tokens `[B, T]` and of which of them are no padding; on the host."""
    mask = np.ones(tokens.shape, bool) if mask is None else mask
    made = {"positions": build_positions_from_mask(mask), "attention_mask": make_causal_attn_mask(mask)}
    return {"input_tokens": tokens, "input_mask": mask, **jax.device_get(made)}


def difference(got: Any, wanted: Any) -> float:
    """The largest difference of two arrays, of the largest value."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    return float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))


def check(pipe: jpipe.Pipeline, variables: Any, model: llama.Llama3, batch: Batch) -> None:
    """Compares loss and gradients with those of tunix's model; ends the program if they differ."""
    (loss, _), grads = pipe.value_and_grad(variables, batch)
    wanted_loss, wanted = nnx.value_and_grad(tunix_loss)(model, **batch)
    got, wanted = pipe.model_variables({"params": grads}), {"params": nnx.to_pure_dict(wanted)}
    differences = jax.tree.leaves(jax.tree.map(difference, got, wanted))
    worst = float(np.max(differences))  # NaN if one of them is
    console.print(
        f"Loss {float(loss):.6f}, of tunix's own model {float(wanted_loss):.6f}. Gradients of all "
        f"{len(differences)} parameters are equal within {worst:.0e} (float32)."
    )
    if not (worst <= TOLERANCE and difference(loss, wanted_loss) <= TOLERANCE):
        raise SystemExit(f"the pipeline isn't tunix's model: they differ by more than {TOLERANCE}")


def windows_of(text: np.ndarray, part: tuple[int, int] = WHOLE) -> Iterator[Batch]:
    """Batches of 32 windows of 64 bytes, or parts of each."""
    return (make_batch(batch["inputs"]) for batch in batches(text, argparse.Namespace(batch=32, seq=64), 0, part))


def fit(pipe: jpipe.Pipeline, state: Any, windows: Iterator[Batch], num_steps: int) -> Any:
    """The state after some steps, the loss of every 20th printed."""
    for step, batch in enumerate(islice(windows, num_steps), 1):
        state, metrics = pipe.train_step(state, pipe.place(batch))
        if step == 1 or step % 20 == 0 or step == num_steps:
            console.print(f"step {step}: loss {float(metrics['loss']):.3f}")
    return state


def train(options: argparse.Namespace) -> None:
    config = replace(TINY, num_layers=options.layers, weight_tying=options.tied)
    text, end = read_text(None)
    held_out = next(windows_of(end))

    model = make_model(config)
    pipe = make_pipeline(config, num_stages=options.stages, num_microbatches=options.microbatches)
    variables = pipe.from_model_variables(tree_of(model), held_out)
    console.print(str(pipe), highlight=False, soft_wrap=True)
    check(pipe, variables, model, held_out)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    state = pipe.create_state(jax.random.key(0), held_out, tx, variables)
    state = fit(pipe, state, windows_of(text), options.steps)

    put_back(pipe.model_variables(state.variables), model)
    reached = float(pipe.evaluate(state.variables, held_out))
    wanted = float(tunix_loss(model, **held_out))
    console.print(f"On text held out: loss {reached:.4f}; tunix's model with these weights: {wanted:.4f}.")


# --- a large one, compiled ---


def batch_shapes(size: int, length: int) -> Batch:
    integers, flags = (jax.ShapeDtypeStruct((size, length), dtype) for dtype in ("int32", "bool"))
    mask = jax.ShapeDtypeStruct((size, length, length), "bool")
    return {"input_tokens": integers, "input_mask": flags, "positions": integers, "attention_mask": mask}


def lower(config: llama.ModelConfig, mesh: Mesh, options: argparse.Namespace) -> tuple[jpipe.Pipeline, Any]:
    """The pipeline and its training step, lowered from shapes alone."""
    batch = batch_shapes(options.microbatches * options.microbatch, options.sequence)
    chosen = {"num_stages": mesh.shape["stage"], "num_microbatches": options.microbatches, "gather": options.gather}
    pipe = make_pipeline(config, mesh=mesh, **chosen)
    state = pipe.abstract_state(batch, optax.adamw(1e-4))
    return pipe, jax.jit(pipe.train_step, donate_argnums=0).lower(state, batch)


def compile_large(options: argparse.Namespace) -> None:
    # No TPU has to be found, and nothing be said of the one that isn't there.
    for name, value in (("SKIP_MDS_QUERY", "1"), ("WORKER_HOSTNAMES", "localhost"), ("ACCELERATOR_TYPE", "v5p-8")):
        os.environ.setdefault(f"TPU_{name}", value)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=options.compile).devices
    except RuntimeError as error:  # no such slice, or no compiler
        raise SystemExit(f"--compile {options.compile}: {error}") from error
    config = getattr(llama.ModelConfig, options.model)()
    config = replace(config, num_layers=options.layers or config.num_layers)
    title = f"Training step of tunix's {options.model}, {config.num_layers} blocks, on {options.compile}"
    table = Table(title=title, show_lines=True, caption=CAPTION.format(**vars(options)), caption_justify="left")
    for name in ("mesh", "layers by stage", "bubble", "state", "temporaries", "in all", "s"):
        table.add_column(name, justify="left" if name in ("mesh", "layers by stage") else "right")
    for shape in options.mesh:
        if np.prod(shape) > len(devices):
            raise SystemExit(f"--mesh {shape} is more than the {len(devices)} chips of {options.compile}")
        mesh = Mesh(np.asarray(devices[: np.prod(shape)]).reshape(shape), ("stage", "fsdp", "tp"))
        begin = time.perf_counter()
        pipe, lowered = lower(config, mesh, options)
        row = f"{bubble(pipe):.1%}", *memory(lowered), f"{time.perf_counter() - begin:.0f}"
        table.add_row(", ".join(map(str, shape)), layers_by_stage(pipe), *row)
    console.print(table)


CAPTION = (
    "Mesh: stage, fsdp, tp. GiB a chip, of which state: parameters and adamw in float32. s: seconds to compile. "
    "{microbatches} micro-batches of {microbatch} x {sequence} tokens, 1f1b, remat layer, gather {gather}."
)


def layers_by_stage(pipe: jpipe.Pipeline) -> str:
    """How many layers each stage has: the embedding, attention and feed-forward of each block, the norm, the head."""
    return ", ".join(str(stop - start) for start, stop in pipe.partition.bounds)


def bubble(pipe: jpipe.Pipeline) -> float:
    """The share of time that stages wait, by their FLOPs."""
    forward = [cost / 3 for cost in pipe.partition.costs]
    return jpipe.simulate(pipe.schedule, forward, [2 * cost for cost in forward]).bubble_fraction


def memory(lowered: Any) -> tuple[str, str, str]:
    """GiB a chip of parameters with optimiser state, of temporaries, and of both."""
    try:
        found = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        console.print(str(error).splitlines()[0])
        return "-", "doesn't fit", "-"
    parts = found.argument_size_in_bytes, found.temp_size_in_bytes
    state, temporaries, both = (f"{part / 2**30:.1f}" for part in (*parts, sum(parts)))
    return state, temporaries, both


def mesh_shape(text: str) -> tuple[int, int, int]:
    stage, fsdp, tp = map(int, text.split(","))
    return stage, fsdp, tp


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, help="blocks (default: 6, with --compile the model's)")
    parser.add_argument("--microbatches", type=int, default=8, help="M (default %(default)s)")
    training = parser.add_argument_group("training a tiny one")
    training.add_argument("--stages", type=int, default=4, help="K (default %(default)s)")
    training.add_argument("--tied", action="store_true", help="the head is the embedding table, as in Llama 3.2")
    training.add_argument("--steps", type=int, default=100, help="(default %(default)s)")
    large = parser.add_argument_group("compiling a large one; needs `pip install libtpu`, and no TPU")
    large.add_argument("--compile", metavar="SLICE", help="for these TPUs, such as v5p:2x2x2")
    known = [name for name in vars(llama.ModelConfig) if name.startswith("llama")]
    large.add_argument("--model", default="llama3p1_8b", choices=known, metavar="NAME", help=", ".join(known))
    meshes = {"nargs": "+", "type": mesh_shape, "default": [(4, 2, 1)], "metavar": "S,F,T"}
    large.add_argument("--mesh", **meshes, help="chips along stage, fsdp and tp (default 4,2,1)")
    large.add_argument("--microbatch", type=int, default=2, help="sequences (default %(default)s)")
    large.add_argument("--sequence", type=int, default=2048, help="tokens (default %(default)s)")
    large.add_argument("--gather", default="step", choices=("step", "use"), help="(default %(default)s)")
    options = parser.parse_args(arguments)
    options.layers = options.layers or (None if options.compile else TINY.num_layers)
    return options


def main() -> None:
    options = parse_options()
    if options.compile:
        jax.config.update("jax_platforms", "cpu")
        compile_large(options)
        return
    simulate_devices(options.stages)
    train(options)


if __name__ == "__main__":
    main()
