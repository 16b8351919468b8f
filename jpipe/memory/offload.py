"""`Offload`: what lies in the memory of the hosts (`offload=`).

A chip's host has several times the memory of its chips, behind a link that is a hundred times slower than the chip's
own memory. So what waits long, or is needed once a step, may lie there, if it moves while the chip computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from jpipe.arrays.trees import is_float
from jpipe.types import Leaf
from jpipe.users_numbers import as_number


@dataclass(frozen=True)
class Offload:
    """The shares of what lies on the hosts: 0 for nothing, 1 for all.

    Attributes:
      residuals: of the bytes that forwards keep for backwards.
      boundaries: of the layers' inputs among them, which are all that remat "layer" keeps.
      optimizer: of the optimiser's state; 0 or 1.
    """

    residuals: float = 0
    boundaries: float = 0
    optimizer: float = 0

    def __bool__(self) -> bool:
        return bool(self.shares)

    @property
    def shares(self) -> dict[str, float]:
        """The shares that aren't 0, by word."""
        return {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name)}


NOTHING = Offload()
WORDS = tuple(field.name for field in fields(Offload))


def as_offload(offload: str | Sequence[str] | Mapping[str, float]) -> Offload:
    """Makes an `Offload` of what a user passed: a word, several, or a share by word.

    Raises:
      ValueError: an unknown word, or a share that is none.
      TypeError: anything else.
    """
    if isinstance(offload, str):
        offload = (offload,)
    if not isinstance(offload, Mapping):
        if not isinstance(offload, (Sequence, set, frozenset)) or isinstance(offload, bytes):
            raise TypeError(f"offload={offload!r} is neither a word nor several; use some of {list(WORDS)}")
        if any(isinstance(word, Mapping) for word in offload):
            raise TypeError(
                f"offload={offload!r}: give all shares in one dict, as {{'residuals': 0.5, 'optimizer': 1}}"
            )
        offload = dict.fromkeys(offload, 1)
    for word, share in offload.items():
        if not isinstance(word, str):
            raise TypeError(f"offload={offload!r} has {word!r}, which is no word; use some of {list(WORDS)}")
        if word not in WORDS:
            raise ValueError(f"offload={word!r} is unknown; use some of {list(WORDS)}")
        remedy = "use 0 or 1: all of it, or nothing" if word == "optimizer" else "use a share from 0 to 1"
        number = as_number(f"offload[{word!r}]", share, remedy)
        if number > 1 or (word == "optimizer" and number not in (0, 1)):
            raise ValueError(f"offload[{word!r}]={share!r}; {remedy}")
    return Offload(**{word: float(share) for word, share in offload.items()})


SMALLEST_RECORD = 2**10
"""The fewest elements of a leaf that goes layer by layer. A TPU's compiler moves no slices of narrower arrays."""


def may_go(leaf: Leaf, buffer: Leaf, *, by_layer: bool) -> bool:
    """Whether a leaf of an optimiser's state can lie on the hosts: floats of the shape of their buffer.

    Args:
      leaf: it, or its shape and dtype.
      buffer: `[K, ...]`; of leaves of two dimensions and more `[K, entries, ...]`.
      by_layer: whether a layer's part goes and comes at once (`jpipe.per_layer`), not slices of all layers'.
    """
    is_wide = len(buffer.shape) >= 4 and math.prod(buffer.shape[2:]) >= SMALLEST_RECORD
    return leaf.shape == buffer.shape and is_float(leaf) and (is_wide or not by_layer)
