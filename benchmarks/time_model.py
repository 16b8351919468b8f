"""Predicted step times against the TPU compiler's cycles, for settings of `benchmarks/tpu_speed.py`.

    python benchmarks/time_model.py --chip v5e v5p v6e --microbatch 1 4 --remat layer none

`predict_time` compiles nothing; each row is compiled here once, to see how far it was off.
"""

import argparse
import itertools

import jax
import optax
from common import batch_shapes, console, lowered_step, on_cpu, show
from tpu_speed import Setting, Walk, make_pipeline

from jpipe.forecasting.hardware import CHIPS
from jpipe.forecasting.time_model import predict_time
from tpu_program import compile_with_text

COLUMNS = ("step", "predicted, ms", "compiler, ms", "error", "limit")


def measure(setting: Setting) -> tuple[str, ...]:
    pipe, tx, batch = make_pipeline(setting), optax.sgd(1e-3), batch_shapes(setting.size, setting.count)
    chip = CHIPS[setting.chip]
    found = predict_time(pipe, batch, chip, tx=tx)
    _, text = compile_with_text(lowered_step(pipe, tx, batch))
    compiler = Walk(pipe, setting, text).cycles() / chip.clock
    return (
        str(setting),
        f"{found.total * 1e3:.1f}",
        f"{compiler * 1e3:.1f}",
        f"{found.total / compiler - 1:+.0%}",
        found.limit,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", nargs="+", default=["v5e", "v5p", "v6e"])
    parser.add_argument("--microbatch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--remat", nargs="+", default=["layer", "none"])
    options = parser.parse_args()
    on_cpu()
    rows = []
    for chip, microbatch, remat in itertools.product(options.chip, options.microbatch, options.remat):
        rows.append(measure(Setting(chip, microbatch=microbatch, remat=remat)))
        console.print(*rows[-1], sep=" | ", highlight=False)
    show("Step times, predicted and by the TPU compiler", COLUMNS, rows, f"jax {jax.__version__}, K=4, M=16")


if __name__ == "__main__":
    main()
