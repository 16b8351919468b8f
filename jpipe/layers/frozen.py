"""`freeze`: keeps parameters that aren't trained in a collection of their own, which is only read.

They have no gradients, no place in the optimiser's state, and nothing is added up for them. The layer inside sees them
among its parameters, as ever, and so does who asks for the layer's own variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from jpipe.layers.base import Activation, Around, Context, Inputs, Item, LayerError, LayerVariables, Specs
from jpipe.layers.connections import Marked
from jpipe.layers.shared import Shared, Use
from jpipe.types import Batch, PyTree

Where = Callable[[str], bool]
"""From a parameter's path in its layer, such as "attention/query/kernel", to whether it is frozen."""

FROZEN = "frozen"
"""The collection that frozen parameters are in."""


@dataclass(frozen=True)
class Frozen:
    """A user's layer with frozen parameters: what `freeze` returns."""

    layer: object
    where: Where


def _everything(path: str) -> bool:
    return True


def freeze(layer: object, where: Where = _everything) -> Frozen | Marked:
    """The layer, with parameters that aren't trained: without gradients, optimiser state and sums of either.

    `blocks = [jpipe.freeze(Block(), lambda path: "lora" not in path) for _ in range(8)]`

    Args:
      layer: any layer, with connections too; what several places share is frozen inside: `jpipe.Shared(freeze(layer))`.
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


@dataclass(frozen=True)
class FrozenLayer(Around):
    """A layer of whose parameters some are in the collection `FROZEN`, the others' places being None.

    The inner layer has them all in "params".

    Attributes:
      where: which are frozen.
    """

    where: Where

    @property
    def ready(self) -> LayerVariables | None:
        return None if self.inner.ready is None else self._apart(self._checked(self.inner.ready))

    @property
    def reads_batch(self) -> bool:
        return self.inner.reads_batch

    @property
    def made_of(self) -> Sequence[object]:
        return type(self.inner), self.inner.made_of, self.where

    def init(self, key: jax.Array, inputs: Inputs, batch: Batch) -> LayerVariables:
        return self._apart(self._checked(self.inner.init(key, inputs, batch)))

    def apply(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        return self.inner.apply(thawed(variables), inputs, context)

    def to_item(self, variables: LayerVariables) -> Item:
        """The inner layer's, without what is missing: gradients have nothing that is frozen."""
        whole = thawed(variables)
        if FROZEN not in variables and "params" in whole:
            whole["params"] = _without_holes(whole["params"])
        return self.inner.to_item(whole)

    def from_item(self, item: Item) -> LayerVariables:
        return self._apart(self.inner.from_item(item))

    def partition_specs(self, variables: LayerVariables) -> Specs:
        """The specs that the inner layer's metadata names, for the parameters of each collection."""
        whole = thawed(variables)
        specs = self.inner.partition_specs(whole)
        is_frozen = jax.tree.leaves(self._frozen(whole.get("params", {})))
        known = list(zip(specs.get("params", []), is_frozen, strict=True))
        apart = {name: [spec for spec, is_ in known if is_ == (name == FROZEN)] for name in ("params", FROZEN)}
        return {name: apart.get(name, specs.get(name, [])) for name in variables}

    def _apart(self, variables: LayerVariables) -> LayerVariables:
        """The variables with frozen parameters in their own collection."""
        if FROZEN in variables:
            raise LayerError(
                f"has a collection {FROZEN!r} of its own; don't freeze it, or give that another name (variables of a "
                "frozen layer have all parameters in 'params', as its library has them)"
            )
        params = variables.get("params", {})
        frozen = self._frozen(params)
        only = lambda wanted: jax.tree.map(lambda leaf, is_: leaf if is_ == wanted else None, params, frozen)
        return variables | {"params": only(False), FROZEN: only(True)}

    def _checked(self, variables: LayerVariables) -> LayerVariables:
        """All of the inner layer's variables, of which some parameter has to be frozen."""
        params = variables.get("params", {})
        if not any(jax.tree.leaves(self._frozen(params))) and jax.tree.leaves(params):
            paths = parameter_paths(params)
            raise LayerError(f"has no parameter that `where` of jpipe.freeze names; its parameters are {paths}")
        return variables

    def _frozen(self, params: PyTree) -> PyTree:
        """For each parameter whether it is frozen."""
        return jax.tree_util.tree_map_with_path(lambda path, _: bool(self.where(_as_text(path))), params)


def parameter_paths(params: PyTree) -> list[str]:
    """The paths of a layer's parameters, as users know them, in the order of the leaves."""
    return [_as_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def _as_text(path: tuple[object, ...]) -> str:
    """A parameter's path as users know it, without the box that Flax's metadata is around it."""
    boxed = path[-1:] == (jax.tree_util.GetAttrKey("value"),)
    return jax.tree_util.keystr(path[: len(path) - boxed], simple=True, separator="/")


def thawed(variables: LayerVariables) -> LayerVariables:
    """A layer's variables with what is frozen among the parameters; places that nothing is known of are None."""
    is_hole = lambda x: x is None
    given = [variables[name] for name in ("params", FROZEN) if name in variables]
    if not given:
        return variables
    joined = jax.tree.map(lambda *found: next((x for x in found if x is not None), None), *given, is_leaf=is_hole)
    others = {name: tree for name, tree in variables.items() if name not in ("params", FROZEN)}
    return {"params": joined, **others}


def _without_holes(tree: PyTree) -> PyTree:
    """A dict without the entries that hold no arrays; anything else as it is."""
    if not isinstance(tree, dict):
        return tree
    return {name: _without_holes(part) for name, part in tree.items() if jax.tree.leaves(part)}
