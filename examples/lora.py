"""LoRA on google-tunix's Llama 3 in pipeline stages: `python examples/lora.py`, or `--help`.

A tiny model learns English. Then its weights stay as they are, and low-rank changes of them learn Python: those of
qwix, as tunix's users make them. The first steps are compared with tunix's own trainer; at the end tunix merges the
changes into a checkpoint and reads it. Needs `pip install -e '.[llama]'`.
"""

import argparse
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import cluster
import jax
import llama
import numpy as np
import optax
from flax import nnx
from lm import hold_out, read_text
from rich.table import Table

import jpipe

try:
    import qwix
    import safetensors.numpy
    from tunix.models.llama3.params import create_model_from_safe_tensors
    from tunix.models.safetensors_saver import save_lora_merged_model_as_safetensors
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; google-tunix is wanted: pip install -e '.[llama]'") from error

console = llama.console
CHECKED_STEPS, TOLERANCE = 3, 1e-4
CHANGED = ".*(q|k|v|o|gate|up|down)_proj"
"""The modules that are changed, by their path: all that have a kernel."""


# --- low-rank changes of tunix's whole model; the rest is frozen ---


def with_lora(model: Any, rngs: nnx.Rngs, rank: int, alpha: float) -> Any:
    """tunix's model with `nnx.LoRAParam`s, as its users make it."""
    provider = qwix.LoraProvider(module_path=CHANGED, rank=rank, alpha=alpha)
    return qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=rngs)


def make_pipeline(config: Any, rank: int, alpha: float, **chosen: Any) -> jpipe.Pipeline:
    """A pipeline that trains the changes alone."""
    changed = lambda rngs: with_lora(llama.llama.Llama3(config, rngs=rngs), rngs, rank, alpha)
    model = jpipe.freeze(changed, lambda path: "lora" not in path)
    return jpipe.Pipeline(model, llama.loss_fn, inputs=llama.inputs_of, **chosen)


# --- what it is compared with ---


def tunix_losses(model: Any, tx: optax.GradientTransformation, batches: Sequence[llama.Batch]) -> np.ndarray:
    """The losses of tunix's own trainer, which changes the model."""
    trainer = PeftTrainer(model, tx, TrainingConfig(eval_every_n_steps=len(batches) + 1))
    trainer.with_gen_model_input_fn(lambda batch: batch).train(batches)
    return trainer.metrics_logger.get_metric_history("", "loss", "train")


def check(what: str, got: Any, wanted: Any) -> None:
    """Says how equal the two are; ends the program if they aren't."""
    difference = llama.difference(got, wanted)
    if not difference <= TOLERANCE:
        raise SystemExit(f"not {what}: {got} and {wanted} differ by {difference:.1e}")
    console.print(f"{what} within {difference:.0e}.")


def sizes_of(pipe: jpipe.Pipeline, batch: llama.Batch, tx: optax.GradientTransformation) -> list[int]:
    """How many parameters are trained; bytes of all weights, of the gradients and of the optimiser's state."""
    state = pipe.abstract_state(batch, tx)
    _, grads = jax.eval_shape(pipe.value_and_grad, state.variables, batch)
    trained = jax.eval_shape(pipe.model_variables, {"params": state.variables["params"]})
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return [sum(leaf.size for leaf in jax.tree.leaves(trained)), *map(size, (state.variables, grads, state.opt_state))]


def show_sizes(rows: dict[str, list[int]]) -> None:
    table = Table(title="Parameters that are trained, and MB on all devices")
    for name in ("", "parameters", "weights", "gradients", "moments"):
        table.add_column(name, justify="right" if name else "left")
    for name, (count, *sizes) in rows.items():
        table.add_row(name, f"{count:,}", *(f"{size / 1e6:.2f}" for size in sizes))
    console.print(table)


# --- merged and exported ---


