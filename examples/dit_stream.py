"""A diffusion Transformer of 40 equal blocks that serves a queue: `python examples/dit_stream.py`, or `--help`.

A request is a micro-batch: noisy latents, their time and class. B of them stream through P stages in one call of
`pipe.apply`, in B+P-1 ticks, so stages are busy for B/(B+P-1) of the time. Throughput wants a deep queue; the first
request has left after P ticks, however deep. Both are simulated and, where each stage has an accelerator or a core to
itself, measured: the last layer is a clock. (P and B are K and M elsewhere.)
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cluster
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from models import dit
from rich.console import Console
from rich.table import Table

import jpipe
from jpipe.tools import figures

TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 0.1}
console = Console(width=None if os.environ.get("COLUMNS") else 120)
Inputs = tuple[Any, Any, Any]  # latents [N, H, H, 4], times [N], classes [N]


class Point(NamedTuple):
    """A queue, served: the share of time in which stages are busy, seconds until its first and its last have left."""

    busy: float
    first: float
    last: float


UNKNOWN = Point(np.nan, np.nan, np.nan)


class Row(NamedTuple):
    """P, B, the images in the queue; what was simulated and what was measured, NaN where it wasn't."""

    stages: int
    depth: int
    images: int
    simulated: Point
    measured: Point


def make_layers(options: argparse.Namespace, left: list[float]) -> list[Any]:
    """The model, and after it a clock: whenever a micro-batch leaves, the time is added to `left`."""

    def clock(noise):
        jax.debug.callback(lambda _: left.append(time.perf_counter()), noise[0, 0, 0, 0])
        return noise

    start = nn.initializers.normal(0.02)  # an untrained DiT's modulations are zeros, and so would all outputs be
    layers = dit.dit(options.blocks, options.width, options.heads, start=start, dtype=options.dtype)
    return [*layers, clock] if jax.process_count() == 1 else layers  # else another process may have the last stage


def make_batch(images: int, options: argparse.Namespace) -> dict[str, Any]:
    random, dtype = np.random.default_rng(0), jnp.promote_types(options.dtype, "float32")
    latents = random.standard_normal((images, options.side, options.side, 4)).astype(dtype)
    times, classes = random.integers(0, 1000, (2, images))
    return {"inputs": (latents, times.astype(dtype), classes.astype("int32")), "targets": latents}


class Stream:
    """The model in P stages, with a pipeline for each depth of the queue, all with the same variables."""

    def __init__(self, stages: int, options: argparse.Namespace):
        self.stages, self.options, self.mesh = stages, options, cluster.make_mesh(stages)
        self.request = options.request * (self.mesh.shape.get("data", 1) if self.mesh else 1)
        self.left: list[float] = []
        self.layers, self.variables = make_layers(options, self.left), None
        self._queue = cache(self._make_queue)

    def queue(self, depth: int, images: int | None = None) -> tuple[jpipe.Pipeline, Inputs]:
        """A pipeline for B requests, and these: so many images, by default `request` in each; made once."""
        return self._queue(depth, depth * self.request if images is None else images)

    def _make_queue(self, depth: int, images: int) -> tuple[jpipe.Pipeline, Inputs]:
        sizes = {"num_stages": self.stages, "num_microbatches": depth}
        pipe = jpipe.Pipeline(self.layers, dit.loss_fn, **sizes, mesh=self.mesh)
        batch = make_batch(images, self.options)
        jax.eval_shape(pipe.init, jax.random.key(0), batch)  # computes nothing: shapes decide the cut
        if self.variables is None:
            self.variables = pipe.init(jax.random.key(0), batch)
        own = cluster.rows(len(batch["targets"]), pipe.data_shard)
        return pipe, pipe.place(jax.tree.map(lambda a: a[own], batch["inputs"]))

    def difference(self, depth: int) -> float:
        """The largest from the plain model's outputs, of the largest of these."""
        pipe, inputs = self.queue(depth)
        trees, whole = jax.device_get((pipe.layer_variables(self.variables), inputs))
        wanted = np.asarray(jax.jit(lambda *x: run_plain(self.layers, *x))(trees, whole), "float64")
        got = np.asarray(pipe.apply(self.variables, inputs), "float64")
        return float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))

    def measure(self, depths: Sequence[int]) -> dict[int, Point]:
        """The shortest of some calls for each depth, and for a depth of 1, by turns.

        A request alone keeps one stage busy at a time, so the stages' busy time in a call is B times what that takes.
        """
        calls: dict[int, list[tuple[float, float]]] = {depth: [] for depth in sorted({1, *depths})}
        for turn in range(self.options.repeats + 1):
            for depth, found in calls.items():
                pipe, inputs = self.queue(depth)
                self.left.clear()
                begin = time.perf_counter()
                jax.block_until_ready(pipe.apply(self.variables, inputs))
                last = time.perf_counter() - begin
                jax.effects_barrier()
                found += [(last, min(self.left, default=np.nan) - begin)] * (turn > 0)  # the first compiles
        shortest = {depth: min(found) for depth, found in calls.items()}
        busy = lambda depth, last: depth * shortest[1][0] / (self.stages * last)
        return {depth: Point(busy(depth, last), first, last) for depth, (last, first) in shortest.items()}

    def rows(self) -> list[Row]:
        """A row for each depth; measured where each stage has a core, or an accelerator, to itself."""
        pipe, _ = self.queue(1)
        alone = jax.default_backend() != "cpu" or pipe.mesh.size <= (os.cpu_count() or 1)
        measured, costs = self.measure(self.options.depths if alone else []), pipe.partition.costs
        seconds = [measured[1].last * cost / sum(costs) for cost in costs]
        of = lambda depth: (depth * self.request, simulate(depth, seconds), measured.get(depth, UNKNOWN))
        return [Row(self.stages, depth, *of(depth)) for depth in self.options.depths]


