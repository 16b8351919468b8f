"""A cutting is found again in other traces of the model, and its pieces, one after the other, are the model."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.cutting.pieces import TiedTogether, decide_cutting, make_pieces
from jpipe.cutting.places import Traced
from jpipe.cutting.straight import Part, straighten
from jpipe.model.alike import Kinds

RNG = np.random.default_rng(0)
WEIGHTS = [RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(7)]
SHAPES = [(4, 4)] * 4


def model(ws, x, drops):
    x = x @ ws[0]
    for w in ws[1:]:
        x = x + jnp.tanh(x @ w) * (jnp.cos(x) if drops else 1.0)
    return x


def traced(function, size=2, num_weights=4):
    x = jax.ShapeDtypeStruct((size, 4), jnp.float32)
    closed = jax.make_jaxpr(function)(WEIGHTS[:num_weights], x)
    return Traced(straighten(closed, num_weights, len(closed.out_avals), ()))


def in_training(ws, x):
    return model(ws, x, True)


def in_evaluation(ws, x):
    return model(ws, x, False)


def test_the_pieces_are_the_model_in_both_modes_and_at_other_shapes():
    cutting = decide_cutting(traced(in_training), traced(in_evaluation), SHAPES, 1)
    assert cutting.parts == ((Part(0),), (Part(1),), (Part(2),), (Part(3),))
    for function, size in ((in_training, 2), (in_evaluation, 2), (in_training, 5)):
        trace = traced(function, size)
        pieces = make_pieces(trace, cutting, cutting.places_in(trace), Kinds())
        x = RNG.normal(size=(size, 4)).astype(np.float32)
        crossing = []
        for weight, piece in zip(WEIGHTS[:4], pieces, strict=True):
            crossing = piece([weight], crossing, [x])
        np.testing.assert_array_equal(crossing[0], function(WEIGHTS[:4], x))


ALONE, BOTH = (Part(0),), (Part(0), Part(1))


@pytest.mark.parametrize(
    ("function", "parts", "owners"),
    [
        (lambda ws, x: jnp.tanh(jnp.tanh((x @ ws[0]) @ ws[1]) @ ws[0].T), (ALONE, (Part(1),), ALONE), (0, None, 0)),
        # One place uses half of what is shared: it has all of it, as a `Shared` of a list has. It was an error.
        (lambda ws, x: jnp.tanh(jnp.tanh(x @ ws[0]) @ (ws[0] @ ws[1])), (BOTH, BOTH), (0, 0)),
        # What nothing uses is shared where all is shared. Only the first of these pieces had it.
        (lambda ws, x: jnp.tanh(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[0]) @ ws[0]), (BOTH, BOTH, BOTH), (0, 0, 0)),
    ],
    ids=["alone", "half", "unused"],
)
def test_tied_weights(function, parts, owners):
    trace = traced(function, num_weights=2)
    cutting = decide_cutting(trace, trace, SHAPES[:2], 1)
    assert (cutting.parts[: len(parts)], cutting.tied[: len(owners)]) == (parts, owners)


def warm(ws, x):
    for w in ws[:3]:
        x = jnp.tanh(x @ w) * jnp.exp(ws[3][0])
    return x


@pytest.mark.parametrize(
    ("training", "evaluation", "part"),
    [
        (lambda ws, x: jnp.tanh(jnp.tanh(x @ ws[0]) @ (ws[0] @ ws[1] @ ws[2])), None, 0),
        (lambda ws, x: jnp.tanh(jnp.tanh(x @ (ws[0] @ ws[1])) @ (ws[0] @ ws[2])), None, 0),
        (lambda ws, x: jnp.tanh(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) @ ws[2]), warm, 3),
    ],
    ids=["more of others", "each with others", "in evaluation alone"],
)
def test_an_operation_of_tied_and_other_weights_is_told(training, evaluation, part):
    with pytest.raises(TiedTogether) as error:
        decide_cutting(traced(training), traced(evaluation or training), SHAPES, 1)
    assert error.value.args[0] == {Part(part)}


@pytest.mark.parametrize("first, second", [(True, False), (False, True)])
def test_places_part_no_uses_of_a_weight_whichever_mode_has_another_head(first, second):
    """Evaluation was cut between the two uses of the last block's weight: two pieces had it, one without gradients."""

    def with_head(has_it, ws, x):
        x = middle = x @ ws[0]
        for before, w in (ws[1:3], ws[3:5]):
            x = x + (jnp.tanh(x @ before + before[0]) @ w + jnp.sum(w**2))
            middle = x if w is ws[2] else middle
        return x @ ws[5], middle @ ws[6] if has_it else jnp.zeros_like(x)

    modes = [traced(partial(with_head, has_it), num_weights=7) for has_it in (first, second)]
    cutting = decide_cutting(*modes, [(4, 4)] * 7, 3)
    owners = [i if first is None else first for i, first in enumerate(cutting.tied)]
    for part in map(Part, range(7)):
        assert len({owner for owner, own in zip(owners, cutting.parts, strict=True) if part in own}) == 1


def test_what_follows_from_the_batch_alone_does_not_cross():
    def masked(ws, x):
        mask = jnp.cumsum(x, 0)
        for w in ws:
            x = jnp.tanh(x @ w) * mask
        return x

    trace = traced(masked)
    cutting = decide_cutting(trace, trace, SHAPES, 1)
    places = cutting.places_in(trace)
    assert [len(trace.crossing[p]) for p in places] == [1, 1, 1]
    assert all(piece.data == (0,) for piece in make_pieces(trace, cutting, places, Kinds()))
    assert len(list(pairwise([0, *places, len(trace.straight.main)]))) == 4
