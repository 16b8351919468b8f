"""Table 1 of the GPipe paper on its own hardware: the largest models that the TPU compiler accepts.

Transformer-L (width 2048, feed-forward 8192, 32 heads, sequence 1024, batch 32) on TPU v3, whose cores have 16 GB, and
AmoebaNet-D (224x224 images, batch 128) on TPU v2 with 8 GB, both with RMSProp: 12 bytes a parameter with its gradient.
Beside them what the paper found, and what 12 bytes a parameter alone would let in. Needs `pip install libtpu`, and no
TPU; no parameter is made.
"""

import argparse
import csv
import math
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
import jax
import optax
from common import Size, console

import jpipe

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import amoebanet

BYTES_A_PARAMETER = 12
"""Itself, its gradient and RMSProp's second moment, in float32."""

_LAYER = {"remat": "layer"}
_SHARED = {"ends": "shared", "remat": "full"}
_CHUNKS = {"schedule": "interleaved", "num_chunks": 3, "remat": "full"}


@dataclass(frozen=True)
class Place:
    """K stages on cores of a TPU, and the paper's largest model there.

    Attributes:
      topology: the TPU, such as "v3:2x2" for eight cores.
      memory: bytes of a core.
      num_stages: K.
      paper: layers of Transformer-L, or filters of AmoebaNet-D.
      options: of `jpipe.Pipeline`.
      layers: of AmoebaNet-D; 0 for Transformer-L, whose layers are counted.
      microbatches: M.
    """

    topology: str
    memory: int
    num_stages: int
    paper: int
    options: dict[str, Any]
    layers: int = 0
    microbatches: int = 32

    @property
    def step(self) -> int:
        """Of what is counted: a layer more on each stage, or 32 filters."""
        return 32 if self.layers else self.num_stages

    def pipeline(self, count: int) -> tuple[jpipe.Pipeline, Any]:
        """The model of that many layers or filters, and its batch."""
        mesh = common.stage_mesh(common.tpu_devices(self.topology), self.num_stages)
        if not self.layers:
            size = Size(count, 2048, 32, 1024, 32000, 32 // self.microbatches, "bfloat16")
            pipe = common.transformer_pipeline(size, self.num_stages, self.microbatches, mesh=mesh, **self.options)
            return pipe, common.batch_shapes(size, self.microbatches)
        layers = amoebanet.amoebanet(self.layers, count, dtype="bfloat16")
        shapes = {"num_stages": self.num_stages, "num_microbatches": self.microbatches, "balance": self._cells()}
        pipe = jpipe.Pipeline(layers, amoebanet.loss_fn, mesh=mesh, **shapes, **self.options)
        images = jax.ShapeDtypeStruct((128, 224, 224, 3), "float32")
        return pipe, {"inputs": images, "targets": jax.ShapeDtypeStruct((128,), "int32")}

    def _cells(self) -> list[int]:
        """Layers of AmoebaNet-D by virtual stage: as many cells of each of the three stacks on every stage."""
        if self.num_stages == 1:
            return [self.layers + 6]
        counts = [self.layers // (3 * self.num_stages)] * 3 * self.num_stages
        for virtual_stage, more in ((0, 3), (self.num_stages, 1), (2 * self.num_stages, 1), (-1, 1)):
            counts[virtual_stage] += more
        return counts

    def limit(self, parameters: int) -> int:
        """Layers or filters by 12 bytes a parameter alone (8 with the moments on the host).

        The paper's largest has so many parameters.
        """
        on_host = 4 * ("optimizer" in self.options.get("offload", ()))
        room = self.memory * self.num_stages / (BYTES_A_PARAMETER - on_host)
        if self.layers:
            return int(self.paper * math.sqrt(room / parameters)) // 8 * 8
        block = Size(1, 2048, 32, 1024, 0, 1).parameters - Size(0, 2048, 32, 1024, 0, 1).parameters
        return self.paper + math.floor((room - parameters) / block)


TABLE = {
    "transformer-l": [
        Place("v3:1x1", 16 * 2**30, 1, 13, _LAYER),
        Place("v3:2x2", 16 * 2**30, 8, 103, _SHARED),
        Place("v3:4x4", 16 * 2**30, 32, 415, _SHARED),
        Place("v3:8x8", 16 * 2**30, 128, 1663, _SHARED),
    ],
    "amoebanet-d": [
        Place("v2:1x1", 8 * 2**30, 1, 416, _LAYER, 18, 128),
        Place("v2:1x1", 8 * 2**30, 2, 544, _CHUNKS | _LAYER, 18, 128),
        Place("v2:2x2", 8 * 2**30, 4, 544, _CHUNKS, 36, 128),
        Place("v2:2x2", 8 * 2**30, 8, 512, _CHUNKS, 72, 128),
    ],
}
"""The paper's columns. With "full" a stage keeps its own input of a micro-batch, and not every layer's. In three chunks
every stage has as many cells of each of AmoebaNet-D's stacks, so that no array is larger than one stage needs."""


@dataclass(frozen=True)
class Fit:
    """A step that fits.

    Attributes:
      arguments: bytes a core of parameters, moments and the batch.
      temporaries: bytes a core of gradients, of what waits for its backward, and of what is being computed.
      parameters: of the whole model.
      seconds: to trace and to compile.
    """

    arguments: int
    temporaries: int
    parameters: int
    seconds: float


def compiled(place: Place, count: int, *, code: bool = True) -> Fit | None:
    """The step of that many layers or filters; None where the compiler says that it doesn't fit.

    Args:
      place: where.
      count: how many.
      code: whether code is generated, which takes minutes for AmoebaNet-D and has to fit too; else the process that
        compiles ends as soon as memory is assigned.
    """
    begin = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = context.Process(target=_compile, args=(place, count, folder, theirs), daemon=True)
        child.start()
        theirs.close()
        try:
            parameters, assigned = ours.recv(), None
            while not assigned and not ours.poll(1):
                assigned = None if code else _assigned(Path(folder))
            assigned = assigned or ours.recv()
        finally:
            child.kill()
            child.join()
    return assigned and Fit(*assigned, parameters, time.perf_counter() - begin)


def _compile(place: Place, count: int, folder: str, answers: Connection) -> None:
    """Sends how many parameters the model has, then (bytes of arguments, of temporaries), None if it doesn't fit."""
    common.on_cpu()
    pipe, batch = place.pipeline(count)
    lowered = common.lowered_step(pipe, optax.rmsprop(1e-3), batch)
    answers.send(num_parameters(pipe))
    try:
        memory = lowered.compile(compiler_options={"xla_dump_to": folder}).memory_analysis()
        answers.send((memory.argument_size_in_bytes, memory.temp_size_in_bytes))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        answers.send(None)


def _assigned(folder: Path) -> tuple[int, int] | None:
    """What `_compile` sends, out of the folder, if the compiler has assigned memory and says how much."""
    if not list(folder.glob("*_after_buffer_assignment.txt")):
        return None
    time.sleep(3)  # until all is written
    (found,) = folder.glob("*after_optimizations-buffer-assignment.txt")
    sizes = re.findall(r"^allocation \d+: size (\d+), page 0, (parameter|preallocated-temp)", found.read_text(), re.M)
    of = lambda kind: sum(int(size) for size, name in sizes if name == kind)
    return (of("parameter"), of("preallocated-temp")) if sizes else None  # libtpu 0.0.42 writes it otherwise


def num_parameters(pipe: jpipe.Pipeline) -> int:
    """Of all layers, each once."""
    model = pipe.plan.model
    size = lambda group: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(group.variables.get("params", {})))
    return sum(size(model.groups[known.group]) * len(known.users) for known in model.variable_sets)


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` that fits, by bisection; `low - 1` if none does.

    >>> largest(lambda n: n <= 26, 13, 28)
    26
    """
    low -= 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def search(place: Place, parameters: int) -> dict[int, Fit]:
    """All that fitted, from the paper's count to the limit of 12 bytes a parameter alone; the last is the largest.

    Bisection goes by assigned memory. Of the largest code is generated, and of the next smaller where that doesn't fit.
    """
    found: dict[int, Fit] = {}

    def fits(steps: int, *, code: bool = False) -> bool:
        fit = compiled(place, steps * place.step, code=code)
        said = f"{fit or 'does not fit'}{', with its code' if code else ''}"
        console.print(f"K={place.num_stages}, {steps * place.step}: {said}", highlight=False)
        found.pop(steps * place.step, None)
        if fit:
            found[steps * place.step] = fit
        return fit is not None

    low = place.paper // place.step
    steps = largest(fits, low, place.limit(parameters) // place.step)
    while steps >= low and not fits(steps, code=True):
        steps -= 1
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=TABLE)
    parser.add_argument("--stages", type=int, nargs="+", help="K (default: the paper's)")
    parser.add_argument("--count", type=int, help="layers, or filters of AmoebaNet-D: these alone, nothing searched")
    parser.add_argument("--offload", nargs="+", default=[], help="what lies on the hosts, such as optimizer")
    parser.add_argument("--no-code", action="store_true", help="with --count: only until memory is assigned")
    parser.add_argument("--csv", type=Path, help="a file to append the rows to, in bytes")
    options = parser.parse_args()
    common.on_cpu()
    rows = []
    for place in TABLE[options.what]:
        if options.stages and place.num_stages not in options.stages:
            continue
        place = replace(place, options=place.options | {"offload": options.offload})
        pipe, batch = place.pipeline(place.paper)
        pipe.abstract_state(batch, optax.rmsprop(1e-3))
        paper = num_parameters(pipe)
        if options.count:
            found = {options.count: compiled(place, options.count, code=not options.no_code)}
        else:
            found = search(place, paper)
        rows.append(figures(place, paper, found))
        if options.csv:
            with options.csv.open("a") as file:
                csv.writer(file, lineterminator="\n").writerow((options.what, *rows[-1]))
    counted = "layers" if options.what == "transformer-l" else "filters"
    caption = f"{common.versions(tpu=True)}, {counted}; MiB a core, the compiler's; bfloat16 activations"
    common.show(f"The largest {options.what}", COLUMNS, [shown(*row) for row in rows], caption)


COLUMNS = ("K", "paper", "parameters", "here", "parameters", "times", "arguments", "temporaries", "by bytes alone", "s")


def figures(place: Place, paper: int, found: dict[int, Fit | None]) -> tuple[int, ...]:
    """(K, paper's count, its parameters, count, parameters, arguments, temporaries, count by 12 bytes, seconds).

    The count is the last of `found`, or 0 if there is none. What isn't known of a count that doesn't fit is 0.
    """
    count, fit = list(found.items())[-1] if found else (0, None)
    fit = fit or Fit(0, 0, 0, 0.0)
    parts = fit.parameters, fit.arguments, fit.temporaries, place.limit(paper), round(fit.seconds)
    return (place.num_stages, place.paper, paper, count, *parts)


def shown(*row: int) -> tuple[Any, ...]:
    """A line of the table, from `figures`; of a count that doesn't fit it says so."""
    stages, count, paper, here, parameters, arguments, temporaries, limit, seconds = row
    theirs, ours = (f"{n / 1e9:.3f}B" for n in (paper, parameters))
    if not parameters:
        return stages, count, theirs, f"{here} doesn't fit" if here else "none fits", *"----", limit, "-"
    held = common.mib(arguments), common.mib(temporaries)
    return stages, count, theirs, here, ours, f"{parameters / paper:.2f}", *held, limit, seconds


if __name__ == "__main__":
    main()
