"""`AnyLayer`: a layer as the rest of the package knows it; `is_same`: when two are equal; `Shared` parameters.

A model is a sequence of unlike layers. Each kind of layer (functions, Linen, NNX) makes an `AnyLayer`. Connections,
frozen parameters and decode mode replace some of its functions. All other code calls these functions, and never asks
for the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jpipe.jax.trees import Casts, same_value
from jpipe.types import Batch, Leaf, PyTree, Shapes

Activation: TypeAlias = PyTree
"""The input or output of a layer: any pytree of arrays (of their shapes, where nothing is computed)."""

Inputs = tuple[Activation, ...]
"""The positional arguments of a layer."""

LayerVariables = dict[str, PyTree]
"""One layer's variables by collection: `{"params": tree, "batch_stats": tree}`; a collection may be missing."""

Item: TypeAlias = PyTree
"""One layer's variables as the library that it comes from has them; for a `Layer` its bare parameters."""

Specs = dict[str, list[PartitionSpec]]
"""The mesh axes that each leaf is split over, by collection, in the order of `jax.tree.leaves`."""


class LayerError(ValueError):
    """A fault of a layer, as the rest of a sentence that begins with its name."""


class Context(NamedTuple):
    """The facts that a layer is told besides its variables and inputs.

    Attributes:
      key: its random key for this micro-batch, or for its initialisation; None in evaluation, unless one is passed.
      train: training or evaluation mode.
      batch: the micro-batch, for layers that read it; None for others.
    """

    key: jax.Array | None
    train: bool
    batch: Batch = None


Apply = Callable[[LayerVariables, Inputs, Context], tuple[Activation, LayerVariables]]
"""(variables, inputs, context) -> (outputs, new values of all collections but the parameters)."""


