"""Plans: which way is taken, by bytes that are worked out here by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.jax.flat_jaxpr import flatten
from jpipe.partitioner.choice import Chooser, with_sub_axes
from jpipe.partitioner.conversions import sent_in
from jpipe.partitioner.per_device import HANDLERS
from jpipe.partitioner.shardings import PARTIAL, Axis, Shard, summed
from partitioned import array, on_mesh
from planned import AXES, COLUMNS, ROWS, WHOLE, P, norm, plan_of, sent

SIXTEEN = (Axis(("model",), (16,)),)


def part(size, outer=1, inner=1):
    return Axis(("model",), (size,), outer=outer, inner=inner)


def parts_for(function, *shapes, axes=SIXTEEN):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return with_sub_axes(flatten(jax.make_jaxpr(function)(*arguments)), axes)


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
def test_an_axis_is_split_into_sub_axes_where_a_reshape_asks_for_it(old, new, parts):
    assert parts_for(lambda x: x.reshape(new), old) == tuple(parts)


SHAPES = {"q": (16, 32), "k": (16, 8), "v": (16, 8), "o": (32, 16)}
SPECS = {name: PartitionSpec(None, "model") for name in "qkv"} | {"o": PartitionSpec("model")}


def attention(p, x):
    """8 heads of queries, 2 of keys and values; `[b, t, 16]`."""
    b, t, _ = x.shape
    q, k, v = (x @ p["q"]).reshape(b, t, 2, 4, 4), (x @ p["k"]).reshape(b, t, 2, 4), (x @ p["v"]).reshape(b, t, 2, 4)
    shares = jax.nn.softmax(jnp.einsum("btkge,bske->bkgts", q, k))
    return x + jnp.einsum("bkgts,bske->btkge", shares, v).reshape(b, t, 32) @ p["o"]


def trained(p, x):
    return jax.value_and_grad(lambda p, x: jnp.sum(attention(p, x) ** 2), (0, 1))(p, x)


@pytest.mark.parametrize("specs", [SPECS, SPECS | {"k": PartitionSpec(), "v": PartitionSpec()}], ids=["split", "whole"])
def test_fewer_heads_of_keys_and_values_than_devices(make_mesh, specs):
    """Values, gradients, and what is sent along the parts: of keys and values, and of their gradients, a few."""
    mesh, in_specs = make_mesh((2, 4), ("data", "model")), (specs, PartitionSpec("data"))
    p, x = {name: array(*shape) / 4 for name, shape in SHAPES.items()}, array(4, 6, 16)
    run = on_mesh(trained, mesh, in_specs, (PartitionSpec(), in_specs), data_axes=["data"])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        split = jax.device_put((p, x), jax.tree.map(lambda s: NamedSharding(mesh, s), in_specs))
        found, expected = run(*split), jax.jit(trained)(p, x)
        sent = sent_in(jax.make_jaxpr(run)(*split).jaxpr, dict(mesh.shape))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    activation = 2 * 6 * 16 * 8
    along_model = sum(one.bytes for one in sent if "model" in one.axes and 6 in one.shape)
    assert 2 * (2 * 3 / 4 * activation) <= along_model <= 2.5 * (2 * 3 / 4 * activation)


def test_a_sum_with_a_linear_reader_and_another_is_taken_before_both():
    """As in the backward of a norm: dh times the norm's weight stays partial; dh times x, split, doesn't."""
    x, size = (2048, 512), 2048 * 512 * 2

    def backward(dy, w, scale, x):
        dh = dy @ w
        return jnp.tanh(dh * scale), dh * x

    plan = plan_of(backward, [COLUMNS, ROWS, WHOLE, ROWS], x, (512, 512), (512,), x, wanted=lambda _: ROWS)
    assert sent(plan) == [("reduce_scatter", x, (P - 1) / P * size)]


def test_a_gradient_is_scattered_in_the_type_that_is_computed_in():
    """Not in that of the parameter, to which the sum is cast; if it is wanted partial, it isn't summed at all."""
    x, dy, size = (2048, 512), (2048, 256), 512 * 256 * 2

    def gradient(x, dy):
        return (x.T @ dy).astype(jnp.float32)

    assert sent(plan_of(gradient, [ROWS, ROWS], x, dy, wanted=lambda _: ROWS)) == [
        ("reduce_scatter", (512, 256), (P - 1) / P * size)
    ]
    late = plan_of(gradient, [ROWS, ROWS], x, dy, wanted=lambda own: own)
    assert sent(late) == [] and late.results == ((PARTIAL,),)


def zeros_in(plan):
    """How what starts as zeros, and has entries added, lies for that."""
    return [e.way.operands[0] for e in plan.equations if e.flat.equation.primitive.name == "scatter-add"]


def test_gradients_of_split_logits_are_added_to_a_devices_own_part():
    """Though whole zeros cost no bytes: each device would write and read those of all words."""

    def gradients(logits, ids):
        chosen = lambda x: jnp.take_along_axis(x, ids.astype(jnp.int32)[:, None], -1).sum()
        return jax.grad(lambda x: jax.nn.logsumexp(x, -1).sum() - chosen(x))(logits)

    plan = plan_of(gradients, [COLUMNS, WHOLE], (64, 4096), (64,), wanted=lambda own: own)
    assert zeros_in(plan) == [COLUMNS] and plan.results == (COLUMNS,)


