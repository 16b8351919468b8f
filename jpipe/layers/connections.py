"""Connections besides the chain: skips from one layer to a later one, and side inputs from the batch.

A skip travels with the activations: between `stash` and `pop` every layer takes and gives `Carried(x, kept)`, and only
touches `x`. What passes by is no residual, and is freed with the boundary that carried it. Kept values are told apart
by places, the lowest free one each, and not by their names, so that layers with skips of their own are alike and
compiled once. A side input doesn't travel at all: every stage reads it from the micro-batch at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe.layers.base import (
    AnyLayer,
    CallError,
    Context,
    LayerError,
    MissingKeyError,
    SideInputError,
    Variables,
    Wrapper,
    describe,
    positional,
)
from jpipe.layers.functions import same_value


@dataclass(frozen=True)
class Marked:
    """A user's layer with connections: what `stash`, `pop` and `reads` return."""

    layer: Any
    stashes: str | None = None
    pops: str | None = None
    read: Callable[[Any], Any] | None = None


def _mark(layer: Any, function: str, **change: Any) -> Marked:
    marked = layer if isinstance(layer, Marked) else Marked(layer)
    ((field, value),) = change.items()
    if getattr(marked, field) is not None:
        raise ValueError(
            f"jpipe.{function} is applied twice to the same layer ({_name(marked.layer)}); apply it once, and for a "
            f"second one put an identity layer next to it, such as jpipe.{function}(lambda x: x, ...)"
        )
    return Marked(**{**vars(marked), field: value})


def _check_name(function: str, layer: Any, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"jpipe.{function}({_name(layer)}, {name!r}): the name has to be a non-empty string")


def _name(layer: Any) -> str:
    return getattr(layer, "name", None) or getattr(layer, "__name__", type(layer).__name__)


def stash(layer: Any, name: str) -> Marked:
    """Passes the layer's output on and also keeps it, for the later layer that pops `name`.

    Args:
      layer: any layer.
      name: different from that of other skips of the model.
    """
    _check_name("stash", layer, name)
    return _mark(layer, "stash", stashes=name)


def pop(layer: Any, name: str) -> Marked:
    """Calls the layer with `(x, kept)`: what the layer before it gives, and what was kept under `name`."""
    _check_name("pop", layer, name)
    return _mark(layer, "pop", pops=name)


def reads(layer: Any, read: Callable[[Any], Any]) -> Marked:
    """Calls the layer with `(x, side)`, or `(x, kept, side)` if it also pops, where `side = read(batch)`.

    Args:
      layer: any layer.
      read: `batch -> any pytree of arrays`, called with the layer's own micro-batch on whatever stage it lies; nothing
        is sent through the boundaries, and nothing is differentiated with respect to it.
    """
    if not callable(read):
        raise TypeError(f"jpipe.reads({_name(layer)}, {read!r}): pass a function of the batch")
    return _mark(layer, "reads", read=read)


def connect(layers: Sequence[AnyLayer], marks: Sequence[Marked | None]) -> tuple[AnyLayer, ...]:
    """Adapted layers with their connections, and with what passes by them.

    Args:
      layers: the adapted layers.
      marks: the connections of each, or None.

    Raises:
      ValueError: a stash without a later pop, a pop without an earlier stash, or a name used twice; layer and name
        are given.
    """
    stashed: dict[str, int] = {}
    popped: dict[str, int] = {}
    places: dict[str, int] = {}
    connected: list[AnyLayer] = []
    for index, (layer, mark) in enumerate(zip(layers, marks, strict=True)):
        passing = tuple(sorted(places.values()))
        mark = mark or Marked(None)
        where = f"layer {index} ({layer.name})"
        pops = stashes = None
        if mark.pops is not None:
            if mark.pops not in stashed:
                raise ValueError(f"{where} pops {mark.pops!r}, which no earlier layer stashes; stash it before")
            if mark.pops in popped:
                raise ValueError(
                    f"{where} pops {mark.pops!r}, which layer {popped[mark.pops]} has popped already; to use it twice, "
                    "stash it again behind an identity layer: jpipe.stash(lambda x: x, 'another name')"
                )
            popped[mark.pops] = index
            pops = places.pop(mark.pops)
        if mark.stashes is not None:
            if mark.stashes in stashed:
                raise ValueError(
                    f"{where} stashes {mark.stashes!r}, as layer {stashed[mark.stashes]} does; use another name"
                )
            stashed[mark.stashes] = index
            stashes = min(set(range(len(places) + 1)) - set(places.values()))
            places[mark.stashes] = stashes
        plain = not passing and stashes is None and pops is None and mark.read is None
        connected.append(layer if plain else ConnectedLayer(layer, passing, stashes, pops, mark.read))
    for name, index in stashed.items():
        if name not in popped:
            raise ValueError(
                f"layer {index} ({layers[index].name}) stashes {name!r}, which no later layer pops; pop it"
            )
    return tuple(connected)


