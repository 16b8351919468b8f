"""Draws when a layer's products and transfers run on one chip of a TPU, with rings and without (docs/rings.png).

python benchmarks/axes_picture.py docs/rings.png
"""

import dataclasses
import sys

import matplotlib.pyplot as plt
from axes import devices_of, programs
from axes_models import ROWS, Sizes
from axes_programs import Case, lower_pipeline
from axes_traffic import Program
from common import on_cpu
from matplotlib.axes import Axes

from compiled_transfers import has_products, is_product
from jpipe.tools.chips import Network, chip_of
from jpipe.tools.compiled_program import turn_in_time
from tpu_program import compile_with_text, read

COLOURS = {"product": "#3b6fb6", "other": "#b9c9de", "way": "#e0a030", "wait": "#c0392b"}


def main(path: str) -> None:
    on_cpu(8)
    (row,) = [row for row in ROWS if row.name == "sequence"]
    case = Case.of(row, row.sizes(Sizes()), devices_of(row, "v5p"))
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(10, 3.6), layout="constrained")
    for ax, rings in zip(axes, (False, True), strict=True):
        of = dataclasses.replace(case, rings=rings)
        draw(ax, programs(of)[1], compile_with_text(lower_pipeline(of))[1], of)
        ax.set_title("products beside transfers" if rings else "transfers that are waited for", loc="left", fontsize=10)
    axes[1].set_xlabel("milliseconds of a layer's forward: attention, then its feed-forward, on one chip of four (v5p)")
    names = {"product": "products", "other": "other work", "way": "on a link", "wait": "the chip waits"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names]
    figure.legend(handles, names.values(), ncols=4, loc="outside lower center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def draw(ax: Axes, program: Program, text: str, case: Case) -> None:
    """One program: what the chip does, and each way what is on a link, by the compiler's cycles and the links."""
    chip = chip_of(case.mesh.devices.flat[0])
    whole = read(text)
    takes = program.takes(whole, Network.of(chip, case.mesh))
    loops = [loop for loop in whole.find("F", "LinenBlock.1") if has_products(loop)]
    begun, transfers = turn_in_time(loops[0], takes, chip)
    bar = lambda row, begin, end, colour: ax.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (row, 0.8), color=colour)
    for begin, operation in begun:
        kind = "product" if is_product(operation, loops[0].computations) else "other"
        bar(1, begin, begin + operation.cycles / chip.clock, COLOURS[kind])
    for one in transfers:
        bar(0, one.begin, one.end, COLOURS["way"])
        bar(1, one.end - one.waited, one.end, COLOURS["wait"])
    ax.set_yticks([0.4, 1.4], ["links", "chip"])
    ax.spines[["top", "right", "left"]].set_visible(False)


if __name__ == "__main__":
    main(sys.argv[1])
