"""`Model`, `LayerGroup`, `VariableSet`: equal layers in groups, and the sets of variables that they use.

Layers that are the same function of the same shapes form a *group*, which is traced and compiled once. A layer is known
by its index in the user's sequence, or by its group and its position among the layers of that group.

A layer's numbers (a rate of stochastic depth, a residual scale) are literals of its trace. Where layers differ in
nothing else, the literals are taken out of the trace of the first of them, and the group's function reads them as
arguments (`Constants`): so all of them are one program. Only literals outside of loops, branches, custom derivatives
and `jax.checkpoint` are taken out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jpipe.jax.flat_jaxpr import without_calls
from jpipe.jax.in_place import Index, take_row
from jpipe.jax.primitives import PLAIN_CALLS, ClosedJaxpr
from jpipe.layers.base import AnyLayer
from jpipe.layers.calls import CACHE
from jpipe.partitioner.shardings import Axis, Sharding, named, part_structs
from jpipe.types import Leaf, PyTree, Shapes

# --- the numbers in which layers differ -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Constants:
    """The scalars in which the functions of a group's layers differ.

    Attributes:
      scalars: all scalars of the trace of the layer that stands for the group, in the order of `scalars_of`.
      places: the indices of the scalars that differ.
      values: by a layer's index in the model, its scalars in these places.
    """

    scalars: Sequence[np.ndarray] = ()
    places: tuple[int, ...] = ()
    values: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the numbers that differ, all of them scalars."""
        return [jax.ShapeDtypeStruct((), self.scalars[place].dtype) for place in self.places]

    def of(self, layer: Index) -> list[Leaf]:
        """Returns the scalars that a layer, given by its index in the model, has in the places."""
        if not self.places:
            return []
        if isinstance(layer, int):
            return [jnp.asarray(value) for value in self.values[layer]]
        missing = [np.zeros((), shape.dtype) for shape in self.shapes]
        rows = [self.values.get(i, missing) for i in range(max(self.values, default=0) + 1)]
        return [take_row(jnp.asarray(np.stack(column)), layer) for column in zip(*rows, strict=True)]

    def put_into(self, closed: ClosedJaxpr, new: Sequence[Leaf]) -> ClosedJaxpr:
        """Puts other scalars into the places of a trace of the layer that stands for the group.

        Raises:
          ValueError: it isn't the trace that layers were compared by.
        """
        flat = without_calls(closed, PLAIN_CALLS)
        at = scalar_places(flat)
        if list(map(bits, scalars_of(flat))) != list(map(bits, self.scalars)):
            raise ValueError("under these keys the layer has other numbers; use keys of JAX's default implementation")
        by_index = dict(zip((at[place] for place in self.places), new, strict=True))
        return ClosedJaxpr(flat.jaxpr, [by_index.get(i, constant) for i, constant in enumerate(flat.consts)])


def differing(scalars: Mapping[int, Sequence[np.ndarray]], first: int, known: Constants = Constants()) -> Constants:
    """Compares the scalars of layers, and returns the constants of their group.

    Args:
      scalars: of each layer's trace, by its index in the model; of equal number and types.
      first: the index of the layer that stands for the group.
      known: the constants of those of the layers that were compared before.
    """
    of_first, places = list(map(bits, scalars[first])), set(known.places)
    new = {i: numbers for i, numbers in scalars.items() if i not in known.values}
    for numbers in new.values():
        places.update(place for place, (a, b) in enumerate(zip(of_first, map(bits, numbers), strict=True)) if a != b)
    chosen = tuple(sorted(places))
    kept, to_read = (known.values, new) if chosen == known.places else ({}, scalars)
    values = {i: [numbers[place] for place in chosen] for i, numbers in to_read.items()}
    return Constants(scalars[first], chosen, {**kept, **values})


def scalars_of(flat: ClosedJaxpr) -> list[np.ndarray]:
    """Lists the scalars of a trace that can be taken out: floating-point numbers and integers.

    They are constants of the trace (`without_calls`, which makes constants of its literals, in plain calls too).
    """
    return [np.asarray(flat.consts[i]) for i in scalar_places(flat)]


def scalar_places(flat: ClosedJaxpr) -> list[int]:
    """Lists the indices of scalars among the constants of a jaxpr."""
    return [i for i, constant in enumerate(flat.consts) if is_scalar(constant)]