def table_gradient(ids, cotangents):
    rows = jnp.zeros((4096, 64), jnp.bfloat16).at[ids.astype(jnp.int32)].add(cotangents)
    return rows.astype(jnp.float32)


@pytest.mark.parametrize("wanted", [ROWS, WHOLE])
def test_gradients_of_a_table_are_added_to_what_is_wanted(wanted):
    plan = plan_of(table_gradient, [WHOLE, WHOLE], (32,), (32, 64), wanted=lambda _: wanted)
    assert zeros_in(plan) == [wanted] and sent(plan) == []


def test_one_gather_of_an_activation_serves_several_products():
    """Each of the weights is smaller than the activation, all of them together are larger."""
    x, w, size = (2048, 512), (512, 1536), 2048 * 512 * 2

    def function(x, a, b, c):
        return x @ a, x @ b, x @ c

    columns = lambda _: COLUMNS
    plan = plan_of(function, [ROWS, COLUMNS, COLUMNS, COLUMNS], x, w, w, w, wanted=columns)
    assert sent(plan) == [("all_gather", x, (P - 1) / P * size)]


def test_a_sum_is_scattered_where_its_readers_are_split():
    """The residual connection, whose other operand is split along the sequence, and the norm before it."""
    x, size = (2048, 512), 2048 * 512 * 2
    plan = plan_of(lambda x, y, w: x + norm(y @ w), [ROWS, COLUMNS, ROWS], x, x, (512, 512))
    assert sent(plan) == [("reduce_scatter", x, (P - 1) / P * size)]
    assert plan.results == (ROWS,)


def test_a_sum_is_taken_once_for_a_norm_and_the_residual_connection_around_it():
    """In its narrow type: not in float32 for the norm and again for the other."""
    x, size = (2048, 512), 2048 * 512 * 2
    plan = plan_of(lambda y, w: ((z := y @ w), z + norm(z))[1], [COLUMNS, ROWS], x, (512, 512), wanted=lambda _: WHOLE)
    assert sum(count for _, _, count in sent(plan)) == 2 * (P - 1) / P * size


def test_a_narrowing_cast_is_of_the_sum():
    """Or the result would be less exact than that of one device."""
    for wanted in (WHOLE, ROWS):
        cast, wants = lambda x, w: (x @ w).astype(jnp.bfloat16), lambda _, wanted=wanted: wanted
        plan = plan_of(cast, [COLUMNS, ROWS], (2048, 512), (512, 256), wanted=wants, dtype=jnp.float32)
        conversions = [c for e in plan.equations for c in e.conversions] + [*plan.conversions]
        (summed,) = [plan.flat.avals[c.value].dtype for c in conversions if PARTIAL in c.now]
        assert summed == jnp.float32


def rules_alone(function, lying, *shapes):
    """What the rules say without looking ahead: how much is sent."""
    jaxpr = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes])
    return Chooser(AXES, HANDLERS).by_rules(flatten(jaxpr), lying, [summed] * len(jaxpr.jaxpr.outvars)).cost


@pytest.mark.parametrize("seed", range(20))
def test_it_costs_at_most_what_the_rules_alone_would(seed):
    rng = np.random.default_rng(seed)
    weights = [tuple(int(n) for n in rng.choice([64, 512, 4096], 2)) for _ in range(3)]

    def function(x, *weights):
        y = x
        for i, w in enumerate(weights):
            y = norm(jnp.tanh(y[:, : w.shape[0]] @ w if w.shape[0] <= y.shape[1] else y @ w[: y.shape[1]]))
            y = y + y.mean() if i % 2 else y
        return y, x.sum()

    lying = [[WHOLE, ROWS, COLUMNS][i] for i in rng.integers(0, 3, 4)]
    shapes = [(2048, 512), *weights]
    assert plan_of(function, lying, *shapes).cost <= rules_alone(function, lying, *shapes)


@pytest.mark.parametrize("examples", [1, 2, 4])
def test_what_was_gathered_for_one_product_is_there_for_the_next(examples):
    """Whether an activation is larger than each of its weights or not: they are all split, and it is one."""
    x, w = (examples, 2048, 1024), (1024, 1024)

    def projected(x, q, k, v):
        return jnp.tanh(x @ q), jnp.tanh(x @ k), jnp.tanh(x @ v)

    along = (Shard(1),)
    plan = plan_of(projected, [along, COLUMNS, COLUMNS, COLUMNS], x, w, w, w, wanted=lambda own: own)
    bytes_of = {1: 1024 * 1024 * 2 * 2, 2: 1024 * 1024 * 2 * 4, 4: 3 * 1024 * 1024 * 2}  # of x, or of all weights
    assert sum(count for *_, count in sent(plan)) <= (P - 1) / P * bytes_of[examples]
