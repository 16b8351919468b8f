"""Makes an `AnyLayer` of whatever users pass as a layer: the only place that knows all that this may be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import ismethod
from itertools import pairwise

import flax.linen as nn
from flax import nnx

from jpipe.layers.base import AnyLayer, Layer, PlainLayer, is_same
from jpipe.layers.connections import Marked, connect
from jpipe.layers.flax import LinenLayer, NnxLayer, check_variable_types, parts_of
from jpipe.layers.frozen import Frozen, FrozenLayer, Where
from jpipe.layers.functions import signature_of
from jpipe.layers.shared import Shared, Use, how_to_share


def as_layers(layers: object) -> tuple[AnyLayer, ...]:
    """Adapts a user's sequence of layers.

    Raises:
      TypeError: `layers` is no sequence, or an item is no layer (its index and type are named).
      ValueError: there are no layers; or two look tied, hold variables of types with one name, or have connections
        that don't match.
    """
    opened = list(layers.layers) if isinstance(layers, nn.Sequential | nnx.Sequential) else layers
    if not isinstance(opened, Sequence) or isinstance(opened, str):
        raise TypeError(
            f"layers is a {type(layers).__name__}; pass a list of layers, a flax.linen.Sequential or an nnx.Sequential"
        )
    if len(opened) == 0:
        raise ValueError("layers is empty; pass at least one layer")
    marks = [layer if isinstance(layer, Marked) else Marked(layer) for layer in opened]
    given = [Use(mark.layer, None) if isinstance(mark.layer, Shared) else mark.layer for mark in marks]
    plain, wheres = zip(*map(_bare, given), strict=True)
    _check_repeats(plain, opened is not layers)
    bare = [_as_layer(layer, index) for index, layer in enumerate(plain)]
    check_variable_types(bare)
    for index, first in _repeats(plain, bare).items():
        if isinstance(layer := bare[index], LinenLayer):
            bare[index] = replace(layer, repeats=first)
    adapted = [layer if where is None else FrozenLayer(layer, where) for layer, where in zip(bare, wheres, strict=True)]
    return connect(adapted, marks)


def _bare(layer: object) -> tuple[object, Where | None]:
    """(a layer without `freeze`, which of its parameters that freezes); of a use, those of the layer that is shared."""
    held = layer.shared.layer if isinstance(layer, Use) else layer
    where = held.where if isinstance(held, Frozen) else None
    return (layer.layer if isinstance(layer, Frozen) else layer), where


def _check_repeats(layers: Sequence[object], in_sequential: bool) -> None:
    """Refuses modules that stand in several places, whole or as a part, and look tied, but wouldn't be.

    In Flax an nnx module, or a linen module in a Sequential, has one set of parameters wherever it stands; here only
    what stands inside one `Shared` has. A module that a function encloses has parameters of its own, if it has any.
    """
    # By the id of a part: the first layer that has it, the Shared around that layer, whether its parameters are tied,
    # whether it is a module.
    owners: dict[int, tuple[int, Shared | None, bool, bool]] = {}
    for index, layer in enumerate(layers):
        owner = layer.shared if isinstance(layer, Use) else None
        module = owner.layer if owner else layer
        module = _bare(module)[0]
        ties = bool(owner) or isinstance(module, nnx.Module) or (in_sequential and isinstance(module, nn.Module))
        is_module = isinstance(module, nn.Module | nnx.Module)
        for part in parts_of(module):
            first, other, tied, was_module = owners.setdefault(id(part), (index, owner, ties, is_module))
            if first != index and (ties or tied or is_module is not was_module) and (owner is not other or not owner):
                held = part if isinstance(part, nn.Module) else layers[first] if was_module else module
                kind = type(held.shared.layer if isinstance(held, Use) else held).__name__
                raise ValueError(
                    f"layers[{index}] ({type(module).__name__}) is or holds the same {type(part).__name__} object as "
                    f"layers[{first}]; {how_to_share(kind)}; or make two modules"
                )


def _repeats(layers: Sequence[object], adapted: Sequence[AnyLayer]) -> dict[int, int]:
    """Where linen modules stand once more as one would tie them, with the index at which each stands first.

    `[block] * 6` and `[attention, mlp] * 6` are meant as so many layers with parameters of their own, and
    `[embed, *blocks, embed]` isn't: it stands nowhere twice in a row, and what lies between the two in no other place.
    """
    found: dict[int, int] = {}
    kinds: list[int] = []  # of each layer: the first one that is the same function
    places: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            places.setdefault(id(layer), []).append(index)
    for first, *others in places.values():
        if any(end == start + 1 for start, end in pairwise([first, *others])):
            continue  # it is used as a pattern
        for start, end in pairwise([first, *others]):
            kinds = kinds or [next(j for j, other in enumerate(adapted) if is_same(other, layer)) for layer in adapted]
            between, size = kinds[start + 1 : end], end - start - 1
            if not any(kinds[i : i + size] == between for i in range(len(kinds)) if i != start + 1):
                found[end] = first
    return found


def _as_layer(layer: object, index: int) -> PlainLayer | LinenLayer | NnxLayer:
    if isinstance(layer, Use):
        return _as_use(layer, index)
    if isinstance(layer, nn.Module):
        if layer.scope is not None:
            raise TypeError(f"layers[{index}] ({type(layer).__name__}) is a bound linen module; pass it unbound")
        return LinenLayer(layer)
    if isinstance(layer, nnx.Module):
        return NnxLayer.from_module(layer)
    if isinstance(layer, Layer):
        return PlainLayer(layer.name, layer.init, layer.apply)
    if callable(layer) and not isinstance(layer, type) and "rngs" in signature_of(layer):
        return NnxLayer.from_factory(layer, index)
    function = layer.func if isinstance(layer, functools.partial) else layer
    if isinstance(function, type):
        raise TypeError(
            f"layers[{index}] is the class {function.__name__}, which makes layers and is none; call it, as in "
            f"{function.__name__}(...), or for a class of nnx pass `lambda rngs: {function.__name__}(..., rngs=rngs)`"
        )
    if callable(layer):
        _check_no_method(layer, index)
        return PlainLayer(getattr(function, "__name__", type(function).__name__), None, layer)
    raise TypeError(
        f"layers[{index}] is a {type(layer).__name__}, which is no layer; use a flax.linen module, an nnx module, "
        "`lambda rngs: Module(..., rngs=rngs)`, jpipe.Layer(init, apply) or a function of the activations"
    )


def _check_no_method(layer: Callable, index: int) -> None:
    """Refuses methods of modules, which have no parameters of their own to train."""
    module = layer.__self__ if ismethod(layer) else None
    if isinstance(module, nnx.Module) or (isinstance(module, nn.Module) and module.scope is None):
        kind = type(module).__name__
        raise TypeError(
            f"layers[{index}] is the method {layer.__name__!r} of a module ({kind}), which brings no parameters; "
            f"{how_to_share(kind, layer.__name__)}"
        )


def _as_use(use: Use, index: int) -> PlainLayer | LinenLayer | NnxLayer:
    """The layer that a use shares, called through the use's method."""
    if isinstance(use.shared.layer, Marked):
        raise TypeError(
            f"layers[{index}] shares a layer with connections; mark its uses instead, as in "
            "jpipe.stash(jpipe.Shared(layer), 'name')"
        )
    layer, method = _as_layer(_bare(use.shared.layer)[0], index), use.method
    if method is None:
        return replace(layer, shared=use.shared)
    if isinstance(layer, PlainLayer):
        if isinstance(method, str):
            raise TypeError(
                f"layers[{index}] uses {layer.name} through {method!r}, but functions have no methods; pass a function "
                "`apply(params, x)`"
            )
        return replace(layer, apply_fn=method, shared=use.shared)
    module = type(layer.module) if isinstance(layer, LinenLayer) else layer.module_type
    if not isinstance(method, str):
        if isinstance(layer, NnxLayer):
            raise TypeError(f"layers[{index}] uses {layer.name} through a function; name one of its methods")
    elif not callable(getattr(module, method, None)):
        raise ValueError(
            f"layers[{index}] uses {layer.name} through {method!r}, which it doesn't have; name one of its methods"
        )
    return replace(layer, method=method, shared=use.shared)
