"""A model that is one module: its traces, the outputs that its loss reads, the names of its pieces.

Nothing here knows Flax, the module is one `AnyLayer`. Pieces are named as the model names its parameters:
`h_3/attention`, `blocks/4/up+down`. What a model returns besides what its loss reads, such as each block's values, no
stage carries to the last one. There it is None, and the loss, which may look at it but uses nothing of it, sees zeros.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jpipe.cutting.lines import NO_LINES, Lines, find_lines, with_lines
from jpipe.cutting.places import Traced
from jpipe.cutting.straight import Part, Straight, straighten
from jpipe.jax.tracing import trace, uses
from jpipe.layers.base import Activation, AnyLayer, Context, Inputs, LayerError, LayerVariables, describe
from jpipe.layers.connections import with_inputs
from jpipe.model.groups import strong
from jpipe.model.layer_function import TracedInit, in_either_mode, or_error, trace_call, trace_init
from jpipe.model.loss import LossFn, call_loss
from jpipe.model.random_keys import key_shape
from jpipe.model.trace import check_updates, described_inputs, inputs_of, telling, warn_of_dropouts
from jpipe.types import Batch, PyTree, Shapes

Read = Callable[..., PyTree]
"""From a batch to the model's inputs."""


@dataclass(frozen=True, eq=False)
class WholeModel:
    """A model that is one module.

    Attributes:
      layer: the module as one layer.
      variables: the shapes of its variables by collection.
      init: how new variables are made; None if the module has its values already.
      read: for each leaf of the outputs, whether the loss reads it; None before that is known.
      lines: what the pieces hand on to the end; known together with `read`.
    """

    layer: AnyLayer
    variables: dict[str, Shapes]
    init: TracedInit | None
    read: tuple[bool, ...] | None = None
    lines: Lines = NO_LINES

    @cached_property
    def collections(self) -> list[str]:
        """The collection of each leaf of the variables."""
        return [name for name in sorted(self.variables) for _ in jax.tree.leaves(self.variables[name])]

    @cached_property
    def paths(self) -> list[tuple[str, ...]]:
        """The path of each leaf of the variables within its collection."""
        # The variables of a `Layer` may be a bare array, without a path.
        in_words = lambda path: tuple(jax.tree_util.keystr((key,), simple=True) for key in path[1:]) or ("value",)
        return [in_words(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.unboxed)]

    @cached_property
    def specs(self) -> list[PartitionSpec]:
        """The mesh axes that the model's metadata names for each leaf of the variables."""
        by_name = self.layer.partition_specs(self.variables)
        return [spec for name in sorted(self.variables) for spec in by_name[name]]

    @cached_property
    def unboxed(self) -> dict[str, Shapes]:
        """The shapes of the variables, without boxes of Flax's metadata."""
        return self.layer.from_item(self.layer.to_item(self.variables))

    def trace(self, read_inputs: Read, batch: Shapes) -> Modes:
        """The model's traces for the shapes of a micro-batch `[b, ...]`."""
        training, outputs = self.trace_mode(read_inputs, batch, train=True, key=key_shape())
        mode = lambda **key: Traced(self.trace_mode(read_inputs, batch, train=False, trained=outputs, **key)[0])
        sampling = evaluation = or_error(lambda: mode(key=key_shape()))
        if isinstance(sampling, str) or sampling.straight.draws:
            evaluation = or_error(mode)
        modes = Modes(Traced(training), evaluation, sampling, outputs)
        return modes if self.read is None else modes.reading(self.read, self.lines)

    def read_by(self, loss_fn: LossFn | None, modes: Modes, batch: Shapes) -> tuple[WholeModel, Modes]:
        """(the model that knows which outputs a loss reads, its traces of these).

        Args:
          loss_fn: the loss that follows, if there is one.
          modes, batch: the model's traces of all outputs for a micro-batch, and that one.
        """
        read = outputs_read(loss_fn, modes.outputs, batch)
        plain = modes.reading(read)
        straight = [one.straight for one in (plain.training, plain.sampling) if isinstance(one, Traced)]
        names = [re.sub(r"\d+", "", jax.tree_util.keystr(at)) for at, _ in jax.tree.leaves_with_path(modes.outputs)]
        lines = find_lines(straight[0], straight[-1], jax.tree.leaves(batch)[0].shape[0], names)
        return replace(self, read=read, lines=lines), modes.reading(read, lines)

    def trace_mode(
        self, read: Read, batch: Shapes, *, train: bool, key: Shapes = None, trained: Shapes = None
    ) -> tuple[Straight, Shapes]:
        """(the model's equations in training or evaluation, the shapes of its outputs).

        Values that it sows in training alone are zeros in evaluation; `trained` are the shapes of its outputs there.
        """
        (layer,) = with_inputs([self.layer], read)
        if layer.sown and trained is not None:
            layer = _sowing(layer, trained[1])
        told = lambda: told_of(trace(read, batch)[1], self.variables)
        with telling(layer.name, told), layer.dropouts() as dropouts:
            closed, (outputs, updates) = trace_call(layer, self.variables, (), batch, key, train=train)
            check_updates(self.variables, updates, closed)
        if train and not uses(closed)[-1]:
            warn_of_dropouts(layer.name, dropouts)
        state = [i for i, name in enumerate(self.collections) if name in updates]
        return straighten(closed, len(self.collections), len(jax.tree.leaves(outputs)), state), strong(outputs)


