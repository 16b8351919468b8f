"""A layer's forward of one micro-batch and a layer's backward of another, in one loop body or in two loops.

DualPipe's idea: what one pass sends may have the other pass's products beside it. The first rows are plain JAX on the
devices of one stage, with four blocks: two loops, one body, and two loops with each micro-batch in two halves. On GPUs
two more rows are jpipe's step of two stages with two blocks each, with "1f1b" and "overlapped"; of it the loops over
layers of a steady tick count. The blocks are those of `axes.py`; each backward computes its layer anew. Programs are
compiled for chips that need not be there.

    python benchmarks/joint_body.py --chip h100 --rows dense sequence

A GPU's compiler estimates no cycles: how many collectives have products beside them is what can be read.
"""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from axes_models import ROWS, Row, Sizes
from axes_programs import Case, lower_pipeline
from axes_traffic import Program
from common import mib, on_cpu, settings, show
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gpu_program
import tpu_program
from compiled_transfers import transfers
from jpipe.jax.in_place import take_row
from jpipe.tools.chips import parse_topology
from jpipe.tools.compiled_program import COLLECTIVES, Loop, read, turn_in_time
from jpipe.tools.time_model import Network

LAYERS = 4
CHIPS = {"h100": "h100:8", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2", "v6e": "v6e:2x2"}
COLUMNS = ("row", "loops", "collectives", "beside products", "works, ms", "waits, ms", "temporaries, MiB", "copies")
Carry = dict[str, Any]
"""x, cotangent; inputs that the forward keeps and the backward reads `[LAYERS, ...]`; gradients `[LAYERS, ...]`."""


@dataclass(frozen=True)
class Trial:
    """A row's blocks on the devices of one stage.

    Attributes:
      row: the row.
      sizes: of its blocks.
      mesh: the devices.
      halves: whether each half of a device's examples goes through a block by itself.
    """

    row: Row
    sizes: Sizes
    mesh: Mesh
    halves: bool = False

    def shapes(self) -> tuple[dict[str, jax.ShapeDtypeStruct], Carry]:
        """(weights, carry), with how they lie."""
        specs = self.row.specs(self.sizes)
        place = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(self.mesh, P(*spec))
        )
        rows = lambda dtype: {name: place((LAYERS, *shape), dtype, None, *at) for name, (shape, at) in specs.items()}
        sizes, dtype = self.sizes, self.sizes.dtype
        shape = sizes.examples * self.row.examples_over, sizes.seq, sizes.width
        between = self.row.between or ()
        one, all_of = place(shape, dtype, *between), place((LAYERS, *shape), dtype, None, *between)
        carry = {"x": one, "cotangent": one, "keeps": all_of, "kept": all_of, "gradients": rows("float32")}
        return rows(dtype), carry

    def block(self, weights: dict[str, Any], x: Any) -> Any:
        if not self.halves:
            return self.row.block(self.sizes, weights, x)
        by_half = x.reshape(self.row.examples_over, 2, -1, *x.shape[1:])
        both = [self.row.block(self.sizes, weights, by_half[:, i].reshape(-1, *x.shape[1:])) for i in range(2)]
        return jnp.stack([y.reshape(by_half.shape[0], -1, *x.shape[1:]) for y in both], 1).reshape(x.shape)

    def forward(self, weights: dict[str, Any], carry: Carry, i: Any) -> Carry:
        keeps = jax.lax.dynamic_update_index_in_dim(carry["keeps"], carry["x"], i, 0)
        own = {name: take_row(stacked, i) for name, stacked in weights.items()}
        return carry | {"x": self.block(own, carry["x"]), "keeps": keeps}

    def backward(self, weights: dict[str, Any], carry: Carry, i: Any) -> Carry:
        own = {name: take_row(stacked, i) for name, stacked in weights.items()}
        found, cotangent = jax.vjp(self.block, own, take_row(carry["kept"], i))[1](carry["cotangent"])
        put = lambda total, new: jax.lax.dynamic_update_index_in_dim(total, take_row(total, i) + new, i, 0)
        gradients = jax.tree.map(lambda total, new: put(total, new.astype(total.dtype)), carry["gradients"], found)
        return carry | {"cotangent": cotangent, "gradients": gradients}

    def two_loops(self, weights: dict[str, Any], carry: Carry) -> Carry:
        carry = jax.lax.fori_loop(0, LAYERS, lambda i, carry: self.forward(weights, carry, i), carry)
        return jax.lax.fori_loop(0, LAYERS, lambda i, carry: self.backward(weights, carry, LAYERS - 1 - i), carry)

    def one_body(self, weights: dict[str, Any], carry: Carry) -> Carry:
        both = lambda i, carry: self.backward(weights, self.forward(weights, carry, i), LAYERS - 1 - i)
        return jax.lax.fori_loop(0, LAYERS, both, carry)