def key_of(path: str) -> str:
    """What a published checkpoint calls the weight of a module of tunix's, such as "layers.0.attn.q_proj"."""
    others = {"embedder": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
    return others.get(path, f"model.{path}".replace(".attn.", ".self_attn.")) + ".weight"


def save_base(model: Any, folder: Path) -> None:
    """Writes tunix's model as a published checkpoint, which one that was downloaded is already."""
    found = {}
    for (*place, name), leaf in nnx.to_flat_state(nnx.state(model)):
        value = np.asarray(leaf.get_value())
        if name != "input_embedding" and value.ndim > 1:  # there it is [out, in]
            value = value.reshape(-1, value.shape[-1]) if "o_proj" in place else value.reshape(len(value), -1)
            value = np.ascontiguousarray(value.T)
        found[key_of(".".join(map(str, place)))] = value
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(found, folder / "model.safetensors")


def export(model: Any, folder: Path, rank: int, alpha: float) -> llama.llama.Llama3:
    """`folder/base` with W + A B alpha / rank in place of W, as `folder/merged`; and that as tunix reads it."""
    base, merged = str(folder / "base"), str(folder / "merged")
    turned = {"_proj": (1, 0)}
    save_lora_merged_model_as_safetensors(base, merged, model, rank, alpha, key_of, transpose_rules=turned)
    return create_model_from_safe_tensors(merged, model.config)


# --- English, then Python ---


def read_python() -> tuple[np.ndarray, np.ndarray]:
    """`hold_out` of some modules of the standard library."""
    names = "argparse", "ast", "datetime", "inspect", "subprocess", "tarfile", "threading", "typing", "zipfile"
    paths = [Path(sysconfig.get_path("stdlib")) / f"{name}.py" for name in names]
    return hold_out(b"".join(path.read_bytes() for path in paths if path.is_file()))


def say_losses(when: str, pipe: jpipe.Pipeline, variables: Any, held_out: dict[str, llama.Batch]) -> None:
    losses = [f"{name} {float(pipe.evaluate(variables, batch)):.3f}" for name, batch in held_out.items()]
    console.print(f"{when}, loss on text held out:", ", ".join(losses))


def tune(pipe: jpipe.Pipeline, model: Any, text: np.ndarray, options: argparse.Namespace) -> Any:
    """The variables after LoRA on a text. tunix's trainer does the first steps too, and leaves them in the model."""
    checked, tx = list(islice(llama.windows_of(text), CHECKED_STEPS)), optax.adamw(options.lr)
    variables = pipe.from_model_variables(jax.device_get(llama.tree_of(model)), checked[0])
    state = pipe.create_state(jax.random.key(0), checked[0], tx, variables)
    windows, losses = llama.windows_of(text, pipe.data_shard), []
    for batch in islice(windows, CHECKED_STEPS):
        state, metrics = pipe.train_step(state, pipe.place(batch))
        losses.append(float(metrics["loss"]))
    check(f"The first {CHECKED_STEPS} losses are those of tunix's trainer", losses, tunix_losses(model, tx, checked))
    return llama.fit(pipe, state, windows, options.steps - CHECKED_STEPS).variables


def run(options: argparse.Namespace, folder: Path) -> None:
    config, lora = replace(llama.TINY, num_layers=options.layers), {"rank": options.rank, "alpha": options.alpha}
    chosen = {"num_stages": options.stages, "num_microbatches": options.microbatches}
    chosen["mesh"] = cluster.make_mesh(options.stages)
    whole, pipe = llama.make_pipeline(config, **chosen), make_pipeline(config, **lora, **chosen)
    texts = {"English": read_text(None), "Python": read_python()}
    held_out = {name: next(llama.windows_of(end)) for name, (_, end) in texts.items()}
    tx, example = optax.adamw(3e-3), held_out["English"]
    show_sizes({"all": sizes_of(whole, example, tx), "LoRA": sizes_of(pipe, example, tx)})

    console.print("All parameters learn English.")
    model = llama.make_model(config)
    variables = whole.from_model_variables(llama.tree_of(model), example)
    state = whole.create_state(jax.random.key(0), example, tx, variables)
    windows = llama.windows_of(texts["English"][0], whole.data_shard)
    variables = llama.fit(whole, state, windows, options.base_steps).variables
    say_losses("Before LoRA", whole, variables, held_out)
    llama.put_back(cluster.to_host(whole.model_variables(variables)), model)

    console.print("Low-rank changes of them learn Python.")
    changed = with_lora(model, nnx.Rngs(0), **lora)
    variables = tune(pipe, changed, texts["Python"][0], options)
    say_losses("After LoRA", pipe, variables, held_out)
    llama.put_back(cluster.to_host(pipe.model_variables(variables)), changed)
    batch = held_out["Python"]
    logits, _ = cluster.to_host(pipe.apply(variables, batch))
    if jax.process_index() == 0:  # tunix reads onto the first device of all
        save_base(model, folder / "base")
        merged = export(changed, folder, **lora)
        got, _ = merged(batch["input_tokens"], batch["positions"], None, batch["attention_mask"])
        check("tunix's model, read from the merged checkpoint, gives the pipeline's logits", got, logits)


OPTIONS = {
    "stages": (4, "K"),
    "microbatches": (8, "M"),
    "layers": (6, "blocks"),
    "rank": (4, "of the changes"),
    "alpha": (8.0, "changes count alpha / rank"),
    "base-steps": (200, "of all parameters"),
    "steps": (100, "of LoRA"),
    "lr": (1e-2, "of LoRA"),
}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, (default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="where the checkpoints, base and merged, are kept")
    cluster.add_options(parser)
    options = parser.parse_args(arguments)
    if options.steps < CHECKED_STEPS:
        parser.error(f"--steps {options.steps} is less than the {CHECKED_STEPS} that are checked")
    return options


def main() -> None:
    options = parse_options()
    cluster.join(options, console)
    with tempfile.TemporaryDirectory() as made:
        run(options, options.save or Path(made))


if __name__ == "__main__":
    main()
