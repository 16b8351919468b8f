"""Layers: what a model is made of, each adapted to one small interface.

A model is a sequence of layers of mixed kinds. Everything after this module sees only `AnyLayer`: a name,
`init`, `apply`, and the translation between the variables jpipe works on (a dict of collections) and the item
a user knows. Flax itself is known to `flax_layers` and `adapt` alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax

from jpipe.layers.functions import mode_arguments, same_value

Variables = dict[str, Any]
"""One layer's variables by collection: `{"params": tree, "batch_stats": tree}`; a collection may be missing."""


class MissingKeyError(ValueError):
    """A layer asked for random numbers where there is no key: in evaluation."""

    def __init__(self, name: str):
        super().__init__(
            f"{name} draws random numbers in evaluation mode, where there is no key; make it deterministic there"
        )


class SideInputError(ValueError):
    """A layer's function of the batch failed."""


class LayerError(ValueError):
    """What a layer does wrong, as the rest of a sentence that begins with its name."""


class Context(NamedTuple):
    """What a layer is told besides its variables and inputs.

    Attributes:
      key: its random key for this micro-batch, or None.
      train: training or evaluation mode.
      batch: the micro-batch, for layers that read it; None for others.
    """

    key: Any
    train: bool
    batch: Any = None


EVALUATION = Context(key=None, train=False)


class CallError(ValueError):
    """A layer with connections can't take what it is called with: that, and the error."""


class AnyLayer(Protocol):
    """What the rest of the package knows of a layer."""

    @property
    def name(self) -> str:
        """A short name for tables and errors."""
        ...

    @property
    def ready(self) -> Variables | None:
        """The values that the layer already has, or None if `init` makes them."""
        ...

    @property
    def reads_batch(self) -> bool:
        """Whether it needs the micro-batch in its context."""
        ...

    @property
    def shared(self) -> Any:
        """What identifies its parameters among the layers that share them; None if they are its own."""
        ...

    def is_same(self, other: AnyLayer) -> bool:
        """Whether both compute the same function of (variables, inputs, context)."""
        ...

    def init(self, key: jax.Array, inputs: tuple, batch: Any) -> Variables:
        """New variables for positional `inputs`."""
        ...

    def apply(self, variables: Variables, inputs: tuple, context: Context) -> tuple[Any, Variables]:
        """(outputs, new values of the collections that are not parameters; empty in evaluation)."""
        ...

    def to_item(self, variables: Variables) -> Any:
        """The variables as the layer's own library would have returned them."""
        ...

    def from_item(self, item: Any) -> Variables:
        """The inverse of `to_item`."""
        ...

    def partition_specs(self, variables: Variables) -> dict[str, list[jax.sharding.PartitionSpec]]:
        """The mesh axes named by the layer's metadata, one spec a leaf, by collection."""
        ...

    def bind(self, item: Any) -> Any:
        """A callable model with these variables."""
        ...


def describe(tree: Any) -> str:
    """A pytree of arrays as text: `float32[8,16]`, or `{'a': float32[8], ...}`.

    >>> describe({"a": jax.numpy.zeros((2, 3)), "b": (jax.numpy.zeros(4), jax.numpy.zeros(4))})
    "{'a': float32[2,3], 'b': (float32[4], float32[4])}"
    """
    short: Callable[[Any], _Text] = lambda leaf: _Text(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]")
    return str(jax.tree.map(short, tree))


