"""What jpipe doesn't do: PipeDream's asynchronous pipeline, simulated beside 1F1B with its flush.

PipeDream (Narayanan et al., SOSP 2019, doi 10.1145/3341301.3359646) never waits for a batch to end: a stage updates its
weights after every backward. A micro-batch's backward has to use the weights of its forward, so a stage keeps those
("weight stashing"). Here that is played through event by event, and counted: weight versions held, how many updates
late a gradient comes, how busy stages are. 1F1B updates once all micro-batches of a batch are through.

    python examples/pipedream.py [picture.png]      # the table, and the picture of benchmarks/results/pipedream.md
    python examples/pipedream.py --train            # what late gradients do to a small regression

Needs `pip install 'jpipe[plot,demo]'`, and no devices. K is the number of stages, F takes 1 and B takes 2.
"""

import argparse
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import jpipe
from jpipe.tools import figures

TIMES = {"F": 1.0, "B": 2.0}
PICTURE = Path(__file__).parents[1] / "docs" / "asynchronous.png"
Order = list[tuple[str, int]]  # what a stage does: "F" or "B", and of which micro-batch


# --- the simulation ---------------------------------------------------------------------------------------------------


def one_f_one_b(num_stages: int, stage: int, first: int, last: int) -> Order:
    """Micro-batches `first` to `last`, excluded: a forward for each stage from this one on, then B and F in turn."""
    ahead = min(num_stages - stage, last - first)
    order = [("F", m) for m in range(first, first + ahead)]
    for m in range(first, last):
        order += [("B", m), *[("F", m + ahead)] * (m + ahead < last)]
    return order


class Work(NamedTuple):
    """One action in time, and the version of its stage's weights that it uses: how many updates they have had."""

    stage: int
    kind: str
    microbatch: int
    start: float
    end: float
    version: int


@dataclass
class Stage:
    """What a stage knows: its weights' version, and those that micro-batches between forward and backward need."""

    order: Order
    version: int = 0
    working: bool = False
    backwards: int = 0
    stashed: dict[int, int] = field(default_factory=dict)
    held: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 1)])
    late: list[int] = field(default_factory=list)

    def count(self, now: float) -> None:
        """Notes how many versions there are: the newest, and older ones that a backward is still to use."""
        self.held.append((now, len({self.version, *self.stashed.values()})))


@dataclass(frozen=True)
class Run:
    """What was simulated.

    Attributes:
      works: every action, in the order in which they ended.
      held: for each stage the times at which the number of versions was counted, and the number.
      late: for each stage and micro-batch how many updates its stage made after its forward and before its own.
    """

    works: tuple[Work, ...]
    held: tuple[tuple[tuple[float, int], ...], ...]
    late: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.held)

    @property
    def makespan(self) -> float:
        return max(work.end for work in self.works)

    def versions(self, microbatch: int) -> list[int]:
        """The version of each stage's weights that a micro-batch meets, forward and backward."""
        found = {(work.stage, work.version) for work in self.works if work.microbatch == microbatch}
        assert len(found) == self.num_stages, "a backward uses its forward's weights"
        return [version for _, version in sorted(found)]

    def busy(self, start: float, end: float) -> list[float]:
        """The share of a span of time for which each stage works."""
        times = np.zeros(self.num_stages)
        for work in self.works:
            times[work.stage] += max(0.0, min(work.end, end) - max(work.start, start))
        return list(times / (end - start))

    def full(self) -> tuple[float, float]:
        """While the pipeline is full: from the first backward on the first stage to the last forward there."""
        first = min(work.start for work in self.works if (work.stage, work.kind) == (0, "B"))
        return first, max(work.end for work in self.works if (work.stage, work.kind) == (0, "F"))


