"""Puts `flax.linen` and `flax.nnx` modules behind the `AnyLayer` interface; finds dropout that is turned off.

Linen keeps variables outside of the module, NNX inside; both become a dict of collections here, and random number
streams are seeded from the one key that a layer gets for a micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from typing import TypeVar

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from flax.traverse_util import unflatten_dict
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jpipe.jaxprs.tracing import no_mesh
from jpipe.layers.base import Activation, AnyLayer, Context, Inputs, Item, LayerError, LayerVariables, Single, Specs
from jpipe.layers.fingerprint import ShownByTraces, values_within
from jpipe.layers.functions import MODE_NAMES, ModeArguments, mode_arguments, modes
from jpipe.layers.shared import Method
from jpipe.seam.flax_inside import collection_of, unsharded_creation
from jpipe.seam.inside import raised, shortened
from jpipe.types import Batch, Leaf, PyTree

Module = TypeVar("Module")

ARRAYS = "arrays"
"""The collection of the arrays that nnx modules hold without an `nnx.Variable` around them (masks, tables)."""

SOWN = (
    "self.sow does; pass the values on with the activation, `return x, total + value`, to a loss_fn that adds them "
    "(the page on losses has an example)"
)
NO_KEY = (
    "draws random numbers in evaluation mode, where there is no key; make it deterministic there, by an argument "
    f"`deterministic` or `train`, which jpipe gives it, as it does those called {MODE_NAMES}"
)


def logical_rules(axes: Collection[str]) -> Callable[[], AbstractContextManager[object]]:
    """The logical axis rules that are in context now (`nn.logical_axis_rules`), as a context that sets them later.

    Only these mesh axes stay in them: rules may name some that a mesh lacks, or `stage`, but constraints may not.
    """

    def kept(found: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
        if found is None or isinstance(found, str):
            return found if found in axes else None
        return tuple(name for name in found if name in axes)

    rules = tuple((name, kept(found)) for name, found in nn.get_logical_axis_rules())
    return lambda: nn.logical_axis_rules(rules)


def parts_of(layer: object) -> list[object]:
    """The objects that a layer's parameters hang on: an nnx module's Variables, a linen module and those in its fields.

    A function's are itself and those of the modules that it names; an nnx module without Variables has none. Anything
    else is its own only part.
    """
    if isfunction(layer):
        named: list[object] = []
        with suppress(ValueError):  # a variable that isn't set yet
            found = getclosurevars(layer)
            values = (*found.nonlocals.values(), *found.globals.values())
            named = [value for value in values if isinstance(value, nn.Module | nnx.Module)]
        return [layer, *(part for module in named for part in parts_of(module))]
    if isinstance(layer, nnx.Module):
        variables = [node for _, node in nnx.iter_graph(layer) if isinstance(node, nnx.Variable)]
        return [variable for variable in variables if not isinstance(variable, nnx.RngState)]
    if isinstance(layer, nn.Module):
        return [part for part in values_within(layer) if isinstance(part, nn.Module)]
    return [layer]


def check_variable_types(layers: Sequence[AnyLayer]) -> None:
    """Refuses nnx variables of two types with one name, which would be one collection, under one rule of `merge`.

    Raises:
      ValueError: naming the first layer with such variables, and both types.
    """
    types: dict[str, type] = {"params": nnx.Param}
    for index, layer in enumerate(layers):
        leaves = nnx.to_flat_state(layer.template) if isinstance(layer, NnxLayer) else []
        for variable in [leaf for _, leaf in leaves if not isinstance(leaf, nnx.Param | nnx.RngState)]:
            name, kind = _collection(variable), type(variable)
            other = types.setdefault(name, kind)
            if other is not kind:
                raise ValueError(
                    f"layers[{index}] ({layer.name}) has variables of the type {kind.__module__}.{kind.__qualname__}, "
                    f"and their collection would be {name!r}, as that of {other.__module__}.{other.__qualname__}; give "
                    "one of the two types another name"
                )


# --- dropout that is off ----------------------------------------------------------------------------------------------


@contextmanager
def dropouts_of(layer: AnyLayer) -> Iterator[list[str]]:
    """The context in which a layer is called in training. Gives its dropouts, as words; some are known only after it.

    A Linen module's are those that are called, as one made in a compact method is seen nowhere else; an nnx module's
    are all that it holds. Those of rate 0 aren't among them, nor those that the user has turned off.
    """
    found: list[str] = []

    def note(called: Callable, args: tuple, kwargs: dict[str, object], where: nn.module.InterceptorContext) -> object:
        found.extend(_dropout(where.module))
        return called(*args, **kwargs)

    if isinstance(layer, NnxLayer) and layer.method is None:
        for _, node in nnx.iter_graph(nnx.merge(layer.graphdef, layer.template)):
            found.extend(_dropout(node))
    watches = isinstance(layer, LinenLayer) and not _is_turned_off(layer.module)
    with nn.intercept_methods(note) if watches else nullcontext():
        yield found


def _dropout(part: object) -> list[str]:
    """A module that draws what it drops, in words; nothing of others. At a rate of 1 it drops everything."""
    if isinstance(part, nn.Dropout | nnx.Dropout):
        rate = part.rate
    else:
        attention = isinstance(part, nn.MultiHeadDotProductAttention | nnx.MultiHeadAttention)
        rate = part.dropout_rate if attention else 0
    return [f"{type(part).__name__} of rate {rate}"] if 0 < rate < 1 else []


def _is_turned_off(module: nn.Module) -> bool:
    """Whether the user gave a module, or one in its fields, the mode of evaluation: by a field, not by its default."""
    off = modes(train=False)
    parts = [part for part in parts_of(module) if isinstance(part, nn.Module)]
    fields = ((part, f) for part in parts for f in dataclasses.fields(part) if f.name in off)
    return any(getattr(part, f.name, None) == off[f.name] != f.default for part, f in fields)


# --- Linen ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinenLayer(Single):
    """A `flax.linen` module; its variables are what `module.init` returns, metadata boxes included."""

    module: nn.Module
    method: Method | None = None  # instead of `__call__`

    @property
    def name(self) -> str:
        return self.module.name or type(self.module).__name__

    @property
    def made_of(self) -> Sequence[object]:
        """The module's type and fields, whatever it is called."""
        names = [f.name for f in dataclasses.fields(self.module) if f.name not in ("name", "parent")]
        return [type(self.module), self.shared, self.method, *(getattr(self.module, name) for name in names)]

    def _mode(self, train: bool) -> ModeArguments:
        fixed = lambda name: getattr(self.module, name, None) is not None
        function = getattr(type(self.module), self.method) if isinstance(self.method, str) else self.method
        return mode_arguments(function or type(self.module).__call__, train, fixed)

    def init(self, key: jax.Array, inputs: Inputs, batch: Batch) -> LayerVariables:
        """`module.init` in evaluation mode, with a random stream for parameters and one for everything else."""
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        return dict(self.module.init(rngs, *inputs, method=self.method, **self._mode(train=False)))

    def apply(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        """`module.apply`; in training the collections other than "params" are mutable."""
        key, train, _ = context
        # A stream that isn't named here falls back to "params", as Flax does.
        rngs = None if key is None else {"dropout": key, "params": jax.random.fold_in(key, 1)}
        mutable = [name for name in variables if (name != "params" if train else name in self.writes)]
        try:
            outputs, changed = self.module.apply(
                _unboxed(variables), *inputs, rngs=rngs, mutable=mutable, method=self.method, **self._mode(train)
            )
        except flax.errors.InvalidRngError as error:
            if key is None:
                raise LayerError(NO_KEY) from error
            raise
        except flax.errors.ModifyScopeVariableError as error:
            if train:
                raise
            raise LayerError(
                "writes its state in evaluation, where nothing is kept; write it only where the layer is told that it "
                f"trains, or where self.is_mutable_collection(...) holds. Flax says: {error}"
            ) from error
        return outputs, {name: _like(variables[name], changed.get(name, {}), name) for name in mutable}

    def from_item(self, item: Item) -> LayerVariables:
        """The variables without metadata boxes, which values from elsewhere may lack."""
        return _unboxed(as_collections(item))

    def partition_specs(self, variables: LayerVariables) -> Specs:
        """The axes that `nn.with_partitioning` names, or rules for what `nn.with_logical_partitioning` names.

        The rules are a box's own, or those in context; a logical name without a rule splits nothing.
        """
        is_box = lambda x: isinstance(x, meta.AxisMetadata)
        return {name: list(map(_box_spec, jax.tree.leaves(tree, is_leaf=is_box))) for name, tree in variables.items()}

    def bind(self, item: Item) -> Callable[..., Activation]:
        """The module bound to its variables, or its method with them."""
        bound = self.module.bind(item)
        if self.method is None:
            return bound
        return getattr(bound, self.method) if isinstance(self.method, str) else functools.partial(self.method, bound)


def _like(old: PyTree, new: PyTree, collection: str) -> PyTree:
    """The leaves of `new` in the structure of `old`, with its metadata boxes."""
    leaves, structure = jax.tree.leaves(new), jax.tree.structure(old)
    if len(leaves) != structure.num_leaves:
        raise LayerError(f"changes the structure of its collection {collection!r} in training, as {SOWN}")
    return jax.tree.unflatten(structure, leaves)


def as_collections(item: Item) -> LayerVariables:
    """A copy of a user's dict by collection.

    Raises:
      LayerError: it is no dict.
    """
    if not isinstance(item, Mapping):
        raise LayerError(f"has its variables in a dict by collection, such as {{'params': ...}}, not {item!r:.60}")
    return dict(item)


def _unboxed(variables: LayerVariables) -> LayerVariables:
    """The variables without metadata boxes."""

    def unbox(x: Leaf | meta.AxisMetadata) -> Leaf:
        # Not meta.unbox: inside shard_map its sharding constraint could name an axis that is manual there.
        if isinstance(x, nn.Partitioned):
            return x.unbox(apply_constraint=False)
        return x.unbox() if isinstance(x, meta.AxisMetadata) else x

    return jax.tree.map(unbox, variables, is_leaf=lambda x: isinstance(x, meta.AxisMetadata))


def _box_spec(x: Leaf | meta.AxisMetadata) -> PartitionSpec:
    """The mesh axes that a linen variable's metadata box names, of which it may have none."""
    if not isinstance(x, nn.LogicallyPartitioned):
        return nn.get_partition_spec(x) or PartitionSpec()
    try:
        found = nn.logical_to_mesh_axes(x.names, x.rules)  # pyright: ignore[reportPrivateImportUsage]
    except ValueError as error:
        raise LayerError(f"names the logical axes {x.names}. Flax says: {error}") from error
    return found or PartitionSpec()


# --- NNX --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NnxLayer(Single):
    """An `nnx` module, ready or to be made by a factory; its variables are its state, grouped by variable type.

    Attributes:
      name: the name of the module's class.
      graphdef: the module without its state.
      template: the state with ShapeDtypeStructs as leaves: paths, variable types and metadata.
      factory: `rngs -> module`; None for a module that is ready.
      method: the name of the method to be called instead of `__call__`.
      module_type: the module's class.
      init_jaxpr: as text, what the factory computes: two may differ only in the values that they start from.
    """

    name: str
    graphdef: nnx.GraphDef[nnx.Module]
    template: nnx.State
    factory: Callable[..., object] | None
    method: Method | None = None
    module_type: type = nnx.Module
    init_jaxpr: str = ""

    @classmethod
    def from_module(cls, module: nnx.Module) -> NnxLayer:
        """A module that has its values already."""
        graphdef, state = nnx.split(module)
        template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        made = type(module)
        return cls(made.__name__, graphdef, template, None, module_type=made, ready=_collections(state))

    @classmethod
    def from_factory(cls, factory: Callable[..., object], index: int) -> NnxLayer:
        """A factory `lambda rngs: Module(..., rngs=rngs)`; it is traced here, and computes nothing.

        Raises:
          TypeError: it makes no nnx module, or one that hides an array from nnx.
        """

        def make(key: jax.Array) -> tuple[nnx.GraphDef[nnx.Module], nnx.State]:
            try:
                with unsharded_creation():
                    module = factory(rngs=nnx.Rngs(key))
            except TypeError as error:
                given = "it is called with rngs alone, which it hands on, as in lambda rngs: Block(width, rngs=rngs)"
                raise TypeError(f"layers[{index}] raised {raised(error)}; {given}") from shortened(error)
            if not isinstance(module, nnx.Module):
                made = type(module).__name__
                raise TypeError(f"layers[{index}] takes rngs, so it should make an nnx module, but it returned {made}")
            return nnx.split(_mark_arrays(module))

        with no_mesh():
            closed, (graphdef, state) = jax.make_jaxpr(make, return_shape=True)(jax.random.key(0))
        if any(isinstance(value, Tracer) for value in values_within(graphdef)):
            raise TypeError(
                f"layers[{index}] makes a module that keeps an array where nnx doesn't see it, such as in a function; "
                "make the array an attribute of the module, or make it in __call__"
            )
        constants = [(c.shape, str(c.dtype), bytes(np.asarray(c).data)) for c in closed.consts]
        made = type(nnx.merge(graphdef, state))
        return cls(made.__name__, graphdef, state, factory, module_type=made, init_jaxpr=f"{closed} {constants}")

    @property
    def made_of(self) -> Sequence[object]:
        """The graph definition (types, attributes, initialisers), and whether the module is ready."""
        shapes = [(path, _value(v).shape, _value(v).dtype) for path, v in nnx.to_flat_state(self.template)]
        init = ShownByTraces(self.init_jaxpr)
        return self.factory is None, self.shared, self.method, self.graphdef, init, shapes

    def init(self, key: jax.Array, inputs: Inputs, batch: Batch) -> LayerVariables:
        """The factory's values under this key; a ready module's own values."""
        if self.factory is None:
            assert self.ready is not None
            return self.ready
        with unsharded_creation():
            return _collections(nnx.state(_mark_arrays(self.factory(rngs=nnx.Rngs(key)))))

    def apply(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        """Merges a fresh module, sets its mode, calls it, and splits its state again."""
        key, train, _ = context
        state = self.state(variables, key)
        module = nnx.merge(self.graphdef, state)
        module.train() if train else module.eval()
        function, drawn = self._function(module), _counts(state)
        outputs = function(*inputs, **mode_arguments(function, train))
        after = nnx.state(_mark_arrays(module))
        if key is None and any(count is not drawn[path] for path, count in _counts(after).items()):
            raise LayerError(NO_KEY)
        found = _collections(after)
        if lost := [name for name in found if train and name not in (*variables, "intermediates")]:
            raise LayerError(f"makes the collection {lost[0]!r} in training, as {SOWN}")
        new = {name: tree for name, tree in found.items() if name in variables and name != "params"}
        return outputs, {name: tree for name, tree in new.items() if train or name in self.writes}

    def _function(self, module: nnx.Module) -> Callable[..., Activation]:
        return getattr(module, self.method) if isinstance(self.method, str) else module

    def state(self, variables: LayerVariables, key: jax.Array | None) -> nnx.State:
        """The module's whole state: the variables, and random number streams that start from `key`."""
        seed, numbers = jax.random.key(0) if key is None else key, itertools.count()
        filled = []
        for path, variable in nnx.to_flat_state(self.template):
            if isinstance(variable, nnx.RngKey):
                value = _stream_key(variable, jax.random.fold_in(seed, next(numbers)))
            elif isinstance(variable, nnx.RngState):
                value = jnp.zeros(_value(variable).shape, _value(variable).dtype)
            else:
                value = functools.reduce(lambda tree, name: tree[name], path, variables[_collection(variable)])
            filled.append((path, variable.replace(value) if isinstance(variable, nnx.Variable) else value))
        return nnx.from_flat_state(filled)

    def from_item(self, item: Item) -> LayerVariables:
        return as_collections(item)

    def partition_specs(self, variables: LayerVariables) -> Specs:
        """The axes that `nnx.with_partitioning` names, translated by the rules in context and the variable's own."""
        try:
            specs = _collections(nnx.get_partition_spec(self.template))
        except ValueError as error:
            raise LayerError(f"names axes that its rules can't translate. Flax says: {error}") from error
        leaves = lambda tree: jax.tree.leaves(tree, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
        return {name: [spec or PartitionSpec() for spec in leaves(tree)] for name, tree in specs.items()}

    def bind(self, item: Item) -> Callable[..., Activation]:
        """The module itself, in evaluation mode, or its method."""
        module = nnx.merge(self.graphdef, self.state(self.from_item(item), None))
        module.eval()
        return self._function(module)


def _stream_key(variable: nnx.RngKey, key: jax.Array) -> jax.Array:
    """`key` in the form in which a module keeps it."""
    if not jnp.issubdtype(_value(variable).dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key)  # modules of the older style keep raw keys
    shape = _value(variable).shape
    return jax.random.split(key, shape) if shape else key  # one key for each copy of a vmapped module


def _mark_arrays(module: Module) -> Module:
    """The module, its traced arrays that are no Variables marked as data; nnx marks those that aren't traced itself.

    To nnx an array that is being traced is no data but a part of the graph definition, where it outlives its trace.
    """
    for node in [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]:
        for name, value in vars(node).items():
            if not nnx.is_data(value) and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
                setattr(node, name, nnx.data(value))
    return module


def _value(variable: nnx.Variable | Leaf) -> Leaf:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def _collection(variable: nnx.Variable | Leaf) -> str:
    if not isinstance(variable, nnx.Variable):
        return ARRAYS
    if isinstance(variable, nnx.Param):  # of a type of its own too, such as LoRAParam
        return "params"
    return collection_of(type(variable))


def _collections(state: nnx.State) -> LayerVariables:
    """`{collection: nested dict by path}` of every variable that is no random number state."""
    variables: dict[str, dict[tuple, Leaf]] = {}
    for path, variable in nnx.to_flat_state(state):
        if not isinstance(variable, nnx.RngState):
            variables.setdefault(_collection(variable), {})[path] = _value(variable)
    return {name: unflatten_dict(tree) for name, tree in variables.items()}


def _counts(state: nnx.State) -> dict[tuple, Leaf]:
    """How often each random number stream was drawn from, by path."""
    return {path: _value(v) for path, v in nnx.to_flat_state(state) if isinstance(v, nnx.RngCount)}
