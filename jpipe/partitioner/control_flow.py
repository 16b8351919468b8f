"""Carries out loops and branches on the parts of arrays that a device has.

A handler takes the chooser, an equation of whole arrays and how its operands lie, and returns how it is carried out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.jaxprs.flat_jaxpr import FlatJaxpr, aval_of
from jpipe.jaxprs.tracing import uses
from jpipe.partitioner.choice import Chooser, Handler, always
from jpipe.partitioner.prices import price
from jpipe.partitioner.shardings import REPLICATED, Shape, Shard, Sharding, is_possible, names_of, replicated, summed
from jpipe.partitioner.way import Axes, DevicePlan, Way
from jpipe.seam.inside import scan_counts
from jpipe.seam.primitives import JaxprEqn


def _combined(now: Sharding, other: Sharding, shape: Shape, axes: Axes) -> Sharding:
    """Joins two shardings: the first, and the other where that is replicated, if an array of the shape can lie so."""
    both = tuple(b if a == REPLICATED else a for a, b in zip(now, other, strict=True))
    return both if is_possible(shape, both, axes) else now


def _loop_shardings(
    chooser: Chooser,
    body: FlatJaxpr,
    consts: Sequence[Sharding],
    carry: Sequence[Sharding],
    slices: Sequence[Sharding],
    fixed: Collection[int],
) -> tuple[list[Sharding], list[Sharding]]:
    """Finds how a loop's carry lies before and after every iteration, and how all results of its body lie.

    They are found by trying: whatever an iteration leaves split, or partial, has to lie so from the start. For the body
    (a, b, c) -> (b, c, c @ w) with w split along its second dimension, and all replicated before the loop:

        a           b           c           an iteration leaves
        replicated  replicated  replicated  replicated  replicated  Shard(1)
        replicated  replicated  Shard(1)    replicated  Shard(1)    Shard(1)
        replicated  Shard(1)    Shard(1)    Shard(1)    Shard(1)    Shard(1)
        Shard(1)    Shard(1)    Shard(1)    Shard(1)    Shard(1)    Shard(1)    as it was: found

    Each part of the carry changes at most once for each axis, from replicated to something else, so that this ends.
    A part that an iteration leaves otherwise in the end (a Shard(0) where it lies as Shard(1)) is converted in each
    iteration. Constants and slices are never partial: a body may use them often.

    Args:
      chooser: of the equation around it.
      body: (constants, carry, slices) -> (carry, ...).
      consts: how the constants lie.
      carry: how the carry lies before the loop.
      slices: how the slices lie.
      fixed: the indices of the parts of the carry that stay as they lie before the loop.
    """
    carry = list(carry)
    shapes = [body.avals[value].shape for value in body.arguments[len(consts) : len(consts) + len(carry)]]
    while True:
        results = chooser.results_at(body, (*consts, *carry, *slices))
        parts = enumerate(zip(carry, results, shapes, strict=False))
        new = [a if i in fixed else _combined(a, b, shape, chooser.axes) for i, (a, b, shape) in parts]
        if new == carry:
            return carry, results
        carry = new


def _scan(chooser: Chooser, equation: JaxprEqn, lying: Sequence[Sharding]) -> Way:
    """Carries out a loop over the first dimension, which is gathered; other dimensions stay split.

    Operands: constants, carry, stacked slices `[length, ...]`. Results: carry, stacked results `[length, ...]`.
    """
    params = equation.params
    (num_consts, num_carry), body = scan_counts(equation), chooser.flat(params["jaxpr"])
    first_slice = num_consts + num_carry
    shardings = list(map(summed, lying))
    consts, slices = shardings[:num_consts], list(map(_of_slice, shardings[first_slice:]))
    carry, results = _loop_shardings(chooser, body, consts, shardings[num_consts:first_slice], slices, ())
    of_each = results[num_carry:]
    plan = chooser.make_plan(body, [*consts, *carry, *slices], list(map(always, [*carry, *of_each])))

    def run(*parts: jax.Array) -> list[jax.Array]:
        def iteration(state: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            made = plan.run(*parts[:num_consts], *state, *xs)
            return made[:num_carry], made[num_carry:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        state, ys = lax.scan(iteration, list(parts[num_consts:first_slice]), list(parts[first_slice:]), **options)
        return [*state, *ys]

    operands = (*consts, *carry, *map(_of_stacked, slices))
    times = float(params["length"])
    return Way(operands, (*carry, *map(_of_stacked, of_each)), run, times * plan.cost, ((plan, times),))


def _of_slice(stacked: Sharding) -> Sharding:
    """Makes the sharding of slices `[...]` of an array `[length, ...]` whose first dimension is gathered."""
    without_first = lambda s: Shard(s.dim - 1, s.outer) if s.dim else REPLICATED
    return tuple(without_first(s) if isinstance(s, Shard) else s for s in stacked)


def _of_stacked(slices: Sharding) -> Sharding:
    """Makes the sharding of slices stacked along a new first dimension: the reverse of `_of_slice`."""
    return tuple(Shard(s.dim + 1, s.outer) if isinstance(s, Shard) else s for s in slices)


def _while(chooser: Chooser, equation: JaxprEqn, lying: Sequence[Sharding]) -> Way:
    """Carries out a loop whose condition looks at replicated values alone.

    Operands: constants of the condition, constants of the body, carry. Results: carry.
    """
    params, whole = equation.params, replicated(chooser.axes)
    num_tested, first_carry = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    many = params["cond_jaxpr"].out_avals[0].shape != ()  # several loops at once, as `jax.vmap` makes them
    fixed = [i for i, is_looked_at in enumerate(uses(params["cond_jaxpr"])[num_tested:]) if many or is_looked_at]
    shardings = list(map(summed, lying))
    consts = shardings[num_tested:first_carry]
    carry = [whole if i in fixed else s for i, s in enumerate(shardings[first_carry:])]
    body, cond = chooser.flat(params["body_jaxpr"]), chooser.flat(params["cond_jaxpr"])
    carry, _ = _loop_shardings(chooser, body, consts, carry, [], fixed)
    test = chooser.make_plan(cond, [*[whole] * num_tested, *carry], [always(whole)])
    plan = chooser.make_plan(body, [*consts, *carry], list(map(always, carry)))

    def run(*parts: jax.Array) -> list[jax.Array]:
        tested, constants = parts[:num_tested], parts[num_tested:first_carry]

        def goes_on(state: list[jax.Array]) -> jax.Array:
            return _agreed(test.run(*tested, *state)[0], chooser.axes, [plan])

        def iteration(state: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
            going, old = state
            new = plan.run(*constants, *old)
            if many:  # those that have ended stay as they are
                spread = lambda x: lax.broadcast_in_dim(going, x.shape, range(going.ndim))
                new = [jnp.where(spread(a), a, b) for a, b in zip(new, old, strict=True)]
            return goes_on(new), new

        start = list(parts[first_carry:])
        return lax.while_loop(lambda state: jnp.any(state[0]), iteration, (goes_on(start), start))[1]

    operands = (*[whole] * num_tested, *consts, *carry)
    return Way(operands, tuple(carry), run, test.cost + plan.cost, ((test, 1.0), (plan, 1.0)))


def _cond(chooser: Chooser, equation: JaxprEqn, lying: Sequence[Sharding]) -> Way:
    """Branches on a replicated index; where they leave a result lying differently, it is brought together.

    Operands: the index of the branch, the operands of all branches.
    """
    branches, whole = list(map(chooser.flat, equation.params["branches"])), replicated(chooser.axes)
    shardings = list(map(summed, lying[1:]))
    results, *others = [chooser.results_at(branch, tuple(shardings)) for branch in branches]
    for of_branch in others:
        pairs = zip(results, of_branch, equation.outvars, strict=True)
        results = [_combined(a, b, aval_of(v).shape, chooser.axes) for a, b, v in pairs]
    plans = [chooser.make_plan(branch, shardings, list(map(always, results))) for branch in branches]

    def run(index: jax.Array, *parts: jax.Array) -> list[jax.Array]:
        if platforms := equation.params.get("branches_platforms"):  # of `jax.lax.platform_dependent`: names, or None
            named_plans = list(zip(platforms, plans, strict=True))
            of_platforms = {name: plan.run for names, plan in named_plans for name in names or ()}
            default = next((plan.run for names, plan in named_plans if names is None), None)
            return lax.platform_dependent(*parts, default=default, **of_platforms)
        which = _agreed(index, chooser.axes, plans)
        return lax.switch(which, [plan.run for plan in plans], *parts)

    cost = max((plan.cost for plan in plans), key=lambda cost: price(chooser.prices, cost))
    return Way((whole, *shardings), tuple(results), run, cost, tuple((plan, 1.0) for plan in plans))


def _agreed(decision: jax.Array, axes: Axes, plans: Sequence[DevicePlan]) -> jax.Array:
    """Makes a decision, such as whether a loop goes on, the same on all devices along the axes.

    Replicated values should be equal, but those that a callback or an unordered sum made may not be to the last
    bit; then one device would wait in a collective for others that never come.

    Args:
      decision: a replicated bool or integer.
      axes: what arrays are split over.
      plans: of what is decided; if nothing is sent in them, devices need not agree.
    """
    if not any(plan.sends for plan in plans):
        return decision
    return lax.pmax(decision.astype(jnp.int32), names_of(axes)).astype(decision.dtype)


CONTROL_FLOW: dict[str, Handler] = {"scan": _scan, "while": _while, "cond": _cond}
"""The handlers of equations that hold jaxprs, by the name of the primitive."""
