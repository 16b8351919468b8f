"""The interface `AnyLayer`, by which all other code sees a layer, and `PlainLayer`: layers from functions.

A model is a sequence of unlike layers. Everything after this module sees only `AnyLayer`: a name, `init`, `apply`, and
the translation between the variables that jpipe works on (a dict by collection) and the item that a user knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import jax
from jax.sharding import PartitionSpec

from jpipe.layers.fingerprint import differ_in_numbers, same_value
from jpipe.layers.functions import mode_arguments, signature_of
from jpipe.layers.shared import Shared
from jpipe.types import Batch, Leaf, PyTree

Activation: TypeAlias = PyTree
"""The input or output of a layer: any pytree of arrays (of their shapes, where nothing is computed)."""

Inputs = tuple[Activation, ...]
"""The positional arguments of a layer."""

LayerVariables = dict[str, PyTree]
"""One layer's variables by collection: `{"params": tree, "batch_stats": tree}`; a collection may be missing."""

Item: TypeAlias = PyTree
"""One layer's variables as the library that it comes from has them; for a `Layer` its bare parameters."""

Specs = dict[str, list[PartitionSpec]]
"""The mesh axes that each leaf is split over, by collection, in the order of `jax.tree.leaves`."""


class LayerError(ValueError):
    """A fault of a layer, as the rest of a sentence that begins with its name."""


class Context(NamedTuple):
    """The facts that a layer is told besides its variables and inputs.

    Attributes:
      key: its random key for this micro-batch; None in evaluation.
      train: training or evaluation mode.
      batch: the micro-batch, for layers that read it; None for others.
    """

    key: jax.Array | None
    train: bool
    batch: Batch = None


