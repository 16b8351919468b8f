"""Storage: what is written for a layer is read for that layer, and lies where it should."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import jpipe.memory.storage
from cases import assert_equal
from jpipe.memory.buffers import FlatBuffer, StackedBuffer
from jpipe.memory.storage import Row, build_storage, make_boundaries


def leaf(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# three types of records on two devices: a run of five, two of mixed dtypes, and one without leaves
LEAVES = [[leaf(2, 3), leaf(3)], [leaf(4, 2), leaf(2, dtype="int32")], []]
OWNERS = [[0, 0, 0, 1, 1], [0, 1], [1]]


@pytest.fixture(params=[StackedBuffer, FlatBuffer])
def make(request, monkeypatch):
    """Makes the records' places, and the same where every leaf lies flat."""
    if request.param is FlatBuffer:
        monkeypatch.setattr(jpipe.memory.storage._Needs, "stacked", lambda *_: set())
    return partial(build_storage, LEAVES, OWNERS, device_of=range(2))


@pytest.fixture
def storage(make):
    return make()


def value(t, record, index, extra=0):
    shape = LEAVES[t][index]
    return jnp.full(shape.shape, 100 * t + 10 * record + index + 1 + extra, shape.dtype)


def zeros(storage):
    return {name: jnp.zeros(buffer.shape, buffer.dtype) for name, buffer in storage.buffers.items()}


def shapes(storage):
    return {name: buffer.shape for name, buffer in storage.buffers.items()}


def fill(storage, device, rows=(None,)):
    buffers = zeros(storage)
    for row in rows:
        for t, owners in enumerate(OWNERS):
            for record, owner in enumerate(owners):
                if owner == device:
                    leaves = [value(t, record, i, 1000 * (row or 0)) for i in range(len(LEAVES[t]))]
                    buffers = storage.write(buffers, t, record, leaves, None if row is None else Row(row, device))
    return buffers


def records():
    return [(t, record, owner) for t, owners in enumerate(OWNERS) for record, owner in enumerate(owners)]


@pytest.mark.parametrize("device", [0, 1])
def test_what_is_written_is_read(storage, device):
    buffers = fill(storage, device)
    types = lambda arrays: {name: (a.shape, a.dtype) for name, a in arrays.items()}
    assert types(buffers) == types(storage.buffers)
    for t, record, owner in records():
        if owner == device:
            expected = [value(t, record, i) for i in range(len(LEAVES[t]))]
            assert_equal(storage.read(buffers, t, record), expected, f"type {t}, record {record}")
            traced = jax.jit(lambda b, r, t=t: storage.read(b, t, r))(buffers, record)
            assert_equal(traced, expected, f"type {t}, record {record}, traced")
    on_host = {(t, r): [value(t, r, i) for i in range(len(LEAVES[t]))] for t, r, _ in records()}
    assert_equal({name: storage.in_numpy(name, device, on_host) for name in storage.buffers}, buffers)


@pytest.mark.parametrize("device", [0, 1])
def test_rows_of_micro_batches(make, device):
    storage = make(rows=(3, 2))
    assert len({type(buffer) for buffer in storage.buffers.values()}) == 1
    buffers = fill(storage, device, range((3, 2)[device]))
    for row, (t, record, owner) in itertools.product(range((3, 2)[device]), records()):
        if owner == device:
            expected = [value(t, record, i, 1000 * row) for i in range(len(LEAVES[t]))]
            assert_equal(storage.read(buffers, t, record, Row(row, device)), expected)


