"""`pipe.view()`: collects a pipeline's own numbers, and puts them into the page, an HTML file that needs no network.

All of these numbers follow from the plan and the planned step: nothing runs, and nothing is compiled but, for TPUs,
what planning a step compiles.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import webbrowser
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

import jax
import numpy as np

from jpipe.memory.boundaries import Boundaries
from jpipe.memory.buffers import Buffer
from jpipe.model.remat import MODES
from jpipe.planning.planner import Planner
from jpipe.planning.step import Step
from jpipe.processes.tables import Table
from jpipe.schedules.orders import has_its_name
from jpipe.schedules.ticks import AWAY
from jpipe.tools.memory_model import holdings, predict_memory
from jpipe.tools.step_cost import Parts
from jpipe.tools.summary import summarize
from jpipe.types import Batch

KNOWN = ("naive", "gpipe", "1f1b", "interleaved", "v", "zero_bubble")
"""The schedules that the page makes itself, for any number of micro-batches."""


@dataclass(frozen=True)
class Held:
    """The bytes of one kind of arrays on a device.

    Attributes:
      own: `[K]`, a device's part of the bytes that each stage has.
      room: the bytes that every device holds, whatever its stage.
    """

    own: tuple[float, ...]
    room: float

    def scaled(self, room: float) -> Held:
        """The same for arrays that are laid out alike, and take that much room."""
        return Held(tuple(own * room / max(self.room, 1) for own in self.own), room)


@dataclass(frozen=True)
class Rows:
    """A buffer of residuals with a row for each micro-batch in flight.

    Attributes:
      kind: which rows (`ticks.ROWS`).
      bytes: the bytes of an entry.
      strides: `[K]`, the entries of a row.
    """

    kind: str
    bytes: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class PipelineFacts:
    """A pipeline's own numbers, for `page.html`. Bytes are a device's, for one micro-batch where they depend on it.

    Attributes:
      table: its stages (`pictures.summary`), with the pipeline in a line as its title.
      schedule: the name of its schedule.
      orders: by stage, the actions of a schedule that isn't in `KNOWN`; else None.
      slots: the slots of a tick.
      style: how its virtual stages are dealt out, "loop" or "v".
      num_stages, num_microbatches, num_chunks: K, M and V.
      batch: the number of examples in a batch.
      shards: the number of parts that each micro-batch is split into.
      remat: its name.
      keeps_inputs: whether boundary inputs wait for the backward, and residuals for none.
      unit: the unit of the times.
      times: a sentence on where the times come from.
      forward, backward, recompute: `[K]`, the times of one micro-batch on each stage; `recompute` is within `backward`,
        0 if it isn't known apart.
      parameters, gradients: at rest; the sums of gradients while a step runs.
      other: other collections, parameters that are gathered for a step, narrow copies of them, and the batch.
      optimizer: the optimiser's state, if there is one.
      residuals: the buffers of residuals; rows that go to the host count as if they stayed.
      activation, cotangent: a row of what waits at a boundary.
      passing: the other bytes at boundaries: a stage's own, and those on their way.
      work: the most that a layer holds while it runs.
    """

    table: Table
    schedule: str
    orders: list[list[str]] | None
    slots: tuple[str, ...]
    style: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    batch: int
    shards: int
    remat: str
    keeps_inputs: bool
    unit: str
    times: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: tuple[float, ...]
    parameters: Held
    gradients: Held
    other: Held
    optimizer: Held | None
    residuals: tuple[Rows, ...]
    activation: int
    cotangent: int
    passing: int
    work: int


def facts_of(planner: Planner, title: str, batch: Batch = None) -> PipelineFacts:
    """A pipeline's own numbers.

    Args:
      planner: the pipeline's.
      title: the pipeline in a line.
      batch: a batch `[B, ...]`, or its shapes; None stands for the first one that the pipeline saw.

    Raises:
      ValueError: there is no batch, so that nothing is planned yet.
    """
    if batch is None and planner.plan is None:
        raise ValueError(
            "this pipeline has seen no batch yet, so its stages and bytes aren't known; call pipe.view(batch), with a "
            "batch or its jax.ShapeDtypeStructs"
        )
    schedule, splits, remat = planner.request.schedule, planner.request.splits, planner.request.remat
    plan = planner.known_plan() if batch is None else planner.plan_for(batch)
    batch = plan.batch if batch is None else batch
    step = planner.training_step(planner.for_training(batch))
    memory = predict_memory(planner, batch)
    parameters, gradients, other = _variables(step, memory)
    boundaries = {"activation": _crossing(step.activations), "cotangent": _crossing(step.cotangents)}
    is_known = schedule.name in KNOWN and has_its_name(schedule)
    forward, backward = (np.asarray(times) / np.mean(plan.stage_times[0]) for times in plan.stage_times)
    return PipelineFacts(
        table=summarize(title, planner),
        schedule=schedule.name,
        orders=None if is_known else [list(map(str, order)) for order in schedule.actions],
        slots=schedule.slots,
        style=schedule.style,
        **schedule.sizes,
        batch=jax.tree.leaves(batch)[0].shape[0],
        shards=splits.num_shards,
        remat=next((name for name, mode in MODES.items() if mode is remat), "a policy"),
        keeps_inputs=remat.keep_inputs,
        unit="F",
        times="Times follow from what the layers cost: 1 F is the mean stage's forward of one micro-batch.",
        forward=tuple(forward.tolist()),
        backward=tuple(backward.tolist()),
        recompute=(0.0,) * schedule.num_stages,
        parameters=parameters,
        gradients=gradients,
        other=other,
        optimizer=None,
        residuals=tuple(
            Rows(AWAY.get(name, name), _entry(buffer), (buffer.strides * schedule.num_stages)[: schedule.num_stages])
            for name, storage in step.kept.storages.items()
            for _, buffer in storage.named_buffers
        ),
        **boundaries,
        passing=memory.boundaries - sum(size * step.table.rows_written(name) for name, size in boundaries.items()),
        work=memory.work,
    )


def _variables(step: Step, memory: Parts[int]) -> tuple[Held, Held, Held]:
    """The bytes on devices of parameters, of their gradients' sums, and of everything else that stays, whatever M."""
    amounts, placement = holdings(step.plan), step.schedule.placement
    stage_of = placement.stage_of(np.arange(placement.num_virtual_stages))

    def held(name: str) -> Held:
        device, room = amounts.device[name].bytes, amounts.room[name].bytes
        of_stages = np.bincount(stage_of, [amount.bytes * device / max(room, 1) for amount in amounts.own[name]])
        return Held(tuple(np.minimum(of_stages, device).tolist()), device)  # less where others hold a part of its own

    parameters, others = held("params"), [held(name) for name in step.plan.layouts if name != "params"]
    room = memory.other_variables + memory.casts + memory.batch
    everywhere = room - sum(each.room for each in others)
    of_stages = everywhere + np.sum([each.own for each in others], axis=0) + np.zeros(placement.num_stages)
    return parameters, parameters.scaled(memory.gradients), Held(tuple(of_stages.tolist()), room)


