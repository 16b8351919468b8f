"""Loops, branches and calls on parts of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jpipe.jaxprs.flat_jaxpr import flatten
from jpipe.partitioner import choice, per_device
from jpipe.partitioner.by_rule import way_by_rule
from jpipe.partitioner.choice import Chooser
from jpipe.partitioner.control_flow import CONTROL_FLOW
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import REPLICATED, Axis, Shard
from partitioned import array, case, compare, integers


def rnn(x, w):
    advance = lambda h, a: ((h := jnp.tanh(h @ w + a)), h)
    return lax.scan(advance, jnp.zeros((x.shape[0], w.shape[0])), x.swapaxes(0, 1))[1]


def backwards_scan(x, w):
    return lax.scan(lambda h, a: (h * w.sum() + a.mean(), a * 2), jnp.zeros(x.shape[1:]), x, reverse=True)


def until(x, w):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1]


def each_until(n, x):
    return jax.vmap(lambda m, a: lax.while_loop(lambda s: s[0] < m, lambda s: (s[0] + 1, s[1] * 2 + 1), (0, a))[1])(
        n, x
    )


def branches(x, w):
    return lax.switch(jnp.asarray(1), [lambda x: x @ w, lambda x: jnp.sin(x) @ w, lambda x: x[..., :8] * 2 + w[0]], x)


def checkpointed(x, w):
    return jax.checkpoint(lambda x: jax.nn.gelu(jax.nn.silu(x @ w)), policy=jax.checkpoint_policies.dots_saveable)(x)


CASES = {
    "rnn": case(rnn, array(4, 6, 8), array(8, 8)),
    "scan backwards": case(backwards_scan, array(4, 6, 8), array(2)),
    "while": case(until, array(4, 8), array(8, 8), gradients=False),
    "vmapped while": case(each_until, integers(5, 4), array(4, 6), gradients=False),
    "cond": case(branches, array(4, 8), array(8, 8)),
    "checkpoint": case(checkpointed, array(4, 6, 8), array(8, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(make_mesh, name):
    compare(make_mesh, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_however_arguments_lie(make_mesh, name):
    compare(make_mesh, CASES[name], 40, 40)


def test_branches_by_platform(make_mesh):
    """A regression: the branches of other platforms were lowered too."""
    mesh = make_mesh((2,), ("model",))

    def function(x):
        return jax.lax.platform_dependent(x, tpu=lambda x: x * 0, cpu=jnp.sin, default=jnp.cos)

    on_parts = per_device(function, mesh, PartitionSpec("model"), PartitionSpec("model"))
    specs = {"in_specs": PartitionSpec("model"), "out_specs": PartitionSpec("model")}
    x = np.arange(4, dtype=np.float32)
    found = jax.jit(jax.shard_map(on_parts, mesh=mesh, check_vma=False, **specs))(x)
    np.testing.assert_allclose(found, np.sin(x), rtol=1e-6)


def test_nested_loops_are_planned_in_time(monkeypatch):
    """A regression: each level asked three times for what is in it; six levels took a minute."""
    function = jnp.tanh
    for _ in range(6):
        function = lambda x, inner=function: jax.lax.scan(lambda c, _: (inner(c), None), x, length=2)[0]
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: function(x).sum()))(np.ones((4, 4), np.float32))
    asked = []

    def counted(equation, *arguments, **options):
        asked.append(equation)
        return way_by_rule(equation, *arguments, **options)

    monkeypatch.setattr(choice, "way_by_rule", counted)
    Chooser((Axis(("model",), (2,)),), CONTROL_FLOW).make_plan(flatten(jaxpr), [(Shard(0),)], [lambda s: s])
    assert 0 < len(asked) < 1000


def test_devices_agree_where_branches_send():
    """A regression: not where operands were replicated, though random bits are split over data axes."""

    def function(x, key):
        return jax.lax.cond(x.sum() > 0, lambda: jnp.sort(jax.random.normal(key, (8,))), lambda: jnp.zeros(8))

    axes = (Axis(("data",), (2,), is_data=True),)
    jaxpr = jax.make_jaxpr(function)(np.ones(4, np.float32), jax.random.key(0))
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("data",), axis_types=(AxisType.Manual,))):
        program = jaxpr_per_device(jaxpr, axes, [(REPLICATED,)] * 2, [lambda _: (REPLICATED,)])
    assert "pmax" in str(program.jaxpr) and "all_gather" in str(program.jaxpr)
