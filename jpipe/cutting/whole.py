"""A model that is one module, as the layers that it is cut into.

`cut_model` finds the places once, from the shapes of the first batch. `CutModel.layers` makes an `AnyLayer` of each
piece, for the shapes of any batch. Nothing here knows Flax: the module is one `AnyLayer` itself, and is only traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jpipe.cutting.module import Modes, WholeModel, paths_below, paths_of, piece_names, with_zeros, without_unread
from jpipe.cutting.pieces import Cutting, NoSuchPlace, Piece, ReadsOthers, TiedTogether, decide_cutting, make_pieces
from jpipe.cutting.places import Traced
from jpipe.cutting.straight import INLINED, Part, rows_of
from jpipe.jax.flat_jaxpr import flatten
from jpipe.jax.flops import flops_of
from jpipe.jax.inside import line_of
from jpipe.jax.primitives import LOOPS_AND_BRANCHES
from jpipe.jax.tracing import no_mesh, replayed, trace
from jpipe.jax.trees import Casts, check_same_shapes, named_leaves, nested
from jpipe.layers import base
from jpipe.layers.base import AnyLayer, Context, Inputs, LayerError, LayerVariables, Shared, Specs, bind_by_call
from jpipe.layers.calls import CACHE
from jpipe.memory.layout import ModelTree
from jpipe.model.alike import Kinds, PartJaxpr
from jpipe.model.groups import bits
from jpipe.model.layer_function import or_error
from jpipe.model.loss import LossFn
from jpipe.model.random_keys import key_shape
from jpipe.types import Leaf, PyTree, Shapes


@dataclass(frozen=True, eq=False)
class CutModel:
    """A model and where it is cut.

    Attributes:
      whole: the model.
      cutting: the places.
    """

    whole: WholeModel
    cutting: Cutting

    @cached_property
    def names(self) -> list[str]:
        """A name for each piece, the same in decode mode: caches give no names."""
        sizes = [leaf.size for leaf in jax.tree.leaves(self.whole.variables)]
        named = [sorted(p for p in own if self.whole.collections[p.leaf] != CACHE) for own in self.cutting.parts]
        return piece_names(named, self.whole.paths, sizes)

    @cached_property
    def trees(self) -> list[dict[str, PyTree]]:
        """For each piece its variables by collection, as nested dicts, of the indices of its parts."""
        # Caches are named apart, so that all else has the same names in decode mode as in training.
        return [own | caches for own, caches in zip(*map(self._trees, (False, True)), strict=True)]

    def _trees(self, of_caches: bool) -> list[dict[str, PyTree]]:
        whole, leaves = self.whole, jax.tree.leaves(self.whole.variables)
        name: Callable[[Part], str] = lambda part: whole.collections[part.leaf]
        kind = lambda part: (name(part), leaves[part.leaf].shape[len(part.indices) :], leaves[part.leaf].dtype)
        is_chosen = lambda part: (name(part) == CACHE) == of_caches
        chosen = [{i: part for i, part in enumerate(own) if is_chosen(part)} for own in self.cutting.parts]
        parts = [list(own.values()) for own in chosen]
        paths = paths_below(paths_of(parts, whole.paths), [list(map(kind, own)) for own in parts])
        trees = []
        for own, below in zip(chosen, paths, strict=True):
            by_name: dict[str, list] = {}
            for (i, part), path in zip(own.items(), below, strict=True):
                by_name.setdefault(name(part), []).append((path, i))
            trees.append({collection: nested(by_name[collection]) for collection in sorted(by_name)})
        return trees

    def model_tree(self, name: str, users: Sequence[Sequence[Sequence[int]]]) -> ModelTree:
        """The model's own tree of a collection, and what of it the variables of pieces are.

        Args:
          name: of the collection.
          users: for each set of variables and instance, the pieces that have it.
        """
        start = self.whole.collections.index(name) if name in self.whole.collections else 0

        def parts_of(index: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
            own = [self.cutting.parts[index][i] for i in jax.tree.leaves(self.trees[index].get(name))]
            return tuple((part.leaf - start, part.indices) for part in own)

        parts = tuple(tuple(parts_of(layers[0]) for layers in instances) for instances in users)
        return ModelTree(jax.tree.structure(self.whole.unboxed.get(name, {})), parts)

    def parameter_names(self, index: int) -> list[str]:
        """The paths of a piece's variables; slices end with their indices."""
        in_words = lambda part: "/".join(self.whole.paths[part.leaf]) + "".join(f"[{i}]" for i in part.indices)
        return list(map(in_words, self.cutting.parts[index]))

    @cached_property
    def shared(self) -> dict[int, Shared]:
        """Stand-ins for tied parameters, by index of the first piece that has them."""
        return {first: Shared(self.whole.layer) for first in self.cutting.tied if first is not None}

    def layers(self, modes: Modes) -> tuple[AnyLayer, ...]:
        """The pieces as layers, from the model's traces for the shapes of a micro-batch.

        Raises:
          ValueError: the model does other things there than in the traces in which its places were found.
        """
        like, kinds = (modes.training, self._places(modes.training)), Kinds()
        training = self.pieces_of(*like, kinds)

        def of(traced: Traced | str) -> list[Piece] | str:
            if isinstance(traced, str):
                return traced
            return or_error(lambda: self.pieces_of(traced, self._places(traced, like), kinds))

        evaluation = of(modes.evaluation)
        sampling = evaluation if modes.sampling is modes.evaluation else of(modes.sampling)
        num_leaves = len(modes.training.straight.data) - 1  # the last is the random key
        return self.as_layers((training, evaluation, sampling), self.wanted(modes.outputs), num_leaves)

    def _places(self, traced: Traced, like: tuple[Traced, Sequence[int]] | None = None) -> list[int]:
        """The places in a trace; arguments as of `Cutting.places_in`."""
        try:
            return self.cutting.places_in(traced, like)
        except NoSuchPlace as error:
            raise ValueError(
                f"{self.whole.layer.name} does other things for this batch than for the first one behind the piece "
                f"{self.names[error.args[0]]}; pass the same dtypes and dimensions, or mark places by x = jpipe.cut(x)"
            ) from None

    @property
    def read(self) -> tuple[bool, ...]:
        """For each leaf of the model's outputs, whether the loss reads it."""
        assert self.whole.read is not None
        return self.whole.read

    def wanted(self, outputs: PyTree) -> PyTree:
        """The model's outputs with None for each that the loss doesn't read."""
        return without_unread(outputs, self.read)

    def loss(self, loss_fn: LossFn, outputs: Shapes, batch: Shapes) -> LossFn:
        """A loss of the outputs that are read, at the shapes of a micro-batch; see `with_zeros`."""
        return with_zeros(loss_fn, outputs, batch, self.read)

    def pieces_of(self, traced: Traced, places: Sequence[int], kinds: Kinds) -> list[Piece]:
        """The pieces of a trace; arguments as of `make_pieces`.

        Raises:
          ValueError: a piece computes an output or a part of the state of variables that other pieces have.
        """
        try:
            return make_pieces(traced, self.cutting, places, kinds)
        except ReadsOthers as error:
            index, parts = error.args
            names = ", ".join(sorted("/".join(self.whole.paths[part.leaf]) for part in parts))
            raise ValueError(
                f"{self.whole.layer.name} computes an output or state in {self.names[index]} of variables that other "
                f"pieces have ({names}); compute it in the loss, or mark places around all of them by x = jpipe.cut(x)"
            ) from None

    def as_layers(
        self, modes: Sequence[Sequence[Piece] | str], outputs: Shapes, num_leaves: int, writes: tuple[str, ...] = ()
    ) -> tuple[AnyLayer, ...]:
        """Makes layers of all pieces.

        Args:
          modes: the pieces in training, in evaluation, and in evaluation with a random key; or why there are none.
          outputs: the shapes of the model's outputs, with None for what isn't read.
          num_leaves: how many leaves the batch has.
          writes: the collections of which they give new values in evaluation too.
        """
        of = lambda i: tuple(one if isinstance(one, str) else one[i] for one in modes)
        indices = range(len(self.cutting.parts))
        return tuple(_PieceLayer(self, i, of(i), outputs, num_leaves, writes).layer() for i in indices)

    def to_model(self, trees: Mapping[int, Mapping[str, PyTree]]) -> dict[str, PyTree]:
        """The model's own variables by collection, from the pieces' by index; collections that these lack are missing.

        Gradients and other arrays like the variables can be given too. What is sliced is stacked again.
        """
        names = {name for tree in trees.values() for name in tree}
        leaves: dict[Part, Leaf] = {}
        for index, parts in enumerate(self.cutting.parts):
            for name, own in trees.get(index, {}).items():
                places = jax.tree.leaves(self.trees[index].get(name))
                leaves |= {parts[i]: leaf for i, leaf in zip(places, jax.tree.leaves(own), strict=True)}
        by_leaf: dict[int, dict[tuple[int, ...], Leaf]] = {}
        for part, leaf in leaves.items():
            by_leaf.setdefault(part.leaf, {})[part.indices] = leaf
        whole = iter([_stacked(by_leaf[i]) if i in by_leaf else None for i in range(len(self.whole.collections))])
        tree = {name: jax.tree.map(lambda _: next(whole), own) for name, own in sorted(self.whole.variables.items())}
        return {name: own for name, own in tree.items() if name in names}

    def from_model(self, tree: PyTree, casts: dict[str, Casts]) -> dict[int, dict[str, PyTree]]:
        """The variables of each piece from the model's own, as `init` returns them; it may lack collections.

        Args:
          tree: the model's own.
          casts: the dtypes in which they are given are added, by collection.

        Raises:
          TypeError, ValueError: they aren't the model's; the first leaf that differs is named.
        """
        for name, leaf in named_leaves("tree", tree):
            if isinstance(leaf, Tracer):
                raise TypeError(f"{name} is being traced; call from_model_variables outside of jax.jit and its like")
        try:
            variables = base.variables_of(self.whole.layer, tree, self.whole.unboxed)
        except LayerError as error:
            raise TypeError(f"{self.whole.layer.name} {error}") from error
        if unknown := sorted(map(str, set(variables).difference(self.whole.unboxed))):
            collections = ", ".join(f'"{name}": ...' for name in self.whole.unboxed)
            raise ValueError(f"the model has no collection {unknown[0]!r}; pass all by collection, {{{collections}}}")
        leaves: dict[int, Leaf] = {}
        for name, tree in variables.items():
            check_same_shapes(f"model's {name}", tree, self.whole.unboxed[name], casts.setdefault(name, {}))
            if own := jax.tree.leaves(tree):
                leaves |= dict(enumerate(own, start=self.whole.collections.index(name)))
        trees: dict[int, dict[str, PyTree]] = {}
        for index, parts in enumerate(self.cutting.parts):
            put = lambda i, parts=parts: leaves[parts[i].leaf][parts[i].indices]
            trees[index] = {name: jax.tree.map(put, self.trees[index].get(name, {})) for name in variables}
        return trees

    @cached_property
    def inits(self) -> list[PartJaxpr]:
        """For each piece the initialisation of its variables: takes a random key, gives its parts."""
        assert self.whole.init is not None
        flat = flatten(self.whole.init.jaxpr, calls=INLINED, unrolls=lambda scan: bool(scan.outvars)).folded
        inits, kinds = [], Kinds()
        for parts in self.cutting.parts:
            numbers = [flat.element(flat.results[part.leaf], part.indices) for part in parts]
            values, of_part = [number for number, _ in numbers], flat
            if any(indices for _, indices in numbers):
                of_part = flatten(trace(rows_of(flat, numbers), key_shape())[0], calls=INLINED).folded
                values = of_part.results
            equations = [of_part.equations[i] for i in of_part.needed_for(values)]
            inits.append(kinds.part(of_part, equations, of_part.arguments, values))
        return inits


