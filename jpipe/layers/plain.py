"""`Layer`: layers from two plain functions, and from functions without parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jpipe.layers.base import Activation, AnyLayer, Context, Inputs, Item, LayerVariables, bind_by_call
from jpipe.layers.calls import both_of, mode_arguments, signature_of
from jpipe.types import PyTree


@dataclass(frozen=True)
class Layer:
    """A layer made of two plain functions.

    Args:
      init: `init(key, x) -> params`, a pytree of floating-point arrays.
      apply: `apply(params, x) -> y`. If its signature has a parameter `key` it is given the layer's own random key
        (None in evaluation, unless one is passed); if it has one of those that `Pipeline` knows (`train`,
        `deterministic`, ...), the mode.
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


def layer_of_functions(name: str, apply: Callable[..., Activation], init: Callable[..., PyTree] | None) -> AnyLayer:
    """Adapts the functions of a `Layer`, whose item is its bare parameters; or a function without any (no `init`)."""

    def from_item(item: Item) -> LayerVariables:
        return {} if init is None else {"params": item}

    def new(inputs: Inputs, context: Context) -> LayerVariables:
        positional, keywords = both_of(inputs)
        return {} if init is None else from_item(init(context.key, *positional, **keywords))

    def call(variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        options: dict[str, object] = {**mode_arguments(apply, context.train)}
        if init is not None and "key" in signature_of(apply):
            options["key"] = context.key
        positional, keywords = both_of(inputs)
        own = () if init is None else (variables["params"],)
        return apply(*own, *positional, **{**options, **keywords}), {}

    return AnyLayer(
        name=name,
        made_of=("functions", init, apply),
        init=new,
        apply=call,
        bind=bind_by_call(call, from_item),
        to_item=lambda variables: {} if init is None else variables.get("params"),
        from_item=from_item,
    )