def _entry(buffer: Buffer) -> int:
    """Bytes of one entry of a buffer."""
    return math.prod(buffer.shape[1:]) * buffer.dtype.itemsize


def _crossing(boundaries: Boundaries) -> int:
    """Bytes of what crosses between stages."""
    return sum(size * _entry(boundaries.buffers[name]) for name, size in boundaries.crossing_sizes)


# --- the page ---------------------------------------------------------------------------------------------------------


PAGE = Path(__file__).with_name("page.html")
NO_FACTS = '<script type="application/json" id="own">null</script>'
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
    if path is None:
        file, path = tempfile.mkstemp(prefix="jpipe-", suffix=".html")
        os.close(file)
    page = Page(checked(path, "path="))
    data = json.dumps(asdict(facts)).replace("<", "\\u003c")  # which could end the element
    page.path.write_text(PAGE.read_text(encoding="utf-8").replace(NO_FACTS, NO_FACTS.replace("null", data)), "utf-8")
    if sys.stdout.isatty():
        open_page(page, "view(path='pipeline.html')")
    return page


def open_page(page: Page, to_save: str) -> None:
    """Opens a page in a browser, or prints where it is, and the call that saves it elsewhere."""
    if not open_browser(page.address):
        print(f"the page is at {page}; to take it along, give the file a name: {to_save}")


def checked(path: str | os.PathLike[str], argument: str) -> Path:
    """The path of a file that can be written.

    Raises:
      ValueError: it is a folder, or in none.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{argument}{path} is a folder; name a file in it, as {path / 'pipeline.html'}")
    if not path.parent.is_dir():
        raise ValueError(f"{argument}{path}: there is no folder {path.parent}; make it first")
    return path


def open_browser(address: str) -> bool:
    """Opens an address, if there is a display; a browser in a terminal would hold that until it is left."""
    displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    if sys.platform not in ("darwin", "win32") and not any(map(os.environ.get, displays)):
        return False
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
