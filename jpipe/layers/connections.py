"""Connections besides the chain: skips (`stash`, `pop`; numbers stand for their names) and side inputs (`reads`).

A skip is an output that one layer stashes and a later one pops. It travels with the activations: every layer between
the two takes and gives `WithSkips(x, skips)`, and computes with `x` alone. A skip that passes a layer isn't a residual
of it, and is freed with the boundary that it crossed. Skips have numbers, each the lowest free one. With the user's
names instead, equal layers with skips of different names would be different functions, and compiled several times. A
side input doesn't travel at all: every stage reads it from the micro-batch at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from jpipe.layers.base import Activation, AnyLayer, Context, Inputs, LayerError, LayerVariables, describe, positional
from jpipe.layers.calls import decoding, signature_of
from jpipe.types import Batch, PyTree, Shapes

Read = Callable[[Batch], PyTree]
"""A user's function from the micro-batch to a layer's side input, any pytree of arrays."""


@dataclass(frozen=True)
class Marked:
    """A user's layer with connections: what `stash`, `pop` and `reads` return."""

    layer: object
    stashes: str | None = None
    pops: str | None = None
    read: Read | None = None


_TWICE = {
    "stash": "for a second name put an identity layer behind it, jpipe.stash(lambda x: x, {!r})",
    "pop": "for a second skip put a layer before it that hands both on, jpipe.pop(lambda x, kept: (x, kept), {!r})",
    "reads": "read both by one function, jpipe.reads(layer, lambda batch: (first(batch), second(batch)))",
}
"""The remedy for applying each of the three twice."""


def _mark(layer: object, function: str, field: str, value: str | Read) -> Marked:
    """Checks the argument of one of the three functions, and notes it in a field of the marked layer."""
    marked = layer if isinstance(layer, Marked) else Marked(layer)
    inner = marked.layer
    name = getattr(inner, "name", None) or getattr(inner, "__name__", type(inner).__name__)
    if function == "reads" and not callable(value):
        raise TypeError(f"jpipe.reads({name}, {value!r}): pass a function of the batch")
    if function != "reads" and not (isinstance(value, str) and value):
        raise TypeError(f"jpipe.{function}({name}, {value!r}): the name has to be a non-empty string")
    if getattr(marked, field) is not None:
        raise ValueError(f"jpipe.{function} is applied twice to the layer {name}; {_TWICE[function].format(value)}")
    return replace(marked, **{field: value})


def stash(layer: object, name: str) -> Marked:
    """Passes the layer's output on, and also keeps it as a skip for the later layer that pops `name`.

    Args:
      layer: any layer.
      name: different from that of other skips of the model.
    """
    return _mark(layer, "stash", "stashes", name)


def pop(layer: object, name: str) -> Marked:
    """Calls the layer with `(x, kept)`: what the layer before it gives, and the skip called `name`."""
    return _mark(layer, "pop", "pops", name)


def reads(layer: object, read: Read) -> Marked:
    """Calls the layer with `(x, side)`, or `(x, kept, side)` if it also pops, where `side = read(batch)`.

    Args:
      layer: any layer.
      read: `batch -> any pytree of arrays`, called with the layer's own micro-batch on whatever stage it lies; nothing
        is sent through the boundaries, and nothing is differentiated with respect to it.
    """
    return _mark(layer, "reads", "read", read)


def connect(layers: Sequence[AnyLayer], marks: Sequence[Marked]) -> tuple[AnyLayer, ...]:
    """Puts connections around each adapted layer that has some, or that skips pass.

    Args:
      layers: the adapted layers.
      marks: the connections of each layer, or none.

    Raises:
      ValueError: a stash without a later pop, a pop without an earlier stash, or a name used twice; layer and name
        are given.
    """
    numbers: dict[str, int] = {}  # by name, the number of each skip that is under way
    stashed: dict[str, int] = {}  # by name, the index of the layer that stashes it
    popped: dict[str, int] = {}  # by name, the index of the layer that pops it
    connected: list[AnyLayer] = []
    for index, (layer, mark) in enumerate(zip(layers, marks, strict=True)):
        where = f"layer {index} ({layer.name})"
        passing = tuple(sorted(numbers.values()))
        pops = stashes = None
        # The pop comes first: a layer that does both may stash under the number that its pop makes free.
        if mark.pops is not None:
            if mark.pops not in stashed:
                raise ValueError(f"{where} pops {mark.pops!r}, which no earlier layer stashes; stash it before")
            if mark.pops in popped:
                raise ValueError(
                    f"{where} pops {mark.pops!r}, as layer {popped[mark.pops]} does; pop a second skip, which an "
                    f"identity behind layer {stashed[mark.pops]} stashes: jpipe.stash(lambda x: x, 'another name')"
                )
            popped[mark.pops] = index
            pops = numbers.pop(mark.pops)
        if mark.stashes is not None:
            if mark.stashes in stashed:
                raise ValueError(f"{where} stashes {mark.stashes!r}, as layer {stashed[mark.stashes]} does; rename it")
            stashed[mark.stashes] = index
            stashes = min(set(range(len(numbers) + 1)) - set(numbers.values()))
            numbers[mark.stashes] = stashes
        connections = Connections(passing, stashes, pops, mark.read)
        connected.append(layer if connections == Connections() else _around(layer, connections))
    for name in numbers:
        where = f"layer {stashed[name]} ({layers[stashed[name]].name})"
        raise ValueError(f"{where} stashes {name!r}, which no later layer pops; pop it")
    return tuple(connected)