def _stacked(parts: Mapping[tuple[int, ...], Leaf]) -> Leaf:
    """An array of its slices by their indices, of any number of dimensions."""
    if () in parts:
        return parts[()]
    slices = jnp.stack([parts[indices] for indices in sorted(parts)])
    return slices.reshape(*(last + 1 for last in max(parts)), *slices.shape[1:])


def cut_model(whole: WholeModel, modes: Modes, wanted: int) -> CutModel:
    """Cuts a model, from its traces for the shapes of a micro-batch, into at least `wanted` pieces.

    Raises:
      ValueError: it has fewer places; or parameters that are used in several places can't be told apart from others.
    """
    shapes = [leaf.shape for leaf in jax.tree.leaves(whole.variables)]
    evaluated = next(one for one in (modes.evaluation, modes.sampling, modes.training) if isinstance(one, Traced))
    try:
        cutting = decide_cutting(modes.training, evaluated, shapes, wanted)
    except TiedTogether as error:
        tied, changed = (
            ", ".join(sorted("/".join(whole.paths[part.leaf]) for part in parts)[:3]) for parts in error.args
        )
        fault = f"and changes the state {changed} in between" if changed else "in one of them with other parameters"
        raise ValueError(
            f"{whole.layer.name} uses {tied} in several places, {fault}; mark places by x = jpipe.cut(x) so that all "
            "uses are in one piece, or give each place a module of its own; the loss may combine numbers of several"
        ) from None
    except NoSuchPlace:
        raise ValueError(
            f"{whole.layer.name} does other things in evaluation than in training; mark places by x = jpipe.cut(x)"
        ) from None
    model = CutModel(whole, cutting)
    if len(cutting.parts) < wanted:
        raise ValueError(_too_few(model, modes.training, wanted))
    return model