def _sowing(layer: AnyLayer, wanted: Shapes) -> AnyLayer:
    """A model whose sown values have this structure: with zeros for those that are missing."""

    def apply(variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[Activation, LayerVariables]:
        (outputs, sown), updates = layer.apply(variables, inputs, context)
        found, kind = dict(jax.tree_util.tree_leaves_with_path(sown)), lambda x: (x.shape, x.dtype)
        like = dict(jax.tree_util.tree_leaves_with_path(wanted))
        if any(path not in like or kind(leaf) != kind(like[path]) for path, leaf in found.items()):
            raise LayerError("sows values in evaluation that it doesn't sow in training, or of other types")
        fill = lambda path, leaf: found.get(path, jnp.zeros(leaf.shape, leaf.dtype))
        return (outputs, jax.tree_util.tree_map_with_path(fill, wanted)), updates

    return replace(layer, apply=apply)


def trace_whole(layer: AnyLayer, loss_fn: LossFn | None, read_inputs: Read, batch: Shapes) -> tuple[WholeModel, Modes]:
    """A model, and its traces of what a loss reads, for the shapes of a micro-batch; errors as of `make_whole`."""

    def traced(train: bool) -> tuple[WholeModel, Modes]:
        whole = make_whole(layer, read_inputs, batch, train=train)
        return whole, whole.trace(read_inputs, batch)

    whole, modes = in_either_mode(traced)
    return whole.read_by(loss_fn, modes, batch)


def make_whole(layer: AnyLayer, read_inputs: Read, batch: Shapes, *, train: bool = False) -> WholeModel:
    """A model with variables for the shapes of a micro-batch `[b, ...]`, those of evaluation or of training.

    Raises:
      ValueError: the inputs can't be read, or the model raises an error.
    """
    if layer.ready is not None:
        return WholeModel(layer, strong(jax.eval_shape(lambda v: v, layer.ready)), None)
    inputs = inputs_of(read_inputs, batch)
    with telling(layer.name, lambda: told_of(inputs)):
        init = trace_init(layer, key_shape(), inputs, batch, train=train)
    return WholeModel(layer, strong(init.variables), init)


def told_of(inputs: Shapes, variables: dict[str, Shapes] | None = None) -> list[str]:
    """The lines that explain an error of a model: what it was called with, and its parameters."""
    has = [f"it has the parameters {describe(variables['params'])}"] if variables and "params" in variables else []
    return [f"it was called with {described_inputs(inputs)}", *has]


@dataclass(frozen=True, eq=False)
class Modes:
    """The traces of a model at some shapes.

    Attributes:
      training: in training.
      evaluation: in evaluation; or the error that the model raises there.
      sampling: in evaluation with a random key, the same trace if nothing is drawn; or the error.
      outputs: the shapes of the model's outputs, `[b, ...]`, also of those that nobody reads.
    """

    training: Traced
    evaluation: Traced | str
    sampling: Traced | str
    outputs: Shapes

    def reading(self, read: tuple[bool, ...], lines: Lines = NO_LINES) -> Modes:
        """The same traces, of which only these outputs are read, with some lines."""
        modes = self.training, self.evaluation, self.sampling
        straight = {id(one): replace(one.straight, read=read) for one in modes if isinstance(one, Traced)}
        # No piece has a slice of what some place uses whole, in whichever mode.
        each = [one.depths_read for one in straight.values()]
        depths = {leaf: min(d[leaf] for d in each if leaf in d) for leaf in set().union(*each)}
        traced = {of: Traced(with_lines(replace(one, depths=depths), lines)) for of, one in straight.items()}
        evaluation, sampling = (traced.get(id(one), one) for one in modes[1:])
        return Modes(traced[id(self.training)], evaluation, sampling, self.outputs)


# --- names of pieces --------------------------------------------------------------------------------------------------


MOST = 0.8
"""A piece is named after the largest of its modules that together have so much of its weights."""

Path = tuple[str, ...]


def piece_names(pieces: Sequence[Sequence[Part]], paths: Sequence[Path], sizes: Sequence[int]) -> list[str]:
    """A name for each piece.

    Args:
      pieces: the variables of each.
      paths: of each leaf of the variables, its path in the model.
      sizes: of each leaf, its elements.
    """
    own = paths_of(pieces, paths)
    everything = {path for of_piece in own for path in of_piece}
    weights = [[sizes[part.leaf] for part in parts] for parts in pieces]
    names = [_name(list(zip(*pair, strict=True)), everything) for pair in zip(own, weights, strict=True)]
    for i, name in enumerate(names):
        names[i] = name or (f"behind {names[i - 1].removeprefix('behind ')}" if i else "start")
    return names


def paths_of(pieces: Sequence[Sequence[Part]], paths: Sequence[Path]) -> list[list[Path]]:
    """For each piece the paths of its variables; slices have their indices behind what is stacked."""
    at = len(_common([paths[part.leaf][:-1] for parts in pieces for part in parts if part.indices]))
    path = lambda part: (*paths[part.leaf][:at], *map(str, part.indices), *paths[part.leaf][at:])
    return [list(map(path, parts)) for parts in pieces]


def paths_below(pieces: Sequence[Sequence[Path]], kinds: Sequence[Sequence[object]]) -> list[list[Path]]:
    """For each piece the paths of its variables below what they have in common.

    Pieces that differ in the numbers of their names alone, such as `Dense_1` and `Dense_4`, get those of the first.

    Args:
      pieces: the paths of each piece's variables.
      kinds: of each variable, what has to be the same (its collection, its shape).
    """
    below = [[path[len(_common([p[:-1] for p in paths])) :] for path in paths] for paths in pieces]
    first: dict[object, list[Path]] = {}
    without_digits = lambda path: tuple(re.sub(r"\d+", "", name) for name in path)
    keys = [(tuple(map(without_digits, paths)), tuple(kind)) for paths, kind in zip(below, kinds, strict=True)]
    return [first.setdefault(key, paths) for key, paths in zip(keys, below, strict=True)]


def _common(paths: Sequence[Path]) -> Path:
    """The beginning that all paths have."""
    columns = zip(*paths, strict=False)
    return tuple(names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns))