def is_scalar(constant: Leaf) -> bool:
    """Whether a constant can be taken out of a trace: a floating-point number or an integer."""
    kinds = (jnp.floating, jnp.integer)
    return np.ndim(constant) == 0 and any(jnp.issubdtype(constant.dtype, kind) for kind in kinds)


def bits(constant: Leaf | object) -> object:
    """Returns the type and the bits of a constant."""
    kind = ""
    if isinstance(constant, jax.Array) and jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        kind, constant = str(constant.dtype), jax.random.key_data(constant)
    array = np.asarray(constant)
    return kind, str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()


# --- groups -----------------------------------------------------------------------------------------------------------

KEEP, GRADIENT = "keep", "gradient"
"""Rules of collections that a layer's forward only reads: nothing becomes of one, the other's gradient is its new
value."""
DEFAULT_RULES: Mapping[str, str] = {"batch_stats": "moments", "frozen": KEEP, "_overwrite_with_gradient": GRADIENT}
"""The rules for collections other than parameters (`jpipe.model.merging`), by their names in Flax and here."""


def role_of(collection: str, rules: Mapping[str, str]) -> str:
    """Returns a collection's role: "params", `KEEP`, `GRADIENT`, or else "state", of which forwards give new values.

    Args:
      collection: its name.
      rules: by collection.
    """
    rule = rules.get(collection)
    return "params" if collection == "params" else rule if rule in (KEEP, GRADIENT) else "state"


WEIGHTS = ("params", KEEP)
"""The roles of collections that are the same for a whole step, so that data axes may split them."""

INIT, TRAIN, EVALUATION, SAMPLING, DECODE = "init", "train", "evaluation", "sampling", "decode"
"""The functions of a layer: its initialisation, its calls in training, in evaluation without a random key and with one,
its initialisation in decode mode."""


