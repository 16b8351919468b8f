"""`pipe.view()`: collects a pipeline's own numbers, and puts them into the page, an HTML file that needs no network.

All of these numbers follow from the plan and the planned step: nothing runs, and nothing is compiled but, for TPUs,
what planning a step compiles.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import os
import sys
import tempfile
import webbrowser
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

import jax
import numpy as np

from jpipe.checks import remat_name
from jpipe.jax.trees import bytes_of
from jpipe.planning.plan import Plan
from jpipe.planning.planner import Planner
from jpipe.schedules.orders import SCHEDULES
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.simulate import crossings_of
from jpipe.schedules.ticks import AWAY, TickTable, lower
from jpipe.tools.memory_model import held_by_device, held_by_stages, predict_memory
from jpipe.tools.summary import summarize
from jpipe.types import Batch

PipelineFacts = dict[str, object]
"""A pipeline's own numbers for `page.html`, as JSON; `facts_of` says which."""


def facts_of(planner: Planner, title: str, batch: Batch = None) -> PipelineFacts:
    """A pipeline's own numbers. Bytes are a device's, for one micro-batch where they depend on it.

    Args:
      planner: the pipeline's.
      title: the pipeline in a line.
      batch: a batch `[B, ...]`, or its shapes; None stands for the first one that the pipeline saw.

    Returns:
      table: its stages (`tools/summary.py`), with the pipeline in a line as its title.
      schedule: the name of its schedule.
      orders: `packed`, this schedule, which is called "own" if it isn't in `OFFERED`, and others that it may be
        compared with.
      num_stages, num_microbatches, num_chunks: K, M and V.
      batch: the number of examples in a batch.
      remat: its name.
      keeps_inputs: whether boundary inputs wait for the backward, and residuals for none.
      unit, times: the unit of the times; a sentence on where they come from.
      forward, backward, recompute: `[K]`, the times of one micro-batch on each stage; `recompute` is within `backward`,
        0 if it isn't known apart.
      parameters: at rest, as `_held` says.
      gradients, optimizer: the room for the sums of gradients while a step runs, and for the optimiser's state, if
        there is one; they are laid out as the parameters are.
      other: other collections, parameters that are gathered for a step, narrow copies of them, and the batch; as
        `parameters`.
      residuals: of each buffer of residuals, of which every micro-batch in flight has a row: what kind of rows
        (`ticks.ROWS`), and the bytes of one on each stage, `[K]`. Rows that go to the host count as if they stayed.
      activation, cotangent: a row of what waits at a boundary.
      passing: the other bytes at boundaries: a stage's own, and those on their way.
      work: the most that a layer holds while it runs.

    Raises:
      ValueError: there is no batch, so that nothing is planned yet.
    """
    schedule, splits, remat = planner.request.schedule, planner.request.splits, planner.request.remat
    K = schedule.num_stages
    plan = planner.known_plan() if batch is None else planner.plan_for(batch)
    batch = plan.batch if batch is None else batch
    step = planner.training_step(planner.for_training(batch))
    memory, _ = predict_memory(planner, batch)
    others = [name for name in plan.layouts if name != "params"]
    waiting = {"activation": step.activations.crossing_bytes, "cotangent": step.cotangents.crossing_bytes}
    entry = lambda buffer: math.prod(buffer.shape[1:]) * buffer.dtype.itemsize
    num_examples = jax.tree.leaves(batch)[0].shape[0]
    forward, backward = (np.asarray(times) / np.mean(plan.stage_times[0]) for times in plan.stage_times)
    return {
        "table": asdict(summarize(title, planner)),
        "schedule": schedule.name,
        "orders": orders_of(schedule, num_examples / splits.num_shards, keeps_inputs=remat.keep_inputs),
        **schedule.sizes,
        "batch": num_examples,
        "remat": remat_name(remat),
        "keeps_inputs": remat.keep_inputs,
        "unit": "F",
        "times": "Times follow from what the layers cost: 1 F is the mean stage's forward of one micro-batch.",
        "forward": forward.tolist(),
        "backward": backward.tolist(),
        "recompute": [0.0] * K,
        "parameters": _held(plan, ["params"], memory["parameters"]),
        "gradients": memory["gradients"],
        "optimizer": None,
        "other": _held(plan, others, memory["other_variables"] + memory["casts"] + memory["batch"]),
        "residuals": [
            (AWAY.get(name, name), [entry(buffer) * row for row in (buffer.strides * K)[:K]])
            for name, storage in step.kept.storages.items()
            for _, buffer in storage.named_buffers
        ],
        **waiting,
        "passing": memory["boundaries"] - sum(size * step.table.rows_written(name) for name, size in waiting.items()),
        "work": memory["work"],
    }


