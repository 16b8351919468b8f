"""Draws the README's picture: three schedules on one time axis, each over the micro-batches that its stages hold.

    python examples/schedules.py [picture.png]

Needs `pip install 'jpipe[plot]'`, and no devices: schedules are data.
"""

import sys
from pathlib import Path

import jpipe

WORDS = {  # what there is to see
    "gpipe": "All forwards first: when the first backward comes,\n"
    "every stage holds 16 micro-batches, all that there are.",
    "1f1b": "As fast, but a backward runs as soon as it can, and makes room for another\n"
    "forward: stages hold 7 at most, and no more if there are 100 micro-batches.",
    "interleaved": "Each stage has two shorter pieces of the model: it waits half as long,\nand sends twice as often.",
}


def draw(path: str):
    figure = jpipe.compare(list(WORDS), num_stages=4, num_microbatches=16, width=6)
    for axes, words in zip(figure.axes[::2], WORDS.values(), strict=True):
        axes.set_title(axes.get_title(loc="left"), fontsize=10, fontweight="bold", loc="left", pad=27)
        place = {"xycoords": "axes fraction", "xytext": (0, 4), "textcoords": "offset points"}
        axes.annotate(words, (0, 1), fontsize=8.5, linespacing=1.2, **place)
    figure.set_figheight(figure.get_figheight() + 0.35 * len(WORDS))
    figure.savefig(path, dpi=180)
    return figure


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_suffix(".png")))
