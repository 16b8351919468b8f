"""Adapts `flax.nnx` modules, which hold their variables; these become a dict of collections by variable type.

Random number streams are seeded from the one key that a layer gets for a micro-batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jpipe.jax.flat_jaxpr import flatten
from jpipe.jax.inside import collection_of, raised, shortened, unsharded_creation
from jpipe.jax.tracing import no_mesh, uses
from jpipe.jax.trees import nested, values_within
from jpipe.layers.base import Activation, AnyLayer, Context, Inputs, Item, LayerError, LayerVariables, Method, Specs
from jpipe.layers.calls import CACHE, NO_KEY, both_of, mode_arguments, signature_of, token_by_token
from jpipe.layers.flax import SOWN, as_collections, check_method, dropout_in_words, without_sown
from jpipe.types import Leaf, PyTree, Shapes

Module = TypeVar("Module")

ARRAYS = "arrays"
"""The collection of the arrays that modules hold without an `nnx.Variable` around them (masks, tables)."""

Factory = Callable[..., object]
"""A user's function `rngs -> module`; whether it makes a module is checked when it is called."""


def layer_of_module(module: nnx.Module, index: int, method: Method | None, sown: tuple[str, ...] = ()) -> AnyLayer:
    """Adapts a module that has its values already.

    Args:
      module: the module.
      index: the layer's, for errors.
      method: the name of the method to be called instead of `__call__`.
      sown: the collections of sown values that it gives behind its outputs.

    Raises:
      TypeError: the method is a function.
      ValueError: the module has no such method.
    """
    module = nnx.clone(module)
    nnx.pop(module, nnx.Intermediate)  # of a call before
    graphdef, state = nnx.split(module)
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    calls, ready = _NnxCalls(graphdef, template, method, sown), _collections(state)

    def copy(rngs: nnx.Rngs) -> nnx.Module:
        """Makes a module for decode mode, with zeros for values: `ready` stays where it is."""
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), ready)
        return nnx.merge(graphdef, calls.state(zeros, None))

    layer = _adapted(calls, copy, index)
    return replace(layer, made_of=("ready", layer.made_of), init=lambda *_: ready, ready=ready)


def layer_of_factory(
    factory: Factory, index: int, method: Method | None, sown: tuple[str, ...] = (), writes: tuple[str, ...] = ()
) -> AnyLayer:
    """Adapts a factory `lambda rngs: Module(..., rngs=rngs)`; it is traced here, and computes nothing.

    Args:
      factory: `rngs -> module`.
      index: the layer's, for errors.
      method: the name of the method to be called instead of `__call__`.
      sown: the collections of sown values that it gives behind its outputs.
      writes: the collections of which the module gives new values in evaluation too.

    Raises:
      TypeError: it makes no nnx module, or one that hides an array from nnx; or the method is a function.
      ValueError: the module has no such method.
    """

    def make(key: jax.Array) -> tuple[nnx.GraphDef[nnx.Module], nnx.State]:
        try:
            with unsharded_creation():
                module = factory(rngs=nnx.Rngs(key))
        except TypeError as error:
            remedy = "it is called with rngs alone, which it hands on, as in lambda rngs: Block(width, rngs=rngs)"
            raise TypeError(f"layers[{index}] raised {raised(error)}; {remedy}") from shortened(error)
        if not isinstance(module, nnx.Module):
            raise TypeError(f"layers[{index}] takes rngs and returned {type(module).__name__}; return an nnx module")
        return nnx.split(_mark_arrays(module))

    with no_mesh():
        closed, (graphdef, template) = jax.make_jaxpr(make, return_shape=True)(jax.random.key(0))
    if any(isinstance(value, Tracer) for value in values_within(graphdef)):
        raise TypeError(f"layers[{index}] keeps an array where nnx doesn't see it; make it an attribute of the module")
    constants = [(c.shape, str(c.dtype), bytes(np.asarray(c).data)) for c in closed.consts]

    layer = _adapted(_NnxCalls(graphdef, template, method, sown, writes), factory, index)
    return replace(layer, made_of=("made", f"{closed} {constants}", layer.made_of))  # by its initial values, too


