"""A training loop to copy: `python examples/train.py --stages 4 --run /tmp/run`; stop it, and start it again.

A mesh from the command line, data by grain, checkpoints from which the run goes on under another mesh too, evaluation,
preemption (SIGTERM), figures in a file. It trains the language model of `lm.py`.
"""

import argparse
import csv
import time
from pathlib import Path

import cluster
import grain
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from lm import Block, Embed, Head, loss_fn, read_text
from rich.console import Console
from rich.progress import Progress

import jpipe

try:
    from tensorboardX import SummaryWriter
except ImportError:
    SummaryWriter = None

console = Console()


class Windows:
    """Batches of the text: `inputs` and, one byte on, `targets`, `[B, T]`; or the rows of B that this process feeds.

    What is in a batch depends on the seed and its index alone, so that a run goes on with any number of processes.
    """

    def __init__(self, text: np.ndarray, options: argparse.Namespace, part: tuple[int, int], seed: int):
        self.text, self.batch, self.seq, self.seed = text, options.batch, options.seq, seed
        self.rows = cluster.rows(options.batch, part)

    def __len__(self) -> int:
        return 1 << 40  # as many as anybody wants

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        starts = np.random.default_rng((self.seed, index)).integers(0, len(self.text) - self.seq, self.batch)[self.rows]
        windows = self.text[starts[:, None] + np.arange(self.seq + 1)].astype(np.int32)
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


class Report:
    """Shows figures: in `figures.csv`, in TensorBoard's files if tensorboardX is installed, and on the console."""

    def __init__(self, options: argparse.Namespace, done: int):
        self.options, self.step, self.begin = options, done, time.perf_counter()
        self.progress = Progress(console=console, disable=not console.is_terminal)
        self.task = self.progress.add_task("training", total=options.steps, completed=done)
        self.table = self.board = None
        if jax.process_index() == 0:
            path, names = (
                options.run / "figures.csv",
                ("step", "loss", "grad_norm", "finite", "tokens_per_s", "held_out"),
            )
            old = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
            self.table = csv.DictWriter(path.open("w", newline="", buffering=1), names, extrasaction="ignore")
            self.table.writeheader()
            self.table.writerows(row for row in old if int(row["step"]) <= done)  # later steps are done again
            self.board = SummaryWriter(str(options.run / "tensorboard"), purge_step=done) if SummaryWriter else None

    def add(self, step: int, figures: dict[str, float]) -> None:
        passed, self.begin = time.perf_counter() - self.begin, time.perf_counter()
        speed, self.step = (step - self.step) * self.options.batch * self.options.seq / passed, step
        figures = {"tokens_per_s": speed, **figures}
        if self.table:
            self.table.writerow({"step": step, **figures})
        for name, value in figures.items() if self.board else ():
            self.board.add_scalar(name, value, step)
        if self.progress.disable:
            console.print(f"step {step}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()), soft_wrap=True)
        self.progress.update(self.task, completed=step, description=f"loss {figures['loss']:.3f}")


def make_pipeline(options: argparse.Namespace, mesh: Mesh) -> jpipe.Pipeline:
    layers = [Embed(options.width, options.seq), *[Block(options.heads)] * options.layers, Head()]
    return jpipe.Pipeline(
        layers,
        loss_fn,
        num_stages=options.stages,
        num_microbatches=options.microbatches,
        num_chunks=options.chunks,
        schedule=options.schedule,
        mesh=mesh,
        shard_over=("data",),
    )


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0, options.lr, options.steps // 10, options.steps)
    # A step whose gradients aren't finite changes nothing; ten in a row, and the trouble is let through.
    return optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)), 10)


def train(options: argparse.Namespace) -> None:
    text, end = read_text(options.text)
    pipe = make_pipeline(options, jpipe.make_mesh(stage=options.stages, data=options.data))
    tx = make_optimizer(options)
    batches = grain.MapDataset.source(Windows(text, options, pipe.data_shard, options.seed))
    data = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
    held_out = pipe.place(Windows(end, options, pipe.data_shard, 0)[0])
    with jpipe.Checkpointer(options.run / "checkpoints") as saved:
        state, position = saved.restore(pipe, held_out, tx)
        if state is None:
            state = pipe.create_state(jax.random.key(options.seed), held_out, tx)
        else:
            data.set_state(position)
        done, batch = int(state.step), pipe.place(next(data))
        console.print(f"Begins after step {done} of {options.steps}, on the mesh {dict(pipe.mesh.shape)}")
        report = Report(options, done)
        with report.progress:
            for step in range(done + 1, options.steps + 1):
                state, metrics = pipe.train_step(state, batch)
                position = data.get_state()
                batch = pipe.place(next(data))  # while the step runs
                last = saved.preempted(step) or step == options.steps
                if step % options.save_every == 0 or last:
                    saved.save(pipe, state, position)
                evaluates = step % options.evaluate_every == 0 or last
                if step % options.log_every == 0 or evaluates:
                    figures = {name: float(value) for name, value in metrics.items()}
                    if evaluates:
                        figures["held_out"] = float(pipe.evaluate(state.variables, held_out))
                    report.add(step, figures)
                if last:
                    break
        console.print("Done." if int(state.step) == options.steps else f"Told to end; saved step {int(state.step)}.")


OPTIONS = {
    "run": (Path("run"), "where checkpoints and figures are kept; a run that is there goes on"),
    "stages": (4, "K"),
    "data": (1, "devices along the data axis; weights are split over it too"),
    "microbatches": (8, "M"),
    "chunks": (1, "V, for interleaved schedules"),
    "schedule": ("1f1b", "naive, gpipe, 1f1b or interleaved"),
    "layers": (8, "Transformer blocks"),
    "width": (128, "of the hidden states"),
    "heads": (4, "of attention"),
    "seq": (64, "bytes in a window"),
    "batch": (32, "windows a step"),
    "steps": (240, "to train"),
    "lr": (3e-3, "peak learning rate"),
    "seed": (0, "of data and weights"),
    "log-every": (10, "steps"),
    "evaluate-every": (100, "steps"),
    "save-every": (100, "steps"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a byte-level language model in pipeline stages.")
    for name, (default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--text", type=Path, help="a file to learn from (default: CPython's documentation)")
    cluster.add_options(parser)
    options = parser.parse_args()
    for name in ("steps", "log_every", "evaluate_every", "save_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is less than 1")
    cluster.join(options, console, num_devices=options.stages * options.data)
    train(options)


if __name__ == "__main__":
    main()