def split_over_nothing(variables: LayerVariables) -> Specs:
    """Makes the specs of a layer without metadata: no leaf is split over an axis."""
    return {name: [PartitionSpec()] * len(jax.tree.leaves(tree)) for name, tree in variables.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class AnyLayer:
    """A layer, whatever it was made from. It holds no variables: its functions take them.

    The first five attributes make a layer; the others have defaults that fit most.

    Attributes:
      name: a short name for tables and errors.
      made_of: the kind of the layer, and all values that decide what it computes of (variables, inputs, context), on
        variables of which shapes; see `is_same`.
      init: (inputs, context) -> new variables: those that it has in the context's mode.
      apply: (variables, inputs, context) -> (outputs, new values of all collections but the parameters). In evaluation
        it gives no new values, but for caches in decode mode.
      bind: item -> the layer with these variables as a function of its inputs, in evaluation mode.
      to_item: variables -> the same as the layer's own library would have returned them.
      from_item: the inverse of `to_item`.
      partition_specs: variables -> the mesh axes that the layer's metadata names.
      decode: (takes, size, length) -> the layer in decode mode, with caches for `size` sequences of `length` tokens;
        `takes` are the shapes that it takes in training, `[b, T, ...]`. None for a layer that decodes as it evaluates.
      keeps_cache: whether it has a cache in decode mode.
      dropouts: the context in which it is traced in training. Gives its dropouts as words, of some kinds only
        after the call.
      ready: the values that the layer already has, or None if `init` makes them.
      reads_batch: whether it needs the micro-batch in its context.
      shared: the shared layer whose parameters it uses; None if they are its own.
      sown: the collections of sown values that it gives behind its outputs, `(outputs, {name: values})`; without names
        its outputs alone.
      has_model_key: whether its random keys are those of the whole model, of which it is a piece.
    """

    name: str
    made_of: Sequence[object]
    init: Callable[[Inputs, Context], LayerVariables]
    apply: Apply
    bind: Callable[[Item], Callable[..., Activation]]
    to_item: Callable[[LayerVariables], Item] = lambda variables: variables
    from_item: Callable[[Item], LayerVariables] = lambda item: item
    partition_specs: Callable[[LayerVariables], Specs] = split_over_nothing
    decode: Callable[[Shapes, int, int], AnyLayer] | None = None
    keeps_cache: bool = False
    dropouts: Callable[[], AbstractContextManager[list[str]]] = lambda: nullcontext([])
    ready: LayerVariables | None = None
    reads_batch: bool = False
    shared: Shared | None = None
    sown: tuple[str, ...] = ()
    has_model_key: bool = False


def variables_of(layer: AnyLayer, item: Item, expected: LayerVariables) -> LayerVariables:
    """A user's item as variables; an outer "params" may be missing or one too many, if the rest is as expected."""
    outline, inside = jax.tree.structure(expected), isinstance(item, Mapping) and "params" in item
    for one in (item, {"params": item}, *([item["params"]] if inside else ())):
        with suppress(LayerError):
            if jax.tree.structure(made := layer.from_item(one)) == outline:
                return made
    return layer.from_item(item)


def with_dtypes(layer: AnyLayer, casts: Sequence[Mapping[str, Casts]]) -> AnyLayer:
    """The layer with initial values of other dtypes; `casts` has the dtypes by collection, one change after another."""

    def cast(path: tuple[object, ...], leaf: Leaf) -> Leaf:
        name, own = jax.tree_util.keystr(path[:1], simple=True), jnp.result_type(leaf)
        dtype = reduce(lambda dtype, by_name: by_name.get(name, {}).get(dtype, dtype), casts, own)
        return leaf if dtype == own else jnp.asarray(leaf, dtype)

    cast_all, decode = partial(jax.tree_util.tree_map_with_path, cast), layer.decode
    return replace(
        layer,
        made_of=("cast", casts, layer.made_of),
        init=lambda inputs, context: cast_all(layer.init(inputs, context)),
        decode=None if decode is None else lambda *call: with_dtypes(decode(*call), casts),
        ready=None if layer.ready is None else cast_all(layer.ready),
    )


def bind_by_call(apply: Apply, from_item: Callable[[Item], LayerVariables]) -> Callable[[Item], Callable]:
    """Makes a `bind` that calls `apply` in evaluation mode, for layers whose library has no modules to bind."""
    return lambda item: lambda *inputs: apply(from_item(item), inputs, Context(None, train=False))[0]


def is_same(a: AnyLayer, b: AnyLayer) -> bool:
    """Whether both compute the same function of (variables, inputs, context), on variables of the same shapes.

    Such layers are compiled once. Callers ask it of layers that take inputs of the same shapes.
    """
    return a.shared is b.shared and same_value(a.made_of, b.made_of)


def describe(tree: PyTree) -> str:
    """Describes a pytree of arrays: `float32[8,16]`, or `{'a': float32[8], ...}`.

    >>> describe({"a": jax.numpy.zeros((2, 3)), "b": (jax.numpy.zeros(4), jax.numpy.zeros(4))})
    "{'a': float32[2,3], 'b': (float32[4], float32[4])}"
    """
    short: Callable[[Leaf], _Shape] = lambda leaf: _Shape(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]")
    return str(jax.tree.map(short, tree))


@dataclass(frozen=True)
class _Shape:
    """An array's shape in words, printed without quotes. It is no string, as some outputs' classes take these apart."""

    words: str

    def __repr__(self) -> str:
        return self.words


def positional(inputs: Activation) -> Inputs:
    """Makes the positional arguments that a layer is called with: a tuple is passed as several."""
    return inputs if type(inputs) is tuple else (inputs,)


# --- shared layers ----------------------------------------------------------------------------------------------------


Method = str | Callable[..., PyTree]
"""How a layer is called instead of as usual: by the name of one of its methods, or through a function of the user's."""


@dataclass(frozen=True, eq=False)
class Shared:
    """A layer whose parameters are used in several places.

    `table = jpipe.Shared(nn.Embed(1000, 64)); layers = [table, *blocks, table.using("attend")]`

    Args:
      layer: a linen or nnx module, a factory of one, or a `jpipe.Layer`; without state that changes. The
        first use in the sequence makes the parameters.
    """

    layer: object

    def __post_init__(self):
        if isinstance(self.layer, Shared | Use):
            raise TypeError("jpipe.Shared: the layer is shared already; use it in several places as it is")

    def using(self, method: Method) -> Use:
        """Uses the same parameters in another place, through another method.

        Args:
          method: the name of a method of the module; of linen modules also a function of the module and its inputs;
            for a `jpipe.Layer` a function `apply(params, x)`.
        """
        if not isinstance(method, str) and not callable(method):
            raise TypeError(f"jpipe.Shared.using({method!r}): pass a method's name, or a function")
        return Use(self, method)


def how_to_share(kind: str, method: str = "") -> str:
    """Says in words how a module of the class `kind` has one set of parameters in two places."""
    method = method or ("attend" if kind == "Embed" else "a_method")
    return f'to share its parameters, put tied = jpipe.Shared({kind}(...)) in both places, or tied.using("{method}")'


@dataclass(frozen=True, eq=False)
class Use:
    """A shared layer where it is called through `method`, or as usual if that is None."""

    shared: Shared
    method: Method | None
