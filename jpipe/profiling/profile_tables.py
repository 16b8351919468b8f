"""Prints the tables of a profile: stages, processes, sizes of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpipe.planning.partition import Partition
from jpipe.profiling.changes import MicrobatchSize
from jpipe.profiling.hosts import ProcessTime
from jpipe.profiling.prediction import StageTimes
from jpipe.schedules.schedule import Schedule
from jpipe.terminal.tables import Table


def stage_table(
    schedule: Schedule, cut: Partition, stages: StageTimes, in_flight: Sequence[int], at_work: Sequence[ProcessTime]
) -> Table:
    """A row for each stage: its layers, and its milliseconds for one micro-batch."""
    total, rows = np.asarray(stages.total), []
    for stage in range(schedule.num_stages):
        times = (stages.forward[stage], stages.backward[stage], stages.recompute[stage], total[stage])
        layers = ", ".join(text for s, text in enumerate(cut.ranges) if schedule.placement.stage_of(s) == stage)
        of_mean = f"{total[stage] / total.mean():.2f}"
        rows.append((str(stage), layers, *map(_in_ms, times), of_mean, str(in_flight[stage])))
    header = ("stage", "layers", "forward", "backward", "recompute", "all", "of mean", "in flight")
    slowest = int(total.argmax())
    whose = ", ".join(str(process) for process in at_work if slowest in process.stages)
    marks = {slowest: f"slowest: {whose}" if whose else "slowest"} if total.max() > 1.02 * total.mean() else {}
    return Table("Stages: milliseconds for one micro-batch, each stage alone", header, rows, marks)


def process_table(processes: Sequence[ProcessTime]) -> Table:
    """A row for each process: its machine, its stages, and its milliseconds for all layers of the model."""
    rows = [
        (str(p.process), p.host, ", ".join(map(str, p.stages)), _in_ms(p.seconds), f"{p.of_median:.2f}")
        for p in processes
    ]
    slowest = max(range(len(processes)), key=lambda p: processes[p].seconds)
    marks = {slowest: "slowest"} if processes[slowest].of_median > 1.02 else {}
    title = "Processes: milliseconds for all layers of a micro-batch, each process alone on one of its devices"
    return Table(title, ("process", "host", "stages", "all layers", "of median"), rows, marks)


def prediction_in_words(step: float, predicted: float, noise: float) -> str:
    """The seconds of a step as predicted from stages alone, beside the measured ones."""
    times = f"{step / predicted:.2f}" if predicted else "-"
    alone = f"predicted from stages alone: {_in_ms(predicted)} ms"
    return f"{alone}, measured {times} times that; rounds differ by {noise:.0%}"


def size_table(sizes: Sequence[MicrobatchSize], num_microbatches: int) -> Table:
    """A row for each number of micro-batches."""
    header = ("M", "examples", "ms an example", "bubble", "step ms")
    rows = [
        (f"{s.num_microbatches}", f"{s.size}", _in_ms(s.sample_seconds), f"{s.bubble:.1%}", _in_ms(s.step))
        for s in sizes
    ]
    told = lambda size: "measured" if size.num_microbatches == num_microbatches else "predicted"
    marks = dict(enumerate(map(told, sizes)))
    return Table("Numbers of micro-batches of the same batch", header, rows, marks)


def _in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds >= 5e-7 else "0"