def _held(plan: Plan, names: Sequence[str], room: int) -> PipelineFacts:
    """The bytes of some collections on devices, and of others that all stages have alike.

    Args:
      plan: the plan.
      names: the collections.
      room: the bytes of all of them.

    Returns:
      own: `[K]`, a device's part of the bytes that each stage has.
      room: the bytes that every device holds, whatever its stage.
    """
    held, placement = held_by_device(plan), plan.request.schedule.placement
    stage_of = placement.stage_of(np.arange(placement.num_virtual_stages))
    own = np.full(placement.num_stages, float(room))
    for name in names:
        device, whole = held[name].bytes, bytes_of(plan.shapes[name]) / placement.num_stages
        shares = [amount.bytes / max(whole, 1) for amount in held_by_stages(plan, name)]
        of_stages = device * np.bincount(stage_of, shares)
        # In place of all the room of a device what its stage has; all of it, where other stages hold the rest.
        own += np.minimum(of_stages, device) - device
    return {"own": own.tolist(), "room": room}


# --- orders -----------------------------------------------------------------------------------------------------------


OFFERED = ("naive", "gpipe", "1f1b", "interleaved", "v", "zero_bubble")
"""The schedules that the page offers."""
STAGES, MICROBATCHES, CHUNKS = (1, 2, 3, 4, 6, 8, 16, 32), (1, 2, 3, 4, 6, 8, 16, 32, 64, 128), (1, 2, 4)
"""Where the sliders for K, M and V stop on the page of any pipeline."""
LARGEST = 1024
"""The most K*M*V, but for a pipeline's own M: many schedules that are larger take long to make."""


def orders_of_any() -> str:
    """The orders on the page of any pipeline, `packed`."""
    return packed(
        (name, SCHEDULES[name](K, M, V))
        for name, K, M, V in itertools.product(OFFERED, STAGES, MICROBATCHES, CHUNKS)
        if K * M * V <= LARGEST and (V == 1 or name in ("interleaved", "zero_bubble"))
    )


