"""Kinds: layers that are the same function of the same shapes, so that they are traced and compiled once.

`trace_kinds` follows the shapes of one micro-batch through the model without computing anything, finds layers that
are the same, and reports what doesn't fit before anything is compiled. Two ends complete the sequence: one layer reads
the model's inputs from the batch, one turns the outputs into the loss. The first and last layer do that themselves,
unless they share their kind with others; then an identity layer does it for them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from jpipe.jax_tools.jaxprs import uses
from jpipe.jax_tools.random_keys import key_shape
from jpipe.jax_tools.tracing import no_mesh, trace
from jpipe.layers.base import (
    AnyLayer,
    CallError,
    Context,
    LayerError,
    SideInputError,
    describe,
    identity_layer,
    positional,
)
from jpipe.model.groups import Kind, Sequential, same_shapes, same_type
from jpipe.sharding.shardings import Axis, Sharding, replicated, settled
from jpipe.sharding.splits import WHOLE, Splits
from jpipe.sharding.spmd import partition_program


@dataclass
class _Group:
    layer: AnyLayer
    members: list[int]
    takes: Any
    gives: Any
    variables: dict[str, Any]
    specs: dict[str, list[PartitionSpec]]
    takes_at: list[Sharding]
    gives_at: list[Sharding]
    needs_key: bool


def trace_kinds(
    layers: Sequence[AnyLayer],
    inputs: Any,
    batch: Any,
    splits: Splits = WHOLE,
    inputs_at: list[Sharding] | None = None,
) -> Sequential:
    """Follows the shapes of one micro-batch through the layers and groups those that are the same.

    Args:
      layers: the adapted layers.
      inputs: what the first one takes, a pytree of ShapeDtypeStructs.
      batch: the whole micro-batch, for layers that read it.
      splits: what arrays are split over.
      inputs_at: how the leaves of `inputs` lie (default: on all devices of the stage).

    Raises:
      ValueError: a layer can't take what the one before it gives (both indices and shapes are named), has a leaf that
        is no array, or parameters that can't be differentiated.
    """
    groups: list[_Group] = []
    group_of: list[int] = []
    value, value_at = (
        inputs,
        [replicated(splits.axes)] * len(jax.tree.leaves(inputs)) if inputs_at is None else inputs_at,
    )
    for index, layer in enumerate(layers):
        same = lambda g, x=value, at=value_at, layer=layer: (
            same_type(g.takes, x) and g.takes_at == at and g.layer.is_same(layer)
        )
        c = next((c for c, g in enumerate(groups) if same(g)), None)
        if c is None:
            c = len(groups)
            twin = next((g for g in groups if layer.shared is not None and g.layer.shared is layer.shared), None)
            groups.append(_trace_layer(layers, index, value, value_at, batch, twin.variables if twin else None, splits))
        groups[c].members.append(index)
        group_of.append(c)
        value, value_at = groups[c].gives, groups[c].gives_at
    return _with_ends(groups, group_of, splits.axes)


def _with_ends(groups: list[_Group], group_of: list[int], axes: tuple[Axis, ...]) -> Sequential:
    first, last = groups[group_of[0]], groups[group_of[-1]]
    load, lose = len(first.members) > 1, len(last.members) > 1
    if load:
        groups = [_identity("inputs", -1, first.takes, first.takes_at), *groups]
        group_of = [0, *(c + 1 for c in group_of)]
    if lose:
        groups = [*groups, _identity("outputs", len(group_of) - load, last.gives, last.gives_at)]
        group_of = [*group_of, len(groups) - 1]
    kinds = tuple(
        Kind(
            layer=g.layer,
            members=tuple(i + load for i in g.members),
            takes=g.takes,
            gives=g.gives,
            variables=g.variables,
            specs=g.specs,
            takes_at=g.takes_at,
            gives_at=g.gives_at,
            entry=c == group_of[0],
            final=c == group_of[-1],
            needs_key=g.needs_key,
        )
        for c, g in enumerate(groups)
    )
    num_layers = len(group_of) - load - lose
    return Sequential(kinds, tuple(group_of), int(load), num_layers, axes, tuple(range(len(kinds))))


def _identity(name: str, index: int, takes: Any, takes_at: list[Sharding]) -> _Group:
    return _Group(identity_layer(name, takes), [index], takes, takes, {}, {}, takes_at, takes_at, False)


def _trace_layer(
    layers: Sequence[AnyLayer],
    index: int,
    takes: Any,
    takes_at: list[Sharding],
    batch: Any,
    variables: Any,
    splits: Splits,
) -> _Group:
    """The group of a layer, given its variables' shapes if another layer shares them."""
    layer = layers[index]
    if variables is None:
        variables = layer.ready
    try:
        if variables is None:
            variables = trace_init(layer, key_shape(), takes, batch)[1]
        variables = _strong(jax.eval_shape(lambda v: v, variables))
        _check_parameters(variables)
        if layer.shared is not None and set(variables) - {"params"}:
            raise LayerError(
                f"is shared but has the collections {sorted(variables)}; only layers without state besides their "
                "parameters can be shared"
            )
        program, gives, needs_key = _trace_call(layer, variables, takes, batch)
    except LayerError as error:
        raise ValueError(f"layer {index} ({layer.name}) {error}") from error
    except CallError as error:
        raise ValueError(f"layer {index} ({layer.name}) can't take what it is called with, {error}") from error
    except SideInputError as error:
        raise ValueError(
            f"layer {index} ({layer.name}) can't read its side input from the batch {describe(batch)}: its function "
            f"raised {error}; pass the whole batch, to apply too where a layer reads it"
        ) from error
    except Exception as error:
        raise ValueError(_mismatch(layers, index, takes, variables, error)) from error
    specs = splits.at_rest(f"layer {index} ({layer.name})", variables, layer.partition_specs(variables))
    gives_at = _outputs_at(program, variables, specs, takes_at, batch, len(jax.tree.leaves(gives)), splits)
    return _Group(layer, [], takes, gives, variables, specs, takes_at, gives_at, needs_key)


