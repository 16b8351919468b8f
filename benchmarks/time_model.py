"""Predicted step times against the TPU compiler's cycles, a count of GPU kernels, and steps measured on this CPU.

    python benchmarks/time_model.py compiled --chip v5e v5p v6e   # adds the settings that the file doesn't have yet
    python benchmarks/time_model.py counted --chip h100 b200      # the same for GPUs
    python benchmarks/time_model.py measured --first 0 --count 7
    python benchmarks/time_model.py rates                         # what `CHIPS` calls counted
    python benchmarks/time_model.py page                          # the tables of benchmarks/results/time_model.md

All keep rows in `benchmarks/data`. A predicted step is compared without links: the compiler estimates none.
"""

import argparse
import csv
import itertools
import math
import os
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import (
    Size,
    batch_shapes,
    console,
    init_by_hand,
    lowered_step,
    make_batch,
    make_layers,
    on_cpu,
    pipeline_stepper,
    stage_mesh,
    transformer_pipeline,
    versions,
)
from tpu_speed import Setting, make_pipeline

import jpipe
from compiled_transfers import counted
from gpu_program import compile_with_text as compile_for_gpu
from gpu_program import kernels
from jpipe.tools.chips import CHIPS, Chip, measure_chip, parse_topology
from jpipe.tools.forecaster import Loop, Operation, compile_with_text, count_cycles, read
from jpipe.tools.time_model import predict_time
from tpu_program import ARRAY

DATA = Path(__file__).parent / "data"
TX = optax.sgd(1e-3)
GRID: list[dict[str, Any]] = [
    *[{"remat": remat} for remat in ("none", "layer", "stage")],
    *[{"remat": remat, "microbatch": 4} for remat in ("none", "layer", "stage")],
    *[{"remat": remat, "width": 2048} for remat in ("none", "layer")],
    {"remat": "layer", "width": 2048, "microbatch": 4},
    {"remat": "layer", "schedule": "interleaved", "chunks": 2},
    {"remat": "none", "schedule": "interleaved", "chunks": 2, "microbatch": 4},
    {"remat": "none", "schedule": "zero_bubble"},
    {"remat": "layer", "schedule": "zero_bubble", "width": 2048},
    {"remat": "none", "attention": "flash"},
    {"remat": "layer", "attention": "flash", "microbatch": 4},
    {"remat": "full", "schedule": "gpipe", "microbatch": 4},
    {"remat": "layer", "vocab": 32768, "ends": "shared"},
    {"remat": "none", "vocab": 32768},
]
"""Of `tpu_speed.Setting`; each for every chip."""
STEPS: list[dict[str, Any]] = [
    *[{"M": m} for m in (4, 8, 16)],
    *[{"remat": remat} for remat in ("layer", "stage", "full")],
    *[{"schedule": schedule} for schedule in ("gpipe", "zero_bubble")],
    *[{"schedule": "interleaved", "V": 2, "remat": remat} for remat in ("none", "layer")],
    *[{"width": width, "remat": remat} for width in (64, 256) for remat in ("none", "layer")],
]
"""Measured on CPU; what isn't given is as in `DEFAULT`."""
DEFAULT = {"width": 128, "M": 8, "remat": "none", "schedule": "1f1b", "V": 1}


TPUS, GPUS = ("v5e", "v5p", "v6e"), ("h100", "b200")
COLUMNS = {"tpu": "compiled, ms", "gpu": "counted, ms"}
SIZE = re.compile(r"\d+ wide, \w+|width=\d+")
CPU_COLUMNS = ("step", "predicted, ms", "measured, ms", "GFLOP/s", "copy, GB/s", "pass, GB/s", "load")


# --- compiled for TPUs ------------------------------------------------------------------------------------------------


@cache
def _traced(setting: Setting) -> jpipe.Pipeline:
    return make_pipeline(setting)


def predicted_ms(setting: Setting) -> float:
    """What the model says of a setting, links taken as infinitely fast."""
    on_gpus = isinstance(setting, OnGpus)
    pipe = _traced(replace(setting, stand_in=True) if on_gpus else replace(setting, chip="v5e"))  # the same on all TPUs
    chip = replace(CHIPS[setting.chip], link_bandwidth=1e30)
    return 1e3 * predict_time(pipe.planner, batch_shapes(setting.size, setting.count), chip, tx=TX).step


def compiled_ms(setting: Setting) -> float:
    """What the compiler's cycles say of it."""
    pipe, batch = make_pipeline(setting), batch_shapes(setting.size, setting.count)
    _, text = compile_with_text(lowered_step(pipe, TX, batch))
    clock = CHIPS[setting.chip].clock
    assert clock is not None
    _, cost = count_cycles(pipe.planner.training_step(pipe.planner.for_training(batch)), read(text), clock)
    return 1e3 * cost.step