def _adapted(calls: _NnxCalls, factory: Factory, index: int) -> AnyLayer:
    """Adapts a module that is ready or made by a factory, but for the values that it starts from.

    Args:
      calls: the ways in which it is called.
      factory: makes the module anew, for `init` and for decode mode.
      index: the layer's, for errors.
    """
    shapes = [(path, _value(v).shape, _value(v).dtype) for path, v in nnx.to_flat_state(calls.template)]
    module = nnx.merge(calls.graphdef, calls.template)
    parts = [part for _, part in nnx.iter_graph(module)]
    # None of a method, which may call only some of the parts.
    dropouts = [words for part in parts for words in dropout_in_words(part) if calls.method is None]
    name = type(module).__name__
    if callable(calls.method):
        raise TypeError(f"layers[{index}] uses {name} through a function; name one of its methods")
    check_method(type(module), name, calls.method, index)

    def init(inputs: Inputs, context: Context) -> LayerVariables:
        with unsharded_creation():
            return _collections(nnx.state(_mark_arrays(factory(rngs=nnx.Rngs(context.key)))))

    def decode(takes: Shapes, size: int, length: int) -> AnyLayer:
        make = functools.partial(_with_caches, factory, takes, size, length)
        return token_by_token(layer_of_factory(make, index, calls.method, calls.sown, writes=(CACHE,)), length)

    return AnyLayer(
        name=name,
        made_of=("nnx", calls.method, calls.sown, calls.graphdef, shapes),
        init=init,
        apply=calls.apply,
        bind=calls.bind,
        from_item=as_collections,
        partition_specs=calls.partition_specs,
        decode=decode,
        sown=calls.sown,
        keeps_cache=any(callable(getattr(part, "init_cache", None)) for part in parts),
        dropouts=lambda: nullcontext(dropouts),
    )


def _with_caches(factory: Factory, takes: Shapes, size: int, length: int, rngs: nnx.Rngs) -> nnx.Module:
    """Makes a module of which all parts are in decode mode, with caches of their own dtype, or of what they take."""
    module = factory(rngs=rngs)
    assert isinstance(module, nnx.Module)
    no_method = lambda _, part: not callable(getattr(part, "decode", None))  # a table's method `decode` is no mode
    module.set_attributes(no_method, decode=True, raise_if_not_found=False)
    first = jax.tree.leaves(takes)[0]
    taken = first.dtype if jnp.issubdtype(first.dtype, jnp.floating) else None  # a model that takes tokens
    for _, part in nnx.iter_graph(module):
        init_cache = getattr(part, "init_cache", None)
        if callable(init_cache):
            own = (getattr(part, "dtype", None), taken, getattr(part, "param_dtype", None), jnp.float32)
            dtype = {"dtype": next(filter(None, own))} if "dtype" in signature_of(init_cache) else {}
            init_cache((size, length, *(first.shape[2:] or (1,))), **dtype)
    return module