def _outputs_at(
    program: ClosedJaxpr,
    variables: Any,
    specs: dict[str, list[PartitionSpec]],
    takes_at: list[Sharding],
    batch: Any,
    num_outputs: int,
    splits: Splits,
) -> list[Sharding]:
    """How a layer's outputs lie in training, if nothing but its weights and inputs decides it."""
    weights = [splits.at_work(spec) for name in sorted(variables) for spec in specs[name]]
    given = [replicated(splits.axes), *weights, *takes_at, *batch_shardings(batch, splits)]
    wanted = [settled] * len(program.jaxpr.outvars)
    return partition_program(program, splits.axes, given, wanted).shardings[:num_outputs]


def batch_shardings(batch: Any, splits: Splits) -> list[Sharding]:
    """How the leaves `[b, ...]` of a micro-batch lie."""
    return [splits.of_examples(leaf.shape[0]) for leaf in jax.tree.leaves(batch)]


def trace_init(layer: AnyLayer, key: jax.ShapeDtypeStruct, takes: Any, batch: Any) -> tuple[ClosedJaxpr, Any]:
    """(the program of a random key that makes a layer's variables, their shapes).

    Traced as if there were no mesh, since Flax constrains what it makes to the mesh axes in its metadata, whether or
    not they exist. A layer that constrains its activations itself needs the mesh.
    """

    def init(key: Any) -> Any:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (takes, batch))
        return layer.init(key, positional(zeros[0]), zeros[1])

    try:
        with no_mesh():
            return trace(init, key)
    except (RuntimeError, NameError, ValueError):  # as where a constraint, a sum or a shard_map finds no mesh
        if jax.sharding.get_abstract_mesh().empty:
            raise
        return trace(init, key)


def _trace_call(layer: AnyLayer, variables: Any, takes: Any, batch: Any) -> tuple[ClosedJaxpr, Any, bool]:
    """(its program in training, what it gives, whether it uses its key)."""

    def run(key: Any, v: Any, x: Any, b: Any) -> Any:
        outputs, updates = layer.apply(v, positional(x), Context(key, True, b))
        for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise LayerError(
                    f"gives a {type(leaf).__name__} at outputs{jax.tree_util.keystr(path)}; layers pass pytrees of "
                    "arrays on, so make it an array or leave it out"
                )
        return outputs, updates

    program, (gives, updates) = trace(run, key_shape(), variables, takes, batch)
    if program.effects & _io_effects():
        raise LayerError(
            "calls back into Python by io_callback or in order, which can't be differentiated or computed again; use "
            "jax.debug.callback, or jax.pure_callback inside of a jax.custom_vjp"
        )
    _check_outputs(gives)
    _check_updates(variables, updates)
    return program, _strong(gives), uses(program)[0]


@functools.cache
def _io_effects() -> frozenset[Any]:
    """How a program shows that it has to call back into Python, once for every call, or in order."""

    def run() -> None:
        for ordered in (False, True):
            io_callback(lambda: None, None, ordered=ordered)
        jax.debug.callback(lambda: None, ordered=True)

    return frozenset(jax.make_jaxpr(run)().effects)


def _strong(shapes: Any) -> Any:
    """Shapes without weak types, which say how Python numbers are promoted: in buffers there are arrays only."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)


def _check_outputs(gives: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(gives):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise LayerError(
                f"gives {leaf.dtype} at {jax.tree_util.keystr(path)}; a boundary carries plain arrays only, such as "
                "jax.random.key_data(key)"
            )


def _check_parameters(variables: dict[str, Any]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables.get("params", {})):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise LayerError(
                f"has the parameter {jax.tree_util.keystr(path)} of dtype {leaf.dtype}; parameters have to be "
                "floating-point (keep integers out of them)"
            )


def _check_updates(variables: dict[str, Any], updates: dict[str, Any]) -> None:
    """State keeps its structure and shapes, and floating-point numbers stay such; wider ones are cast back."""
    for name, new in updates.items():
        old = variables[name]
        kinds = lambda tree: [_kind_of_number(leaf.dtype) for leaf in jax.tree.leaves(tree)]
        if not same_shapes(old, new) or kinds(old) != kinds(new):
            raise LayerError(
                f"changes the type of its collection {name!r} in training: {describe(new)} after {describe(old)}; keep "
                "structure, shapes and dtypes (cast what is stored)"
            )


def _kind_of_number(dtype: Any) -> Any:
    return next((kind for kind in (jnp.integer, jnp.inexact) if jnp.issubdtype(dtype, kind)), dtype)


def _mismatch(layers: Sequence[AnyLayer], index: int, takes: Any, variables: Any, error: Exception) -> str:
    name = f"layer {index} ({layers[index].name})"
    source = f"layer {index - 1} ({layers[index - 1].name}) gives" if index else "the batch holds as inputs"
    own = f"; parameters of {name}: {describe(variables['params'])}" if variables and "params" in variables else ""
    return f"{name} can't take what {source}: {describe(takes)}{own}. It raised {type(error).__name__}: {error}"
