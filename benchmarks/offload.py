"""What residuals on the hosts take and free: a step compiled for TPUs and GPUs that aren't there, with and without.

A decoder of equal blocks with the attention kernel of its chip (Pallas' flash attention, cuDNN's), one row with all
residuals on the device and one for each choice of `offload=`. Of a steady tick: cycles by the TPU's compiler, and the
moves of rows to the host and back that have products beside them. The seconds of a move are its bytes over the link to
the host (`jpipe.tools.chips`), which the compiler's cycles leave out. Needs `pip install 'jpipe[gpu-compiler]' libtpu`,
no TPU and no GPU.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import kernels
import optax
from common import Size, batch_shapes, loss_fn, make_layers, mib, on_cpu, settings, show, stage_mesh

import jpipe
from absent_cudnn import absent_cudnn
from compiled_transfers import HOST_MOVES, transfers
from jpipe.jax.trees import bytes_of
from jpipe.planning.step import Step
from jpipe.tools.chips import ABSENT, parse_topology
from jpipe.tools.forecaster import Loop, compile_with_text, count_cycles, read

FLAGS = {"xla_gpu_experimental_parallel_async_compute_limit": 16}
"""Of XLA for GPUs, which else has two moves under way at a time, and waits for the others."""
COLUMNS = (
    "offload",
    "arguments",
    "temporaries",
    "of those without",
    "on the host",
    "moves",
    "beside products",
    "a move, ms",
    "a tick, Mcycles",
    "compile, s",
)


def layers_for(size: Size, topology: str) -> list[Any]:
    """A decoder with the attention kernel of a chip."""
    is_gpu = parse_topology(topology).chip.gpu is not None
    return make_layers(size, attention="cudnn") if is_gpu else kernels.make_layers(size, "flash")


def steady_tick(program: Loop) -> Loop:
    """The ticks in which most is done: all of them on TPUs, those of one run on GPUs."""
    return max(program.find("ticks"), key=lambda loop: len(loop.operations))


def cycles_of_tick(step: Step, program: Loop) -> str:
    """Millions of cycles of a steady tick, the slowest stage's; "-" if the compiler notes none."""
    if not program.own:
        return "-"
    work, cost = count_cycles(step, program)
    return f"{(sum(map(max, work.times.values())) + cost.seconds['between layers'] / step.table.num_ticks) / 1e6:.3f}"


def row(size: Size, topology: str, offload: str, options: argparse.Namespace) -> tuple[list[str], int]:
    """(what the table shows of a setting, bytes of its temporaries)."""
    devices, begin = parse_topology(topology).devices(), time.perf_counter()
    pipe = jpipe.Pipeline(
        layers_for(size, topology),
        loss_fn,
        num_stages=options.stages,
        num_microbatches=options.microbatches,
        schedule=options.schedule,
        num_chunks=options.chunks,
        remat=options.remat,
        ends=options.ends,
        mesh=stage_mesh(devices, options.stages),
        offload=[] if offload == "none" else offload.split("+"),
    )
    batch, tx = batch_shapes(size, options.microbatches), optax.adamw(1e-4)
    compiled, text = compiled_for(pipe, tx, batch, topology)
    if options.dump:
        Path(options.dump, f"{topology.partition(':')[0]}_{offload}.txt").write_text(text)
    step = pipe.planner.training_step(pipe.planner.for_training(batch))
    memory, program = compiled.memory_analysis(), read(text)
    moves = transfers(steady_tick(program), HOST_MOVES)
    moved = sum(bytes_of(storage.empty_row()) for storage in step.kept.away.values())
    link = parse_topology(topology).chip.host.bandwidth
    shown = [
        offload,
        mib(memory.argument_size_in_bytes),
        mib(memory.temp_size_in_bytes),
        "",
        mib(memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes),
        str(len(moves)),
        str(sum(move.beside_products for move in moves)),
        f"{1e3 * moved / link:.2f}" if moved else "-",
        cycles_of_tick(step, program),
        f"{time.perf_counter() - begin:.0f}",
    ]
    return shown, memory.temp_size_in_bytes


def compiled_for(pipe: Any, tx: Any, batch: Any, topology: str) -> tuple[Any, str]:
    """A step compiled for a chip, and its text."""
    lower = lambda: jax.jit(pipe.train_step, donate_argnums=0).lower(pipe.abstract_state(batch, tx), batch)
    if parse_topology(topology).chip.gpu is None:
        return compile_with_text(lower())
    with absent_cudnn():
        compiled = lower().compile(ABSENT | FLAGS)
    return compiled, compiled.as_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", nargs="+", default=["v5p:2x2x2", "h100:8"], help="(default %(default)s)")
    parser.add_argument("--offload", nargs="+", default=["none", "residuals"], help="(default %(default)s)")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--ends", default="shared", help="(default %(default)s)")
    parser.add_argument("--blocks", type=int, default=2, help="of a stage (default %(default)s)")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--dump", help="a folder for the compiled programs' texts")
    options = parser.parse_args()
    on_cpu()
    size = Size(options.blocks * options.stages, options.width, options.width // 128, options.seq, 8192, 1, "bfloat16")
    for topology in options.topology:
        rows, without = [], 0
        for offload in options.offload:
            shown, temporaries = row(size, topology, offload, options)
            without = without or temporaries
            shown[3] = f"{temporaries / without:.2f}"
            rows.append(shown)
        kind = parse_topology(topology).devices()[0]
        where = f"K={options.stages}", f"M={options.microbatches}", options.schedule
        modes = *where, f"remat {options.remat}", f"ends {options.ends}", size
        show(f"Residuals on the hosts, {topology}, MiB a device", COLUMNS, rows, settings(kind, *modes))


if __name__ == "__main__":
    main()
