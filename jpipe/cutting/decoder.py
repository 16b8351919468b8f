"""A model that is one module in decode mode, cut as in training: each piece has the caches that it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax

from jpipe.cutting.module import Read, WholeModel, told_of, without_unread
from jpipe.cutting.pieces import NoSuchPlace, places_again, unused_parts
from jpipe.cutting.places import Traced
from jpipe.cutting.straight import Part
from jpipe.cutting.whole import CutModel
from jpipe.layers.base import AnyLayer, describe
from jpipe.layers.calls import CACHE, decoding
from jpipe.model.alike import Kinds
from jpipe.model.groups import strong
from jpipe.model.layer_function import trace_init
from jpipe.model.random_keys import key_shape
from jpipe.model.trace import telling
from jpipe.types import Shapes


def cut_decoder(
    model: CutModel, inputs: Shapes, size: int, length: int
) -> Callable[[jax.ShapeDtypeStruct], tuple[AnyLayer, ...]]:
    """Cuts a model in decode mode: tokens `[b, T]` -> the pieces as layers that take these and write their caches.

    Args:
      model: as it is cut in training.
      inputs: the shapes of what it is called with in training; the only array in them is the tokens, `[b, T]`.
      size: the sequences that it is called with at a time.
      length: of the longest sequence.

    Raises:
      ValueError: it has other variables in decode mode, does other things there, or uses a cache in several pieces.
    """
    layer, structure = decoding(model.whole.layer, inputs, size, length), jax.tree.structure(inputs)
    tokens = jax.ShapeDtypeStruct((size, 1), jax.tree.leaves(inputs)[0].dtype)
    read: Read = lambda tokens: jax.tree.unflatten(structure, [tokens])
    with telling(f"generate: {layer.name}", lambda: told_of(read(tokens))):
        init = trace_init(layer, key_shape(), read(tokens), tokens)
    whole = WholeModel(layer, strong(init.variables), init, model.whole.read)
    cutting = model.cutting.renumbered(_numbers(model.whole, whole))
    decoder = CutModel(whole, cutting)
    caches = _caches(decoder, *_trace_again(decoder, read, tokens)[:2])
    parts = tuple((*own, *more) for own, more in zip(cutting.parts, caches, strict=True))
    return partial(_layers, CutModel(whole, replace(cutting, parts=parts)), read)


def _layers(model: CutModel, read: Read, tokens: jax.ShapeDtypeStruct) -> tuple[AnyLayer, ...]:
    """The pieces of a model in decode mode; `read` makes of tokens what it is called with.

    Raises:
      ValueError: the model can't be cut for so many tokens; or a piece but the first reads the tokens.
    """
    traced, places, outputs = _trace_again(model, read, tokens)
    pieces = model.pieces_of(traced, places, Kinds())
    for index, piece in enumerate(pieces[1:], start=1):
        if piece.data:
            raise ValueError(
                f"generate: the piece {model.names[index]} of {model.whole.layer.name} reads the tokens in decode "
                "mode, but they are on the first stage only: leave out there what is made of them, such as a mask of "
                "padding"
            )
    return model.as_layers(pieces, pieces, outputs, 1, (CACHE,))


def _numbers(training: WholeModel, decoder: WholeModel) -> list[int]:
    """For each leaf of the variables in training, its index in decode mode."""
    named = lambda whole: list(zip(whole.collections, whole.paths, strict=True))
    by_name = {name: i for i, name in enumerate(named(decoder)) if name[0] != CACHE}
    if [*by_name] != named(training):
        without = {name: tree for name, tree in decoder.unboxed.items() if name != CACHE}
        raise ValueError(
            f"{training.layer.name} has {describe(without)} in decode mode and {describe(training.unboxed)} in "
            "training, so that it can't take over what was trained"
        )
    return list(by_name.values())


def _trace_again(model: CutModel, read: Read, tokens: jax.ShapeDtypeStruct) -> tuple[Traced, list[int], Shapes]:
    """(the trace of a model in decode mode, with slices where training has slices; its places; outputs as trained)."""
    whole, (straight, outputs) = model.whole, model.whole.trace_mode(read, tokens, train=False)
    depths = {part.leaf: len(part.indices) for part in model.cutting.all_parts}
    straight = replace(straight, depths=straight.depths_read | depths)
    if whole.read is not None and len(whole.read) == len(straight.read):
        straight, outputs = replace(straight, read=whole.read), without_unread(outputs, whole.read)
    try:
        return (traced := Traced(straight)), places_again(model.cutting, traced, None), outputs
    except NoSuchPlace as error:
        raise ValueError(
            f"generate: {model.whole.layer.name} does in decode mode other things than in training behind the piece "
            f"{model.names[error.args[0]]}: no place there bears arrays of the same dtypes behind the same parameters; "
            "mark places that both have by x = jpipe.cut(x)"
        ) from None


def _caches(model: CutModel, traced: Traced, places: Sequence[int]) -> list[list[Part]]:
    """For each piece the parts of caches that it has.

    Raises:
      ValueError: several pieces use one.
    """
    whole, cutting = model.whole, model.cutting
    is_cache = lambda part: whole.collections[part.leaf] == CACHE
    used = [traced.used(*pair) for pair in pairwise([0, *places, len(traced.straight.main)])]
    caches = [sorted(filter(is_cache, own)) for own in used]
    users: dict[Part, int] = {}
    for index, (own, parts) in enumerate(zip(used, cutting.parts, strict=True)):
        if strange := [part for part in own if not is_cache(part) and part not in parts]:
            name = "/".join(whole.paths[strange[0].leaf])
            raise ValueError(f"generate: {whole.layer.name} uses {name} in decode mode in {model.names[index]} too")
        for part in caches[index]:
            if users.setdefault(part, index) != index:
                raise ValueError(
                    f"generate: {whole.layer.name} uses its cache {'/'.join(whole.paths[part.leaf])} in the pieces "
                    f"{model.names[users[part]]} and {model.names[index]}, which may lie on two stages; give each "
                    "block a cache of its own"
                )
    shapes = [leaf.shape for leaf in jax.tree.leaves(whole.variables)]
    first = next((i for i, tied in enumerate(cutting.tied) if tied is None), 0)
    caches[first] += sorted(filter(is_cache, unused_parts([*cutting.all_parts, *users], shapes)))
    return caches
