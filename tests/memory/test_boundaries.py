"""Boundaries: whatever is packed comes back, also after it crossed to another stage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import assert_equal
from jpipe.memory.boundaries import make_boundaries

DTYPES = ["float32", "int32", "bool", "bfloat16"]


def leaf(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def values(leaves, seed):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.integers(0, 2, x.shape)).astype(x.dtype) for x in leaves]


def check(boundaries, cuts):
    """Packs the boundaries one after the other, each crossing where there is a cut."""
    made = make_boundaries(boundaries, cuts)
    now = made.empty()
    for index, boundary in enumerate(boundaries):
        given = values(boundary, index)
        now = made.write(now, index, 0, given)
        if index in cuts:
            now = made.with_crossed(made.empty(), made.crossing(now))
        assert jax.tree.structure(now) == jax.tree.structure(made.empty())
        for a, b in zip(jax.tree.leaves(now), jax.tree.leaves(made.empty()), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), "the format is common to all boundaries"
        assert_equal(made.read(now, index, 0), given)
    return made


def shapes(made):
    return {name: a.shape for name, a in made.empty().items()}


def test_equal_boundaries_stay_as_they_are():
    made = check([[leaf((4, 3)), leaf((4,), "int32")]] * 3, [0, 1])
    assert shapes(made) == {"float32_4x3": (1, 4, 3), "int32_4": (1, 4)}
    assert made.crossing_sizes == (("float32_4x3", 1), ("int32_4", 1))


def test_equal_layers_find_their_activation_in_the_same_place():
    """Layers of one group are at several boundaries, of which the first one's index serves them all."""
    boundaries = [[leaf((4, 9))], [leaf((4, 3)), leaf((2,))], [leaf((4, 3)), leaf((2,))], [leaf((2,))]]
    made = check(boundaries, [1])
    assert_equal(made.read(made.write(made.empty(), 1, 0, values(boundaries[1], 0)), 2, 0), values(boundaries[1], 0))


def test_a_leaf_that_no_cut_needs_does_not_cross():
    made = check([[leaf((4, 3))], [leaf((4, 3)), leaf((4,), "bool")], [leaf((4, 3))]], [0, 2])
    assert made.crossing_sizes == (("float32_4x3", 1),)
    made = check([[leaf((4, 3))] * 3, [leaf((4, 3))]], [1])
    assert shapes(made) == dict.fromkeys(("float32_4x3", "float32_4x3_of_1", "float32_4x3_of_2"), (1, 4, 3))
    assert made.crossing_sizes == (("float32_4x3", 1),)


def test_the_picture_of_make_boundaries():
    x, mask = leaf((4, 3)), leaf((4,), "bool")
    made = check([[x], [x, mask], [x, x], [x]], [0, 1])
    assert shapes(made) == {"float32_4x3": (1, 4, 3), "float32_4x3_of_1": (1, 4, 3), "bool_4": (1, 4)}
    assert made.crossing_sizes == (("bool_4", 1), ("float32_4x3", 1))


def test_many_different_boundaries_share_a_buffer():
    """Each of a type of its own: stacked, they would take more than twice as much as the largest."""
    boundaries = [[leaf((4, n)) for n in sizes] for sizes in ([9], [8, 3], [7], [6], [5], [4], [2, 1])]
    made = check(boundaries, [0, 3])
    assert shapes(made)["float32"] > (0,)
    total = sum(int(np.prod(shape)) for shape in shapes(made).values())
    assert total <= 2 * 44
    few = check([[leaf((4, 9))], [leaf((4, 8))]], [0])
    assert set(shapes(few)) == {"float32_4x9", "float32_4x8"}


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
