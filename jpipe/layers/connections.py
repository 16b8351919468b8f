"""Connections besides the chain: skips from one layer to a later one, and side inputs from the batch.

A skip is what a layer stashes and a later one pops. It travels with the activations: in between, every layer takes and
gives `WithSkips(x, skips)`, and computes with `x` alone. A skip that passes a layer is no residual of it, and is freed
with the boundary that it crossed. Skips are told apart by numbers, each the lowest free one, and not by the
user's names, so that layers with skips of their own are the same function and compiled once. A side input doesn't
travel at all: every stage reads it from the micro-batch at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe.layers.base import (
    Activation,
    AnyLayer,
    Batch,
    CallError,
    Context,
    Inputs,
    LayerError,
    MissingKeyError,
    SideInputError,
    Variables,
    Wrapper,
    describe,
    positional,
)
from jpipe.layers.fingerprint import same_value

Read = Callable[[Batch], Any]
"""A user's function from the micro-batch to a layer's side input, any pytree of arrays."""


@dataclass(frozen=True)
class Marked:
    """A user's layer with connections: what `stash`, `pop` and `reads` return."""

    layer: Any
    stashes: str | None = None
    pops: str | None = None
    read: Read | None = None


def _mark(layer: Any, function: str, field: str, value: str | Read) -> Marked:
    marked = layer if isinstance(layer, Marked) else Marked(layer)
    if getattr(marked, field) is not None:
        raise ValueError(
            f"jpipe.{function} is applied twice to the same layer ({_name(marked.layer)}); apply it once, and for a "
            f"second one put an identity layer next to it, such as jpipe.{function}(lambda x: x, ...)"
        )
    return replace(marked, **{field: value})


def _check_name(function: str, layer: Any, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"jpipe.{function}({_name(layer)}, {name!r}): the name has to be a non-empty string")


def _name(layer: Any) -> str:
    return getattr(layer, "name", None) or getattr(layer, "__name__", type(layer).__name__)


def stash(layer: Any, name: str) -> Marked:
    """Passes the layer's output on, and also keeps it as a skip for the later layer that pops `name`.

    Args:
      layer: any layer.
      name: different from that of other skips of the model.
    """
    _check_name("stash", layer, name)
    return _mark(layer, "stash", "stashes", name)


def pop(layer: Any, name: str) -> Marked:
    """Calls the layer with `(x, kept)`: what the layer before it gives, and the skip called `name`."""
    _check_name("pop", layer, name)
    return _mark(layer, "pop", "pops", name)


def reads(layer: Any, read: Read) -> Marked:
    """Calls the layer with `(x, side)`, or `(x, kept, side)` if it also pops, where `side = read(batch)`.

    Args:
      layer: any layer.
      read: `batch -> any pytree of arrays`, called with the layer's own micro-batch on whatever stage it lies; nothing
        is sent through the boundaries, and nothing is differentiated with respect to it.
    """
    if not callable(read):
        raise TypeError(f"jpipe.reads({_name(layer)}, {read!r}): pass a function of the batch")
    return _mark(layer, "reads", "read", read)


def connect(layers: Sequence[AnyLayer], marks: Sequence[Marked | None]) -> tuple[AnyLayer, ...]:
    """The adapted layers with their connections: a `ConnectedLayer` around each that has some or that skips pass.

    Args:
      layers: the adapted layers.
      marks: the connections of each layer, or None.

    Raises:
      ValueError: a stash without a later pop, a pop without an earlier stash, or a name used twice; layer and name
        are given.
    """
    known = [mark or Marked(None) for mark in marks]
    _check_pairs(layers, known)
    numbers: dict[str, int] = {}  # of the skips that are under way, by name
    connected: list[AnyLayer] = []
    for layer, mark in zip(layers, known, strict=True):
        passing = tuple(sorted(numbers.values()))
        pops = stashes = None
        if mark.pops is not None:
            pops = numbers.pop(mark.pops)
        if mark.stashes is not None:
            stashes = min(set(range(len(numbers) + 1)) - set(numbers.values()))
            numbers[mark.stashes] = stashes
        plain = not passing and stashes is None and pops is None and mark.read is None
        connected.append(layer if plain else ConnectedLayer(layer, passing, stashes, pops, mark.read))
    return tuple(connected)


