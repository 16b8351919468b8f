"""Adapts `flax.linen` modules, which keep their variables outside of themselves.

Random number streams are seeded from the one key that a layer gets for a micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import flax.errors
import flax.linen as nn
import jax
from flax.core import meta
from jax.sharding import PartitionSpec

from jpipe.jax.trees import values_within
from jpipe.layers.base import Activation, AnyLayer, Context, Inputs, Item, LayerError, LayerVariables, Method, Specs
from jpipe.layers.calls import CACHE, NO_KEY, ModeArguments, both_of, mode_arguments, modes, token_by_token
from jpipe.layers.flax import SOWN, as_collections, check_method, dropout_in_words, without_sown
from jpipe.types import Leaf, PyTree, Shapes


def linen_layer(module: nn.Module, index: int, method: Method | None, sown: tuple[str, ...] = ()) -> AnyLayer:
    """Adapts a Linen module; its variables are those that `module.init` returns, metadata boxes included.

    Args:
      module: the module.
      index: the layer's, for errors.
      method: called instead of `__call__`.
      sown: the collections of sown values that it gives behind its outputs.

    Raises:
      TypeError: the module is bound.
      ValueError: it has no such method.
    """
    kind = type(module).__name__
    if module.scope is not None:
        raise TypeError(f"layers[{index}] ({kind}) is a bound linen module; pass it unbound")
    check_method(type(module), module.name or kind, method, index)
    return _adapted(_LinenCalls(module, method, sown))


def _adapted(calls: _LinenCalls) -> AnyLayer:
    module, fields = calls.module, dataclasses.fields(calls.module)
    can_decode = any(field.name == "decode" for field in fields)

    def decode(takes: Shapes, size: int, length: int) -> AnyLayer:
        decoder = dataclasses.replace(calls, module=module.clone(decode=True), writes=(CACHE,))
        return token_by_token(_adapted(decoder), length)

    values = [getattr(module, field.name, None) for field in fields if field.name not in ("name", "parent")]
    return AnyLayer(
        name=module.name or type(module).__name__,
        made_of=("linen", type(module), calls.method, calls.sown, values),
        init=calls.init,
        apply=calls.apply,
        bind=calls.bind,
        # Values from elsewhere may lack boxes of metadata.
        from_item=lambda item: _unboxed(without_sown(as_collections(item), calls.sown)),
        partition_specs=_partition_specs,
        decode=decode if can_decode else None,
        sown=calls.sown,
        keeps_cache=can_decode,
        dropouts=calls.dropouts,
    )


@dataclass(frozen=True)
class _LinenCalls:
    """The ways in which a module is called.

    Attributes:
      module: the module.
      method: called instead of `__call__`.
      sown: the collections of sown values that it gives behind its outputs, `(outputs, {name: values})`.
      writes: the collections of which it gives new values in evaluation too.
    """

    module: nn.Module
    method: Method | None
    sown: tuple[str, ...]
    writes: tuple[str, ...] = ()

    def init(self, inputs: Inputs, context: Context) -> LayerVariables:
        """Calls `module.init`, with a random stream for parameters and one for everything else."""
        assert context.key is not None
        rngs = {"params": context.key, "dropout": jax.random.fold_in(context.key, 1)}
        positional, keywords = both_of(inputs)
        options = {"method": self.method, **self._mode(context.train), **keywords}
        return without_sown(dict(self.module.init(rngs, *positional, mutable=True, **options)), self.sown)

    def apply(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        """Calls `module.apply`; in training the collections other than "params" are mutable."""
        key, train, _ = context
        # A stream that isn't named here falls back to "params", as Flax does.
        rngs = None if key is None else {"dropout": key, "params": jax.random.fold_in(key, 1)}
        mutable = [name for name in variables if (name != "params" if train else name in self.writes)]
        positional, keywords = both_of(inputs)
        options = {"mutable": [*mutable, *self.sown], "method": self.method, **self._mode(train), **keywords}
        try:
            outputs, changed = self.module.apply(_unboxed(variables), *positional, rngs=rngs, **options)
        except flax.errors.InvalidRngError as error:
            if key is None:
                raise LayerError(NO_KEY) from error
            raise
        except flax.errors.ModifyScopeVariableError as error:
            if train:
                raise
            raise LayerError(f"writes state in evaluation; write it in training only. Flax says: {error}") from error
        if self.sown:
            outputs = outputs, {name: changed.get(name, {}) for name in self.sown}
        return outputs, {name: _like(variables[name], changed.get(name, {}), name) for name in mutable}

    def _mode(self, train: bool) -> ModeArguments:
        is_fixed = lambda name: getattr(self.module, name, None) is not None
        function = getattr(type(self.module), self.method) if isinstance(self.method, str) else self.method
        return mode_arguments(function or type(self.module).__call__, train, is_fixed)

    def bind(self, item: Item) -> Callable[..., Activation]:
        """Returns the module bound to its variables, or its method with them."""
        bound = self.module.bind(item)
        if self.method is None:
            return bound
        return getattr(bound, self.method) if isinstance(self.method, str) else functools.partial(self.method, bound)

    @contextmanager
    def dropouts(self) -> Iterator[list[str]]:
        """Gives the dropouts that are called in the context, but for those of rate 0; none if the user turned them off.

        Only calls show them all: one made in a compact method is seen nowhere else.
        """
        called_dropouts: list[str] = []

        def note(called: Callable, args: tuple, kwargs: dict[str, object], where: nn.module.InterceptorContext):
            called_dropouts.extend(dropout_in_words(where.module))
            return called(*args, **kwargs)

        with nullcontext() if _is_turned_off(self.module) else nn.intercept_methods(note):
            yield called_dropouts


def _is_turned_off(module: nn.Module) -> bool:
    """Whether the user gave a module, or one in its fields, the mode of evaluation: by a field, not by its default."""
    off = modes(train=False)
    parts = [part for part in values_within(module) if isinstance(part, nn.Module)]
    fields = ((part, f) for part in parts for f in dataclasses.fields(part) if f.name in off)
    return any(getattr(part, f.name, None) == off[f.name] != f.default for part, f in fields)


def _like(old: PyTree, new: PyTree, collection: str) -> PyTree:
    """Puts the leaves of `new` into the structure of `old`, with its metadata boxes."""
    leaves, structure = jax.tree.leaves(new), jax.tree.structure(old)
    if len(leaves) != structure.num_leaves:
        raise LayerError(f"changes the structure of its collection {collection!r} in training, as {SOWN}")
    return jax.tree.unflatten(structure, leaves)


def _is_box(x: object) -> bool:
    return isinstance(x, meta.AxisMetadata)


def _unboxed(variables: LayerVariables) -> LayerVariables:
    """Takes the variables out of their metadata boxes."""

    def unbox(x: Leaf | meta.AxisMetadata) -> Leaf:
        # Not meta.unbox: inside shard_map its sharding constraint could name an axis that is manual there.
        if isinstance(x, nn.Partitioned):
            return x.unbox(apply_constraint=False)
        return x.unbox() if isinstance(x, meta.AxisMetadata) else x

    return jax.tree.map(unbox, variables, is_leaf=_is_box)


def _partition_specs(variables: LayerVariables) -> Specs:
    """Reads the axes that `nn.with_partitioning` names, or rules for the names of `nn.with_logical_partitioning`.

    The rules are a box's own, or those in context; a logical name without a rule splits nothing.
    """
    return {name: list(map(_box_spec, jax.tree.leaves(tree, is_leaf=_is_box))) for name, tree in variables.items()}


def _box_spec(x: Leaf | meta.AxisMetadata) -> PartitionSpec:
    """Reads the mesh axes that a variable's metadata box names; none for a variable without a box."""
    if not isinstance(x, nn.LogicallyPartitioned):
        return nn.get_partition_spec(x) or PartitionSpec()
    return nn.logical_to_mesh_axes(x.names, x.rules) or PartitionSpec()  # pyright: ignore[reportPrivateImportUsage]
