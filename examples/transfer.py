"""A network that learnt digits 0 to 4, fine-tuned to 5 to 9 with a new head: `python examples/transfer.py`.

As the paper's ImageNet model is to other tasks (GPipe, arXiv 1811.06965, table 4): all layers but the classifier keep
what they learnt, and all go on learning. Beside it the same network that begins anew, with the same few examples.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import cluster
import digits
import jax
import numpy as np
from rich.table import Table

import jpipe

FIRST, SECOND = range(5), range(5, 10)


def part_of(images: digits.Batch, wanted: range, most: int | None = None) -> digits.Batch:
    """The images of some digits, at most so many of each, their targets counted from 0."""
    rows = [np.flatnonzero(images["targets"] == digit)[:most] for digit in wanted]
    rows = np.sort(np.concatenate(rows))
    return {"inputs": images["inputs"][rows], "targets": images["targets"][rows] - wanted.start}


def fit(pipe: jpipe.Pipeline, images: digits.Batch, options: argparse.Namespace, trees=None):
    """The state after training; `trees` are what its layers begin with."""
    tx = digits.make_optimizer(digits.num_steps(images, options), options.lr)
    example = {name: array[: options.batch] for name, array in images.items()}
    variables = None if trees is None else pipe.from_layer_variables(trees, example)
    state = pipe.create_state(jax.random.key(options.seed), example, tx, variables)
    return digits.train(pipe, state, images, options)[0]


def with_new_head(pipe: jpipe.Pipeline, learnt, example: digits.Batch, seed: int) -> list:
    """Each layer's variables: as learnt, but for the last's, which are new."""
    anew = pipe.layer_variables(pipe.init(jax.random.key(seed), example))
    return [*pipe.layer_variables(learnt)[:-1], anew[-1]]


def compare(options: argparse.Namespace, seed: int) -> list[tuple[int, int, float, float]]:
    """(seed, examples of each digit, accuracy begun anew, accuracy fine-tuned) for each number of examples."""
    training, tested = digits.read_digits()
    options = argparse.Namespace(**{**vars(options), "seed": seed})
    pipe = digits.make_pipeline(options, cluster.make_mesh(options.stages), num_classes=5)
    learnt = fit(pipe, part_of(training, FIRST), options).variables
    before = digits.accuracy(pipe, learnt, part_of(tested, FIRST))
    digits.console.print(f"seed {seed}: {before:.1%} of digits 0 to 4 that it wasn't trained on")
    rows = []
    for few in options.few:
        images, unseen = part_of(training, SECOND, few), part_of(tested, SECOND)
        fewer = {"batch": min(options.batch, len(images["targets"])), "epochs": options.tuned}
        tuning = argparse.Namespace(**{**vars(options), **fewer})
        example = {name: array[: tuning.batch] for name, array in images.items()}
        trees = with_new_head(pipe, learnt, example, seed + 1)
        reached = [digits.accuracy(pipe, fit(pipe, images, tuning, t).variables, unseen) for t in (None, trees)]
        rows.append((seed, few, *reached))
    return rows


def show(rows: list[tuple[int, int, float, float]]) -> None:
    table = Table("images of each digit", "begun anew", "fine-tuned", title="Digits 5 to 9 that it wasn't trained on")
    for few in dict.fromkeys(row[1] for row in rows):
        found = 100 * np.array([row[2:] for row in rows if row[1] == few])
        shown = [f"{mean:.1f} ± {std:.1f} %" for mean, std in zip(found.mean(0), found.std(0), strict=True)]
        table.add_row(str(few), *shown)
    digits.console.print(table)


def draw(rows: list[tuple[int, int, float, float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    few = list(dict.fromkeys(row[1] for row in rows))
    for column, label, color in ((2, "begun anew", "#999999"), (3, "fine-tuned from 0 to 4", "#0072B2")):
        found = [[100 * row[column] for row in rows if row[1] == number] for number in few]
        axes.plot(few, np.mean(found, axis=1), color=color, label=label)
        axes.plot(few, found, ".", color=color)
    axes.set(xscale="log", xlabel="images of each digit 5 to 9", ylabel="right of the digits 5 to 9 held out, %")
    axes.set_xticks(few, map(str, few), minor=False)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=4, help="M (default %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="normal cells, a multiple of 3 (default %(default)s)")
    parser.add_argument("--filters", type=int, default=16, help="of the first cells (default %(default)s)")
    parser.add_argument("--few", type=int, nargs="+", default=[4, 16], help="images of each new digit (default 4 16)")
    parser.add_argument("--epochs", type=int, default=4, help="of digits 0 to 4 (default %(default)s)")
    parser.add_argument("--tuned", type=int, default=20, help="epochs of the new digits (default %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="digits a step (default %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default 0 1 2)")
    parser.add_argument("--figures", type=Path, help="a file to keep the accuracies in, as CSV")
    parser.add_argument("--picture", type=Path, help="a file to draw them in")
    cluster.add_options(parser)
    options = parser.parse_args(arguments)
    if least := [few for few in options.few if few * 5 % options.microbatches]:
        parser.error(f"--few {least[0]} of 5 digits isn't divided by --microbatches {options.microbatches}")
    return argparse.Namespace(chunks=1, schedule="1f1b", remat="layer", **vars(options))


def main() -> None:
    options = parse_options()
    cluster.join(options, digits.console)
    rows = [row for seed in options.seeds for row in compare(options, seed)]
    show(rows)
    if jax.process_index() == 0 and options.figures:
        with open(options.figures, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["seed", "images of each digit", "begun anew", "fine-tuned"])
            writer.writerows(rows)
    if jax.process_index() == 0 and options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