ENDS, SPLIT = [[leaf(3, 2)], [leaf(7)]], PartitionSpec(None, "model")
LIES = {
    "as large as the fullest device needs": (
        (LEAVES, OWNERS, {}),
        {"float32_2x3": (3, 2, 3), "float32_3": (3, 3), "float32_4x2": (1, 4, 2), "int32_2": (1, 2)},
    ),
    "two rows of two on device 1": (
        (LEAVES, OWNERS, {"rows": (1, 2)}),
        {"float32_2x3": (4, 2, 3), "float32_3": (4, 3), "float32_4x2": (2, 4, 2), "int32_2": (2, 2)},
    ),
    "two leaves of a type": (([[leaf(2), leaf(2)], [leaf(2)]], [[0], [1]], {}), {"float32_2": (2, 2)}),
    "flat, if few devices have them": ((ENDS, [[0], [3]], {"device_of": range(4)}), {"float32": (7,)}),
    # Large ones, if the others are larger still: what stacked buffers waste is little then.
    "stacked beside what all have": (
        ([*ENDS, [leaf(9, 9)]], [[0], [3], [0, 1, 2, 3]], {"device_of": range(4)}),
        {"float32_9x9": (1, 9, 9), "float32_3x2": (1, 3, 2), "float32_7": (1, 7)},
    ),
    "split over another axis": (
        (ENDS, [[0], [1]], {"specs": [[SPLIT], [PartitionSpec()]]}),
        {"float32_3x2_none_model": (1, 3, 2), "float32_7": (1, 7)},
    ),
    "on all devices, with an entry for itself": (
        ([[leaf(4, 3)], [leaf(4, 3)]], [[0], [1, 1]], {"specs": [[PartitionSpec("stage")]] * 2}),
        {"float32_4x3_stage": (3, 4, 3)},
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_leaves_of_one_type_share_a_buffer(name):
    (leaves, owners, options), expected = LIES[name]
    assert shapes(build_storage(leaves, owners, **{"device_of": range(2)} | options)) == expected


@pytest.mark.parametrize("on_gpu", [False, True])
def test_adding(storage, on_gpu):
    buffers, add = fill(storage, 0), partial(storage.add, on_gpu=on_gpu)
    one, other = storage.read(add(buffers, 1, 0, [jnp.full((4, 2), 0.5), None]), 1, 0)
    assert_equal(one, value(1, 0, 0) + 0.5)
    assert_equal(other, value(1, 0, 1), "nothing is added to it")
    again = add(buffers, 0, 1, [jnp.ones((2, 3)), jnp.ones(3)])
    assert_equal(storage.read(again, 0, 1), [value(0, 1, i) + 1 for i in range(2)])
    assert_equal(storage.read(again, 0, 2), [value(0, 2, i) for i in range(2)], "the others stay")


def test_a_table_and_its_transpose_share_an_array():
    """Of two stages the first has a table and the last a head; of what every stage has nothing is turned."""
    leaves = [[leaf(7, 3), leaf(2, 6)], [leaf(3, 7)], [leaf(6, 2)]]
    storage = build_storage(leaves, [[0], [3], [0, 1, 2, 3]], device_of=range(4))
    assert shapes(storage) == {"float32_2x6": (1, 2, 6), "float32_6x2": (1, 6, 2), "float32_7x3": (1, 7, 3)}
    head = jnp.arange(21.0).reshape(3, 7)
    buffers = storage.add(storage.write(zeros(storage), 1, 0, [head]), 1, 0, [head])
    assert_equal(buffers["float32_7x3"][0], 2 * head.T)
    assert_equal(storage.read(buffers, 1, 0), [2 * head])
    assert_equal(storage.in_numpy("float32_7x3", 3, {(1, 0): [head]})[0], np.asarray(head.T))
    assert_equal(storage.in_numpy("float32_7x3", 0, {(1, 0): [head]})[0], np.zeros((7, 3), np.float32))


# --- boundaries: whatever is packed comes back, also after it crossed to another stage ---


def values(leaves, seed):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.integers(0, 2, x.shape)).astype(x.dtype) for x in leaves]


def check_boundaries(boundaries, cuts):
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


def test_equal_layers_find_their_activation_in_the_same_place():
    """Layers of one group are at several boundaries, of which the first one's index serves them all."""
    boundaries = [[leaf(4, 9)], [leaf(4, 3), leaf(2)], [leaf(4, 3), leaf(2)], [leaf(2)]]
    made = check_boundaries(boundaries, [1])
    assert_equal(made.read(made.write(made.empty(), 1, 0, values(boundaries[1], 0)), 2, 0), values(boundaries[1], 0))


def test_a_leaf_that_no_cut_needs_does_not_cross():
    made = check_boundaries([[leaf(4, 3)], [leaf(4, 3), leaf(4, dtype="bool")], [leaf(4, 3)]], [0, 2])
    assert made.crossing_sizes == (("float32_4x3", 1),)
    made = check_boundaries([[leaf(4, 3)] * 3, [leaf(4, 3)]], [1])
    assert shapes(made) == dict.fromkeys(("float32_4x3", "float32_4x3_of_1", "float32_4x3_of_2"), (1, 4, 3))
    assert made.crossing_sizes == (("float32_4x3", 1),)


SHAPES = st.sampled_from([(2,), (2, 3), (4, 5), (6, 1, 2), ()])
DTYPES = st.sampled_from(["float32", "int32", "bool", "bfloat16"])


@settings(max_examples=10)
@given(st.lists(st.lists(st.tuples(SHAPES, DTYPES), max_size=4), min_size=1, max_size=5), st.data())
def test_any_boundaries(shapes, data):
    boundaries = [[leaf(*shape, dtype=dtype) for shape, dtype in group] for group in shapes]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(boundaries) - 1))))
    check_boundaries(boundaries, cuts)
