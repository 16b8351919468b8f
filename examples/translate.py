"""One model that translates names from 145 languages into English: `python examples/translate.py`, or with `--help`.

T(L, H, A) of section 5 of GPipe (arXiv 1811.06965) at the size of a laptop, encoder and decoder in pipeline stages.
At the end it is tested on names that it never saw; `--picture` draws what it knows by how much it had to learn from.
"""

import argparse
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import cluster
import jax
import jax.numpy as jnp
import names
import numpy as np
import optax
from jax.sharding import Mesh
from models import translation
from names import Batch, Examples, Vocabulary
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import jpipe

console = Console()
Scores = dict[str, tuple[float, float]]


def make_pipeline(
    options: argparse.Namespace, vocabulary_size: int, mesh: Mesh | None = None, dtype: jnp.dtype = jnp.float32
) -> jpipe.Pipeline:
    size = (options.layers, options.hidden, options.heads, options.width, vocabulary_size)
    clip = options.clip_logits or None
    return jpipe.Pipeline(
        translation.translation(*size, scale_init=options.scale_init, clip_logits=clip, dtype=dtype),
        translation.loss_fn,
        num_stages=options.stages,
        num_microbatches=options.microbatches,
        remat=options.remat,
        mesh=mesh,
    )


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    warmup = max(1, options.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(options.lr / 20, options.lr, warmup, options.steps, options.lr / 20)
    clip = optax.clip_by_global_norm(options.clip_gradients) if options.clip_gradients else optax.identity()
    return optax.chain(clip, optax.adamw(rate, b2=0.98))


def train(pipe: jpipe.Pipeline, state, stream: Iterator[Batch], options: argparse.Namespace):
    """Trains from the state's step on: (the state after all steps, the losses of these)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    figures = TextColumn("{task.fields[loss]:.3f} nats a token")
    losses, done = [], int(state.step)
    with Progress(*columns, figures, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=options.steps, completed=done, loss=np.nan)
        for _ in range(done, options.steps):
            state, metrics = pipe.train_step(state, pipe.place(next(stream)))
            losses.append(float(metrics["loss"]))
            progress.update(task, advance=1, loss=np.mean(losses[-20:]))
    return state, losses


def scores(pipe: jpipe.Pipeline, variables, tested: dict[str, Examples], vocabulary: Vocabulary) -> Scores:
    """(nats a token, share of names that are right to the letter) of each language's names."""
    rows = [(language, i) for language, examples in tested.items() for i in range(len(examples.inputs))]
    size, found = 64 * pipe.schedule.num_microbatches, {language: [] for language in tested}
    forward = jax.jit(pipe.apply)
    for begin in range(0, len(rows), size):
        part = [rows[i % len(rows)] for i in range(begin, begin + size)]  # repeats some, to fill up
        parts = [tested[language].batch(slice(i, i + 1)) for language, i in part]
        batch = {name: np.concatenate([row[name] for row in parts]) for name in ("inputs", "targets")}
        nats = nats_of(cluster.to_host(forward(variables, batch)), batch["targets"])
        said = translate(forward, variables, batch["inputs"])
        for (language, _), row, target, answer in list(zip(part, nats, batch["targets"], said, strict=True))[
            : len(rows) - begin
        ]:
            found[language].append((row.sum(), (target > 0).sum(), vocabulary.text(answer) == vocabulary.text(target)))
    summed = {language: np.sum(rows, axis=0) for language, rows in found.items() if rows}
    return {
        language: (nats / tokens, right / len(found[language])) for language, (nats, tokens, right) in summed.items()
    }


def nats_of(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Of each token `[B, T]`, 0 for padding."""
    nats = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), targets)
    return np.asarray(nats) * (targets != names.PADDING)


def translate(forward, variables, inputs: np.ndarray) -> np.ndarray:
    """The likeliest token at each place in turn, `[B, T]`. What stands behind a place doesn't matter to it."""
    said = np.zeros((len(inputs), names.TARGET_TOKENS), np.int32)
    for place in range(names.TARGET_TOKENS):
        logits = cluster.to_host(forward(variables, {"inputs": inputs, "targets": said}))
        said[:, place] = np.argmax(logits[:, place], axis=-1)
    return said


def mean(found: Scores, languages: Sequence[str]) -> tuple[float, float]:
    """Nats a token and share of right names, over those of some languages that were tested, each weighing the same."""
    nats, right = np.mean([found[language] for language in languages if language in found], axis=0)
    return float(nats), float(right)


def show(found: Scores, learnt: names.Pairs) -> None:
    table = Table(title="Names held out, into English")
    for name in ("languages", "names learnt from", "nats a token", "right"):
        table.add_column(name, justify="left" if name == "languages" else "right")
    for group, languages in names.by_resources({key: learnt[key] for key in found}).items():
        if languages:
            nats, right = mean(found, languages)
            total = sum(len(learnt[language]) for language in languages)
            table.add_row(f"{len(languages)} of {group} resource", f"{total:,}", f"{nats:.2f}", f"{right:.1%}")
    console.print(table)


def draw(found: Scores, learnt: names.Pairs, path: Path) -> None:
    """Each language as a dot: how many of its held-out names are right, by how many it had to learn from."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    sizes = np.array([len(learnt[language]) for language in found])
    right = 100 * np.array([right for _, right in found.values()])
    axes.scatter(sizes, right, s=14, color="#0072B2")
    for language, x, y in zip(found, sizes, right, strict=True):
        axes.annotate(language, (x, y), (2, 2), textcoords="offset points", fontsize=7, color="#555555")
    axes.set(xscale="log", xlabel="names that the model learnt from", ylabel="right of the names held out, %")
    axes.set_title(f"One model, {len(found)} languages into English", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    console.print(f"{path} shows each language.")


def read_vocabulary(options: argparse.Namespace, learnt: names.Pairs) -> Vocabulary:
    """The file's that was given, or one made of all names that are learnt from, and kept beside a checkpoint."""
    file = options.vocabulary or (options.run / "vocabulary.model" if options.run else None)
    if file is None or not file.exists():
        if options.vocabulary:
            raise SystemExit(f"--vocabulary {file} isn't there; leave it out, and one is made")
        try:
            vocabulary = Vocabulary.train(learnt, options.tokens)
        except RuntimeError as error:  # sentencepiece says how many it needs
            raise SystemExit(f"--tokens {options.tokens}: {error}") from error
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(vocabulary.model)
        return vocabulary
    try:
        return Vocabulary(file.read_bytes())
    except RuntimeError as error:
        raise SystemExit(f"{file} is no vocabulary of sentencepiece's: {error}") from error


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument("--stages", type=int, default=4, help="K (default %(default)s)")
    pipeline.add_argument("--microbatches", type=int, default=8, help="M (default %(default)s)")
    pipeline.add_argument("--remat", default="none", help="none, layer, stage or full (default %(default)s)")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=2, help="L, of encoder and decoder each (default %(default)s)")
    model.add_argument("--hidden", type=int, default=512, help="H, of feed-forward networks (default %(default)s)")
    model.add_argument("--heads", type=int, default=4, help="A, of 64 channels each (default %(default)s)")
    model.add_argument("--width", type=int, default=128, help="of the hidden states (default %(default)s)")
    unscaled = "leave feed-forward networks' initial weights undivided by L"
    model.add_argument("--no-scale-init", dest="scale_init", action="store_false", help=unscaled)
    model.add_argument("--clip-logits", type=float, default=0, help="their largest magnitude (default: any)")
    data = parser.add_argument_group("data")
    data.add_argument("--languages", nargs="+", default=[], help="such as fr ja (default: all)")
    data.add_argument("--temperature", type=float, default=5, help="1 draws languages by size (default %(default)s)")
    data.add_argument("--tokens", type=int, default=4000, help="in the vocabulary (default %(default)s)")
    data.add_argument("--vocabulary", type=Path, help="a file of sentencepiece's (default: made of the names)")
    data.add_argument("--tested", type=int, default=20, help="names held out of each language (default %(default)s)")
    training = parser.add_argument_group("training")
    training.add_argument("--batch", type=int, default=128, help="names a step (default %(default)s)")
    training.add_argument("--steps", type=int, default=400, help="(default %(default)s)")
    training.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default %(default)s)")
    training.add_argument("--clip-gradients", type=float, default=1, help="their norm; 0: any (default %(default)s)")
    training.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    training.add_argument("--run", type=Path, help="a folder to keep model and vocabulary in, and to go on from")
    parser.add_argument("--picture", type=Path, help="a file to draw what each language came to")
    cluster.add_options(parser)
    return parser.parse_args(arguments)


