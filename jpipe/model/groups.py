"""A model as its stages run it: a sequence of kinds of layers, and where their variables have their homes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jpipe.layers.base import AnyLayer
from jpipe.sharding.shardings import Axis, Sharding, local_structs


@dataclass(frozen=True, eq=False)
class Kind:
    """One or more layers that are traced and compiled once.

    Attributes:
      layer: any of them (they are the same function).
      members: their indices in the sequence, ends included, ascending.
      takes: what they are called with, a pytree of ShapeDtypeStructs at the micro-batch's shapes.
      gives: what they return.
      variables: their variables by collection, a pytree of ShapeDtypeStructs.
      specs: the mesh axes that each leaf is split over at rest, by collection.
      takes_at: how the leaves of `takes` lie on a stage's devices.
      gives_at: how those of `gives` lie.
      entry: this layer reads the model's inputs from the batch (and has one member).
      final: this layer's outputs are the model's (and it has one member).
      needs_key: it draws random numbers in training.
    """

    layer: AnyLayer
    members: tuple[int, ...]
    takes: Any
    gives: Any
    variables: dict[str, Any]
    specs: dict[str, list[PartitionSpec]]
    takes_at: list[Sharding]
    gives_at: list[Sharding]
    entry: bool
    final: bool
    needs_key: bool

    @property
    def state_names(self) -> list[str]:
        """The collections that aren't parameters, in order."""
        return [name for name in self.variables if name != "params"]

    @property
    def shared(self) -> Any:
        """What identifies its parameters if it shares them with other layers, else None."""
        return self.layer.shared


@dataclass(frozen=True, eq=False)
class Sequential:
    """A model as a sequence of kinds.

    Attributes:
      kinds: in order of their first member.
      kind_of: the kind's index, for each layer (ends included).
      first: index of the user's layer 0 in that numbering (1 if an identity layer reads the inputs, else 0).
      num_layers: the number of the user's layers.
      axes: what a stage's arrays are split over.
      traced_as: for each kind the index of the first that is the same but for its members (`unrolled`).
    """

    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    first: int
    num_layers: int
    axes: tuple[Axis, ...]
    traced_as: tuple[int, ...]

    def kind_at(self, layer: int) -> Kind:
        """The kind of a layer in the user's numbering."""
        return self.kinds[self.kind_of[layer + self.first]]

    @property
    def homes(self) -> list[Home]:
        """Where variables live: a home for each kind (empty for one that shares), then one for each shared layer."""
        own = [Home(c, () if k.shared else tuple((i,) for i in k.members)) for c, k in enumerate(self.kinds)]
        uses: dict[Any, list[int]] = {}
        for i, c in enumerate(self.kind_of):
            if self.kinds[c].shared:
                uses.setdefault(self.kinds[c].shared, []).append(i)
        return own + [Home(self.kind_of[indices[0]], (tuple(indices),)) for indices in uses.values()]

    def home_of(self, c: int) -> int:
        """The index of the home of a kind's variables."""
        shared = self.kinds[c].shared
        if not shared:
            return c
        return next(
            h for h, home in enumerate(self.homes) if h >= len(self.kinds) and self.kinds[home.kind].shared is shared
        )

    @property
    def boundaries(self) -> list[list[jax.ShapeDtypeStruct]]:
        """The leaves between each layer and the next, as one device has them."""
        return [local_structs(self.kinds[c].gives, self.kinds[c].gives_at, self.axes) for c in self.kind_of[:-1]]


@dataclass(frozen=True)
class Home:
    """Where variables of one kind live.

    Attributes:
      kind: the kind whose `init` makes them.
      members: for each set of variables the layers that use it; the first makes it, all show it.
    """

    kind: int
    members: tuple[tuple[int, ...], ...]


def unrolled(model: Sequential, bounds: Sequence[tuple[int, int]]) -> Sequential:
    """The same model with a kind for each place that a layer may have among those of its kind on a virtual stage.

    A virtual stage then has at most one layer of each kind, and no loop over layers.

    Args:
      model: as traced.
      bounds: for each virtual stage its first layer and one past its last, ends included in the numbering.
    """
    members: dict[tuple[int, int], list[int]] = {}
    place_of: list[tuple[int, int]] = []
    for start, stop in bounds:
        seen: Counter = Counter()
        for i in range(start, stop):
            c = model.kind_of[i]
            place_of.append((c, seen[c]))
            members.setdefault(place_of[-1], []).append(i)
            seen[c] += 1
    places = sorted(members, key=lambda place: members[place][0])
    kinds = tuple(replace(model.kinds[c], members=tuple(members[c, n])) for c, n in places)
    kind_of = tuple(map(places.index, place_of))
    traced_as = tuple(places.index((c, 0)) for c, _ in places)
    return replace(model, kinds=kinds, kind_of=kind_of, traced_as=traced_as)


def same_shapes(a: Any, b: Any) -> bool:
    """Whether two pytrees are equal in structure and shapes."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(np.shape(x) == np.shape(y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def same_type(a: Any, b: Any) -> bool:
    """Whether two pytrees of arrays or shapes are equal in structure, shapes and dtypes."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False)
    return same_shapes(a, b) and all(x.dtype == y.dtype for x, y in pairs)
