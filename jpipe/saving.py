"""Refuses Flax's serialisation of a pipeline's variables, and says what to save instead.

Variables are laid out over a pipeline's devices, so that their bytes mean nothing to another pipeline. `pickle` is told
by `StageTree` itself, Flax's serialisation here.
"""

from __future__ import annotations

from typing import NoReturn

from flax import serialization

from jpipe.memory.layout import NOT_SAVED, StageTree
from jpipe.training.train_state import TrainState


def _refuse(*_: object) -> NoReturn:
    raise TypeError(NOT_SAVED)


def register() -> None:
    """Tells Flax's serialisation about variables and states."""
    for laid_out in (StageTree, TrainState):
        serialization.register_serialization_state(laid_out, _refuse, _refuse, override=True)
