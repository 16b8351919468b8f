"""Tables 2 and 3 of the GPipe paper, and its breakdown of a step, beside what layers' costs and the schedule predict.

The paper's models are planned from shapes alone: FLOPs of every layer, the best cut into K stages, then the simulator,
with GPipe's schedule and rematerialisation. Nothing is fitted to the paper's throughputs, and only FLOPs take time: no
transfer, no update, and a micro-batch costs by the example whatever its size. Residuals say how far that goes.

    python benchmarks/paper_tables.py [--markdown]
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import on_cpu, show

import jpipe
from jpipe.planning.costs import Cost
from jpipe.tools.measure import StageTimes, StepModel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import amoebanet, transformer_l

STAGES = (2, 4, 8)
TABLE_2 = {  # throughput by K and M, relative to K=2, M=1, on TPUs
    "AmoebaNet-D (18, 256)": {1: (1, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)},
    "Transformer-48": {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)},
}
TABLE_3 = {  # throughput by K with M=32, relative to K=2, on P100 GPUs over PCI-E
    "AmoebaNet-D (18, 128)": (1, 1.7, 2.7),
    "Transformer-24": (1, 1.8, 3.3),
}
BREAKDOWN = {  # of a step's time, in percent (NeurIPS version)
    "computation": 65.6,
    "recomputation": 22.5,
    "bubble": 4.1,
    "load imbalance": 3.2,
    "setup": 2.9,
    "weight update": 1.7,
}
COMPARED = tuple(BREAKDOWN)[:4]  # the others aren't simulated


@dataclass(frozen=True)
class Table:
    """A table, for the terminal or the documentation."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str

    def markdown(self) -> list[str]:
        """Its lines as the documentation has them."""
        head, *rows = (f"| {' | '.join(cells)} |" for cells in (self.columns, *self.rows))
        return [head, "|---" * len(self.columns) + "|", *rows]


# --- the models -------------------------------------------------------------------------------------------------------


@cache
def costs_of(model: str, remat: str = "stage") -> tuple[Cost, ...]:
    """The FLOPs of each layer for one micro-batch, under GPipe's remat; from shapes, so nothing is allocated."""
    shape = jax.ShapeDtypeStruct
    if model.startswith("Transformer-"):  # table 1's sizes: 2048 wide, 8192 in between, 32 heads, 32k tokens
        layers, loss_fn = transformer_l.transformer_l(int(model.partition("-")[2])), transformer_l.loss_fn
        batch = {name: shape((1, 1024), jnp.int32) for name in ("inputs", "targets")}
    else:
        num_layers, filters = map(int, model.partition("(")[2].rstrip(")").split(","))
        layers, loss_fn = amoebanet.amoebanet(num_layers, filters), amoebanet.loss_fn
        batch = {"inputs": shape((4, 224, 224, 3), jnp.float32), "targets": shape((4,), jnp.int32)}
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=1, num_microbatches=1, schedule="gpipe", remat=remat)
    jax.eval_shape(pipe.init, jax.random.key(0), batch)
    return pipe.plan.costs


def cut(costs: Sequence[Cost], num_stages: int, objective: str = "max") -> jpipe.Partition:
    return jpipe.partition([cost.total for cost in costs], num_stages, objective)


# --- the prediction ---------------------------------------------------------------------------------------------------


def stage_times(costs: Sequence[Cost], partition: jpipe.Partition) -> StageTimes:
    """FLOPs of each stage of a model with the remat "stage", whose backward computes its forward once more."""
    stages = [costs[start:stop] for start, stop in partition.bounds]
    forward = np.array([sum(cost.forward for cost in stage) for stage in stages])
    total = np.array([sum(cost.total for cost in stage) for stage in stages])
    return StageTimes(forward, total - 2 * forward, recompute=forward, weight=np.zeros(len(stages)))


def gpipe(times: StageTimes, num_microbatches: int) -> jpipe.Schedule:
    return jpipe.make_schedule("gpipe", num_stages=len(times.forward), num_microbatches=num_microbatches)


def throughput(times: StageTimes, num_microbatches: int) -> float:
    """Micro-batches in the time that all stages' work on one of them takes.

    That is relative to M=1 with any K, where the stages work one after the other: K=2, M=1 in table 2.
    """
    return num_microbatches * sum(times.total) / times.timeline(gpipe(times, num_microbatches)).makespan


def slices(times: StageTimes, num_microbatches: int) -> dict[str, float]:
    """Shares of the stages' time in a step, in percent, as `jpipe.profile` has them where only stages take time."""
    schedule = gpipe(times, num_microbatches)
    model = StepModel(schedule, times, measured=times.timeline(schedule).makespan, update=0.0, idle=0.0)
    cost = model.what_if()
    return {name: 100 * seconds / cost.step for name, seconds in zip(COMPARED, cost.seconds.values(), strict=False)}


# --- the tables -------------------------------------------------------------------------------------------------------


def balanced(num_stages: int, num_microbatches: int) -> float:
    """`throughput` of equal stages: no cut gives more."""
    return num_stages * num_microbatches / (num_microbatches + num_stages - 1)