_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float)


class WithSkips(NamedTuple):
    """The activation and the skips under way, by number, as they cross from layer to layer."""

    x: Activation
    skips: dict[int, Activation]


class Connections(NamedTuple):
    """The inputs of a layer besides the activation, and the skips around it.

    Attributes:
      passing: the numbers of the skips that arrive with its inputs.
      stashes: the number under which its output leaves as a skip, if it does.
      pops: the number of the skip that it is called with, if it pops one.
      read: from the batch to its side input, if it has one.
    """

    passing: tuple[int, ...] = ()
    stashes: int | None = None
    pops: int | None = None
    read: Read | None = None

    def split(self, arriving: Inputs, batch: Batch) -> tuple[Inputs, dict[int, Activation]]:
        """Splits the inputs: (the positional inputs of the layer itself, the skips that pass it)."""
        inputs, skips = arriving, dict[int, Activation]()
        if self.passing:
            ((x, skips_here),) = arriving
            inputs, skips = positional(x), dict(skips_here)
        extra = [] if self.pops is None else [skips.pop(self.pops)]
        extra += [] if self.read is None else [_side_input(self.read, batch)]
        if extra:
            inputs = (inputs[0] if len(inputs) == 1 else inputs, *extra)
        return inputs, skips


def _around(layer: AnyLayer, connections: Connections) -> AnyLayer:
    """Puts connections around a layer. Where skips are under way it takes and gives `WithSkips`."""

    def init(arriving: Inputs, context: Context) -> LayerVariables:
        return layer.init(connections.split(arriving, context.batch)[0], context)

    def apply(variables: LayerVariables, arriving: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        inputs, skips = connections.split(arriving, context.batch)
        outputs, updates = layer.apply(variables, inputs, context)
        if connections.stashes is not None:
            skips[connections.stashes] = outputs
        return (WithSkips(outputs, skips) if skips else outputs), updates

    def decode(takes: Shapes, size: int, length: int) -> AnyLayer:
        read = None if connections.read is None else no_batch
        return _around(decoding(layer, takes, size, length), connections._replace(read=read))

    return replace(
        layer,
        made_of=("connected", layer.made_of, connections),
        init=init,
        apply=apply,
        decode=decode,
        reads_batch=connections.read not in (None, no_batch) or layer.reads_batch,
    )


def _side_input(read: Read, batch: Batch) -> PyTree:
    if read is no_batch:
        return None
    try:
        side = read(batch)
    except Exception as error:
        raise LayerError(f"can't read a side input from {describe(batch)}: {error!r}; pass the whole batch") from error
    if side is None or not all(isinstance(leaf, _NUMBERS) for leaf in jax.tree.leaves(side)):
        raise LayerError(f"reads {side!r:.60} from the batch; its function has to return a pytree of arrays")
    return side


def no_batch(batch: Batch) -> None:
    """Reads None: the side input of a layer as it decodes, where there is no batch."""


INPUTS = 0x1A97
"""A function `inputs` that takes a random key gets the first layer's, with this folded in."""


def with_inputs(layers: Sequence[AnyLayer], read_inputs: Callable[..., PyTree]) -> list[AnyLayer]:
    """Lets the first layer read its inputs from the micro-batch, on whatever stage it lies: nothing is sent to it.

    Args:
      layers: the layers as `connect` gives them.
      read_inputs: micro-batch -> the inputs of the first one; it may name a random key.
    """
    first, takes_key = layers[0], "key" in signature_of(read_inputs)

    def init(nothing: Inputs, context: Context) -> LayerVariables:
        return first.init(positional(read_inputs(context.batch)), context)

    def apply(variables: LayerVariables, nothing: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        keys = {"key": jax.random.fold_in(context.key, INPUTS)} if takes_key and context.key is not None else {}
        if takes_key and not keys:
            raise LayerError("reads inputs that take a random key, and got none: pipe.evaluate(variables, batch, key)")
        return first.apply(variables, positional(read_inputs(context.batch, **keys)), context)

    made_of = ("reads its inputs", first.made_of, read_inputs)
    return [replace(first, made_of=made_of, init=init, apply=apply, decode=None, reads_batch=True), *layers[1:]]
