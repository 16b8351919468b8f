"""Values that are better converted before any equation reads them, by bytes that are worked out here by hand."""

import jax
import jax.numpy as jnp
import pytest

from jpipe.jaxprs.flat_jaxpr import flatten
from jpipe.partitioner.choice import cheapest_plan
from jpipe.partitioner.control_flow import CONTROL_FLOW
from jpipe.partitioner.shardings import PARTIAL, Axis, Shard
from planned import COLUMNS, ROWS, WHOLE, P, plan_of, sent


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


def test_over_two_data_axes_it_is_scattered_along_one():
    axes = Axis(("data",), (2,), is_data=True), Axis(("fsdp",), (P,), is_data=True)
    rows, x, dy = (Shard(0), Shard(0, 2)), (2048, 512), (2048, 256)
    jaxpr = jax.make_jaxpr(lambda x, dy: (x.T @ dy).astype(jnp.float32))(*[jnp.ones(s, jnp.bfloat16) for s in (x, dy)])
    wanted = lambda _: (PARTIAL, Shard(0))
    plan = cheapest_plan(axes, CONTROL_FLOW, flatten(jaxpr), [rows, rows], [wanted])
    (scatter,) = [c for e in plan.equations for c in e.conversions]
    assert plan.flat.avals[scatter.value].dtype == jnp.bfloat16 and scatter.wanted == (PARTIAL, Shard(0))
    assert not plan.conversions and plan.results == ((PARTIAL, Shard(0)),)


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