def simulate(orders: Sequence[Order], microbatches_an_update: int) -> Run:
    """Runs the stages' orders event by event; an event is the end of an action.

    Args:
      orders: what each stage does, in order; it waits until what an action needs has ended.
      microbatches_an_update: after how many backwards a stage updates its weights; 1 in PipeDream.
    """
    stages = [Stage(list(order)) for order in orders]
    ended: set[tuple[str, int, int]] = set()
    events: list[tuple[float, Work]] = []
    works = []

    def begin(index: int, now: float) -> None:
        stage = stages[index]
        if stage.working or not stage.order or not _needs(*stage.order[0], index, len(stages)) <= ended:
            return
        kind, m = stage.order.pop(0)
        version = stage.stashed.setdefault(m, stage.version)  # the newest forward; that one again backward
        stage.working = True
        work = Work(index, kind, m, now, now + TIMES[kind], version)
        heapq.heappush(events, (work.end, work))

    def end(work: Work) -> None:
        works.append(work)
        ended.add((work.kind, work.microbatch, work.stage))
        stage = stages[work.stage]
        stage.working = False
        if work.kind == "B":
            del stage.stashed[work.microbatch]
            stage.late.append(stage.version - work.version)
            stage.backwards += 1
            stage.version += stage.backwards % microbatches_an_update == 0
        stage.count(work.end)

    now = 0.0
    while True:
        for index in range(len(stages)):
            begin(index, now)
        if not events:
            break
        now = events[0][0]
        while events and events[0][0] == now:
            end(heapq.heappop(events)[1])
    assert not any(stage.order for stage in stages), "the orders deadlock"
    return Run(tuple(works), tuple(tuple(s.held) for s in stages), tuple(tuple(s.late) for s in stages))


def _needs(kind: str, m: int, stage: int, num_stages: int) -> set[tuple[str, int, int]]:
    """The actions that have to have ended before one begins."""
    if kind == "F":
        return {("F", m, stage - 1)} if stage else set()
    return {("F", m, stage), *[("B", m, stage + 1)] * (stage + 1 < num_stages)}


def pipedream(num_stages: int, num_microbatches: int) -> Run:
    """PipeDream: an update after every backward, and no flush."""
    return simulate([one_f_one_b(num_stages, k, 0, num_microbatches) for k in range(num_stages)], 1)


def with_flush(num_stages: int, num_microbatches: int, steps: int) -> Run:
    """1F1B: an update a step, when its micro-batches are all through (PipeDream-Flush)."""
    bounds = [(step * num_microbatches, (step + 1) * num_microbatches) for step in range(steps)]
    orders = [[item for bound in bounds for item in one_f_one_b(num_stages, k, *bound)] for k in range(num_stages)]
    return simulate(orders, num_microbatches)


def by_jpipe(num_stages: int, num_microbatches: int, steps: int) -> Run:
    """The steps of jpipe's own "1f1b", one after the other, as `jpipe.simulate` times them."""
    schedule = jpipe.make_schedule("1f1b", num_stages=num_stages, num_microbatches=num_microbatches)
    timeline = jpipe.simulate(schedule, TIMES["F"], TIMES["B"])
    works = [
        Work(span.stage, action.kind, m + action.microbatch, start + span.start, start + span.end, step)
        for step in range(steps)
        for start, m in [(step * timeline.makespan, step * num_microbatches)]
        for span in timeline.spans
        for action in [span.action]
    ]
    once = [(0,) * num_microbatches * steps] * num_stages  # a step begins when all stages have updated
    return Run(tuple(works), (((0.0, 1),),) * num_stages, tuple(once))


# --- the table --------------------------------------------------------------------------------------------------------

COLUMNS = ("stage", "versions held", "updates late", "busy", "versions held, 1F1B", "updates late, 1F1B", "busy, 1F1B")


def rows(num_stages: int, num_microbatches: int) -> list[tuple[str, ...]]:
    """A row for each stage: PipeDream while its pipeline is full, then 1F1B in steps of M micro-batches."""
    enough = 4 * max(num_stages, num_microbatches)  # to fill the pipeline
    alone, flushed = pipedream(num_stages, enough), with_flush(num_stages, num_microbatches, 3)
    busy = alone.busy(*alone.full()), flushed.busy(0, flushed.makespan)
    found = []
    for k in range(num_stages):
        cells = [
            (str(max(count for _, count in run.held[k])), str(max(run.late[k])), f"{100 * share[k]:.1f} %")
            for run, share in zip((alone, flushed), busy, strict=True)
        ]
        found.append((str(k), *cells[0], *cells[1]))
    return found