def _too_few(model: CutModel, training: Traced, wanted: int) -> str:
    """The words for a model that has too few places: how many, the largest piece, and where most of its work is."""
    ends = [0, *model.cutting.places_in(training), len(training.straight.main)]
    flops = training.flops
    sizes = [float(flops[stop] - flops[start]) for start, stop in pairwise(ends)]
    largest = sizes.index(max(sizes))
    inside = training.straight.main[ends[largest] : ends[largest + 1]] or range(1)  # a model without parameters
    heaviest = max((training.straight.flat.equations[i] for i in inside), key=lambda e: flops_of(e.equation))
    operation, line = heaviest.equation.primitive.name, line_of(heaviest.equation, heaviest.callers)
    remedy = "use fewer stages or chunks, or split what that line does: each piece has to use parameters"
    if marks := len(training.marked):
        remedy = f"it has {marks} marks (jpipe.cut), and with marks nothing else is a place: add some, or drop all"
    elif operation in LOOPS_AND_BRANCHES:
        remedy = "a loop is one operation: write its blocks one by one, or by nn.scan with parameters of their own"
    return (
        f"{model.whole.layer.name} can be cut into {len(model.cutting.parts)} pieces, but there are {wanted} virtual "
        f"stages (num_stages * num_chunks). {model.names[largest]} has {max(sizes) / max(sum(sizes), 1.0):.0%} of the "
        f"FLOPs, most of them in a {operation} at {line or 'an unknown line'}; {remedy}"
    )


