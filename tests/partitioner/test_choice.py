"""Plans: which way is taken, by bytes that are worked out here by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.jaxprs.flat_jaxpr import flatten
from jpipe.partitioner.choice import Chooser
from jpipe.partitioner.control_flow import CONTROL_FLOW
from jpipe.partitioner.prices import PRICES, price
from jpipe.partitioner.shardings import PARTIAL, Shard, summed
from planned import AXES, COLUMNS, ROWS, WHOLE, P, norm, plan_of, sent


def test_of_two_operands_the_smaller_one_is_sent():
    """Both are split along a dimension of their own; products that follow want the result as the weights say."""
    large, small = (4096, 512), (512, 512)
    size = 512 * 512 * 2
    gathered = plan_of(jnp.dot, [ROWS, COLUMNS], large, small)
    assert sent(gathered) == [("all_gather", small, (P - 1) / P * size)]
    assert gathered.results == (ROWS,)
    ((kind, shape, _),) = sent(plan_of(jnp.dot, [ROWS, COLUMNS], small, (512, 4096)))
    assert (kind, shape) == ("all_gather", small)


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


def test_what_a_product_takes_whole_is_summed_and_not_scattered_and_gathered():
    """Both send the same; a compiler pads what is scattered, and joins what the split would save in the norm."""
    x, size = (2048, 512), 2048 * 512 * 2

    def block(x, y, a, b):
        z = x + y @ a
        return z, norm(z) @ b

    lying = [WHOLE, COLUMNS, ROWS, COLUMNS]
    plan = plan_of(block, lying, x, x, (512, 512), (512, 2048), wanted=lambda own: WHOLE if own != COLUMNS else own)
    assert sent(plan) == [("all_reduce", x, 2 * (P - 1) / P * size)]


def test_a_narrowing_cast_is_of_the_sum():
    """Or the result would be less exact than that of one device."""
    for wanted in (WHOLE, ROWS):
        cast, wants = lambda x, w: (x @ w).astype(jnp.bfloat16), lambda _, wanted=wanted: wanted
        plan = plan_of(cast, [COLUMNS, ROWS], (2048, 512), (512, 256), wanted=wants, dtype=jnp.float32)
        conversions = [c for e in plan.equations for c in e.conversions] + [*plan.conversions]
        (summed,) = [plan.flat.avals[c.value].dtype for c in conversions if PARTIAL in c.now]
        assert summed == jnp.float32


def test_a_cast_in_a_loop_is_of_a_sum():
    """What an iteration gives is read, though not in it."""
    x, w, size = (64, 512), (512, 512), 64 * 512 * 2

    def function(x, w):
        return jax.lax.scan(lambda carry, _: (carry, (x @ w).astype(jnp.float32)), 0, length=5)[1]

    (loop,) = [e.way for e in plan_of(function, [COLUMNS, ROWS], x, w).equations if e.way.plans]
    assert sent(loop.plans[0][0]) == [("all_reduce", x, 2 * (P - 1) / P * size)]


def test_nothing_is_computed_on_every_device_to_save_a_few_bytes():
    """Gathering two small weights sends less than adding up a large activation, but each device would do all."""
    x, w = (65536, 512), (512, 512)
    plan = plan_of(lambda x, a, b: jnp.tanh(x @ a) @ b, [WHOLE, COLUMNS, ROWS], x, w, w)
    products = [e for e in plan.equations if e.flat.equation.primitive.name == "dot_general"]
    assert not [e for e in products if set(e.way.operands) == {WHOLE}]


def rules_alone(function, lying, *shapes):
    """What the rules say without looking ahead: how much is sent."""
    jaxpr = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes])
    return Chooser(AXES, CONTROL_FLOW).by_rules(flatten(jaxpr), lying, [summed] * len(jaxpr.jaxpr.outvars)).cost


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
    assert price(PRICES, plan_of(function, lying, *shapes).cost) <= price(PRICES, rules_alone(function, lying, *shapes))


def test_partial_sums_are_left_where_they_are_wanted():
    plan = plan_of(jnp.dot, [COLUMNS, ROWS], (64, 512), (512, 512), wanted=lambda _: (PARTIAL,))
    assert sent(plan) == [] and plan.results == ((PARTIAL,),)


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
