"""Mesh axes taken apart: which, what the parts mean, and what a plan along them sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.jaxprs.flat_jaxpr import flatten
from jpipe.partitioner import per_device
from jpipe.partitioner.conversions import bytes_sent, hops
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard
from jpipe.partitioner.sub_axes import apart, taken_apart, together
from jpipe.partitioner.traffic import sent_in
from partitioned import array

P = PartitionSpec
SIXTEEN = (Axis(("model",), (16,)),)


def part(size, outer=1, inner=1):
    return Axis(("model",), (size,), outer=outer, inner=inner)


def parts_for(function, *shapes, axes=SIXTEEN):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return taken_apart(flatten(jax.make_jaxpr(function)(*arguments)), axes)


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ((3, 32), (3, 8, 4), [part(8, inner=2), part(2, outer=8)]),
        ((160,), (40, 4), [part(8, inner=2), part(2, outer=8)]),
        ((3, 32), (3, 16, 2), SIXTEEN),  # as it is
        ((3, 32), (3, 2, 16), [part(2, inner=8), part(8, outer=2)]),
        ((3, 24), (3, 8, 3), SIXTEEN),  # 16 devices can't split 24
        ((2, 32), (64,), SIXTEEN),  # blocks of one dimension become blocks of another
    ],
)
def test_an_axis_is_taken_apart_where_a_reshape_asks_for_it(old, new, parts):
    assert parts_for(lambda x: x.reshape(new), old) == tuple(parts)


def test_into_more_parts_in_loops_too_and_data_axes_never():
    def function(x):
        inner = lambda carry, _: (jnp.sin(carry.reshape(4, 8)).reshape(32), None)
        return jax.lax.scan(inner, x, length=2)[0].reshape(8, 4)

    assert parts_for(function, (32,)) == (part(4, inner=4), part(2, outer=4, inner=2), part(2, outer=8))
    data = (Axis(("data",), (16,), is_data=True),)
    assert parts_for(function, (32,), axes=data) == data


def test_what_lies_along_an_axis_and_along_its_parts():
    axes, parts = (Axis(("data",), (2,)), *SIXTEEN), (Axis(("data",), (2,)), part(8, inner=2), part(2, outer=8))
    for whole, taken in [
        ((REPLICATED, REPLICATED), (REPLICATED, REPLICATED, REPLICATED)),
        ((Shard(0), PARTIAL), (Shard(0), PARTIAL, PARTIAL)),
        ((Shard(0, 16), Shard(0)), (Shard(0, 16), Shard(0), Shard(0, 8))),
        ((PARTIAL, Shard(1, 3)), (PARTIAL, Shard(1, 3), Shard(1, 24))),
    ]:
        assert apart(whole, axes, parts) == taken
        assert together(taken, axes, parts) == whole
    assert together((REPLICATED, Shard(0), Shard(1)), axes, parts) == (REPLICATED, REPLICATED)
    assert together((REPLICATED, Shard(0), PARTIAL), axes, parts) == (REPLICATED, PARTIAL)


SHAPES = {"q": (16, 32), "k": (16, 8), "v": (16, 8), "o": (32, 16)}
SPECS = {name: P(None, "model") for name in "qkv"} | {"o": P("model")}


def attention(p, x):
    """8 heads of queries, 2 of keys and values; `[b, t, 16]`."""
    b, t, _ = x.shape
    q, k, v = (x @ p["q"]).reshape(b, t, 2, 4, 4), (x @ p["k"]).reshape(b, t, 2, 4), (x @ p["v"]).reshape(b, t, 2, 4)
    shares = jax.nn.softmax(jnp.einsum("btkge,bske->bkgts", q, k))
    return x + jnp.einsum("bkgts,bske->btkge", shares, v).reshape(b, t, 32) @ p["o"]


def trained(p, x):
    return jax.value_and_grad(lambda p, x: jnp.sum(attention(p, x) ** 2), (0, 1))(p, x)


@pytest.mark.parametrize("specs", [SPECS, SPECS | {"k": P(), "v": P()}], ids=["split", "whole"])
def test_fewer_heads_of_keys_and_values_than_devices(make_mesh, specs):
    """Values, gradients, and what is sent along the parts: of keys and values, and of their gradients, a few."""
    mesh, in_specs, out_specs = make_mesh((2, 4), ("data", "model")), (specs, P("data")), (P(), (specs, P("data")))
    p, x = {name: array(*shape) / 4 for name, shape in SHAPES.items()}, array(4, 6, 16)
    on_parts = per_device(trained, mesh, in_specs, out_specs, data_axes=["data"])
    run = jax.shard_map(on_parts, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        split = jax.device_put((p, x), jax.tree.map(lambda s: NamedSharding(mesh, s), in_specs))
        found, expected = jax.jit(run)(*split), jax.jit(trained)(p, x)
        sent = sent_in(jax.make_jaxpr(run)(*split).jaxpr, dict(mesh.shape))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    activation = 2 * 6 * 16 * 8
    along_model = sum(one.bytes for one in sent if "model" in one.axes and len(one.shape) > 2)
    assert 2 * (2 * 3 / 4 * activation) <= along_model <= 2.5 * (2 * 3 / 4 * activation)


def test_a_sum_over_all_parts_is_one_sum():
    """Where it is needed whole: along each part in turn more would be sent."""
    axes, whole = (part(8, inner=2), part(2, outer=8)), (REPLICATED,) * 2
    for now, over in [((PARTIAL, PARTIAL), (0, 1)), ((PARTIAL, REPLICATED), (0,)), ((PARTIAL, Shard(0)), (0,))]:
        assert [hop.over for hop in hops(axes, now, whole)][:1] == [over]
    (hop,) = hops(axes, (PARTIAL, PARTIAL), whole)
    assert bytes_sent(axes, (32,), 1, hop) == 2 * 15 / 16 * 32
    data = Axis(("data",), (2,))
    found = hops((data, *axes), (PARTIAL, PARTIAL, Shard(0)), (REPLICATED,) * 3)
    assert [hop.over for hop in found] == [(0,), (1,), (2,)], "a part is summed by itself"
    assert [hop.over for hop in hops((data, *SIXTEEN), (PARTIAL, PARTIAL), whole)] == [(0, 1)]
