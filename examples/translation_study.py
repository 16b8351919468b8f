"""What section 5 of GPipe (arXiv 1811.06965) says of translation, tried: `python examples/translation_study.py`.

Each run is `translate.py` on one device; three seeds of each are kept in `data/translation.csv`, and those that are
there aren't run again. At the end: tables, and with `--picture` a picture.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import cluster
import jax
import names
import numpy as np
import translate
from names import Examples, Vocabulary
from rich.table import Table

KEPT = Path(__file__).parent / "data" / "translation.csv"
SEEDS = (0, 1, 2)
ALONE = ("fr", "ja", "fi", "cy", "mt", "zu")  # two of each of high, middle and low resource
DEEP = ["--layers", "32", "--hidden", "128", "--heads", "1", "--width", "64", "--batch", "32", "--steps", "60"]
DEEP += ["--lr", "0.1", "--clip-gradients", "0", "--tested", "0"]
SMALL = ["--steps", "200"]
RUNS = {
    "many": [],
    **{f"only {language}": ["--languages", language, "--batch", "32", "--tested", "100"] for language in ALONE},
    "deep": ["--layers", "4", "--hidden", "256", "--heads", "2"],
    **{f"batch {size}": [*SMALL, "--batch", str(size)] for size in (16, 64, 256)},
    "64 layers, plain": [*DEEP, "--no-scale-init"],
    "64 layers, divided": DEEP,
    "64 layers, clipped": [*DEEP, "--no-scale-init", "--clip-logits", "10"],
    "64 layers, both": [*DEEP, "--clip-logits", "10"],
}
"""The options of `translate.py`. "many" has the middle of the sizes, T(2, 512, 4), which is wide beside "deep"."""

Figures = dict[tuple[str, str], list[float]]
"""(run, figure) to its values, one a seed."""


def run(name: str, seed: int) -> dict[str, float]:
    """One run's figures: of groups and of single languages, and losses on the way."""
    options = translate.parse_options(["--stages", "1", "--microbatches", "1", "--seed", str(seed), *RUNS[name]])
    learnt, held_out = names.read()
    vocabulary = Vocabulary.train(learnt, options.tokens)
    learnt = names.chosen(learnt, options.languages)
    examples = [Examples.encode(pairs, vocabulary) for pairs in learnt.values()]
    pipe = translate.make_pipeline(options, vocabulary.size)
    stream = names.batches(examples, options.batch, options.temperature, seed)
    state = pipe.create_state(jax.random.key(seed), next(stream), translate.make_optimizer(options))
    sizes = [leaf.size for tree in pipe.layer_variables(state.variables) for leaf in jax.tree.leaves(tree)]
    state, losses = translate.train(pipe, state, stream, options)
    figures = {"parameters": float(sum(sizes) - options.width * vocabulary.size)}  # the shared table is in two layers
    figures |= {
        f"loss {step}": float(np.mean(losses[max(0, step - 10) : step])) for step in range(10, len(losses) + 1, 10)
    }
    tested = {key: Examples.encode(held_out[key][: tested_of(key, options)], vocabulary) for key in learnt}
    tested = {key: part for key, part in tested.items() if len(part.inputs)}
    found = translate.scores(pipe, state.variables, tested, vocabulary) if tested else {}
    groups = {key: group for key, group in names.by_resources(learnt).items() if len(learnt) > 1}
    for group, languages in {**groups, **{key: [key] for key in ALONE}}.items():
        if any(language in found for language in languages):
            figures |= dict(zip((f"nats {group}", f"right {group}"), translate.mean(found, languages), strict=True))
    return figures


def tested_of(language: str, options: argparse.Namespace) -> int:
    """How many names: more of those that are compared with a model of their own."""
    return max(options.tested, 100) if language in ALONE and options.tested else options.tested


def kept() -> Figures:
    found: Figures = {}
    if KEPT.exists():
        with open(KEPT, newline="") as file:
            for row in csv.DictReader(file):
                found.setdefault((row["run"], row["figure"]), []).append(float(row["value"]))
    return found