def main() -> None:
    options, begin = parse_options(), time.perf_counter()
    cluster.join(options, console)
    learnt, held_out = names.read()
    vocabulary = read_vocabulary(options, learnt)
    try:
        learnt = names.chosen(learnt, options.languages)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    examples = [Examples.encode(pairs, vocabulary) for pairs in learnt.values()]
    tested = {key: Examples.encode(held_out[key][: options.tested], vocabulary) for key in learnt}
    total = sum(len(part.inputs) for part in examples)
    console.print(f"{total:,} names in {len(learnt)} languages, {vocabulary.size:,} tokens.")

    pipe = make_pipeline(options, vocabulary.size, cluster.make_mesh(options.stages))
    example = next(names.batches(examples, options.batch, options.temperature, options.seed))
    state, tx = None, make_optimizer(options)
    if options.run:
        with jpipe.Checkpointer(options.run) as saved:
            state, position = saved.restore(pipe, example, tx)
        if state is not None and position["vocabulary"] != zlib.crc32(vocabulary.model):
            raise SystemExit(f"the model in {options.run} was trained with another vocabulary; its own is beside it")
    state = state or pipe.create_state(jax.random.key(options.seed), example, tx)
    console.print(pipe)
    seed = options.seed + int(state.step)  # one that goes on sees names that it didn't see
    stream = names.batches(examples, options.batch, options.temperature, seed, pipe.data_shard)
    state, _ = train(pipe, state, stream, options)
    if options.run:
        with jpipe.Checkpointer(options.run) as saved:
            saved.save(pipe, state, position={"vocabulary": zlib.crc32(vocabulary.model)})

    found = scores(pipe, state.variables, tested, vocabulary)
    show(found, learnt)
    if options.picture and jax.process_index() == 0:
        draw(found, learnt, options.picture)
    first = {key: part for key, part in tested.items() if len(part.inputs)}
    shown = [(key, part.batch(slice(0, 1))) for key, part in list(first.items())[:: max(1, len(first) // 8)]]
    inputs = np.concatenate([row["inputs"] for _, row in shown])
    inputs = np.resize(inputs, (64 * options.microbatches, inputs.shape[1]))
    said = translate(jax.jit(pipe.apply), state.variables, inputs)
    for (key, row), answer in zip(shown, said, strict=False):
        asked = vocabulary.text(row["inputs"][0])
        console.print(
            f"{key}: {asked} → {vocabulary.text(answer)} ({vocabulary.text(row['targets'][0])})", markup=False
        )
    console.print(f"{time.perf_counter() - begin:.0f} s with compilation.")


if __name__ == "__main__":
    main()