class _Text(str):
    """A string that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def positional(inputs: Any) -> tuple:
    """The positional arguments that a layer is called with: a tuple is passed as several."""
    return inputs if type(inputs) is tuple else (inputs,)


def empty_specs(variables: Variables) -> dict[str, list[jax.sharding.PartitionSpec]]:
    """No mesh axis for any leaf."""
    return {name: [jax.sharding.PartitionSpec()] * len(jax.tree.leaves(tree)) for name, tree in variables.items()}


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

    init: Callable[..., Any]
    apply: Callable[..., Any]
    name: str = "Layer"

    def __post_init__(self):
        for what in ("init", "apply"):
            if not callable(getattr(self, what)):
                raise TypeError(f"jpipe.Layer: {what}={getattr(self, what)!r} is not callable; pass a function")


@dataclass(frozen=True)
class PlainLayer:
    """Adapts `Layer`, and plain functions without parameters (`init=None`)."""

    name: str
    init_fn: Callable[..., Any] | None
    apply_fn: Callable[..., Any]
    ready: None = None
    reads_batch: bool = False
    shared: None = None
    parameters: Mapping[str, inspect.Parameter] = field(default_factory=dict, compare=False)

    def is_same(self, other: AnyLayer) -> bool:
        """Same functions."""
        return (
            isinstance(other, PlainLayer)
            and same_value(self.init_fn, other.init_fn)
            and same_value(self.apply_fn, other.apply_fn)
        )

    def init(self, key: jax.Array, inputs: tuple, batch: Any) -> Variables:
        """Calls the user's `init(key, *inputs)`."""
        del batch
        return {} if self.init_fn is None else {"params": self.init_fn(key, *inputs)}

    def apply(self, variables: Variables, inputs: tuple, context: Context) -> tuple[Any, Variables]:
        """Calls the user's `apply`, with key and mode if its signature takes them."""
        options: dict[str, Any] = mode_arguments(self.apply_fn, context.train)
        if "key" in self.parameters and self.init_fn is not None:
            options["key"] = context.key if context.train else None
        arguments = inputs if self.init_fn is None else (variables["params"], *inputs)
        return self.apply_fn(*arguments, **options), {}

    def to_item(self, variables: Variables) -> Any:
        """The bare parameters, as the user's `init` returned them."""
        return variables if self.init_fn is None else variables.get("params")

    def from_item(self, item: Any) -> Variables:
        """The inverse of `to_item`."""
        return {} if self.init_fn is None else {"params": item}

    def partition_specs(self, variables: Variables) -> dict[str, list[jax.sharding.PartitionSpec]]:
        """Plain functions carry no metadata."""
        return empty_specs(variables)

    def bind(self, item: Any) -> Callable:
        """`x -> y` with the parameters filled in, in evaluation mode."""
        return lambda *inputs: self.apply(self.from_item(item), inputs, EVALUATION)[0]


def identity_layer(name: str, takes: Any) -> PlainLayer:
    """A layer that passes on what it takes: a pytree like `takes`."""
    return PlainLayer(name, None, _same_tuple if type(takes) is tuple else _same)


def _same(x: Any) -> Any:
    return x


def _same_tuple(*inputs: Any) -> Any:
    return inputs


@dataclass(frozen=True)
class Wrapper:
    """A layer around another one, which does what the inner one does unless it says otherwise."""

    inner: AnyLayer

    @property
    def name(self) -> str:
        """The inner layer's."""
        return self.inner.name

    @property
    def ready(self) -> Variables | None:
        """The inner layer's."""
        return self.inner.ready

    @property
    def reads_batch(self) -> bool:
        """The inner layer's."""
        return self.inner.reads_batch

    @property
    def shared(self) -> Any:
        """The inner layer's."""
        return self.inner.shared

    def init(self, key: jax.Array, inputs: tuple, batch: Any) -> Variables:
        """The inner layer's."""
        return self.inner.init(key, inputs, batch)

    def apply(self, variables: Variables, inputs: tuple, context: Context) -> tuple[Any, Variables]:
        """The inner layer's."""
        return self.inner.apply(variables, inputs, context)

    def to_item(self, variables: Variables) -> Any:
        """The inner layer's."""
        return self.inner.to_item(variables)

    def from_item(self, item: Any) -> Variables:
        """The inner layer's."""
        return self.inner.from_item(item)

    def partition_specs(self, variables: Variables) -> dict[str, list[jax.sharding.PartitionSpec]]:
        """The inner layer's."""
        return self.inner.partition_specs(variables)

    def bind(self, item: Any) -> Any:
        """The inner layer's, to be called with its own inputs."""
        return self.inner.bind(item)