def measure(trial: Trial, run: Callable[..., Carry], name: str) -> tuple[str, ...]:
    """A row of the table, of plain JAX."""
    chip = parse_topology(CHIPS[name]).chip
    with jax.set_mesh(trial.mesh):
        lowered = jax.jit(run, donate_argnums=1).lower(*trial.shapes())
        is_gpu = trial.mesh.devices.flat[0].platform == "gpu"
        compiled, text = (gpu_program if is_gpu else tpu_program).compile_with_text(lowered)
    program = read(text)
    loops = [loop for loop in program.walk() if loop is not program]
    times = ("", "")
    if chip.clock:
        takes = Program(None, 0, 1, trial.mesh).takes(program, Network.of(chip, trial.mesh))
        waits = sum(one.waited for loop in loops for one in turn_in_time(loop, takes, chip)[1])
        times = f"{1e3 * sum(loop.own for loop in loops) / chip.clock:.3f}", f"{1e3 * waits:.3f}"
    return row_of(loops, compiled, times)


def measure_pipeline(row: Row, sizes: Sizes, devices: list[Any], schedule: str) -> tuple[str, ...]:
    """A row of the table, of jpipe on GPUs."""
    lowered = lower_pipeline(Case.of(row, sizes, devices), schedule=schedule)
    compiled, text = gpu_program.compile_with_text(lowered)
    ticks = max(read(text).find("ticks"), key=lambda loop: sum(len(one.operations) for one in loop.walk()))
    return row_of([loop for loop in ticks.walk() if loop is not ticks], compiled, ("", ""))


def row_of(loops: list[Loop], compiled: Any, times: tuple[str, str]) -> tuple[str, ...]:
    """What is read of loops: their collectives, and how many arrays of more than one number they copy."""
    moves = [move for loop in loops for move in transfers(loop, COLLECTIVES)]
    beside = sum(move.beside_products for move in moves)
    copies = sum(one.opcode == "copy" and "[]" not in one.type for loop in loops for one in loop.operations)
    temporaries = mib(compiled.memory_analysis().temp_size_in_bytes)
    return str(len(moves)), str(beside), *times, temporaries, str(copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [row.name for row in ROWS if row.num_devices <= 4 and not row.tied]
    parser.add_argument("--rows", nargs="+", choices=names, default=["dense", "sequence", "fsdp-use", "experts"])
    parser.add_argument("--chip", choices=list(CHIPS), default="h100", help="(default %(default)s)")
    options, sizes = parser.parse_args(), Sizes(examples=2)
    on_cpu(8)
    devices, rows = parse_topology(CHIPS[options.chip]).devices(), []
    for row in (row for row in ROWS if row.name in options.rows):
        shape, types = [*row.axes.values()], (AxisType.Auto,) * len(row.axes)
        mesh = Mesh(np.asarray(devices[: row.num_devices]).reshape(shape), [*row.axes], axis_types=types)
        trial = Trial(row, row.sizes(sizes), mesh)
        apart = dataclasses.replace(trial, halves=True)
        runs = {"two loops": trial.two_loops, "one body": trial.one_body, "two halves": apart.two_loops}
        rows += [(row.name, name, *measure(trial, run, options.chip)) for name, run in runs.items()]
        if mesh.devices.flat[0].platform == "gpu":
            for schedule in ("1f1b", "overlapped"):
                rows.append((row.name, f"jpipe, {schedule}", *measure_pipeline(row, sizes, devices, schedule)))
    show("Two passes in one body", COLUMNS, rows, settings(devices[0], str(sizes)))


if __name__ == "__main__":
    main()