def _check_pairs(layers: Sequence[AnyLayer], marks: Sequence[Marked]) -> None:
    stashed: dict[str, int] = {}  # by name, the layer that stashes it
    popped: dict[str, int] = {}
    for index, (layer, mark) in enumerate(zip(layers, marks, strict=True)):
        where = f"layer {index} ({layer.name})"
        if mark.pops is not None:
            if mark.pops not in stashed:
                raise ValueError(f"{where} pops {mark.pops!r}, which no earlier layer stashes; stash it before")
            if mark.pops in popped:
                raise ValueError(
                    f"{where} pops {mark.pops!r}, which layer {popped[mark.pops]} has popped already; to use it twice, "
                    "stash it again behind an identity layer: jpipe.stash(lambda x: x, 'another name')"
                )
            popped[mark.pops] = index
        if mark.stashes is not None:
            if mark.stashes in stashed:
                raise ValueError(
                    f"{where} stashes {mark.stashes!r}, as layer {stashed[mark.stashes]} does; use another name"
                )
            stashed[mark.stashes] = index
    for name, index in stashed.items():
        if name not in popped:
            raise ValueError(
                f"layer {index} ({layers[index].name}) stashes {name!r}, which no later layer pops; pop it"
            )


_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float)


class WithSkips(NamedTuple):
    """What crosses from layer to layer where skips are under way: the activation, and the skips by number."""

    x: Activation
    skips: dict[int, Activation]


@dataclass(frozen=True)
class ConnectedLayer(Wrapper):
    """A layer that stashes, pops or reads, or that skips pass; it takes and gives `WithSkips` where there are some.

    Attributes:
      passing: the numbers of the skips that arrive with its inputs.
      stashes: the number under which its output leaves as a skip, if it does.
      pops: the number of the skip that it is called with, if it pops one.
      read: from the batch to its side input, if it has one.
    """

    passing: tuple[int, ...]
    stashes: int | None
    pops: int | None
    read: Read | None

    @property
    def reads_batch(self) -> bool:
        return self.read is not None or self.inner.reads_batch

    def is_same(self, other: AnyLayer) -> bool:
        if not isinstance(other, ConnectedLayer) or not self.inner.is_same(other.inner):
            return False
        numbers = lambda layer: (layer.passing, layer.stashes, layer.pops)
        return numbers(self) == numbers(other) and same_value(self.read, other.read)

    def init(self, key: jax.Array, inputs: Inputs, batch: Batch) -> Variables:
        own, _ = self._split(inputs, batch)
        return self._call(own, lambda: self.inner.init(key, own, batch))

    def apply(self, variables: Variables, inputs: Inputs, context: Context) -> tuple[Activation, Variables]:
        """Calls the layer with its own inputs, and passes the other skips on."""
        own, skips = self._split(inputs, context.batch)
        outputs, updates = self._call(own, lambda: self.inner.apply(variables, own, context))
        if self.stashes is not None:
            skips = {**skips, self.stashes: outputs}
        return (WithSkips(outputs, skips) if skips else outputs), updates

    def _split(self, inputs: Inputs, batch: Batch) -> tuple[Inputs, dict[int, Activation]]:
        """(the layer's own positional inputs, the skips that pass it)."""
        skips: dict[int, Activation] = {}
        if self.passing:
            ((x, arriving),) = inputs
            inputs, skips = positional(x), dict(arriving)
        extra = [] if self.pops is None else [skips.pop(self.pops)]
        extra += [] if self.read is None else [self._side_input(self.read, batch)]
        if extra:
            inputs = (inputs[0] if len(inputs) == 1 else inputs, *extra)
        return inputs, skips

    def _call(self, own: Inputs, function: Callable[[], Any]) -> Any:
        """What `function()` returns, which calls the layer with `own`; its errors tell what that is."""
        try:
            return function()
        except (LayerError, MissingKeyError):
            raise
        except Exception as error:
            names = ["x"] + ["kept"] * (self.pops is not None) + ["side"] * (self.read is not None)
            shown = f"({', '.join(names)}) = {describe(own)}" if len(names) > 1 else describe(own)
            raise CallError(f"{shown}. It raised {type(error).__name__}: {error}") from error

    def _side_input(self, read: Read, batch: Batch) -> Any:
        try:
            side = read(batch)
        except Exception as error:
            raise SideInputError(f"{type(error).__name__}: {error}") from error
        if side is None or not all(isinstance(leaf, _NUMBERS) for leaf in jax.tree.leaves(side)):
            raise LayerError(f"reads {side!r:.60} from the batch; its function has to return a pytree of arrays")
        return side
