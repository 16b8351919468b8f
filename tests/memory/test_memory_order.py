"""The order of dimensions in memory: kept where it is asked for, and found out where a compiler chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.memory.memory_order import compact_order, in_order, result_orders
from tpu_program import needs_tpu_compiler, tpu_devices


def traced(function, *shapes):
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])


def mesh_of(devices):
    return jax.sharding.Mesh(np.asarray(devices[:1]), ("stage",))


def test_an_order_changes_no_values():
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(lambda x: in_order(x, (1, 0)))(x), x)
    assert in_order(x, None) is x
    assert in_order(x[0], (0,)) is not None
    assert "layout" in jax.jit(lambda x: in_order(x, (1, 0))).lower(x).as_text().lower()


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