class LayerTrace(NamedTuple):
    """A layer's call as traced on whole arrays, in training.

    Attributes:
      jaxpr: variables, inputs, batch, key -> outputs, new state.
      variables: the shapes of its variables by collection.
      gives: the shapes of its outputs.
      dropouts: the names of its dropouts.
      updated: the collection of each leaf of the new state.
      written: the collections of which it gives other values than it is called with.
      init_trains: whether it is initialised in training mode: in evaluation it has fewer variables.
    """

    jaxpr: ClosedJaxpr
    variables: dict[str, Shapes]
    gives: Shapes
    dropouts: list[str]
    updated: list[str]
    written: frozenset[str]
    init_trains: bool = False


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers that are the same function of the same shapes, but for numbers.

    The last layer of a model is always alone in its group, since the loss follows it, and so is the first, which takes
    no activation but reads the micro-batch.

    Attributes:
      layer: the one that stands for all: the first of them, as traced.
      indices: their indices in the sequence, ascending; a layer's position in the group is its place here.
      takes: the activation that they are called with, whole (not a device's part), as shapes; `()` for the first layer.
      gives: the activation that they return.
      variables: the shapes of their variables by collection.
      specs: the mesh axes that each leaf of `variables` is split over at rest (between steps), by collection.
      takes_at: how the leaves of `takes` lie on the devices of a stage.
      gives_at: how those of `gives` lie.
      needs_key: whether they draw random numbers in training.
      constrained: the mesh axes that sharding constraints and `shard_map`s in them name.
      rules: what becomes of collections other than parameters, by name.
      variable_set: the index in `Model.variable_sets` of the set that their variables are in; None without variables.
      constants: the numbers in which they differ, by function; empty if they are the same.
      sampled: gives those in evaluation with a random key.
      trace: of the first of them; None in tests that make groups by hand.
    """

    layer: AnyLayer
    indices: tuple[int, ...]
    takes: Shapes
    gives: Shapes
    variables: dict[str, Shapes]
    specs: dict[str, list[PartitionSpec]]
    takes_at: list[Sharding]
    gives_at: list[Sharding]
    needs_key: bool
    constrained: frozenset[str] = frozenset()
    rules: Mapping[str, str] = field(default_factory=lambda: DEFAULT_RULES)
    variable_set: int | None = None
    constants: Mapping[str, Constants] = field(default_factory=dict)
    sampled: Callable[[], Constants] = Constants
    trace: LayerTrace | None = None

    @property
    def in_words(self) -> str:
        """The first of the layers, for messages."""
        return f"layer {self.indices[0]} ({self.layer.name})"

    def scope(self, g: int) -> str:
        """The named scope in which programs call the layers, if they are group g; "/" would part it in two."""
        return f"{self.layer.name.replace('/', '.')}.{g}"

    @property
    def state_names(self) -> list[str]:
        """The collections of which every micro-batch gives new values, in the order of `variables`."""
        return [name for name in self.variables if role_of(name, self.rules) == "state"]

    @property
    def fixed_names(self) -> list[str]:
        """The collections that a forward only reads, in the order of `variables`."""
        return [name for name in self.variables if role_of(name, self.rules) in (KEEP, GRADIENT)]

    @property
    def names(self) -> list[str]:
        """All collections, in the order in which a layer is called with them: parameters, state, those only read."""
        return ["params"] * ("params" in self.variables) + self.state_names + self.fixed_names

    @property
    def asked_axes(self) -> set[str]:
        """The mesh axes that the layers' metadata names for parameters, by the logical axis rules in context now."""
        return named(self.layer.partition_specs(self.variables).get("params", []))

    def leaves(self, names: Sequence[str]) -> list[jax.ShapeDtypeStruct]:
        """Lists the shapes of the leaves of some collections, in order."""
        return [leaf for name in names for leaf in jax.tree.leaves(self.variables[name])]


@dataclass(frozen=True)
class VariableSet:
    """Variables of equal shapes: an instance for each layer of a group, or a single one that several layers share.

    Attributes:
      group: the index of the group whose `init` makes them.
      users: `[instances][users]`, the indices of the layers that use each instance; the first of them makes it.
      shared: whether layers share the one instance.
    """

    group: int
    users: tuple[tuple[int, ...], ...]
    shared: bool


@dataclass(frozen=True, eq=False)
class Model:
    """A sequence of N layers, traced at the shapes of one micro-batch.

    Attributes:
      groups: in the order of their first layers.
      batch: the shapes of the micro-batch `[b, ...]`.
      inputs: the shapes of what the first layer reads from it.
      axes: the mesh axes besides `stage` that arrays are split over.
      variable_sets: all variables of the model.
    """

    groups: tuple[LayerGroup, ...]
    batch: Shapes
    inputs: Shapes
    axes: tuple[Axis, ...]
    variable_sets: tuple[VariableSet, ...] = ()

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The index of each layer's group, `[N]`."""
        return tuple(g for _, g in sorted((i, g) for g, group in enumerate(self.groups) for i in group.indices))

    @property
    def num_layers(self) -> int:
        """The number N of layers."""
        return len(self.group_of)

    @property
    def last(self) -> int:
        """The index of the last layer's group."""
        return len(self.groups) - 1

    def described(self) -> str:
        """Says in words how much there is to compile."""
        return f"{len(self.groups)} group{'s' * (len(self.groups) > 1)} of layers"

    def group_at(self, layer: int) -> LayerGroup:
        """Returns the group of a layer."""
        return self.groups[self.group_of[layer]]

    def called_with(self, layer: int) -> Shapes:
        """Returns the shapes that a layer is called with; for the first one the shapes of the model's inputs."""
        return self.inputs if layer == 0 else self.group_at(layer).takes

    @property
    def boundaries(self) -> list[list[jax.ShapeDtypeStruct]]:
        """For each of the N-1 boundaries between a layer and the next, its leaves as one device has them."""
        return [part_structs(self.groups[g].gives, self.groups[g].gives_at, self.axes) for g in self.group_of[:-1]]

    def with_variable_sets(self) -> Model:
        """The model with its sets of variables collected, and in each group the index of its own."""
        sets: list[VariableSet] = []
        set_of: dict[int, int] = {}  # by the identity of a group, or of what its layers share
        groups = []
        for g, group in enumerate(self.groups):
            shared = group.layer.shared
            owner = id(group if shared is None else shared)
            if set(group.variables) - {CACHE} and owner not in set_of:  # caches lie apart
                users = tuple((i,) for i in group.indices)
                if shared is not None:
                    users = (tuple(i for i, c in enumerate(self.group_of) if self.groups[c].layer.shared is shared),)
                set_of[owner] = len(sets)
                sets.append(VariableSet(g, users, shared is not None))
            groups.append(replace(group, variable_set=set_of.get(owner)))
        return replace(self, groups=tuple(groups), variable_sets=tuple(sets))


def same_type(a: PyTree, b: PyTree) -> bool:
    """Whether two pytrees of arrays or shapes are equal in structure, shapes and dtypes."""
    return jax.tree.flatten(strong(a)) == jax.tree.flatten(strong(b))


def strong(shapes: Shapes) -> Shapes:
    """Drops weak types, which say how Python numbers are promoted: in buffers there are arrays only."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)
