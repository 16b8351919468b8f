"""Buffers, and the order of dimensions in memory: kept where it is asked for, and found where a compiler chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_equal
from jpipe.memory.buffers import FlatBuffer, LeafType, StackedBuffer, compact_order, result_orders
from tpu_program import needs_tpu_compiler, tpu_devices


def traced(function, *shapes):
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])


def mesh_of(devices):
    return jax.sharding.Mesh(np.asarray(devices[:1]), ("stage",))


def test_nothing_is_compiled_where_there_is_no_choice():
    jaxpr = traced(lambda x, y: (x, x @ y, y.sum(0)), (2, 3), (3, 4))
    assert result_orders(jaxpr, [0, 1, 2], mesh_of(jax.devices())) == [(0, 1), (0, 1), None]


@needs_tpu_compiler
def test_a_tpu_says_how_a_forward_gives_its_results():
    jaxpr = traced(lambda x, w: (x, jnp.einsum("bshd,dhk->bshk", x, w), x.sum()), (2, 256, 8, 128), (128, 8, 128))
    found = result_orders(jaxpr, [1, 0, 2], mesh_of(tpu_devices("v5e:2x2")))
    assert sorted(found[0] or ()) == [0, 1, 2, 3]
    assert found[1:] == [(0, 1, 2, 3), None], "an input lies as it comes, a scalar has no order"


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((4, 224, 224, 3), (0, 3, 1, 2)),
        ((512, 8, 8, 3), (1, 3, 2, 0)),
        ((4, 1024), None),
        ((4, 1024, 64), None),
        ((128,), None),
        ((), None),
    ],
)
def test_a_tpu_holds_the_largest_dimensions_innermost(shape, order):
    assert compact_order(shape, mesh_of(tpu_devices("v5e:2x2"))) == order
    assert compact_order(shape, mesh_of(jax.devices())) is None


KERNEL = LeafType((2, 3), "float32")
STACKED, FLAT = StackedBuffer(KERNEL, (4,), 4), FlatBuffer(np.dtype("float32"), (24,), 24)


@pytest.mark.parametrize("buffer, entry", [(STACKED, 2), (FLAT, 12)], ids=["stacked", "flat"])
@pytest.mark.parametrize("traced", [False, True])
def test_a_leaf_at_its_entry(buffer, entry, traced):
    """The third kernel of four is at the same place in both."""
    leaf, run = np.arange(6, dtype=np.float32).reshape(2, 3), jax.jit if traced else lambda f: f
    array = run(buffer.put)(jnp.ones(buffer.shape), entry, leaf)
    assert_equal(array.reshape(-1), np.concatenate([np.ones(12), np.arange(6), np.ones(6)]).astype(np.float32))
    assert_equal(run(lambda a, i: buffer.take(a, i, (2, 3)))(array, entry), leaf)
    assert_equal(run(lambda a, i: buffer.take(a, i, (2, 3)))(run(buffer.add)(array, entry, leaf), entry), 2 * leaf)


def test_a_devices_part_of_a_stacked_buffer_has_its_part_of_a_leaf():
    """Split over another mesh axis, an array has fewer columns than the buffer says."""
    array = jnp.arange(16.0).reshape(4, 2, 2)
    assert_equal(STACKED.take(array, 1, (2, 3)), jnp.asarray([[4.0, 5], [6, 7]]))


def test_an_order_is_held_on_the_way_in_and_out():
    held = StackedBuffer(KERNEL._replace(order=(1, 0)), (4,), 4)
    leaf = jnp.arange(6.0).reshape(2, 3)
    run = jax.jit(lambda array: held.take(held.put(array, 1, leaf), 1, (2, 3)))
    assert_equal(run(jnp.zeros(held.shape)), leaf)
    assert "LayoutConstraint" in run.lower(jnp.zeros(held.shape)).as_text()
