"""Prints the tables of a profile: stages, processes, slices, sizes of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpipe.pictures.tables import Table
from jpipe.planning.partition import Partition
from jpipe.profiling.changes import MicrobatchSize
from jpipe.profiling.hosts import ProcessTime
from jpipe.profiling.prediction import StageTimes
from jpipe.schedules.schedule import Schedule


def stage_table(
    schedule: Schedule,
    cut: Partition,
    stages: StageTimes,
    in_flight: Sequence[int],
    processes: Sequence[ProcessTime] = (),
) -> Table:
    """A row for each stage: its layers, and its milliseconds for one micro-batch."""
    total, rows = np.asarray(stages.total), []
    for stage in range(schedule.num_stages):
        times = (stages.forward[stage], stages.backward[stage], stages.recompute[stage], total[stage])
        rows.append(
            (
                str(stage),
                ", ".join(text for s, text in enumerate(cut.ranges) if schedule.placement.stage_of(s) == stage),
                *(_milliseconds(seconds) for seconds in times),
                f"{total[stage] / total.mean():.2f}",
                str(in_flight[stage]),
            )
        )
    header = ("stage", "layers", "forward", "backward", "recompute", "all", "of mean", "in flight")
    slowest = int(total.argmax())
    at_work = ", ".join(str(process) for process in processes if slowest in process.stages)
    marks = {slowest: f"slowest: {at_work}" if at_work else "slowest"} if total.max() > 1.02 * total.mean() else {}
    return Table("Stages: milliseconds for one micro-batch, each stage alone", header, rows, marks)


def process_table(processes: Sequence[ProcessTime]) -> Table:
    """A row for each process: its machine, its stages, and its milliseconds for all layers of the model."""
    rows = [
        (
            str(own.process),
            own.host,
            ", ".join(map(str, own.stages)),
            _milliseconds(own.seconds),
            f"{own.of_median:.2f}",
        )
        for own in processes
    ]
    slowest = max(range(len(processes)), key=lambda p: processes[p].seconds)
    marks = {slowest: "slowest"} if processes[slowest].of_median > 1.02 else {}
    title = "Processes: milliseconds for all layers of a micro-batch, each process alone on one of its devices"
    return Table(title, ("process", "host", "stages", "all layers", "of median"), rows, marks)


def slice_table(slices: dict[str, float], step: float, predicted: float, noise: float) -> Table:
    """A row for each slice of the step."""
    share = lambda seconds: f"{seconds / step:.1%}" if step else "-"
    rows = [(name, _milliseconds(seconds), share(seconds)) for name, seconds in slices.items()]
    times = f"{step / predicted:.2f}" if predicted else "-"
    note = (
        f"predicted from stages alone: {_milliseconds(predicted)} ms, measured {times} times that; "
        f"rounds differ by {noise:.0%}"
    )
    return Table(
        "A training step, by what its time goes into",
        ("slice", "ms", "share"),
        [*rows, ("step", _milliseconds(step), f"{1:.1%}")],
        {},
        [note],
    )


def size_table(sizes: Sequence[MicrobatchSize], num_microbatches: int) -> Table:
    """A row for each number of micro-batches."""
    header = ("M", "examples", "ms an example", "bubble", "step ms")
    rows = [
        (
            str(size.num_microbatches),
            str(size.size),
            _milliseconds(size.sample_seconds),
            f"{size.bubble:.1%}",
            _milliseconds(size.step),
        )
        for size in sizes
    ]
    told = lambda size: "measured" if size.num_microbatches == num_microbatches else "predicted"
    marks = dict(enumerate(map(told, sizes)))
    return Table("Numbers of micro-batches of the same batch", header, rows, marks)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds >= 5e-7 else "0"