def keep(name: str, seed: int, figures: dict[str, float]) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    is_new = not KEPT.exists()
    with open(KEPT, "a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(["run", "seed", "figure", "value"])
        writer.writerows([name, seed, figure, f"{value:.6g}"] for figure, value in figures.items())


def seeds_of(name: str) -> set[int]:
    if not KEPT.exists():
        return set()
    with open(KEPT, newline="") as file:
        return {int(row["seed"]) for row in csv.DictReader(file) if row["run"] == name}


# --- what came out ----------------------------------------------------------------------------------------------------


def tables(figures: Figures) -> dict[str, list[list[str]]]:
    """By title the rows of each table, its head first: means over seeds, and their standard deviation."""
    nats = lambda run, group: spread(figures[run, f"nats {group}"], "{:.2f}")
    right = lambda run, group: spread([100 * value for value in figures[run, f"right {group}"]], "{:.1f}") + " %"
    learnt, _ = names.read()
    groups = ("high", "middle", "low")
    compared = lambda runs: [
        ["resource of the languages", *(f"nats, {run}" for run in runs), *(f"right, {run}" for run in runs)],
        *([group, *(nats(run, group) for run in runs), *(right(run, group) for run in runs)] for group in groups),
    ]
    alone = [
        [f"{language}, {len(learnt[language]):,} names"]
        + [show(run, language) for show in (nats, right) for run in (f"only {language}", "many")]
        for language in ALONE
    ]
    return {
        "One model for each language, or one for all": [
            ["language", "nats, alone", "nats, among all", "right, alone", "right, among all"],
            *alone,
        ],
        "Deep or wide": compared(["many", "deep"]),
        "Names a step": compared([f"batch {size}" for size in (16, 64, 256)]),
        "32 encoder and 32 decoder layers": [
            ["", "nats at step 10", "at step 30", "at step 60", "diverged"],
            *([run.removeprefix("64 layers, "), *course(figures, run)] for run in RUNS if run.startswith("64")),
        ],
    }


def spread(values: Sequence[float], form: str) -> str:
    return f"{form.format(np.mean(values))} ± {form.format(np.std(values))}"


def course(figures: Figures, run: str) -> list[str]:
    """Losses on the way, and of how many seeds the last is not finite or a nat above the least."""
    losses = np.array([values for (name, figure), values in figures.items() if name == run and "loss" in figure])
    diverged = ~(losses[-1] <= np.min(losses, axis=0) + 1)
    shown = [spread(figures[run, f"loss {step}"], "{:.2f}") for step in (10, 30, 60)]
    return [*shown, f"{diverged.sum()} of {len(diverged)}"]


def draw(figures: Figures, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    right = lambda run, group: [100 * value for value in figures[run, f"right {group}"]]
    bars(axes[0, 0], ALONE, {"alone": "only {}", "among all": "many"}, right)
    axes[0, 0].set_title("One model a language, or one for all", loc="left")
    groups = ("high", "middle", "low")
    bars(axes[0, 1], groups, {"wide: T(2, 512, 4)": "many", "deep: T(4, 256, 2)": "deep"}, right)
    axes[0, 1].set_title("Wide or deep, with as many parameters", loc="left")
    bars(axes[1, 0], groups, {f"{size} names a step": f"batch {size}" for size in (16, 64, 256)}, right)
    axes[1, 0].set_title("Batches, 200 steps each", loc="left")
    for color, run in zip(COLORS, (run for run in RUNS if run.startswith("64")), strict=False):
        steps = sorted(int(key.split()[1]) for name, key in figures if name == run and key.startswith("loss"))
        losses = np.array([figures[run, f"loss {step}"] for step in steps])
        label = run.removeprefix("64 layers, ")
        style = "--" if label in ("clipped", "both") else "-"  # which lie on the others where no logit is that large
        axes[1, 1].plot(steps, losses.mean(axis=1), style, color=color, label=label)
        axes[1, 1].fill_between(steps, losses.min(axis=1), losses.max(axis=1), color=color, alpha=0.15, lw=0)
    axes[1, 1].set(xlabel="step", ylabel="training loss, nats a token")
    axes[1, 1].set_title("64 layers: initial weights divided, logits clipped", loc="left")
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


COLORS = ("#999999", "#0072B2", "#E69F00", "#009E73")


def bars(ax, groups: Sequence[str], runs: dict[str, str], values) -> None:
    """Means over seeds of each group, run beside run, with all seeds as dots; a run's name may hold the group's."""
    for i, (label, run) in enumerate(runs.items()):
        places = np.arange(len(groups)) + (i - (len(runs) - 1) / 2) * 0.8 / len(runs)
        found = [values(run.format(group), group) for group in groups]
        ax.bar(places, [np.mean(seeds) for seeds in found], 0.76 / len(runs), color=COLORS[i], label=label)
        for place, seeds in zip(places, found, strict=True):
            ax.plot([place] * len(seeds), seeds, ".", color="black", markersize=4)
    ax.set_xticks(np.arange(len(groups)), groups)
    ax.set_xlabel("language" if groups == ALONE else "resource of the languages")
    ax.set_ylabel("right of the names held out, %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS), help="these runs (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="(default 0 1 2)")
    parser.add_argument("--picture", type=Path, help="a file to draw it in")
    options = parser.parse_args()
    cluster.simulate_devices(1)
    for seed in options.seeds:
        for name in options.only:
            if seed not in seeds_of(name):
                translate.console.print(f"{name}, seed {seed}")
                keep(name, seed, run(name, seed))
    figures = kept()
    if missing := [name for name in RUNS if not seeds_of(name)]:
        raise SystemExit(f"no figures yet of {', '.join(missing)}")
    for title, (head, *rows) in tables(figures).items():
        table = Table(*head, title=title)
        for row in rows:
            table.add_row(*row)
        translate.console.print(table)
    if options.picture:
        draw(figures, options.picture)


if __name__ == "__main__":
    main()
