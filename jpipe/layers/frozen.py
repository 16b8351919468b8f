"""`freeze`: keeps parameters that aren't trained in a collection of their own, which is only read.

They have no gradients, no place in the optimiser's state, and nothing is added up for them. The layer inside sees them
among its parameters, and so do users who ask for the layer's own variables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from jpipe.layers.base import AnyLayer, LayerError, LayerVariables, Shared, Specs, Use
from jpipe.layers.calls import decoding
from jpipe.layers.connections import Marked
from jpipe.types import PyTree

Where = Callable[[str], bool]
"""From a parameter's path in its layer, such as "attention/query/kernel", to whether it is frozen."""

FROZEN = "frozen"
"""The collection that frozen parameters are in."""


@dataclass(frozen=True)
class Frozen:
    """A user's layer with frozen parameters, as `freeze` returns it."""

    layer: object
    where: Where


def freeze(layer: object, where: Where = lambda path: True) -> Frozen | Marked:
    """Keeps parameters of a layer from being trained: they have no gradients, optimiser state or sums of either.

    `blocks = [jpipe.freeze(Block(), lambda path: "lora" not in path) for _ in range(8)]`

    Args:
      layer: any layer, with connections too, or a model that is one module; what several places share is frozen
        inside: `jpipe.Shared(freeze(layer))`.
      where: `path -> bool`, which parameters are frozen; all by default. The path is that in the layer, such as
        "attention/query/kernel".
    """
    if isinstance(layer, list | tuple):
        raise TypeError("jpipe.freeze takes one layer; freeze each: [jpipe.freeze(layer, where) for layer in layers]")
    if isinstance(layer, Shared | Use):
        raise TypeError("jpipe.freeze: the layer is shared; freeze what is in it: jpipe.Shared(jpipe.freeze(layer))")
    if isinstance(layer, Frozen):
        raise ValueError("jpipe.freeze: the layer is frozen already; pass one `where` for all of its parameters")
    if not callable(where):
        raise TypeError(f"jpipe.freeze: where={where!r} is not callable; pass a function of a parameter's path")
    return replace(layer, layer=freeze(layer.layer, where)) if isinstance(layer, Marked) else Frozen(layer, where)


def frozen_layer(layer: AnyLayer, where: Where) -> AnyLayer:
    """Moves some parameters of a layer to the collection `FROZEN`; in "params" their places are None.

    The layer inside has all of them in "params".

    Raises:
      LayerError: it has its values already, and `where` names none of its parameters.
    """

    def is_frozen(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, _: bool(where(_as_text(path))), params)

    def apart(variables: LayerVariables) -> LayerVariables:
        if FROZEN in variables:
            raise LayerError(f"has a collection {FROZEN!r} of its own; don't freeze it, or rename the collection")
        params = variables.get("params", {})
        flags = is_frozen(params)
        trained = jax.tree.map(lambda leaf, flag: None if flag else leaf, params, flags)
        frozen = jax.tree.map(lambda leaf, flag: leaf if flag else None, params, flags)
        return variables | {"params": trained, FROZEN: frozen}

    def new(variables: LayerVariables) -> LayerVariables:
        """Takes new variables apart, after a check that some parameter is frozen."""
        paths = parameter_paths(variables.get("params", {}))
        if paths and not any(map(where, paths)):
            raise LayerError(f"has no parameter that `where` of jpipe.freeze names; its parameters are {paths}")
        return apart(variables)

    def partition_specs(variables: LayerVariables) -> Specs:
        whole = thawed(variables)
        specs = layer.partition_specs(whole)
        flags = jax.tree.leaves(is_frozen(whole.get("params", {})))
        flagged = list(zip(specs.get("params", []), flags, strict=True))
        parts = {name: [spec for spec, flag in flagged if flag == (name == FROZEN)] for name in ("params", FROZEN)}
        return {name: parts.get(name, specs.get(name, [])) for name in variables}

    return replace(
        layer,
        made_of=("frozen", layer.made_of, where),
        init=lambda inputs, context: new(layer.init(inputs, context)),
        apply=lambda variables, inputs, context: layer.apply(thawed(variables), inputs, context),
        to_item=lambda variables: layer.to_item(_without_missing(variables)),
        from_item=lambda item: apart(layer.from_item(item)),
        partition_specs=partition_specs,
        decode=lambda takes, size, length: frozen_layer(decoding(layer, takes, size, length), where),
        ready=None if layer.ready is None else new(layer.ready),
    )


def parameter_paths(params: PyTree) -> list[str]:
    """Lists the paths of a layer's parameters, as users know them, in the order of the leaves."""
    return [_as_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def _as_text(path: tuple[object, ...]) -> str:
    """Writes a parameter's path as users know it, without the box of Flax's metadata around it."""
    boxed = path[-1:] == (jax.tree_util.GetAttrKey("value"),)
    return jax.tree_util.keystr(path[: len(path) - boxed], simple=True, separator="/")


def thawed(variables: LayerVariables) -> LayerVariables:
    """Puts frozen parameters back among the others; a parameter that is in neither place is None."""
    trees = [variables[name] for name in ("params", FROZEN) if name in variables]
    if not trees:
        return variables
    first_value = lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None)
    others = {name: tree for name, tree in variables.items() if name not in ("params", FROZEN)}
    return {"params": jax.tree.map(first_value, *trees, is_leaf=lambda x: x is None), **others}


def _without_missing(variables: LayerVariables) -> LayerVariables:
    """Makes the inner layer's variables, without frozen parameters where these are missing, as among gradients."""
    whole = thawed(variables)
    if FROZEN not in variables and "params" in whole:
        whole["params"] = _without_holes(whole["params"])
    return whole


def _without_holes(tree: PyTree) -> PyTree:
    """Drops the entries of a dict that hold no arrays; anything else stays as it is."""
    if not isinstance(tree, dict):
        return tree
    return {name: _without_holes(part) for name, part in tree.items() if jax.tree.leaves(part)}
