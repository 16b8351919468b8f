"""Makes an `AnyLayer` of whatever users pass as a layer: the only place that knows all that this may be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import getclosurevars, isfunction, ismethod, unwrap

import flax.linen as nn
import jax
from flax import nnx

from jpipe.jax.trees import values_within
from jpipe.layers.base import AnyLayer, LayerError, Method, Shared, Use, how_to_share
from jpipe.layers.calls import signature_of
from jpipe.layers.connections import Marked, connect
from jpipe.layers.frozen import Frozen, frozen_layer
from jpipe.layers.linen import linen_layer
from jpipe.layers.nnx import layer_of_factory, layer_of_module
from jpipe.layers.plain import Layer, layer_of_functions


def as_layers(layers: object, sown: tuple[str, ...] = ()) -> tuple[AnyLayer, ...]:
    """Adapts a user's sequence of layers.

    Args:
      layers: the sequence.
      sown: the collections of sown values that a layer gives behind its outputs, `(outputs, {name: values})`.

    Raises:
      TypeError: `layers` is no sequence, or an item is no layer (its index and type are named).
      ValueError: there are no layers; or two look tied, or have connections that don't match.
    """
    opened = list(layers.layers) if isinstance(layers, nn.Sequential | nnx.Sequential) else layers
    if not isinstance(opened, Sequence) or isinstance(opened, str):
        inner = opened.layer if isinstance(opened, Frozen) else opened
        remedy = _of_another_library(inner) or "pass a model that is one module, or a list of layers"
        raise TypeError(f"layers is a {type(layers).__name__}; {remedy}")
    if len(opened) == 0:
        raise ValueError("layers is empty; pass at least one layer")
    marks = [layer if isinstance(layer, Marked) else Marked(layer) for layer in opened]
    places = [_taken_apart(mark.layer) for mark in marks]
    _check_repeats(places, opened is not layers)
    adapted = [replace(_as_layer(place, index, sown), shared=place.shared) for index, place in enumerate(places)]
    return connect([_frozen(*pair, index) for index, pair in enumerate(zip(adapted, places, strict=True))], marks)


def as_whole(model: object, sown: str | Sequence[str] = ()) -> AnyLayer | None:
    """A model that is one module, a factory of one, or a `Layer`, as one layer; None for a sequence of layers.

    Args:
      model: the user's.
      sown: as of `as_layers`.

    Raises:
      TypeError, ValueError: as of `as_layers`; or `sown` are no names, or of layers that don't sow.
    """
    names = (sown,) if isinstance(sown, str) else sown
    are_names = isinstance(names, Sequence) and all(isinstance(n, str) and n != "params" for n in names)
    inner = model.layer if isinstance(model, Frozen) else model
    is_list = isinstance(inner, nn.Sequential | nnx.Sequential | Sequence)  # an nnx.List is a module, too
    is_factory = callable(inner) and not isinstance(inner, type) and "rngs" in signature_of(inner)
    sows = not is_list and (isinstance(inner, nn.Module | nnx.Module) or is_factory)
    if names and not (sows and are_names):
        raise TypeError(f"sown={sown!r}: name collections that one Linen or nnx module sows into; others return values")
    return as_layers([model], tuple(names))[0] if sows or isinstance(inner, Layer) else None


@dataclass(frozen=True)
class _UsersLayer:
    """One item of the user's sequence, taken apart.

    Attributes:
      module: the module, `Layer` or function.
      shared: the `Shared` around it, if there is one.
      method: how a shared layer is called here.
      frozen: the `Frozen` around it, if there is one.
    """

    module: object
    shared: Shared | None
    method: Method | None
    frozen: Frozen | None


def _taken_apart(layer: object) -> _UsersLayer:
    """Takes `Shared` and `Frozen` off a layer."""
    use = Use(layer, None) if isinstance(layer, Shared) else layer
    shared, method = (use.shared, use.method) if isinstance(use, Use) else (None, None)
    inner = layer if shared is None else shared.layer
    frozen = inner if isinstance(inner, Frozen) else None
    return _UsersLayer(inner if frozen is None else frozen.layer, shared, method, frozen)


def _frozen(layer: AnyLayer, place: _UsersLayer, index: int) -> AnyLayer:
    try:
        return layer if place.frozen is None else frozen_layer(layer, place.frozen.where)
    except LayerError as error:
        raise ValueError(f"layer {index} ({layer.name}) {error}") from error


def _check_repeats(places: Sequence[_UsersLayer], in_sequential: bool) -> None:
    """Refuses modules that stand in several places, whole or as a part, and look tied, but wouldn't be.

    In Flax an nnx module, or a linen module in a Sequential, has one set of parameters wherever it stands; here only
    the places inside one `Shared` have. A module that a function encloses has parameters of its own, if it has any.
    """

    def is_tied(place: _UsersLayer) -> bool:
        kinds = (nn.Module, nnx.Module) if in_sequential else nnx.Module
        return place.shared is not None or isinstance(place.module, kinds)

    is_module = lambda place: isinstance(place.module, nn.Module | nnx.Module)
    first_places: dict[int, int] = {}  # by the id of a part
    for index, place in enumerate(places):
        for part in _parts(place.module):
            at = first_places.setdefault(id(part), index)
            first = places[at]
            looks_tied = is_tied(place) or is_tied(first) or is_module(place) is not is_module(first)
            is_one_shared = place.shared is not None and place.shared is first.shared
            if at != index and looks_tied and not is_one_shared:
                holder = first.module if is_module(first) else place.module
                kind = type(part if isinstance(part, nn.Module) else holder).__name__
                same = f"layers[{index}] is or holds the same {type(part).__name__} as layers[{at}]"
                raise ValueError(f"{same}; {how_to_share(kind)}, or make two modules")


def _parts(layer: object) -> list[object]:
    """Lists the objects that a layer's parameters hang on: an nnx module's Variables, a linen module and its fields'.

    A function's are itself and those of the modules that it names; an nnx module without Variables has none. Anything
    else is its own only part.
    """
    if isfunction(layer):
        modules: list[object] = []
        with suppress(ValueError):  # a variable that isn't set yet
            variables = getclosurevars(layer)
            values = (*variables.nonlocals.values(), *variables.globals.values())
            modules = [value for value in values if isinstance(value, nn.Module | nnx.Module)]
        return [layer, *(part for module in modules for part in _parts(module))]
    if isinstance(layer, nnx.Module):
        variables = [node for _, node in nnx.iter_graph(layer) if isinstance(node, nnx.Variable)]
        return [variable for variable in variables if not isinstance(variable, nnx.RngState)]
    if isinstance(layer, nn.Module):
        return [part for part in values_within(layer) if isinstance(part, nn.Module)]
    return [layer]


def _as_layer(place: _UsersLayer, index: int, sown: tuple[str, ...]) -> AnyLayer:
    layer, method = place.module, place.method
    if isinstance(layer, Marked):
        raise TypeError(f"layers[{index}] shares a marked layer; mark its use: jpipe.stash(jpipe.Shared(layer), 'a')")
    if isinstance(layer, nn.Module):
        return linen_layer(layer, index, method, sown)
    if isinstance(layer, nnx.Module):
        return layer_of_module(layer, index, method, sown)
    if isinstance(layer, Layer):
        return layer_of_functions(layer.name, _called_function(layer.apply, method, layer.name, index), layer.init)
    # Before the check for classes: a partial of an nnx class, with all but `rngs`, is a factory.
    if callable(layer) and not isinstance(layer, type) and "rngs" in signature_of(layer):
        return layer_of_factory(layer, index, method, sown)
    function = layer.func if isinstance(layer, functools.partial) else layer
    if isinstance(function, type):
        kind = function.__name__
        remedy = f"call it, as in {kind}(...), or for a class of nnx pass `lambda rngs: {kind}(..., rngs=rngs)`"
        raise TypeError(f"layers[{index}] is the class {kind}, which makes layers and is none; {remedy}")
    if remedy := _of_another_library(layer):
        raise TypeError(f"layers[{index}] is a {type(layer).__name__}; {remedy}")
    if callable(layer):
        _check_no_method(layer, index)
        name = getattr(function, "__name__", type(function).__name__)
        return layer_of_functions(name, _called_function(layer, method, name, index), None)
    raise TypeError(f"layers[{index}] is a {type(layer).__name__}; use a module, function or jpipe.Layer(init, apply)")


_EQUINOX = """
  params, static = eqx.partition(model, eqx.is_inexact_array)
  jpipe.Layer(lambda key, x: params, lambda params, x: jax.vmap(eqx.combine(params, static))(x))"""

_KERAS = """
  weights, rest = ([v.value for v in of] for of in (model.trainable_variables, model.non_trainable_variables))
  jpipe.Layer(lambda key, x: weights, lambda weights, x: model.stateless_call(weights, rest, x)[0])"""


def _of_another_library(layer: object) -> str:
    """Says how to pass a model of Hugging Face, equinox or Keras; "" of what is none. It imports none of them.

    As functions, also within `jax.vmap`, they would be layers without parameters, of which nothing is trained.
    """
    inner = unwrap(layer) if callable(layer) else layer
    packages = {kind.__module__.partition(".")[0] for kind in type(inner).__mro__}
    if isinstance(getattr(inner, "module", None), nn.Module) and "params" in dir(inner):
        return 'pass its `.module`, and {"params": model.params} to pipe.from_model_variables'
    if "equinox" in packages and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(inner)):
        return f"wrap the equinox model:{_EQUINOX}"
    return f"wrap the Keras model (JAX backend), once it is built:{_KERAS}" if "keras" in packages else ""


def _check_no_method(layer: Callable, index: int) -> None:
    """Refuses methods of modules, which have no parameters of their own to train."""
    module = layer.__self__ if ismethod(layer) else None
    if isinstance(module, nnx.Module) or (isinstance(module, nn.Module) and module.scope is None):
        kind = type(module).__name__
        raise TypeError(f"layers[{index}] is a method of a {kind}; {how_to_share(kind, layer.__name__)}")


def _called_function(function: Callable, method: Method | None, name: str, index: int) -> Callable:
    """Picks the function that is called: a layer's own, or the one through which its parameters are shared."""
    if isinstance(method, str):
        raise TypeError(f"layers[{index}] uses {name} through {method!r}; pass a function `apply(params, x)` instead")
    return method or function
