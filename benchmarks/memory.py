"""Memory of a training step: temporary bytes a device, by schedule, number of micro-batches and remat.

At a fixed micro-batch size GPipe keeps something for all M micro-batches, 1F1B for at most 2K - 1 of them. Figures are
the compiler's own (`memory_analysis`); `--tpu v5e:2x2` asks the TPU compiler, which needs no TPU.
"""

import argparse

import jax
import optax
from common import (
    Size,
    batch_shapes,
    compiled_step,
    mib,
    on_cpu,
    settings,
    show,
    stage_mesh,
    tpu_devices,
    transformer_pipeline,
)

SIZE = Size(layers=8, width=256, heads=4, seq=128, vocab=256, microbatch=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="compile for this one, such as v5e:2x2")
    parser.add_argument("--stages", type=int, default=4, help="K (default %(default)s)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 32, 64], help="M (default %(default)s)")
    parser.add_argument("--remat", nargs="+", default=["layer", "stage", "full", "none"], help="(default %(default)s)")
    Size.add_arguments(parser, SIZE)
    options = parser.parse_args()
    on_cpu(options.stages)
    size, tx = Size.of(options), optax.adamw(1e-4)
    mesh = stage_mesh(tpu_devices(options.tpu) if options.tpu else jax.devices(), options.stages)

    def temporaries(schedule: str, remat: str, m: int) -> int:
        pipe = transformer_pipeline(size, options.stages, m, schedule=schedule, remat=remat, mesh=mesh)
        return compiled_step(pipe, tx, batch_shapes(size, m)).memory_analysis().temp_size_in_bytes

    rows = []
    for remat in options.remat:
        for schedule in ("gpipe", "1f1b"):
            found = [temporaries(schedule, remat, m) for m in options.microbatches]
            rows.append((f"{schedule}, {remat}", *map(mib, found), f"{found[-1] / found[0]:.2f}"))
    columns = ["schedule, remat", *(f"M={m}" for m in options.microbatches), "last / first"]
    caption = settings(mesh.devices.flat[0], size, f"K={options.stages}")
    show("Temporary MiB a device", columns, rows, caption)


if __name__ == "__main__":
    main()