_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float)


class Carried(NamedTuple):
    """What passes from layer to layer where values are kept: the activations, and these values by place."""

    x: Any
    kept: dict[int, Any]


@dataclass(frozen=True)
class ConnectedLayer(Wrapper):
    """A layer that stashes, pops or reads, or that kept values pass by.

    Attributes:
      passing: the places of the values kept before it.
      stashes: the place where it keeps its output, if it does.
      pops: the place of the value that it is called with, if it pops one.
      read: batch -> its side input, if it has one.
    """

    passing: tuple[int, ...]
    stashes: int | None
    pops: int | None
    read: Callable[[Any], Any] | None

    @property
    def reads_batch(self) -> bool:
        """Whether it has a side input."""
        return self.read is not None or self.inner.reads_batch

    def is_same(self, other: AnyLayer) -> bool:
        """The same layer with the same connections."""
        if not isinstance(other, ConnectedLayer) or not self.inner.is_same(other.inner):
            return False
        places = lambda layer: (layer.passing, layer.stashes, layer.pops)
        return places(self) == places(other) and same_value(self.read, other.read)

    def init(self, key: jax.Array, inputs: tuple, batch: Any) -> Variables:
        """The layer's own, with its own inputs."""
        own = self._split(inputs, batch)[0]
        return self._call(own, lambda: self.inner.init(key, own, batch))

    def apply(self, variables: Variables, inputs: tuple, context: Context) -> tuple[Any, Variables]:
        """Calls the layer with its own inputs; passes on what is kept."""
        own, kept = self._split(inputs, context.batch)
        outputs, updates = self._call(own, lambda: self.inner.apply(variables, own, context))
        if self.stashes is not None:
            kept = {**kept, self.stashes: outputs}
        return (Carried(outputs, kept) if kept else outputs), updates

    def _split(self, inputs: tuple, batch: Any) -> tuple[tuple, dict[int, Any]]:
        """The layer's own positional inputs, and what is kept after it has popped its own."""
        kept: dict[int, Any] = {}
        if self.passing:
            ((x, passing),) = inputs
            inputs, kept = positional(x), dict(passing)
        extra = [] if self.pops is None else [kept.pop(self.pops)]
        extra += [] if self.read is None else [self._side_input(batch)]
        if extra:
            inputs = (inputs[0] if len(inputs) == 1 else inputs, *extra)
        return inputs, kept

    def _call(self, own: tuple, function: Callable[[], Any]) -> Any:
        """What `function` returns, which calls the layer with its own inputs."""
        try:
            return function()
        except (LayerError, MissingKeyError):
            raise
        except Exception as error:
            names = ["x"] + ["kept"] * (self.pops is not None) + ["side"] * (self.read is not None)
            shown = f"({', '.join(names)}) = {describe(own)}" if len(names) > 1 else describe(own)
            raise CallError(f"{shown}. It raised {type(error).__name__}: {error}") from error

    def _side_input(self, batch: Any) -> Any:
        assert self.read is not None
        try:
            side = self.read(batch)
        except Exception as error:
            raise SideInputError(f"{type(error).__name__}: {error}") from error
        if side is None or not all(isinstance(leaf, _NUMBERS) for leaf in jax.tree.leaves(side)):
            raise LayerError(f"reads {side!r:.60} from the batch; its function has to return a pytree of arrays")
        return side
