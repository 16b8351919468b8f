"""Flax layers: `flax.linen` and `flax.nnx` modules behind the `AnyLayer` interface.

Linen keeps variables outside of the module, NNX inside; both become a dict of collections here, and random number
streams are seeded from the one key that a layer gets for a micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jpipe.jax_tools.tracing import no_mesh
from jpipe.layers.base import (
    Activation,
    AnyLayer,
    Batch,
    Context,
    Inputs,
    Item,
    LayerError,
    MissingKeyError,
    Specs,
    Variables,
)
from jpipe.layers.fingerprint import same_value, values_within
from jpipe.layers.functions import mode_arguments, signature_of
from jpipe.layers.shared import Method, Shared
from jpipe.seam.flax_inside import collection_of, unsharded_creation

ARRAYS = "arrays"
"""The collection of the arrays that nnx modules hold without an `nnx.Variable` around them (masks, tables)."""


def open_sequential(layers: Any) -> Any:
    """The layers inside a `flax.linen.Sequential` or `nnx.Sequential`; anything else as it is."""
    if isinstance(layers, nn.Sequential | nnx.Sequential):
        return list(layers.layers)
    return layers


def parts_of(layer: Any) -> list[Any]:
    """The objects that a layer's parameters hang on: an nnx module's Variables, a linen module and those in its fields.

    Anything else is its own only part; an nnx module without Variables has none.
    """
    if isinstance(layer, nnx.Module):
        variables = [node for _, node in nnx.iter_graph(layer) if isinstance(node, nnx.Variable)]
        return [variable for variable in variables if not isinstance(variable, nnx.RngState)]
    if not isinstance(layer, nn.Module):
        return [layer]
    is_module = lambda x: isinstance(x, nn.Module)
    fields = [getattr(layer, f.name, None) for f in dataclasses.fields(layer) if f.name not in ("parent", "name")]
    inner = filter(is_module, jax.tree.leaves(fields, is_leaf=is_module))
    return [layer, *(part for module in inner for part in parts_of(module))]


def as_flax_layer(layer: Any, index: int) -> AnyLayer | None:
    """The adapter for a module, or for a factory of nnx modules; None for anything else."""
    if isinstance(layer, nn.Module):
        if layer.scope is not None:
            raise TypeError(f"layers[{index}] ({type(layer).__name__}) is a bound linen module; pass it unbound")
        return LinenLayer(layer)
    if isinstance(layer, nnx.Module):
        return NnxLayer.from_module(layer)
    if callable(layer) and not isinstance(layer, type) and "rngs" in signature_of(layer):
        return NnxLayer.from_factory(layer, index)
    return None


@dataclass(frozen=True)
class LinenLayer:
    """A `flax.linen` module; its variables are what `module.init` returns, metadata boxes included."""

    module: nn.Module
    ready: None = None
    reads_batch: bool = False
    shared: Shared | None = None
    method: Method | None = None  # instead of `__call__`

    @property
    def name(self) -> str:
        return self.module.name or type(self.module).__name__

    def is_same(self, other: AnyLayer) -> bool:
        """Whether the modules are equal, whatever they are called."""
        if not isinstance(other, LinenLayer) or type(self.module) is not type(other.module):
            return False
        names = [f.name for f in dataclasses.fields(self.module) if f.name not in ("name", "parent")]
        parts = lambda layer: [layer.shared, layer.method, *(getattr(layer.module, name) for name in names)]
        return same_value(parts(self), parts(other))

    def _mode(self, train: bool) -> dict[str, bool]:
        fixed = lambda name: getattr(self.module, name, None) is not None
        function = getattr(type(self.module), self.method) if isinstance(self.method, str) else self.method
        return mode_arguments(function or type(self.module).__call__, train, fixed)

    def init(self, key: jax.Array, inputs: Inputs, batch: Batch) -> Variables:
        """`module.init` in evaluation mode, with a random stream for parameters and one for everything else."""
        del batch
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        options: dict[str, Any] = self._mode(train=False)
        return dict(self.module.init(rngs, *inputs, method=self.method, **options))

    def apply(self, variables: Variables, inputs: Inputs, context: Context) -> tuple[Activation, Variables]:
        """`module.apply`; in training the collections other than "params" are mutable."""
        key, train, _ = context
        plain = jax.tree.map(_unbox, variables, is_leaf=_is_box)
        # A stream that isn't named here falls back to "params", as Flax does.
        rngs = None if key is None else {"dropout": key, "params": jax.random.fold_in(key, 1)}
        mutable = [name for name in variables if name != "params"] if train else []
        options: dict[str, Any] = self._mode(train)
        try:
            outputs, changed = self.module.apply(
                plain, *inputs, rngs=rngs, mutable=mutable, method=self.method, **options
            )
        except flax.errors.InvalidRngError as error:
            if key is None:
                raise MissingKeyError(self.name) from error
            raise
        except flax.errors.ModifyScopeVariableError as error:
            if train:
                raise
            raise LayerError(
                "writes its state in evaluation, where nothing is kept; write it only where the layer is told that it "
                f"trains, or where self.is_mutable_collection(...) holds. Flax says: {error}"
            ) from error
        return outputs, {name: _like(variables[name], changed.get(name, {}), name) for name in mutable}

    def to_item(self, variables: Variables) -> Item:
        return variables

    def from_item(self, item: Item) -> Variables:
        """The variables without metadata boxes, which values from elsewhere may lack."""
        return {name: jax.tree.map(_unbox, tree, is_leaf=_is_box) for name, tree in as_collections(item).items()}

    def partition_specs(self, variables: Variables) -> Specs:
        """The axes that `nn.with_partitioning` and its like name."""
        return {name: _leaf_specs(nn.get_partition_spec(tree)) for name, tree in variables.items()}

    def bind(self, item: Item) -> Callable[..., Activation]:
        """The module bound to its variables, or its method with them."""
        bound = self.module.bind(item)
        if self.method is None:
            return bound
        return getattr(bound, self.method) if isinstance(self.method, str) else functools.partial(self.method, bound)


def _like(old: Any, new: Any, collection: str) -> Any:
    """The leaves of `new` in the structure of `old`, with its metadata boxes."""
    leaves, structure = jax.tree.leaves(new), jax.tree.structure(old)
    if len(leaves) != structure.num_leaves:
        raise LayerError(
            f"changes the structure of its collection {collection!r} in training, as self.sow does; "
            "give the values back as outputs instead"
        )
    return jax.tree.unflatten(structure, leaves)


def as_collections(item: Item) -> Variables:
    """A copy of a user's dict by collection.

    Raises:
      LayerError: it is no dict.
    """
    if not isinstance(item, Mapping):
        raise LayerError(f"has its variables in a dict by collection, such as {{'params': ...}}, not {item!r:.60}")
    return dict(item)


def _is_box(x: Any) -> bool:
    return isinstance(x, meta.AxisMetadata)


def _unbox(x: Any) -> Any:
    # Not meta.unbox: inside shard_map its sharding constraint could name an axis that is manual there.
    if isinstance(x, nn.Partitioned):
        return x.unbox(apply_constraint=False)
    return x.unbox() if _is_box(x) else x


def _leaf_specs(tree: Any) -> list[PartitionSpec]:
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)
    return [spec or PartitionSpec() for spec in jax.tree.leaves(tree, is_leaf=is_spec)]


@dataclass(frozen=True)
class NnxLayer:
    """An `nnx` module, ready or to be made by a factory; its variables are its state, grouped by variable type.

    Attributes:
      name: the name of the module's class.
      graphdef: the module without its state.
      template: the state with ShapeDtypeStructs as leaves: paths, variable types and metadata.
      factory: `rngs -> module`; None for a module that is ready.
      ready: a ready module's own values.
      reads_batch: never.
      shared: the shared layer that it is a use of, if it is one.
      method: the name of the method to be called instead of `__call__`.
      module_type: the module's class.
      init_jaxpr: as text, what the factory computes: two may differ only in the values that they start from.
    """

    name: str
    graphdef: nnx.GraphDef[Any]
    template: nnx.State
    factory: Callable[..., nnx.Module] | None
    ready: Variables | None = None
    reads_batch: bool = False
    shared: Shared | None = None
    method: Method | None = None
    module_type: type = nnx.Module
    init_jaxpr: str = ""

    @classmethod
    def from_module(cls, module: nnx.Module) -> NnxLayer:
        """A module that has its values already."""
        graphdef, state = nnx.split(module)
        template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        made = type(module)
        return cls(made.__name__, graphdef, template, None, _collections(state), module_type=made)

    @classmethod
    def from_factory(cls, factory: Callable[..., Any], index: int) -> NnxLayer:
        """A factory `lambda rngs: Module(..., rngs=rngs)`; it is traced here, and computes nothing.

        Raises:
          TypeError: it makes no nnx module, or one that hides an array from nnx.
        """
        found: list[Any] = []  # the graph definition, or what isn't a module

        def make(key: jax.Array) -> nnx.State | None:
            with unsharded_creation():
                module = _mark_arrays(factory(rngs=nnx.Rngs(key)))
            found.append(nnx.split(module)[0] if isinstance(module, nnx.Module) else module)
            return nnx.state(module) if isinstance(module, nnx.Module) else None

        with no_mesh():
            closed, state = jax.make_jaxpr(make, return_shape=True)(jax.random.key(0))
        (graphdef,) = found
        if state is None:
            made = type(graphdef).__name__
            raise TypeError(f"layers[{index}] takes rngs, so it should make an nnx module, but it returned {made}")
        if any(isinstance(value, Tracer) for value in values_within(graphdef)):
            raise TypeError(
                f"layers[{index}] makes a module that keeps an array where nnx doesn't see it, such as in a function; "
                "make the array an attribute of the module, or make it in __call__"
            )
        constants = [(c.shape, str(c.dtype), bytes(np.asarray(c).data)) for c in closed.consts]
        made = type(nnx.merge(graphdef, state))
        return cls(made.__name__, graphdef, state, factory, module_type=made, init_jaxpr=f"{closed} {constants}")

    def is_same(self, other: AnyLayer) -> bool:
        """Whether their graph definitions are equal (types, attributes, initialisers), and both or none are ready."""
        if not isinstance(other, NnxLayer) or (self.factory is None) != (other.factory is None):
            return False
        values = lambda layer: (layer.graphdef, layer.init_jaxpr, _shapes(layer.template))
        parts = lambda layer: (layer.shared, layer.method, *values(layer))
        return same_value(parts(self), parts(other))

    def init(self, key: jax.Array, inputs: Inputs, batch: Batch) -> Variables:
        """The factory's values under this key; a ready module's own values."""
        del inputs, batch  # an nnx module knows its shapes
        if self.factory is None:
            assert self.ready is not None
            return self.ready
        with unsharded_creation():
            return _collections(nnx.state(_mark_arrays(self.factory(rngs=nnx.Rngs(key)))))

    def apply(self, variables: Variables, inputs: Inputs, context: Context) -> tuple[Activation, Variables]:
        """Merges a fresh module, sets its mode, calls it, and splits its state again."""
        key, train, _ = context
        state = self._state(variables, key)
        module = nnx.merge(self.graphdef, state)
        module.train() if train else module.eval()
        function = self._function(module)
        described = type(module).__call__ if self.method is None else function
        drawn = _counts(state)
        outputs = function(*inputs, **mode_arguments(described, train))
        after = nnx.state(_mark_arrays(module))
        if key is None and any(count is not drawn[path] for path, count in _counts(after).items()):
            raise MissingKeyError(self.name)
        new = {name: tree for name, tree in _collections(after).items() if name in variables and name != "params"}
        return outputs, (new if train else {})

    def _function(self, module: Any) -> Callable[..., Any]:
        return getattr(module, self.method) if isinstance(self.method, str) else module

    def _state(self, variables: Variables, key: jax.Array | None) -> nnx.State:
        """The module's whole state: the variables, and random number streams that start from `key`."""
        seed, numbers = jax.random.key(0) if key is None else key, itertools.count()
        filled = []
        for path, variable in nnx.to_flat_state(self.template):
            if isinstance(variable, nnx.RngKey):
                value = _stream_key(variable, jax.random.fold_in(seed, next(numbers)))
            elif isinstance(variable, nnx.RngState):
                value = jnp.zeros(_value(variable).shape, _dtype(variable))
            else:
                value = functools.reduce(lambda tree, name: tree[name], path, variables[_collection(variable)])
            filled.append((path, variable.replace(value) if isinstance(variable, nnx.Variable) else value))
        return nnx.from_flat_state(filled)

    def to_item(self, variables: Variables) -> Item:
        return variables

    def from_item(self, item: Item) -> Variables:
        return as_collections(item)

    def partition_specs(self, variables: Variables) -> Specs:
        """The axes that `nnx.with_partitioning` and its like name."""
        return {name: _leaf_specs(tree) for name, tree in _collections(nnx.get_partition_spec(self.template)).items()}

    def bind(self, item: Item) -> Callable[..., Activation]:
        """The module itself, in evaluation mode, or its method."""
        module = nnx.merge(self.graphdef, self._state(self.from_item(item), None))
        module.eval()
        return self._function(module)


