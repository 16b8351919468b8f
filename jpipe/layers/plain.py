"""`Layer`: layers from two plain functions, and from functions without parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jpipe.layers.base import Activation, AnyLayer, Context, Inputs, Item, LayerVariables, bind_by_call
from jpipe.layers.calls import both_of, mode_arguments, signature_of
from jpipe.types import Batch, PyTree


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


def layer_of_functions(layer: Layer) -> AnyLayer:
    """Adapts a `Layer`; its item is its bare parameters."""

    def init(key: jax.Array, inputs: Inputs, batch: Batch) -> LayerVariables:
        positional, keywords = both_of(inputs)
        return from_item(layer.init(key, *positional, **keywords))

    def apply(variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        options: dict[str, object] = {**mode_arguments(layer.apply, context.train)}
        if "key" in signature_of(layer.apply):
            options["key"] = context.key if context.train else None
        positional, keywords = both_of(inputs)
        return layer.apply(variables["params"], *positional, **{**options, **keywords}), {}

    def from_item(item: Item) -> LayerVariables:
        return {"params": item}

    return AnyLayer(
        name=layer.name,
        made_of=("two functions", layer.init, layer.apply),
        init=init,
        apply=apply,
        bind=bind_by_call(apply, from_item),
        to_item=lambda variables: variables.get("params"),
        from_item=from_item,
    )


def layer_of_function(function: Callable[..., Activation], name: str) -> AnyLayer:
    """Adapts a function of the activations, which has no parameters."""

    def no_variables(*_: object) -> LayerVariables:
        return {}

    def apply(variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        positional, keywords = both_of(inputs)
        return function(*positional, **{**mode_arguments(function, context.train), **keywords}), {}

    return AnyLayer(
        name=name,
        made_of=("one function", function),
        init=no_variables,
        apply=apply,
        bind=bind_by_call(apply, no_variables),
        from_item=no_variables,
    )
