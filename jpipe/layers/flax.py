"""Holds what Linen and NNX have in common: logical axis rules, sown values, dropouts, methods of shared modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import flax.linen as nn
from flax import nnx
from flax.core import unfreeze

from jpipe.layers.base import Item, LayerError, LayerVariables, Method
from jpipe.processes.progress import warn_once

SOWN = (
    "self.sow does. To have its values behind the outputs of a model that is one module, name it in sown=(...) of "
    "jpipe.Pipeline; a layer of a list passes them on, `return x, total + value`"
)


def logical_rules(axes: Collection[str]) -> Callable[[], AbstractContextManager[object]]:
    """Takes the logical axis rules in context now (`nn.logical_axis_rules`); returns a context that sets them later.

    Only these mesh axes stay in them: rules may name some that a mesh lacks, or `stage`, but constraints may not.
    """

    def kept(names: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
        if names is None or isinstance(names, str):
            return names if names in axes else None
        return tuple(name for name in names if name in axes)

    rules = tuple((logical, kept(names)) for logical, names in nn.get_logical_axis_rules())
    return lambda: nn.logical_axis_rules(rules)


def as_collections(item: Item) -> LayerVariables:
    """Copies a user's dict by collection.

    Raises:
      LayerError: it is no dict.
    """
    if not isinstance(item, Mapping):
        raise LayerError(f"has its variables in a dict by collection, such as {{'params': ...}}, not {item!r:.60}")
    return unfreeze(dict(item))


def without_sown(variables: LayerVariables, sown: Sequence[str]) -> LayerVariables:
    """Drops what was sown, which comes out behind the outputs if it is named; says once that intermediates aren't."""
    if "intermediates" in variables and "intermediates" not in sown:
        warn_once('self.sow("intermediates", ...) is dropped; sown="intermediates" gives it behind a module\'s outputs')
    return {name: tree for name, tree in variables.items() if name not in (*sown, "intermediates")}


def check_method(module: type, name: str, method: Method | None, index: int) -> None:
    """Checks the method through which a shared module is called.

    Raises:
      ValueError: the module's class has no such method.
    """
    if isinstance(method, str) and not callable(getattr(module, method, None)):
        raise ValueError(f"layers[{index}] uses {name} through {method!r}, which it doesn't have; name one of its own")


def dropout_in_words(part: object) -> list[str]:
    """Describes a module that draws what it drops, not other objects. At a rate of 1 it draws nothing."""
    attention = isinstance(part, nn.MultiHeadDotProductAttention | nnx.MultiHeadAttention)
    rate = part.rate if isinstance(part, nn.Dropout | nnx.Dropout) else part.dropout_rate if attention else 0
    return [f"{type(part).__name__} of rate {rate}"] if 0 < rate < 1 else []
