"""Storage: what is written for a layer is read for that layer, and lies where it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_equal
from jpipe.storage import Row, build_storage, choose_stacked, look_up


def leaf(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# three kinds on two devices: a run of five, two of mixed dtypes, and one without leaves
LEAVES = [[leaf(2, 3), leaf(3)], [leaf(4, 2), leaf(2, dtype="int32")], []]
CELLS = [[0, 0, 0, 1, 1], [0, 1], [1]]


def made(stacked=(True, False, False), **options):
    return build_storage(LEAVES, CELLS, stacked, num_devices=2, **options)


def value(c, member, index, extra=0):
    shape = LEAVES[c][index]
    return jnp.full(shape.shape, 100 * c + 10 * member + index + 1 + extra, shape.dtype)


def fill(storage, device, rows=(None,)):
    buffers = storage.zeros()
    for row in rows:
        for c, cells in enumerate(CELLS):
            for member, cell in enumerate(cells):
                if cell == device:
                    leaves = [value(c, member, i, 1000 * (row or 0)) for i in range(len(LEAVES[c]))]
                    buffers = storage.write(buffers, c, member, leaves, None if row is None else Row(row, device))
    return buffers


@pytest.mark.parametrize("stacked", [(True, False, False), (False, False, False), (True, True, True)])
@pytest.mark.parametrize("device", [0, 1])
def test_what_is_written_is_read(stacked, device):
    storage = made(stacked)
    buffers = fill(storage, device)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), buffers) == jax.tree.map(
        lambda a: (a.shape, a.dtype), storage.shapes()
    )
    for c, cells in enumerate(CELLS):
        for member, cell in enumerate(cells):
            if cell == device:
                expected = [value(c, member, i) for i in range(len(LEAVES[c]))]
                assert_equal(storage.read(buffers, c, member), expected, f"kind {c}, member {member}")
                traced = jax.jit(lambda b, m, c=c: storage.read(b, c, m))(buffers, member)
                assert_equal(traced, expected, f"kind {c}, member {member}, traced")


@pytest.mark.parametrize("stacked", [(True, False, False), (False, False, False)])
@pytest.mark.parametrize("device", [0, 1])
def test_rows_of_micro_batches(stacked, device):
    rows = (3, 2)
    storage = made(stacked, rows=rows)
    buffers = fill(storage, device, range(rows[device]))
    for row in range(rows[device]):
        for c, cells in enumerate(CELLS):
            for member, cell in enumerate(cells):
                if cell == device:
                    expected = [value(c, member, i, 1000 * row) for i in range(len(LEAVES[c]))]
                    assert_equal(storage.read(buffers, c, member, Row(row, device)), expected)


def test_pools_are_as_large_as_the_fullest_device_needs():
    storage = made((False, False, False))
    assert dict(storage.sizes) == {"float32": 3 * 9 + 8, "int32": 2}
    assert dict(made((False, False, False), rows=(1, 2)).sizes) == {"float32": 2 * (2 * 9 + 8), "int32": 4}
    assert {name: a.shape for name, a in storage.zeros()["pools"].items()} == {"float32": (1, 35), "int32": (1, 2)}


def test_stacks_have_as_many_slots_as_the_fullest_device_needs():
    stacks = made().zeros()["stacks"]
    assert [a.shape for a in stacks["0"]] == [(3, 2, 3), (3, 3)]
    assert [a.shape for a in made(rows=(4, 2)).zeros()["stacks"]["0"]] == [(4, 3, 2, 3), (4, 3, 3)]


def test_adding():
    storage = made()
    buffers = fill(storage, 0)
    more = [jnp.full((4, 2), 0.5), jnp.full((2,), 7, jnp.int32)]
    floats, integers = storage.read(storage.add(buffers, 1, 0, more), 1, 0)
    assert_equal(floats, value(1, 0, 0) + 0.5)
    assert_equal(integers, more[1], "integers are replaced")
    again = storage.add(buffers, 0, 1, [jnp.ones((2, 3)), jnp.ones(3)])
    assert_equal(storage.read(again, 0, 1), [value(0, 1, i) + 1 for i in range(2)])
    assert_equal(storage.read(again, 0, 2), [value(0, 2, i) for i in range(2)], "the others stay")


def test_buffers_of_another_dtype():
    storage = build_storage([[leaf(2, dtype="bfloat16")]], [[0]], [False], num_devices=1)
    buffers = storage.zeros(lambda dtype: jnp.float32)
    for _ in range(3):
        buffers = storage.add(buffers, 0, 0, [jnp.full((2,), 2.0**-9, jnp.bfloat16) + jnp.ones((), jnp.bfloat16)])
    assert buffers["pools"]["bfloat16"].dtype == jnp.float32
    assert_equal(storage.read(buffers, 0, 0)[0], jnp.full((2,), 3.0, jnp.float32))


def test_shards():
    storage = build_storage([[leaf(4, 3), leaf(6)]], [[0]], [False], num_devices=1, shards=2)
    assert storage.shards == 2
    given = [jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3), jnp.arange(6.0, dtype=jnp.float32)]
    buffers = storage.write(storage.zeros(), 0, 0, given)
    assert_equal(storage.read(buffers, 0, 0), given)
    first_half = buffers["pools"]["float32"][0]
    assert_equal(first_half, jnp.concatenate([given[0][:2].ravel(), given[1][:3]]))
    assert build_storage([[leaf(3, 3)]], [[0]], [False], num_devices=1, shards=2).shards == 1


@pytest.mark.parametrize(
    ("cells", "num_devices", "split", "stacked"),
    [
        ([0, 0, 1, 1], 2, False, True),
        ([0], 1, False, True),
        ([0], 4, False, False),
        ([0], 4, True, True),
        ([0, 1, 2, 3, 3], 4, False, True),
        ([0, 0, 0, 1], 4, False, False),
    ],
)
def test_when_to_stack(cells, num_devices, split, stacked):
    assert choose_stacked(cells, num_devices, split) is stacked


def test_look_up():
    assert look_up([3, 4], 1) == 4
    assert look_up([5, 5], jnp.int32(0)) == 5
    assert isinstance(look_up([5, 5], jnp.int32(0)), int)
    assert int(jax.jit(lambda i: look_up(np.asarray([3, 4]).tolist(), i))(1)) == 4