# --- counted in programs for GPUs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnGpus(Setting):
    """A setting on the GPUs of a host, or on what stands for them in plans."""

    stand_in: bool = False

    def devices(self) -> list[Any]:
        host = parse_topology(f"{self.chip}:8")
        return host.stand_ins() if self.stand_in else host.devices()


def counted_ms(setting: OnGpus) -> float:
    """What the kernels of a compiled step take: their bytes at the memory's bandwidth, and products' FLOPs at the peak.

    Collectives, and the time in which kernels start, are left out.
    """
    _, text = compile_for_gpu(lowered_step(make_pipeline(setting), TX, batch_shapes(setting.size, setting.count)))
    return 1e3 * kernel_seconds(read(text), CHIPS[setting.chip])


def kernel_seconds(loop: Loop, chip: Chip) -> float:
    """Seconds of the kernels of one trip, those of loops inside as often as the compiler counts them."""
    bodies = [loop.computations.get(operation.attribute("calls") or "", []) for operation in loop.operations]
    seconds = kernels([loop]).bytes / chip.memory_bandwidth + sum(map(product_flops, bodies)) / chip.flops
    for inner, count in counted(loop):
        assert count is not None, f"nothing says how often {inner.scope} turns"
        seconds += count * kernel_seconds(inner, chip)
    return seconds


def product_flops(body: list[Operation]) -> float:
    """FLOPs of the products of a kernel."""
    types = {operation.name: operation.type for operation in body}
    sizes = lambda kind: [int(size) for size in ARRAY.findall(kind)[0][1].split(",")]
    total = 0.0
    for product in body:
        if contracted := re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.line):
            left = sizes(types[product.operands[0]])
            total += 2.0 * math.prod(sizes(product.type)) * math.prod(left[int(d)] for d in contracted[1].split(","))
    return total


def settings_of(chips: Iterable[str]) -> Iterator[Setting]:
    """All of the grid; but for flash attention, which is a kernel for TPUs, on GPUs too."""
    for given, chip in itertools.product(GRID, chips):
        if chip in TPUS:
            yield Setting(chip, **given)
        elif "attention" not in given:
            yield OnGpus(chip, **given)


def compile_grid(name: str, chips: list[str], count: int) -> None:
    """Compiles so many settings that aren't kept yet, and writes all predictions anew."""
    kept = {row["step"]: row[COLUMNS[name]] for row in kept_rows(name)}
    console.print(f"To be compiled by {versions(tpu=name == 'tpu')}", highlight=False)
    for setting in [setting for setting in settings_of(chips) if str(setting) not in kept][:count]:
        kept[str(setting)] = f"{counted_ms(setting) if isinstance(setting, OnGpus) else compiled_ms(setting):.1f}"
        console.print(f"{setting}: {kept[str(setting)]}", highlight=False)
        write_compiled(name, kept)
    write_compiled(name, kept)


def write_compiled(name: str, kept: dict[str, str]) -> None:
    """The rows of all settings that were compiled, in the grid's order."""
    there = [setting for setting in settings_of([*TPUS, *GPUS]) if str(setting) in kept]
    rows = [(str(s), f"{predicted_ms(s):.1f}", kept[str(s)]) for s in there]
    write(name, rows, ("step", "predicted, ms", COLUMNS[name]))


def rates() -> None:
    """Of one pass over an array and of one product, compiled alone, bytes/s and FLOP/s; seconds of a pass over next to
    nothing."""
    console.print(f"Compiled by {versions(tpu=True)}", highlight=False)
    for name, chip in CHIPS.items():
        if chip.clock is None:
            continue
        device = jax.sharding.SingleDeviceSharding(parse_topology(f"{name}:{chip.example}").devices()[0])
        x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=device)
        small = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=device)
        one_pass, product, start = (
            read(compile_with_text(jax.jit(function).lower(of))[1]).own / chip.clock
            for function, of in ((twice, x), (lambda x: x @ x, x), (twice, small))
        )
        found = f"a pass {8 * x.size / one_pass / 1e9:.0f} GB/s, a product {2 * 4096**3 / product / 1e12:.0f} TFLOP/s"
        console.print(f"{name}: {found}, a kernel at least {1e6 * start:.2f} us", highlight=False)


def twice(x: jax.Array) -> jax.Array:
    return x * 2 + 1


# --- measured on CPU --------------------------------------------------------------------------------------------------


def step_name(given: dict[str, Any]) -> str:
    """Of a measured step."""
    return ", ".join(f"{k}={v}" if isinstance(v, int) else v for k, v in (DEFAULT | given).items())