def _name(leaves: Sequence[tuple[Path, int]], everything: Collection[Path]) -> str:
    """The module of which these are all variables; else those that most of the weights are in, below a common one.

    Variables that are in no module give their own names.
    """
    modules = [path[:-1] for path, _ in leaves]
    common = _common(modules)
    if common and sum(path[: len(common)] == common for path in everything) == len(leaves):
        return "/".join(common)
    sizes: dict[str, int] = {}
    for (_, size), module in zip(leaves, modules, strict=True):
        if len(module) > len(common):
            sizes[module[len(common)]] = sizes.get(module[len(common)], 0) + size
    if not common and not sizes:
        return "+".join(path[-1] for path, _ in leaves)
    largest: list[str] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sum(sizes[n] for n in largest) < MOST * sum(sizes.values()):
            largest.append(name)
    return "/".join([*common, *(["+".join(largest)] if largest else [])])


# --- outputs that the loss doesn't read -------------------------------------------------------------------------------


def outputs_read(loss_fn: LossFn | None, outputs: Shapes, batch: Shapes) -> tuple[bool, ...]:
    """For each leaf of a model's outputs, whether a loss reads it, in training or in evaluation.

    All count as read without a loss, or if the loss fails, which is told elsewhere, or if it reads none.

    Args:
      loss_fn: the user's.
      outputs, batch: for one micro-batch.
    """
    read = [False] * len(jax.tree.leaves(outputs))
    if loss_fn is None:
        return (True,) * len(read)
    with suppress(Exception):
        for key in (key_shape(), None):
            reads = uses(trace(functools.partial(call_loss, loss_fn), outputs, batch, key)[0])
            read = [a or b for a, b in zip(read, reads, strict=False)]
    return tuple(read) if any(read) else (True,) * len(read)


def without_unread(outputs: Shapes, read: Sequence[bool]) -> Shapes:
    """A model's outputs with None for each leaf that isn't read."""
    leaves, structure = jax.tree.flatten(outputs)
    pairs = zip(leaves, read, strict=True)
    return jax.tree.unflatten(structure, [leaf if is_read else None for leaf, is_read in pairs])


def with_zeros(loss_fn: LossFn, outputs: Shapes, shapes: Shapes, read: Sequence[bool]) -> LossFn:
    """A loss that takes outputs with None for each leaf that isn't read.

    Args:
      loss_fn: the user's.
      outputs, shapes: all outputs for one micro-batch, and that micro-batch.
      read: for each leaf of the outputs, whether it is read.

    Raises:
      ValueError: it reads others at these shapes.
    """
    if all(read):
        return loss_fn
    if any(now and not then for now, then in zip(outputs_read(loss_fn, outputs, shapes), read, strict=True)):
        raise ValueError("loss_fn reads other outputs than it did for the first batch; read the same for all shapes")

    @functools.wraps(loss_fn)
    def loss(given: PyTree, batch: Batch, **options: object) -> PyTree:
        kept, (size, now) = iter(jax.tree.leaves(given)), (jax.tree.leaves(x)[0].shape[0] for x in (shapes, batch))
        rows = lambda shape: (now, *shape[1:]) if shape[:1] == (size,) else shape
        pairs = zip(jax.tree.leaves(outputs), read, strict=True)
        leaves = [next(kept) if is_read else jnp.zeros(rows(leaf.shape), leaf.dtype) for leaf, is_read in pairs]
        return loss_fn(jax.tree.unflatten(jax.tree.structure(outputs), leaves), batch, **options)

    return loss