def simulate(depth: int, seconds: Sequence[float]) -> Point:
    """B requests, by the schedule that `apply` follows, through stages that take so many seconds each."""
    schedule = jpipe.make_schedule("forward", num_stages=len(seconds), num_microbatches=depth)
    timeline = jpipe.simulate(schedule, seconds)
    return Point(1 - timeline.bubble_fraction, timeline.of_stages[-1][0].end, timeline.makespan)


def run_plain(layers: list[Any], trees: list[Any], inputs: Inputs) -> Any:
    """The model without jpipe: each layer applied in turn."""
    x: Any = inputs
    for layer, item in zip(layers, trees, strict=True):
        x = layer.apply(item, *x) if isinstance(layer, nn.Module) else x
    return x


def serve(stream: Stream, options: argparse.Namespace) -> None:
    """Draws images from noise in the deepest queue, as `--steps` asks for."""
    depth = max(options.depths)
    pipe, (noise, _, classes) = stream.queue(depth, options.images)
    drawn = jax.jit(lambda variables, *x: dit.sample(lambda now: pipe.apply(variables, now), *x, options.steps))
    for _ in range(2):  # the first compiles
        begin = time.perf_counter()
        jax.block_until_ready(drawn(stream.variables, noise, classes))
    seconds, images = time.perf_counter() - begin, len(noise)
    what = f"{images} images by {options.steps} steps of DDIM, P={stream.stages}, B={depth}"
    console.print(f"{what}: {seconds:.2f} s, {images / seconds:.2f} images/s.")


FIGURES: dict[str, Callable[[Row, Point], float]] = {
    "busy, %": lambda row, point: 100 * point.busy,
    "images/s": lambda row, point: row.images / point.last,
    "first out, ms": lambda row, point: 1e3 * point.first,
    "last out, ms": lambda row, point: 1e3 * point.last,
}
CAPTION = """\
Simulated: stages take their parts, by FLOPs, of what one request alone took. Measured: the shortest of some calls; busy
is B times what one request alone took, over P times the call. -: stages share cores, so that seconds tell nothing."""


def show(rows: list[Row], options: argparse.Namespace) -> None:
    size = f"{options.blocks} blocks of width {options.width}, latents {options.side}x{options.side}x4"
    table = Table(title=f"DiT, {size} ({jax.devices()[0].device_kind})", caption=CAPTION, caption_justify="left")
    for name in ("P", "B", "B/(B+P-1)", *(f"{name},\n{how}" for name in FIGURES for how in ("simulated", "measured"))):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{of(row, point):.1f}" for of in FIGURES.values() for point in (row.simulated, row.measured)]
        cells = [row.stages, row.depth, f"{row.depth / (row.depth + row.stages - 1):.1%}", *cells]
        last = row.depth == options.depths[-1]
        table.add_row(*(str(cell).replace("nan", "-") for cell in cells), end_section=last)
    console.print(table)