def make_step(given: dict[str, Any]) -> tuple[Size, int, jpipe.Pipeline]:
    """(size, M, pipeline) on two devices of this CPU."""
    of = DEFAULT | given
    size = Size(4, of["width"], of["width"] // 32, 128, 256, 2)
    options = {"remat": of["remat"], "schedule": of["schedule"], "num_chunks": of["V"]}
    return size, of["M"], transformer_pipeline(size, 2, of["M"], mesh=stage_mesh(jax.devices(), 2), **options)


def measure(steps: list[dict[str, Any]], rounds: int) -> None:
    """The shortest of each step, in turns; predictions by a product, a copy and a pass on both devices."""
    made = {step_name(given): make_step(given) for given in steps}
    chip = measure_chip(jax.devices()[:2])
    steppers = {}
    for name, (size, m, pipe) in made.items():
        batch = make_batch(size, m)
        trees = init_by_hand(make_layers(size), jax.random.key(0), batch)
        steppers[name] = pipeline_stepper(pipe, TX, batch, trees)
    for stepper in steppers.values():
        stepper()  # the first call compiles
    times = [{name: stepper()[0] for name, stepper in steppers.items()} for _ in range(rounds)]
    found = {name: min(of_round[name] for of_round in times) for name in steppers}
    rows = {row["step"]: tuple(row.values()) for row in kept_rows("cpu")}
    rates = [f"{rate / 1e9:.1f}" for rate in (chip.flops, chip.memory_bandwidth, chip.pass_bandwidth)]
    for name, (size, m, pipe) in made.items():
        predicted = predict_time(pipe.planner, batch_shapes(size, m), chip, tx=TX).step
        rows[name] = (name, f"{1e3 * predicted:.0f}", f"{1e3 * found[name]:.0f}", *rates, f"{os.getloadavg()[0]:.1f}")
    write("cpu", list(rows.values()), CPU_COLUMNS)


# --- rows -------------------------------------------------------------------------------------------------------------


def kept_rows(name: str) -> list[dict[str, str]]:
    path = DATA / f"time_model_{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(name: str, rows: list[tuple[str, ...]], columns: tuple[str, ...]) -> None:
    DATA.mkdir(exist_ok=True)
    with (DATA / f"time_model_{name}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def summary(rows: list[dict[str, str]]) -> str:
    """Errors of rows, and how many pairs of those of one size are ordered as they really are."""
    found = [(SIZE.findall(row["step"]), *map(float, list(row.values())[1:3])) for row in rows]
    errors = [predicted / there - 1 for _, predicted, there in found]
    pairs = [(a, b) for a, b in itertools.combinations(found, 2) if a[0] == b[0]]
    ordered = sum((a[1] - b[1]) * (a[2] - b[2]) > 0 for a, b in pairs)
    median, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
    return f"{len(rows)} | {median:.0%} | {worst:+.0%} | {ordered} of {len(pairs)}"


def page() -> list[str]:
    """The lines of the page's tables."""
    tpu, gpu, cpu = map(kept_rows, ("tpu", "gpu", "cpu"))
    whole = [row for row in tpu if "flash" not in row["step"]]  # of a Pallas kernel the compiler estimates no cycles
    groups = {chip: [row for row in (*whole, *gpu) if row["step"].startswith(chip)] for chip in (*TPUS, *GPUS)}
    words = dict.fromkeys(GPUS, ", counted")
    lines = [f"| {chip}{words.get(chip, '')} | {summary(rows)} |" for chip, rows in groups.items() if rows]
    lines += [f"| CPU, measured | {summary(cpu)} |"] if cpu else []
    for row in (*tpu, *gpu, *cpu):
        name, predicted, there, *_ = row.values()
        lines.append(f"| {name} | {predicted} | {there} | {float(predicted) / float(there) - 1:+.0%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("compiled", "counted", "measured", "rates", "page"))
    parser.add_argument("--chip", nargs="+", help="default: all with rows")
    parser.add_argument("--first", type=int, default=0, help="of the measured steps (default %(default)s)")
    parser.add_argument("--count", type=int, default=100, help="at most so many steps are compiled or measured")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    on_cpu(2)
    if options.what == "compiled":
        compile_grid("tpu", options.chip or [*TPUS], options.count)
    elif options.what == "counted":
        compile_grid("gpu", options.chip or [*GPUS], options.count)
    elif options.what == "measured":
        measure(STEPS[options.first : options.first + options.count], options.rounds)
    elif options.what == "rates":
        rates()
    else:
        print("\n".join(page()))


if __name__ == "__main__":
    main()
