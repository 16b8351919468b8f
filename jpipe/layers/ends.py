"""The first layer reads its inputs from the micro-batch, on whatever stage it lies: nothing is sent to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from jpipe.layers.base import Activation, AnyLayer, Context, Inputs, LayerVariables, Wrapper, positional
from jpipe.types import Batch

ReadInputs = Callable[[Batch], Activation]
"""Micro-batch -> what the first layer is called with, a pytree of arrays."""


@dataclass(frozen=True)
class ReadingLayer(Wrapper):
    """The first layer of a model: it takes no activation, but what `read` finds in the micro-batch.

    Attributes:
      read: micro-batch -> what the layer is called with, a pytree of arrays.
    """

    read: ReadInputs

    @property
    def reads_batch(self) -> bool:
        return True

    def is_same(self, other: AnyLayer) -> bool:
        return isinstance(other, ReadingLayer) and self.read is other.read and self.inner.is_same(other.inner)

    def init(self, key: jax.Array, inputs: Inputs, batch: Batch) -> LayerVariables:
        return self.inner.init(key, positional(self.read(batch)), batch)

    def apply(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        return self.inner.apply(variables, positional(self.read(context.batch)), context)


def with_inputs(layers: Sequence[AnyLayer], read: ReadInputs) -> list[AnyLayer]:
    """The layers, the first of which reads its inputs from the micro-batch."""
    return [ReadingLayer(layers[0], read), *layers[1:]]