KINDS = "FBWI"  # whose colours pictures have, one for each P


def draw(rows: list[Row], path: Path) -> None:
    """Busy time and throughput by depth for each P, latency for the last that was measured throughout, or the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    busy, speed, latency = figure.subplots(1, 3)
    groups = {row.stages: [other for other in rows if other.stages == row.stages] for row in rows}
    for (stages, own), kind in zip(groups.items(), KINDS[: len(groups)], strict=True):
        depths = np.geomspace(1, own[-1].depth)
        busy.plot(depths, 100 * depths / (depths + stages - 1), color=figures.COLOURS[kind])
        for axes, name, style in ((busy, "busy, %", "o"), (speed, "images/s", "o-")):
            curve(axes, own, name, style, figures.COLOURS[kind], f"{stages} stages")
    whole = [own for own in groups.values() if not any(np.isnan(row.measured.last) for row in own)]
    chosen = whole[-1] if whole else next(iter(groups.values()))
    for name, colour in (("first out, ms", figures.COLOURS["I"]), ("last out, ms", figures.MEMORY)):
        curve(latency, chosen, name, "o-", colour, name.partition(",")[0])
    titles = (
        "Share of time for which stages work, %,\nand as lines B/(B+P-1)",
        "Images a second",
        f"Milliseconds until requests are out,\n{chosen[0].stages} stages",
    )
    for axes, title in zip((busy, speed, latency), titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks([row.depth for row in chosen], [row.depth for row in chosen])
        axes.set_ylim(0)
        axes.set_title(title, fontsize=figures.TITLE)
        axes.set_xlabel("B, requests in the queue (rings: simulated, diamonds: measured)", fontsize=figures.TEXT)
        axes.legend(frameon=False, fontsize=figures.TEXT)
    figure.savefig(path, dpi=120)


def curve(axes: Any, rows: list[Row], name: str, style: str, colour: figures.RGB, label: str) -> None:
    depths, of = [row.depth for row in rows], FIGURES[name]
    simulated, measured = ([of(row, getattr(row, how)) for row in rows] for how in Row._fields[-2:])
    axes.plot(depths, simulated, style, color=colour, markerfacecolor="white", label=label)
    axes.plot(depths, measured, "D", color=colour, markersize=5)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", help="P, one after the other (default: of 2, 4, 8 what fits)")
    depths = {"type": int, "nargs": "+", "default": [1, 2, 4, 8, 16, 32]}
    parser.add_argument("--depths", **depths, help="B, one after the other (default %(default)s)")
    parser.add_argument("--request", type=int, default=1, help="images in a request (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=40, help="(default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the hidden states (default %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--side", type=int, default=16, help="of the latents (default %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="of DDIM, to draw images by in the deepest queue")
    parser.add_argument("--dtype", default="float32", choices=TOLERANCE, help="to compute in (default %(default)s)")
    parser.add_argument("--images", type=int, help="to draw (default: as many as the deepest queue has)")
    parser.add_argument("--picture", type=Path, help="a file to draw the table in; needs jpipe[plot]")
    cluster.add_options(parser)
    options = parser.parse_args(arguments)
    options.depths.sort()
    if options.picture and len(set(options.stages or ())) > len(KINDS):
        parser.error(f"--picture has colours for {len(KINDS)} of --stages {options.stages}; give fewer")
    return options


def run(options: argparse.Namespace) -> list[Row]:
    rows = []
    for stages in options.stages or [p for p in (2, 4, 8) if p <= jax.device_count()] or [1]:
        stream = Stream(stages, options)
        if jax.process_count() == 1:
            worst, most = stream.difference(max(options.depths)), TOLERANCE[options.dtype]
            if not worst <= most:
                raise SystemExit(f"the pipeline isn't the plain model: they differ by {worst:.0e}, more than {most}")
            console.print(f"P={stages}: outputs equal the plain model's within {worst:.0e} ({options.dtype}).")
        if options.steps:
            serve(stream, options)
        rows += stream.rows()
    return rows


def main() -> None:
    options = parse_options()
    # A simulated device is one thread, so that stages don't take one another's cores.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    jax.config.update("jax_enable_x64", options.dtype == "float64")
    cluster.join(options, console, max(options.stages or [8]))
    try:
        rows = run(options)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    show(rows, options)
    if options.picture and jax.process_index() == 0:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