@dataclass(frozen=True)
class _NnxCalls:
    """The ways in which a module is called.

    Attributes:
      graphdef: the module without its state.
      template: the state with ShapeDtypeStructs as leaves: paths, variable types and metadata.
      method: the name of the method to be called instead of `__call__`.
      sown: the collections of sown values that it gives behind its outputs, `(outputs, {name: values})`.
      writes: the collections of which it gives new values in evaluation too.
    """

    graphdef: nnx.GraphDef[nnx.Module]
    template: nnx.State
    method: Method | None
    sown: tuple[str, ...]
    writes: tuple[str, ...] = ()

    def apply(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        """Merges a fresh module, sets its mode, calls it, and splits its state again."""
        train = context.train
        outputs, collections = self._called(variables, inputs, context)
        if context.key is None and any(isinstance(v, nnx.RngKey) for _, v in nnx.to_flat_state(self.template)):
            given = lambda key: self._called(variables, inputs, context._replace(key=key))
            if uses(jax.make_jaxpr(given)(jax.random.key(0)))[0]:
                raise LayerError(NO_KEY)
        if train and (written := self._written(collections.get("params"), variables, inputs, context)):
            raise LayerError(f"writes its parameter {written}, as only the optimiser may; keep it in an nnx.BatchStat")
        if (lost := without_sown(collections, self.sown).keys() - variables) and train:
            raise LayerError(f"makes the collection {min(lost)!r} in training, as {SOWN}")
        if self.sown:
            outputs = outputs, {name: collections.get(name, {}) for name in self.sown}
        state = [name for name in collections if name in variables and name != "params"]
        return outputs, {name: collections[name] for name in state if train or name in self.writes}

    def _called(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[PyTree, LayerVariables]:
        """Calls a fresh module: (its outputs, its variables after that)."""
        module = nnx.merge(self.graphdef, self.state(variables, context.key))
        module.train() if context.train else module.eval()
        function, (positional, keywords) = self._function(module), both_of(inputs)
        outputs = function(*positional, **{**mode_arguments(function, context.train), **keywords})
        return outputs, _collections(nnx.state(_mark_arrays(module)))

    def _written(self, after: PyTree, variables: LayerVariables, inputs: Inputs, context: Context) -> str:
        """The path of a parameter that the call changes; "" if there is none.

        One that is another array afterwards may have gone through a call (`nnx.remat`): its trace tells.
        """
        pairs = zip(jax.tree.leaves(after), jax.tree.leaves(variables.get("params")), strict=True)
        if all(new is old for new, old in pairs):
            return ""

        called = lambda params: self._called({**variables, "params": params}, inputs, context)[1]["params"]
        flat = flatten(jax.make_jaxpr(called)(variables["params"]))
        paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(after))
        changed = (p for p, old, new in zip(paths, flat.arguments, flat.results, strict=True) if old != new)
        return jax.tree_util.keystr(next(changed, ()), simple=True, separator="/")

    def _function(self, module: nnx.Module) -> Callable[..., Activation]:
        return getattr(module, self.method) if isinstance(self.method, str) else module

    def state(self, variables: LayerVariables, key: jax.Array | None) -> nnx.State:
        """Fills the module's state: the variables, and random number streams that start from `key`."""
        seed, numbers = jax.random.key(0) if key is None else key, itertools.count()
        filled = []
        for path, variable in nnx.to_flat_state(self.template):
            if isinstance(variable, nnx.RngKey):
                value = _stream_key(variable, jax.random.fold_in(seed, next(numbers)))
            elif isinstance(variable, nnx.RngState):
                value = jnp.zeros(_value(variable).shape, _value(variable).dtype)
            else:
                value = functools.reduce(lambda tree, name: tree[name], path, variables[_collection(type(variable))])
            filled.append((path, variable.replace(value) if isinstance(variable, nnx.Variable) else value))
        return nnx.from_flat_state(filled)

    def partition_specs(self, variables: LayerVariables) -> Specs:
        """Reads the axes of `nnx.with_partitioning`, translated by the rules in context and the variable's own."""
        specs = _collections(nnx.get_partition_spec(self.template))
        leaves = lambda tree: jax.tree.leaves(tree, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
        return {name: [spec or PartitionSpec() for spec in leaves(tree)] for name, tree in specs.items()}

    def bind(self, item: Item) -> Callable[..., Activation]:
        """Returns the module itself, in evaluation mode, or its method."""
        module = nnx.merge(self.graphdef, self.state(as_collections(item), None))
        module.eval()
        return self._function(module)


def _stream_key(variable: nnx.RngKey, key: jax.Array) -> jax.Array:
    """Puts `key` into the form in which a module keeps it."""
    if not jnp.issubdtype(_value(variable).dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key)  # modules of the older style keep raw keys
    shape = _value(variable).shape
    return jax.random.split(key, shape) if shape else key  # one key for each copy of a vmapped module


def _mark_arrays(module: Module) -> Module:
    """Marks traced arrays of the module that are no Variables as data, which nnx does only for arrays with values.

    Without the mark nnx takes a traced array for a part of the graph definition, where it outlives its trace.
    """
    for node in [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]:
        for name, value in vars(node).items():
            if not nnx.is_data(value) and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
                setattr(node, name, nnx.data(value))
    return module


def _value(variable: nnx.Variable | Leaf) -> Leaf:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def _collection(kind: type) -> str:
    """Names the collection of variables of a type, or of bare arrays."""
    if not issubclass(kind, nnx.Variable):
        return ARRAYS
    # Parameters are also those of a user's subclass, such as LoRAParam.
    return "params" if issubclass(kind, nnx.Param) else collection_of(kind)


def _collections(state: nnx.State) -> LayerVariables:
    """Collects every variable that is no random number state: `{collection: nested dict by path}`."""
    variables: dict[str, dict[tuple, Leaf]] = {}
    for path, variable in nnx.to_flat_state(state):
        if not isinstance(variable, nnx.RngState):
            variables.setdefault(_collection(type(variable)), {})[path] = _value(variable)
    return {name: nested(tree.items()) for name, tree in variables.items()}
