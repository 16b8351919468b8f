"""Plans of small functions along one axis of four devices, and what they send."""

import jax
import jax.numpy as jnp

from jpipe.jax.flat_jaxpr import flatten
from jpipe.partitioner.choice import cheapest_plan
from jpipe.partitioner.conversions import bytes_sent, collective_of, hops
from jpipe.partitioner.per_device import HANDLERS
from jpipe.partitioner.shardings import REPLICATED, Axis, Shard, summed

P = 4
AXES = (Axis(("model",), (P,)),)
WHOLE, ROWS, COLUMNS = (REPLICATED,), (Shard(0),), (Shard(1),)


def plan_of(function, lying, *shapes, wanted=summed, dtype=jnp.bfloat16):
    jaxpr = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])
    return cheapest_plan(AXES, HANDLERS, flatten(jaxpr), lying, [wanted] * len(jaxpr.jaxpr.outvars))


def sent(plan):
    """(collective, shape of the whole value, bytes) in order."""
    conversions = [c for equation in plan.equations for c in equation.conversions] + [*plan.conversions]
    found = []
    for value, now, wanted in conversions:
        aval = plan.flat.avals[value]
        for hop in hops(AXES, now, wanted):
            kind = collective_of(AXES, hop)
            if kind:
                found.append((kind, aval.shape, bytes_sent(AXES, aval.shape, aval.dtype.itemsize, hop)))
    return found


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True))).astype(x.dtype)