@dataclass(frozen=True, eq=False)
class _PieceLayer:
    """Makes a layer of a piece.

    Attributes:
      model: the model.
      index: of the piece.
      modes: the piece in training, in evaluation, and in evaluation with a random key; or why there is none.
      outputs: the shapes of the model's outputs.
      num_leaves: how many leaves the batch has.
      writes: the collections of which it gives new values in evaluation too.
    """

    model: CutModel
    index: int
    modes: tuple[Piece | str, ...]
    outputs: Shapes
    num_leaves: int
    writes: tuple[str, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the model's variables that the piece has."""
        return self.model.cutting.parts[self.index]

    def layer(self) -> AnyLayer:
        """The layer, whose variables are named as the model names them."""
        model, cutting = self.model.whole, self.model.cutting
        pieces = [piece for piece in dict.fromkeys(self.modes) if isinstance(piece, Piece)]
        inits = [] if model.init is None else [self.model.inits[self.index]]
        parts = [*(piece.part for piece in pieces), *inits]
        numbers = [(part.kind, list(map(bits, part.closed.consts))) for part in parts]
        reads = [(piece.variables, piece.data, piece.num_given, piece.written) for piece in pieces]
        tied = cutting.tied[self.index]
        return AnyLayer(
            name=self.model.names[self.index],
            made_of=("piece", str((numbers, reads, self.tree, self.partition_specs({})))),
            init=self.init,
            apply=self.apply,
            bind=bind_by_call(self.apply, lambda item: item),
            partition_specs=self.partition_specs,
            ready=None if model.layer.ready is None else self._chosen(jax.tree.leaves(model.layer.ready)),
            reads_batch=any(i < self.num_leaves for piece in pieces for i in piece.data),
            shared=None if tied is None else self.model.shared[tied],
            has_model_key=True,
        )

    def _chosen(self, leaves: Sequence[Leaf]) -> dict[str, PyTree]:
        """The piece's part of the leaves of the model's variables."""
        with no_mesh():  # the leaves may lie on a mesh
            return self._by_collection([leaves[part.leaf][part.indices] for part in self.parts])

    def init(self, inputs: Inputs, context: Context) -> LayerVariables:
        """New variables: of those that `init` of the whole model makes from the key, the piece's part."""
        key = context.key
        assert key is not None and self.model.whole.init is not None
        if key.dtype != key_shape().dtype:  # others may draw other numbers for a block alone than for all at once
            return self._chosen(replayed(self.model.whole.init.jaxpr, key))
        return self._by_collection(replayed(self.model.inits[self.index].closed, key))

    def apply(self, variables: LayerVariables, inputs: Inputs, context: Context) -> tuple[PyTree, LayerVariables]:
        """Computes what crosses out of the piece, and the new state."""
        piece = self.modes[0 if context.train else 1 if context.key is None else 2]
        if isinstance(piece, str):
            raise ValueError(piece)
        places, values = jax.tree.leaves(self.tree), jax.tree.leaves({name: variables[name] for name in self.tree})
        by_place = dict(zip(places, values, strict=True))
        leaves = [by_place[i] for i in range(len(self.parts))]
        batch = jax.tree.leaves(context.batch) or [None] * self.num_leaves
        given = piece(leaves, [] if self.index == 0 else inputs, [*batch, context.key])
        outputs, new = given[: piece.num_given], iter(given[piece.num_given :])
        if self.index == len(self.model.cutting.parts) - 1:
            gives = jax.tree.unflatten(jax.tree.structure(self.outputs), outputs)
        else:
            gives = outputs[0] if len(outputs) == 1 else tuple(outputs)
        updated = [next(new) if i in piece.written else leaf for i, leaf in enumerate(leaves)]
        updates = self._by_collection(updated)
        written = [name for name in updates if (name != "params" if context.train else name in self.writes)]
        return gives, {name: updates[name] for name in written}

    def partition_specs(self, variables: LayerVariables) -> Specs:
        """The mesh axes that the model's metadata names for these parts."""
        own = [PartitionSpec(*self.model.whole.specs[part.leaf][len(part.indices) :]) for part in self.parts]
        return {name: [own[i] for i in jax.tree.leaves(tree)] for name, tree in self.tree.items()}

    @property
    def tree(self) -> dict[str, PyTree]:
        """The piece's variables by collection, of the indices of its parts."""
        return self.model.trees[self.index]

    def _by_collection(self, leaves: Sequence[Leaf]) -> dict[str, PyTree]:
        return jax.tree.map(lambda i: leaves[i], self.tree)