def imbalance_for(num_stages: int, num_microbatches: int, wanted: float) -> float:
    """The slowest stage over the mean that would give a throughput, if nothing else were in the way."""
    return num_stages * (num_microbatches / wanted - 1) / (num_microbatches - 1)


def beside(predicted: float, paper: float, most: float = float("inf")) -> str:
    """Predicted / paper = residual; starred where the paper has more than there can be."""
    return f"{predicted:.2f} / {paper:g} = {predicted / paper:.2f}" + "*" * (paper > most + 0.005)


def table_2(models: Sequence[str] = tuple(TABLE_2)) -> Table:
    rows = []
    for model in models:
        for i, k in enumerate(STAGES):
            partition = cut(costs_of(model), k)
            times = stage_times(costs_of(model), partition)
            counts = " ".join(map(str, partition.counts))
            cells = [beside(throughput(times, m), paper[i], balanced(k, m)) for m, paper in TABLE_2[model].items()]
            needed = f"{imbalance_for(k, 32, TABLE_2[model][32][i]):.2f}"
            rows.append((f"{model}, K={k}", counts, f"{partition.imbalance:.3f}", *cells, needed))
    columns = ("Table 2, TPU", "layers a stage", "slowest / mean", "M=1", "M=4", "M=32", "for the paper's M=32")
    caption = (
        "Relative to K=2, M=1; predicted / paper = residual. *: the paper's is above KM/(M+K-1), which no cut gives. "
        "Last: the slowest / mean that would give the paper's M=32, if nothing else were in the way"
    )
    return Table("Table 2: throughput", columns, tuple(rows), caption)


def table_3(models: Sequence[str] = tuple(TABLE_3)) -> Table:
    rows = []
    for model in models:
        runs = [throughput(stage_times(costs_of(model), cut(costs_of(model), k)), 32) for k in STAGES]
        rows.append((model, *(beside(run / runs[0], p) for run, p in zip(runs, TABLE_3[model], strict=True))))
    caption = "M=32, relative to K=2 (two GPUs, not one); predicted / paper = residual"
    return Table("Table 3: throughput", ("Table 3, P100", *(f"K={k}" for k in STAGES)), tuple(rows), caption)


def own_table(models: Sequence[str] = tuple(TABLE_2)) -> Table:
    """What micro-batches alone give, without what more devices give at M=1."""
    rows = []
    for model in models:
        paper = TABLE_2[model]
        found = [throughput(stage_times(costs_of(model), cut(costs_of(model), k)), 32) for k in STAGES]
        gains = [many / one for one, many in zip(paper[1], paper[32], strict=True)]
        rows.append((model, *(f"{f:.2f} / {g:.2f} = {f / g:.2f}" for f, g in zip(found, gains, strict=True))))
    caption = "Throughput of M=32 over M=1 with the same K, from table 2; predicted / paper = residual"
    return Table("M=32 over M=1", ("M=32 over M=1", *(f"K={k}" for k in STAGES)), tuple(rows), caption)


def compared() -> dict[str, float]:
    """The paper's shares of what is simulated, in percent of their sum."""
    total = sum(BREAKDOWN[name] for name in COMPARED)
    return {name: 100 * BREAKDOWN[name] / total for name in COMPARED}


def fitting_microbatches(num_stages: int) -> int:
    """The M with which equal stages have the paper's ratio of bubble to work."""
    work = BREAKDOWN["computation"] + BREAKDOWN["recomputation"]
    return round((num_stages - 1) * work / BREAKDOWN["bubble"])


def breakdown(models: Sequence[str] = tuple(TABLE_2)) -> Table:
    paper = compared()
    rows = [("the paper, of these four (baseline)", *(f"{share:.1f} %" for share in paper.values()))]
    for model in models:
        for k in STAGES:
            m = fitting_microbatches(k)
            found = slices(stage_times(costs_of(model), cut(costs_of(model), k)), m)
            cells = (f"{found[name]:.1f} % ({found[name] / paper[name]:.2f})" for name in COMPARED)
            rows.append((f"{model}, K={k}, M={m}", *cells))
    caption = "In brackets predicted / paper. M is chosen for the bubble, so that column isn't a prediction"
    return Table("Where a step's time goes", ("a step", *COMPARED), tuple(rows), caption)


def other_cuts() -> Iterator[str]:
    """Where the paper's objective, the least variance, cuts otherwise than the least maximum."""
    for model in (*TABLE_2, *TABLE_3):
        for k in STAGES:
            ours, theirs = (cut(costs_of(model), k, objective) for objective in ("max", "variance"))
            if ours.counts != theirs.counts:
                yield f"{model}, K={k}: {theirs.counts} instead of {ours.counts}, slowest / mean {theirs.imbalance:.3f}"


def main(arguments: Any = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", action="store_true", help="as benchmarks/results/paper_tables.md has them")
    options = parser.parse_args(arguments)
    on_cpu()
    for table in (table_2(), own_table(), table_3(), breakdown()):
        if options.markdown:
            print("\n".join([*table.markdown(), ""]))
        else:
            show(table.title, table.columns, table.rows, table.caption)
    print("Cut by the least variance, the paper's objective:", "; ".join(other_cuts()) or "the same stages")


if __name__ == "__main__":
    main()
