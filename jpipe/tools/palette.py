"""Colours that people with any colour vision tell apart (Okabe and Ito, jfly.uni-koeln.de/color), and words for kinds.

They differ in lightness too, so that they also do in print.
"""

RGB = tuple[float, float, float]

NAMES = {"F": "forward", "R": "recomputation", "B": "backward", "I": "input gradient", "W": "weight gradient"}
"""The names of all that has a colour of its own: kinds of action, "R" for what a backward computes anew, "W" for what
is done to weights."""

COLOURS: dict[str, RGB] = {
    "F": (0.000, 0.447, 0.698),  # blue
    "R": (0.337, 0.706, 0.914),  # sky blue, hatched: the forward once more
    "B": (0.902, 0.624, 0.000),  # orange
    "I": (0.600, 0.150, 0.000),  # vermillion, darker: its own is near to orange
    "W": (0.000, 0.620, 0.451),  # bluish green
}
BUBBLE: RGB = (0.90, 0.90, 0.90)
MEMORY: RGB = (0.800, 0.475, 0.655)  # reddish purple
SCALE: RGB = (0.96, 0.94, 0.95)  # behind memory, as high as the scale

HATCH = {"R": "////"}

TITLE, TEXT, NUMBER = 10.0, 8.5, 6.0
"""Points of what is written: above bars, beside them, and in them. Legible where a picture of 6 inches is as wide as a
telephone."""

DARKEST = 0.45
"""The part by which the last of many chunks is darker than the first."""


def shade(kind: str, chunk: int, num_chunks: int) -> RGB:
    """The colour of a kind on a chunk: the later the chunk, the darker."""
    darker = DARKEST * chunk / max(1, num_chunks - 1)
    red, green, blue = COLOURS[kind]
    return red * (1 - darker), green * (1 - darker), blue * (1 - darker)


def text_colour(background: RGB) -> str:
    """Black or white, whichever is easier to read on a background (WCAG's contrast of luminances)."""
    return "white" if (relative_luminance(background) + 0.05) ** 2 < 1.05 * 0.05 else "black"


def relative_luminance(colour: RGB) -> float:
    """WCAG 2.2's, from 0 for black to 1 for white.

    >>> round(relative_luminance((1.0, 1.0, 1.0)), 3), round(relative_luminance((0.0, 0.0, 0.0)), 3)
    (1.0, 0.0)
    """
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