class AnyLayer(Protocol):
    """The interface by which the rest of the package knows a layer."""

    @property
    def name(self) -> str:
        """A short name for tables and errors."""
        ...

    @property
    def ready(self) -> LayerVariables | None:
        """The values that the layer already has, or None if `init` makes them."""
        ...

    @property
    def reads_batch(self) -> bool:
        """Whether it needs the micro-batch in its context."""
        ...

    @property
    def shared(self) -> Shared | None:
        """The shared layer whose parameters it uses; None if they are its own."""
        ...

    @property
    def repeats(self) -> int | None:
        """The index of the first layer that is the same object, where one would think the two tied; else None."""
        ...

    @property
    def made_of(self) -> Sequence[object]:
        """The values that decide what it computes of (variables, inputs, context), on which shapes; see `is_same`."""
        ...

    def init(self, key: jax.Array, inputs: Inputs, batch: Batch) -> LayerVariables:
        """New variables for a layer that is called with `inputs`; `batch` is for layers that read it."""
        ...

    def apply(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        """(outputs, new values of all collections but the parameters; no collections in evaluation)."""
        ...

    def to_item(self, variables: LayerVariables) -> Item:
        """The variables as the layer's own library would have returned them."""
        ...

    def from_item(self, item: Item) -> LayerVariables:
        """The inverse of `to_item`."""
        ...

    def partition_specs(self, variables: LayerVariables) -> Specs:
        """The mesh axes named by the layer's metadata."""
        ...

    def bind(self, item: Item) -> Callable[..., Activation]:
        """The layer with these variables as a function of its inputs, in evaluation mode."""
        ...


def is_same(a: AnyLayer, b: AnyLayer) -> bool:
    """Whether both compute the same function of (variables, inputs, context), on variables of the same shapes.

    Such layers are compiled once. It is asked of layers that take inputs of the same shapes.
    """
    return type(a) is type(b) and same_value(a.made_of, b.made_of)


def innermost(layer: AnyLayer) -> AnyLayer:
    """The layer inside of all those that are around it."""
    return innermost(layer.inner) if isinstance(layer, Around) else layer


def may_differ_in_numbers(a: AnyLayer, b: AnyLayer) -> bool:
    """Whether both are the same but for numbers among what they are made of; their traces tell what these do."""
    return type(a) is type(b) and differ_in_numbers(a.made_of, b.made_of)


def describe(tree: PyTree) -> str:
    """A pytree of arrays as text: `float32[8,16]`, or `{'a': float32[8], ...}`.

    >>> describe({"a": jax.numpy.zeros((2, 3)), "b": (jax.numpy.zeros(4), jax.numpy.zeros(4))})
    "{'a': float32[2,3], 'b': (float32[4], float32[4])}"
    """
    short: Callable[[Leaf], _Text] = lambda leaf: _Text(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]")
    return str(jax.tree.map(short, tree))


class _Text(str):
    """A string that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def positional(inputs: Activation) -> Inputs:
    """The positional arguments that a layer is called with: a tuple is passed as several."""
    return inputs if type(inputs) is tuple else (inputs,)


@dataclass(frozen=True)
class Layer:
    """A layer made of two plain functions.

    Args:
      init: `init(key, x) -> params`, a pytree of floating-point arrays.
      apply: `apply(params, x) -> y`. If its signature has a parameter `key` it is given the layer's own random key
        (None in evaluation); if it has one of those that `Pipeline` knows (`train`, `deterministic`, ...), the mode.
      name: shown in tables and errors.

    `x` and `y` are any pytrees of arrays; a tuple `x` is passed as several positional arguments. With `jpipe.pop` or
    `jpipe.reads` both functions get the further arguments.
    """

    init: Callable[..., PyTree]
    apply: Callable[..., Activation]
    name: str = "Layer"

    def __post_init__(self):
        for what in ("init", "apply"):
            if not callable(getattr(self, what)):
                raise TypeError(f"jpipe.Layer: {what}={getattr(self, what)!r} is not callable; pass a function")


@dataclass(frozen=True, kw_only=True)
class Single:
    """A base of all layers without connections; see `AnyLayer`.

    Attributes:
      writes: the collections of which they give new values in evaluation too.
    """

    ready: LayerVariables | None = None
    reads_batch: bool = False
    shared: Shared | None = None
    repeats: int | None = None
    writes: tuple[str, ...] = ()

    def to_item(self, variables: LayerVariables) -> Item:
        return variables


@dataclass(frozen=True)
class Around:
    """A base of all layers around another one; see `AnyLayer`.

    Attributes:
      inner: the other layer.
    """

    inner: AnyLayer

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def shared(self) -> Shared | None:
        return self.inner.shared

    @property
    def repeats(self) -> int | None:
        return self.inner.repeats

    def bind(self, item: Item) -> Callable[..., Activation]:
        """The inner layer, to be called with its own inputs."""
        return self.inner.bind(item)


@dataclass(frozen=True)
class Passing(Around):
    """A base of layers around another one that have its variables as they are."""

    @property
    def ready(self) -> LayerVariables | None:
        return self.inner.ready

    def to_item(self, variables: LayerVariables) -> Item:
        return self.inner.to_item(variables)

    def from_item(self, item: Item) -> LayerVariables:
        return self.inner.from_item(item)

    def partition_specs(self, variables: LayerVariables) -> Specs:
        return self.inner.partition_specs(variables)


@dataclass(frozen=True)
class PlainLayer(Single):
    """Adapts `Layer`, and plain functions without parameters (`init_fn=None`)."""

    name: str
    init_fn: Callable[..., PyTree] | None
    apply_fn: Callable[..., Activation]

    @property
    def made_of(self) -> Sequence[object]:
        return self.shared, self.init_fn, self.apply_fn

    def init(self, key: jax.Array, inputs: Inputs, batch: Batch) -> LayerVariables:
        return {} if self.init_fn is None else {"params": self.init_fn(key, *inputs)}

    def apply(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        """Calls the user's `apply`, with key and mode if its signature takes them."""
        options = mode_arguments(self.apply_fn, context.train)
        if self.init_fn is None:
            return self.apply_fn(*inputs, **options), {}
        if "key" in signature_of(self.apply_fn):
            options["key"] = context.key if context.train else None
        return self.apply_fn(variables["params"], *inputs, **options), {}

    def to_item(self, variables: LayerVariables) -> Item:
        return variables if self.init_fn is None else variables.get("params")

    def from_item(self, item: Item) -> LayerVariables:
        return {} if self.init_fn is None else {"params": item}

    def partition_specs(self, variables: LayerVariables) -> Specs:
        """No mesh axes: plain functions have no metadata."""
        return {name: [PartitionSpec()] * len(jax.tree.leaves(tree)) for name, tree in variables.items()}

    def bind(self, item: Item) -> Callable[..., Activation]:
        return lambda *inputs: self.apply(self.from_item(item), inputs, Context(None, train=False))[0]
