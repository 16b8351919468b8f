"""What jpipe sends along tensor, sequence, expert, fsdp and context axes, beside plain JAX with the same splits.

Each row is a block (`axes_models.py`) in a training step of two stages, and in plain JAX (jit with `NamedSharding`s: a
scan over as many blocks as a stage has, each under `jax.checkpoint`, in a scan over micro-batches). Both are compiled,
for TPUs that need not be there or with `--cpu` for simulated devices, and their collectives are counted where they
stand. What goes along `stage` is left out. How bytes are counted is said in `axes_traffic.py`.

    python benchmarks/axes.py --chip v5p --rows dense sequence
    python benchmarks/axes.py --cpu

A CPU's compiler makes no asynchronous pairs, estimates no cycles, and reduces in float32 what is bfloat16.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
from axes_models import ROWS, SMALL, Row, Sizes
from axes_programs import BLOCKS, MICROBATCHES, Case, lower_pipeline, lower_plain
from axes_traffic import PLACES, Counts, Program, per_step, total
from common import console, on_cpu, settings, show, tpu_devices

from jpipe.tools.chips import Network, chip_of
from tpu_program import compile_with_text

CHIPS = {
    "v5e": {8: "v5e:2x4", 32: "v5e:4x8"},
    "v5p": {8: "v5p:2x2x2", 32: "v5p:4x4x2"},
    "v6e": {8: "v6e:2x4", 32: "v6e:4x8"},
}
COLLECTIVES = ("where", "kind", "arrays", "MiB each", "MiB sent", "plain JAX", "jpipe", "beside work")
SUMMARY = ("row", "F, MiB", "B, MiB", "step, MiB", "of plain", "F, Mcycles", "B, Mcycles", "held, MiB", "at most plain")
WAITS = ("row", "F works, ms", "F waits, ms", "B works, ms", "B waits, ms", "a layer, ms", "of it waits")
SLACK = 1.01
"""How much more counts as no more: a compiler pads what it scatters."""


@dataclass(frozen=True)
class Side:
    """One program of a row.

    Attributes:
      sent: what it sends.
      cycles: by place; 0 where the compiler estimates none.
      waits: by place, the seconds in which a chip waits for what it sends; 0 where the compiler estimates no cycles.
      clock: cycles/s; 0 without an estimate.
      temporaries: bytes that a device holds besides arguments and results.
      blocks: how often a layer's forward and backward run for a micro-batch; once where they are those of the ends.
    """

    sent: Counts
    cycles: dict[str, float]
    waits: dict[str, float]
    clock: float
    temporaries: int
    blocks: int = BLOCKS
    plain: bool = False

    @property
    def step(self) -> float:
        """Bytes sent in a step."""
        return per_step(self.sent, self.blocks, MICROBATCHES)

    def as_json(self) -> dict[str, Any]:
        sent = [dataclasses.asdict(sent) | {"count": count} for sent, count in self.sent.items()]
        counted = {"cycles": self.cycles, "waits": self.waits, "temporaries": self.temporaries}
        return {"sent": sent, **counted, "step": self.step}

    def times(self, place: str) -> tuple[float, float]:
        """Milliseconds of a layer's forward or backward, (of work, of waiting). Plain JAX adds gradients up apart."""
        cycles, waits = self.cycles[place], self.waits[place]
        if place == "backward" and self.plain:
            cycles, waits = (
                n + of["micro-batch"] / self.blocks for n, of in ((cycles, self.cycles), (waits, self.waits))
            )
        return 1e3 * cycles / self.clock, 1e3 * waits


def compare(case: Case) -> tuple[Side, Side]:
    """(plain JAX, jpipe), one compiled after the other."""
    (plain, ours), blocks = programs(case), 1 if case.row.tied else BLOCKS
    return side(plain, lower_plain(case), blocks, plain=True), side(ours, lower_pipeline(case), blocks)


def programs(case: Case) -> tuple[Program, Program]:
    """How the loops of the two are known."""
    row, turns = case.row, case.row.axes.get("context", 1)
    layer = None if row.tied else "NnxBlock.1" if row.library == "nnx" else "LinenBlock.1"
    plain = Program(None, 1 + row.tied, turns, case.plain_mesh, ends=row.tied)
    return plain, Program(layer, 2, turns, case.mesh, ends=row.tied)


def side(program: Program, lowered: Any, blocks: int = BLOCKS, *, plain: bool = False) -> Side:
    """A program, compiled and read."""
    chip = chip_of(program.mesh.devices.flat[0])
    if chip is None:
        compiled = lowered.compile()
        text, waits, clock = compiled.as_text(), dict.fromkeys(PLACES, 0.0), 0.0
    else:
        compiled, text = compile_with_text(lowered)
        waits, clock = program.waits(text, Network.of(chip, program.mesh)), chip.clock
    held = compiled.memory_analysis().temp_size_in_bytes
    return Side(program.sent(text), program.cycles(text), waits, clock, held, blocks, plain)


def is_at_most(plain: Side, ours: Side) -> bool:
    """Whether jpipe sends at most what plain JAX does: in a layer's forward, in its backward, and in a step."""
    pairs = [(total(plain.sent, place), total(ours.sent, place)) for place in ("forward", "backward")]
    return all(b <= SLACK * a for a, b in [*pairs, (plain.step, ours.step)])