def orders_of(schedule: Schedule, examples: float, *, keeps_inputs: bool) -> str:
    """The orders on a pipeline's own page, `packed`: its own, and others of its K and V.

    Args:
      schedule: its own; it is called "own" if it isn't one of `OFFERED`.
      examples: those of a batch in each shard, which M has to divide.
      keeps_inputs: whether it refuses backwards in two parts.
    """
    K, own, V = schedule.sizes.values()
    sizes = sorted({own, *(M for M in range(1, 1 + LARGEST // (K * V)) if examples % M == 0)})
    turns = schedule.style == "v"
    fits = {"interleaved": V > 1, "v": turns, "zero_bubble": not (turns or keeps_inputs)}
    made = [(name, SCHEDULES[name](K, M, V)) for name in OFFERED if fits.get(name, True) for M in sizes]
    return packed(made if (schedule.name, schedule) in made else [("own", schedule), *made])


def packed(schedules: Iterable[tuple[str, Schedule]]) -> str:
    """Schedules by name, K, M and V as JSON, compressed, in letters: `unpacked` of page.html reads them."""
    orders = {" ".join(map(str, (name, *made.sizes.values()))): _described(made) for name, made in schedules}
    return base64.b64encode(zlib.compress(json.dumps(orders).encode(), 9)).decode()


def _described(schedule: Schedule) -> dict[str, object]:
    """A schedule for page.html: who sends to whom after a slot, its orders, its rows without `keep_inputs` and with it.

    Orders are written as in a CSV, a line for each stage and a cell for each slot in time, empty where it idles. A cell
    has the kind, by how many the micro-batch is off the next one of this kind and chunk, and the chunk: mostly "F0.0".
    So lines are alike, and take little room when they are compressed.
    """
    lines = [[""] * (1 + max(schedule.slot_times.values())) for _ in schedule.actions]
    due = Counter[tuple[int, str, int]]()
    for (stage, (kind, microbatch, chunk)), tau in schedule.slot_times.items():
        lines[stage][tau] = f"{kind}{microbatch - due[stage, kind, chunk]}.{chunk}"
        due[stage, kind, chunk] = microbatch + 1
    rows = [_rows(lower(schedule, keep_inputs=keep_inputs)) for keep_inputs in (False, True)]
    crossings = [
        [[*pair, beside] for *ends, beside in crossings_of(schedule, slot) for pair in np.transpose(ends).tolist()]
        for slot in range(len(schedule.slots))
    ]
    return {"crossings": crossings, "orders": list(map(",".join, lines)), "rows": rows}


def _rows(table: TickTable) -> dict[str, object]:
    """The rows that stages need, by `ROWS`, and for what waits at boundaries those of all devices and a stage's own."""

    def waiting(name: str) -> dict[str, object]:
        read = np.concatenate([getattr(slot, name) for slot in table.slots])
        return {"rows": table.rows_written(name), "own": [len({*column.tolist()} - {-1}) for column in read.T]}

    return {**table.rows, **{name: waiting(name) for name in table.waiting}}


# --- the page ---------------------------------------------------------------------------------------------------------


PAGE = Path(__file__).with_name("page.html")
NO_FACTS = '<script type="application/json" id="facts">null</script>'
HEIGHT = 1000
"""Pixels of the frame in a notebook."""


@dataclass(frozen=True)
class Page:
    """A page that was written to a file. Printed it is its address; in a notebook it is the page itself.

    Attributes:
      path: the file.
    """

    path: Path

    @property
    def address(self) -> str:
        """The address that a browser on this machine opens."""
        return self.path.resolve().as_uri()

    def __str__(self) -> str:
        return self.address

    def _repr_html_(self) -> str:
        text = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{text}" title="jpipe view" width="100%" height="{HEIGHT}" style="border: 0"></iframe>'


def page_of(facts: PipelineFacts | None = None) -> str:
    """The text of the page with a pipeline's numbers, or of that for any pipeline."""
    data = json.dumps(facts or {"orders": orders_of_any()}).replace("<", "\\u003c")  # "<" could end the element
    return PAGE.read_text(encoding="utf-8").replace(NO_FACTS, NO_FACTS.replace("null", data))


def show(facts: PipelineFacts, path: str | os.PathLike[str] | None = None) -> Page:
    """Writes a page with these numbers, and opens it where somebody sits at a terminal with a display.

    It never waits for the browser. At a terminal without one it prints the address; elsewhere, as in a notebook or a
    batch job, it says nothing.

    Args:
      facts: the numbers.
      path: the file; default: a new one in the folder for temporary files.

    Raises:
      ValueError: `path` can't be a file.
    """
    page = write_page(path, facts)
    if sys.stdout.isatty():
        open_page(page, "view(path='pipeline.html')")
    return page


def write_page(path: str | os.PathLike[str] | None, facts: PipelineFacts | None = None) -> Page:
    """Writes a page, with a pipeline's numbers or for any pipeline, to a file; None for a new temporary one.

    Raises:
      ValueError: it can't be a file: it is a folder, or in none.
    """
    if path is None:
        file, path = tempfile.mkstemp(prefix="jpipe-", suffix=".html")
        os.close(file)
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it, as {path / 'pipeline.html'}")
    if not path.parent.is_dir():
        raise ValueError(f"for {path} there is no folder {path.parent}; make it first")
    path.write_text(page_of(facts), "utf-8")
    return Page(path)


def open_page(page: Page, to_save: str) -> None:
    """Opens a page in a browser, if there is a display, or prints where it is, and the call that saves it elsewhere.

    Without a display, a browser that runs in the terminal would block it until somebody quits.
    """
    if sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))):
        with contextlib.suppress(webbrowser.Error):
            if webbrowser.open(page.address):
                return
    print(f"the page is at {page}; to take it along, give the file a name: {to_save}")
