"""Colours can be told apart, with any colour vision, and numbers on them be read."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from jpipe.tools import palette

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB; the rows sum to 1, so that greys stay.
VISION = {
    "usual": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def seen(colour, vision: str) -> np.ndarray:
    """CIELAB of a colour as it looks with a kind of colour vision; 2.3 is a just noticeable difference."""
    rgb = np.asarray(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.asarray(VISION[vision]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.asarray(to_xyz) @ linear / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_kinds_can_be_told_apart(vision):
    colours = {**palette.COLOURS, "bubble": palette.BUBBLE}
    for one, other in itertools.combinations(colours, 2):
        distance = np.linalg.norm(seen(colours[one], vision) - seen(colours[other], vision))
        assert distance > (15 if "W" in (one, other) else 24), (one, other)
    assert palette.HATCH.keys() == {"R"}, "the forward once more is near to the forward, so it is hatched too"


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("num_chunks", [2, 4])
def test_chunks_keep_the_look_of_their_kind(vision, num_chunks):
    """The forward and the backward of any chunks are as far apart as kinds are; chunks side by side are noticeable."""
    shades = {kind: [seen(palette.shade(kind, v, num_chunks), vision) for v in range(num_chunks)] for kind in "FB"}
    for one, other in itertools.product(shades["F"], shades["B"]):
        assert np.linalg.norm(one - other) > 24
    for kind in "FB":
        for one, other in itertools.pairwise(shades[kind]):
            assert np.linalg.norm(one - other) > 5


@pytest.mark.parametrize("kind", palette.COLOURS)
def test_numbers_stand_out_from_their_bars(kind):
    for num_chunks in (1, 2, 3, 8):
        for chunk in range(num_chunks):
            colour = palette.shade(kind, chunk, num_chunks)
            text, bar = (palette.relative_luminance(to_rgb(c)) for c in (palette.text_colour(colour), colour))
            assert (max(text, bar) + 0.05) / (min(text, bar) + 0.05) >= 4.5  # WCAG 2.2, level AA