def show(columns: Sequence[str], lines: Sequence[Sequence[str]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    Console().print(table)


# --- the picture ------------------------------------------------------------------------------------------------------


def draw(path: str, num_stages: int = 4, num_microbatches: int = 6, steps: int = 2) -> Any:
    """PipeDream above, jpipe's 1F1B below, each over the weight versions that its stages hold."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    above, below = pipedream(num_stages, 2 * steps * num_microbatches), by_jpipe(num_stages, num_microbatches, steps)
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    axes = figure.subplots(4, sharex=True, height_ratios=(4, 2.2, 4, 2.2))
    axes[0].set_xlim(0, below.makespan)
    for run, bars, memory in zip((above, below), axes[::2], axes[1::2], strict=True):
        _draw_bars(bars, run)
        _draw_versions(memory, run, num_stages)
    titles = {
        0: "PipeDream: a stage updates its weights after each of its backwards; once full, nobody waits",
        2: "jpipe's 1F1B: all stages update when a batch is through, and then begin the next (flush)",
    }
    for index, title in titles.items():
        axes[index].set_title(title, fontsize=10, fontweight="bold", loc="left")
    _ring(axes[0], above, microbatch=6)
    for step in range(1, steps + 1):
        end = step * below.makespan / steps
        axes[2].axvline(end, color="black", linewidth=2, zorder=5)
        words = f"all update:\nw{step - 1} becomes w{step}"
        axes[2].text(end - 0.3, num_stages - 1, words, fontsize=7.5, ha="right", va="center")
    axes[3].set_xlabel("time (1 = the forward of one micro-batch on one stage)", fontsize=8)
    entries = [Patch(facecolor=figures.COLOURS[name[0].upper()], label=name) for name in ("forward", "backward")]
    entries.append(Patch(facecolor=figures.BUBBLE, label="bubble: stage waits"))
    entries.append(Patch(facecolor=figures.MEMORY, label="weight versions held"))
    words = (
        "In each bar the micro-batch, below it the version of the stage's weights that it uses (w3: after 3 updates)"
    )
    place = {"loc": "outside lower center", "ncols": 4, "frameon": False, "fontsize": 8}
    figure.legend(handles=entries, title=words, title_fontsize=8, **place)
    figure.savefig(path, dpi=130)
    return figure


def _draw_bars(axes: Any, run: Run) -> None:
    limit = axes.get_xlim()[1]
    for stage in range(run.num_stages):
        axes.barh(stage, limit, height=0.86, color=figures.BUBBLE, zorder=0.5)
    for work in [work for work in run.works if work.start < limit]:
        colour = figures.COLOURS[work.kind]
        width, middle = work.end - work.start, (work.start + work.end) / 2
        axes.barh(work.stage, width, left=work.start, height=0.86, color=colour, edgecolor="white", linewidth=0.7)
        look = {"color": figures.text_colour(colour), "ha": "center", "va": "center", "clip_on": True}
        axes.text(middle, work.stage - 0.17, str(work.microbatch), fontsize=7.5, fontweight="bold", **look)
        fits = 6 if width > 1 or work.version < 10 else 4.8
        axes.text(middle, work.stage + 0.23, f"w{work.version}", fontsize=fits, **look)
    _finish(axes, run)


def _draw_versions(axes: Any, run: Run, scale: int) -> None:
    limit = axes.get_xlim()[1]
    for stage, held in enumerate(run.held):
        counts = [(time, count) for time, count in held if time < limit]
        base, times = stage + 0.43, [time for time, _ in counts]
        heights = [base - 0.86 * count / scale for _, count in counts]
        axes.barh(stage, limit, height=0.86, color=figures.SCALE, zorder=0.5)
        axes.stairs(heights, [*times, limit], baseline=base, fill=True, color=figures.MEMORY)
        most = max(count for _, count in held)
        _beside(axes, stage, f"{most} version" + "s" * (most > 1))
    _finish(axes, run)


def _beside(axes: Any, stage: float, words: str) -> None:
    place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    axes.annotate(words, (axes.get_xlim()[1], stage), fontsize=7.5, **place)


def _finish(axes: Any, run: Run) -> None:
    figures.label_stages(axes, run.num_stages)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(bottom=False)


def _ring(axes: Any, run: Run, microbatch: int) -> None:
    """Frames a micro-batch's forward and backward on the first stage, and says how late its gradient comes."""
    works = [work for work in run.works if (work.stage, work.microbatch) == (0, microbatch)]
    for work in works:
        look = {"fill": False, "edgecolor": "black", "linewidth": 2.2, "zorder": 5}
        axes.barh(0, work.end - work.start, left=work.start, height=0.86, **look)
    used, late = works[0].version, run.late[0][microbatch]
    words = f"In frames: micro-batch {microbatch}\non stage 0 uses w{used}. Its\ngradient changes w{used + late},"
    _beside(axes, 0.35, f"{words}\n{late} updates later.")


# --- late gradients ---------------------------------------------------------------------------------------------------


def loss_and_gradients(weights: Sequence[np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """Squared error of the chain of layers `x + x w`, one a stage, `[B, D]` to `[B, D]`, and its gradients."""
    inputs = [x]
    for w in weights:
        inputs.append(inputs[-1] + inputs[-1] @ w)
    cotangent = 2 * (inputs[-1] - y) / len(x)
    gradients = []
    for w, h in zip(reversed(weights), reversed(inputs[:-1]), strict=True):
        gradients.append(h.T @ cotangent)
        cotangent = cotangent + cotangent @ w.T
    return float(np.mean(np.sum((inputs[-1] - y) ** 2, axis=-1))), gradients[::-1]


def train(run: Run, rate: float, width: int = 8) -> np.ndarray:
    """Losses `[M]` of gradient descent, an update a micro-batch, each stage at the weight versions that a run used.

    All micro-batches are one and the same, so that nothing but the delay makes a difference; the targets are those of
    such a chain, so that the loss can become 0.
    """
    random = np.random.default_rng(0)
    teacher = 0.05 * random.standard_normal((run.num_stages, width, width))
    x = random.standard_normal((64, width))
    y = x
    for w in teacher:
        y = y + y @ w
    history = [[np.zeros((width, width))] for _ in teacher]
    losses = []
    for m in range(len(run.late[0])):
        versions = run.versions(m)
        loss, gradients = loss_and_gradients([history[k][v] for k, v in enumerate(versions)], x, y)
        losses.append(loss)
        for own, gradient in zip(history, gradients, strict=True):
            own.append(own[-1] - rate * gradient)
    return np.asarray(losses)


RATES = (0.002, 0.005, 0.01, 0.02)
TRAINING_COLUMNS = ("learning rate", "none late", "PipeDream")


def training_rows(num_stages: int = 8, updates: int = 200) -> list[tuple[str, ...]]:
    """For each learning rate after how many updates the loss is a hundredth, with none late and by PipeDream."""
    runs = with_flush(num_stages, 1, updates), pipedream(num_stages, updates)
    found = []
    for rate in RATES:
        reached = []
        for run in runs:
            losses = train(run, rate)
            below = np.flatnonzero(losses < losses[0] / 100)
            reached.append(str(below[0]) if below.size else "never")
        found.append((f"{rate:g}", *reached))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", nargs="?", default=str(PICTURE), help="where to save it (default %(default)s)")
    parser.add_argument("--stages", type=int, default=4, help="K of the table (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="M of 1F1B's steps (default %(default)s)")
    parser.add_argument("--train", action="store_true", help="train a small regression instead, K=8")
    options = parser.parse_args()
    if options.train:
        show(TRAINING_COLUMNS, training_rows(), "Updates until the loss is a hundredth of the first, of 200; K=8")
        return
    title = f"K={options.stages}; 1F1B in steps of M={options.microbatches}"
    show(COLUMNS, rows(options.stages, options.microbatches), title)
    draw(options.picture)


if __name__ == "__main__":
    main()
