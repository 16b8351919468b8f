"""Draws the README's picture: four schedules on one time axis, each over the micro-batches that its stages hold.

    python examples/schedules.py [picture.png]

Needs `pip install 'jpipe[plot]'`, and no devices: schedules are data.
"""

import sys
from pathlib import Path

import jpipe

WORDS = {  # what there is to see
    "naive": "",
    "gpipe": "All forwards first: when the first backward comes,\n"
    "every stage holds 8 micro-batches, all that there are.",
    "1f1b": "As fast, but a micro-batch's backward runs as soon as it can,\n"
    "and makes room for another's forward: stages hold fewer,\n"
    "and no more than these if there are 100 micro-batches.",
    "interleaved": "Each stage has two shorter pieces of the model:\nit waits half as long, and sends twice as often.",
}


def draw(path: str):
    figure = jpipe.compare(list(WORDS), num_stages=4, num_microbatches=8)
    for axes, words in zip(figure.axes[::2], WORDS.values(), strict=True):
        axes.text(38, 1.5, words, fontsize=8, va="center", linespacing=1.4)
    figure.savefig(path, dpi=150)
    return figure


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_suffix(".png")))