def _stream_key(variable: nnx.RngKey, key: jax.Array) -> jax.Array:
    """`key` in the form in which a module keeps it."""
    if not jnp.issubdtype(_dtype(variable), jax.dtypes.prng_key):
        return jax.random.key_data(key)  # modules of the older style keep raw keys
    shape = _value(variable).shape
    return jax.random.split(key, shape) if shape else key  # one key for each copy of a vmapped module


def _mark_arrays(module: Any) -> Any:
    """The module, its traced arrays that are no Variables marked as data; nnx marks those that aren't traced itself.

    To nnx an array that is being traced is no data but a part of the graph definition, where it outlives its trace.
    """
    nodes = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]
    for node in nodes:
        for name, value in vars(node).items():
            if not nnx.is_data(value) and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
                setattr(node, name, nnx.data(value))
    return module


def _value(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def _dtype(variable: Any) -> Any:
    return _value(variable).dtype


def _collection(variable: Any) -> str:
    if not isinstance(variable, nnx.Variable):
        return ARRAYS
    if isinstance(variable, nnx.Param):  # of a type of its own too, such as LoRAParam
        return "params"
    return collection_of(type(variable))


def _collections(state: Any) -> Variables:
    """`{collection: nested dict by path}` of every variable that is no random number state."""
    variables: Variables = {}
    for path, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.RngState):
            continue
        tree = variables.setdefault(_collection(variable), {})
        for name in path[:-1]:
            tree = tree.setdefault(name, {})
        tree[path[-1]] = _value(variable)
    return variables


def _counts(state: Any) -> dict[Any, Any]:
    """How often each random number stream was drawn from, by path."""
    return {path: _value(v) for path, v in nnx.to_flat_state(state) if isinstance(v, nnx.RngCount)}


def _shapes(state: Any) -> list:
    return [(path, _value(v).shape, _dtype(v)) for path, v in nnx.to_flat_state(state)]