def collective_rows(plain: Side, ours: Side) -> list[tuple[str, ...]]:
    """A row for all collectives that are alike, in the order of places, the largest first."""
    alike = {dataclasses.replace(sent, beside_work=False) for sent in [*plain.sent, *ours.sent]}
    rows = []
    for sent in sorted(alike, key=lambda s: (PLACES.index(s.place), -s.moved, s.kind, s.types)):
        beside = dataclasses.replace(sent, beside_work=True)
        counts = [(side.sent[sent] + side.sent[beside], side.sent[beside]) for side in (plain, ours)]
        hidden = " and ".join(str(n) for _, n in counts) if any(n for _, n in counts) else ""
        sizes = f"{sent.bytes / 2**20:,.3f}", f"{sent.moved / 2**20:,.3f}"
        rows.append((sent.place, sent.kind, sent.types, *sizes, *(str(n or "") for n, _ in counts), hidden))
    return rows


def summary_row(name: str, plain: Side, ours: Side) -> tuple[str, ...]:
    """The row of the last table."""

    def pair(number: Callable[[Side], float], unit: float, digits: int) -> str:
        """Plain JAX's and jpipe's; empty without either."""
        both = number(plain), number(ours)
        return " | ".join(f"{n / unit:,.{digits}f}" for n in both) if any(both) else ""

    # jpipe adds gradients up in its backward; of a tied table plain JAX has no loops, and all is in the micro-batch's.
    adding = {id(plain): plain.cycles["micro-batch"] / plain.blocks, id(ours): 0.0}
    return (
        name,
        *(pair(lambda side, place=place: total(side.sent, place), 2**20, 2) for place in ("forward", "backward")),
        pair(lambda side: side.step, 2**20, 2),
        f"{ours.step / plain.step:.2f}" if plain.step else "-",
        pair(lambda side: side.cycles["forward"], 1e6, 3),
        pair(lambda side: side.cycles["backward"] + adding[id(side)], 1e6, 3),
        pair(lambda side: side.temporaries, 2**20, 0),
        "yes" if is_at_most(plain, ours) else "no",
    )


def waits_row(name: str, *sides: Side) -> tuple[str, ...]:
    """The row of the table of what chips wait for, plain JAX's numbers and jpipe's."""
    times = [[side.times(place) for place in ("forward", "backward")] for side in sides]
    pair = lambda numbers, digits=3: " | ".join(f"{n:.{digits}f}" for n in numbers)
    whole = [sum(map(sum, of_side)) for of_side in times]
    waits = [sum(waited for _, waited in of_side) / all_of for of_side, all_of in zip(times, whole, strict=True)]
    columns = [pair(of_side[i][j] for of_side in times) for i in range(2) for j in range(2)]
    return name, *columns, pair(whole), " | ".join(f"{share:.1%}" for share in waits)


def fitted(row: Row, small: bool) -> Row:
    """The row on as many devices as there are: simulated ones are eight."""
    return dataclasses.replace(row, axes={"model": 4}) if small and row.num_devices > 4 else row


def devices_of(row: Row, chip: str | None) -> list[Any]:
    """Devices for two stages: of a chip, or simulated ones."""
    return tpu_devices(CHIPS[chip][2 * row.num_devices]) if chip else jax.devices()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, help="(default: all)")
    parser.add_argument("--chip", choices=list(CHIPS), default="v5p", help="(default %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="simulated devices and small sizes")
    parser.add_argument("--json", type=Path, help="a file for what was found")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name}", type=type(field.default), help=f"(default {field.default})")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    on_cpu(8)
    given = {f.name: getattr(options, f.name) for f in fields(Sizes) if getattr(options, f.name) is not None}
    sizes = dataclasses.replace(SMALL if options.cpu else Sizes(), **given)
    summary, waited, found, device = [], [], {}, None
    for row in (fitted(row, options.cpu) for row in ROWS if row.name in options.rows):
        devices = devices_of(row, None if options.cpu else options.chip)
        case, device = Case.of(row, sizes, devices), devices[0]
        try:
            plain, ours = compare(case)
        except Exception as error:  # a row that fails says so, and the others go on
            summary.append((row.name, f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"))
            console.print(*summary[-1], sep=": ", highlight=False)
            continue
        title = f"{row.name}: {', '.join(f'{name} {size}' for name, size in row.axes.items())}"
        show(title, COLLECTIVES, collective_rows(plain, ours), settings(device, str(case.sizes)))
        summary.append(summary_row(row.name, plain, ours))
        if ours.clock:
            waited.append(waits_row(row.name, plain, ours))
        found[row.name] = {"plain": plain.as_json(), "jpipe": ours.as_json(), "at_most": is_at_most(plain, ours)}
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    caption = settings(device, str(sizes), "plain JAX | jpipe; B with adding gradients up")
    show("What a layer sends", SUMMARY, summary, caption)
    if waited:
        show("What a layer waits for, by the links of the chip", WAITS, waited, caption)


if __name__ == "__main__":
    main()
