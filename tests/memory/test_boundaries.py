"""Carriers: whatever is packed comes back, also after it crossed to another stage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import assert_equal
from jpipe.memory.boundaries import FlatCarrier, SlotCarrier, make_carrier

DTYPES = ["float32", "int32", "bool", "bfloat16"]


def leaf(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def values(leaves, seed):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.integers(0, 2, x.shape)).astype(x.dtype) for x in leaves]


def check(boundaries, cuts):
    """Packs the boundaries one after the other, each crossing where there is a cut."""
    carrier = make_carrier(boundaries, cuts)
    now = carrier.empty()
    for index, boundary in enumerate(boundaries):
        given = values(boundary, index)
        now = carrier.pack(now, given)
        if index in cuts:
            now = carrier.arrived(carrier.empty(), carrier.crossing(now))
        assert jax.tree.structure(now) == jax.tree.structure(carrier.empty())
        for a, b in zip(jax.tree.leaves(now), jax.tree.leaves(carrier.empty()), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), "the type is common to all boundaries"
        assert_equal(carrier.unpack(now, boundary), given)
    return carrier


def test_equal_boundaries_stay_as_they_are():
    carrier = check([[leaf((4, 3)), leaf((4,), "int32")]] * 3, [0, 1])
    assert isinstance(carrier, SlotCarrier)
    assert [slot.shape for slot in carrier.slots] == [(4, 3), (4,)]
    assert carrier.crosses == (True, True)


def test_a_leaf_that_no_cut_needs_does_not_cross():
    carrier = check([[leaf((4, 3))], [leaf((4, 3)), leaf((4,), "bool")], [leaf((4, 3))]], [0, 2])
    assert isinstance(carrier, SlotCarrier)
    assert carrier.crosses == (True, False)


def test_different_boundaries_share_a_buffer():
    boundaries = [[leaf((4, n)) for n in sizes] for sizes in ([9], [8, 3], [7], [6], [5], [4], [2, 1])]
    carrier = check(boundaries, [0, 3])
    assert isinstance(carrier, FlatCarrier)
    assert carrier.sizes == (("float32", 44),)
    assert carrier.crossing_sizes == (("float32", 36),)


def test_boundaries_that_cross_in_many_types_share_a_buffer():
    boundaries = [[leaf((4, 9))], [leaf((4, 8))], [leaf((4, 7))]]
    assert isinstance(check(boundaries, [0, 1]), SlotCarrier)
    assert isinstance(check(boundaries, [0, 1, 2]), FlatCarrier)


def test_many_types_lie_end_to_end():
    boundaries = [[leaf((4, n)), leaf((8,), "int32")] for n in range(3, 12)]
    carrier = check(boundaries, [1])
    assert isinstance(carrier, FlatCarrier)
    assert {name: a.shape for name, a in carrier.empty().items()} == {"float32": (44,), "int32": (8,)}


@pytest.mark.parametrize("boundaries", [[], [[]], [[], [leaf((2,))]]])
def test_nothing_to_carry(boundaries):
    check(boundaries, [])
    if boundaries:
        check(boundaries, [0])


SHAPES = st.lists(
    st.tuples(st.sampled_from([(2,), (2, 3), (4, 5), (6, 1, 2), ()]), st.sampled_from(DTYPES)), max_size=4
)


@settings(max_examples=25)
@given(st.lists(SHAPES, min_size=1, max_size=5), st.data())
def test_any_boundaries(shapes, data):
    boundaries = [[leaf(*item) for item in group] for group in shapes]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(boundaries) - 1))))
    check(boundaries, cuts)
