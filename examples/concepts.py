"""Draws the pictures of docs/concepts.md and docs/schedules.md: the bubble, micro-batches, memory, chunks, schedules.

    python examples/concepts.py [folder]

Needs `pip install 'jpipe[plot]'`, and no devices: schedules are data.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import published_orders

import jpipe
from jpipe.tools.figures import write_beside

WIDTH = 6  # inches: legible on a telephone


def bubble() -> Any:
    """Each stage works for 12 units and waits for 6, wherever in time."""
    figure = jpipe.compare(["gpipe"], num_stages=3, num_microbatches=4, width=WIDTH, memory=False)
    timeline = jpipe.simulate(jpipe.make_schedule("gpipe", num_stages=3, num_microbatches=4))
    for stage, busy in enumerate(timeline.busy):
        write_beside(figure.axes[0], f"waits {timeline.makespan - busy:g}", (timeline.makespan, stage))
    return figure


def microbatches() -> Any:
    """One batch, whole or cut: its forward takes 8 on each stage."""
    timelines = []
    for count in (1, 4, 16):
        schedule = jpipe.make_schedule("gpipe", num_stages=4, num_microbatches=count)
        timelines.append(jpipe.simulate(schedule, forward=8 / count, backward=16 / count))
    return jpipe.compare(timelines, width=WIDTH, memory=False, unit="8 = the forward of the whole batch on one stage")


def memory() -> Any:
    """The same time, and other numbers of micro-batches in flight."""
    return jpipe.compare(["gpipe", "1f1b"], num_stages=3, num_microbatches=8, width=WIDTH)


def chunks() -> Any:
    """The same stages with one chunk and with two."""
    return jpipe.compare(["1f1b", "interleaved"], num_stages=4, num_microbatches=4, width=WIDTH, memory=False)


def simple() -> Any:
    """The schedules that are there to compare with, and inference."""
    sizes = {"num_stages": 4, "num_microbatches": 4}
    return jpipe.compare(["naive", "gpipe", "forward"], **sizes, width=WIDTH, memory=False)


def schedules() -> Any:
    """Those to train with, and what they hold."""
    names = ["1f1b", "interleaved", "v", "zero_bubble"]
    return jpipe.compare(names, num_stages=4, num_microbatches=8, width=WIDTH)


def published() -> Any:
    """Those of papers."""
    orders = [make(4, 8) for make in published_orders.PUBLISHED.values()]
    return jpipe.compare(orders, width=WIDTH, memory=False)


PICTURES: dict[str, Callable[[], Any]] = {
    "bubble": bubble,
    "microbatches": microbatches,
    "memory": memory,
    "chunks": chunks,
    "simple": simple,
    "schedules": schedules,
    "published": published,
}


def draw(folder: str | Path) -> None:
    for name, picture in PICTURES.items():
        picture().savefig(Path(folder) / f"concepts-{name}.png", dpi=180)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs")
