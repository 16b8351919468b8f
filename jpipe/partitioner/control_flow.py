"""Loops, branches and calls on the parts of arrays that a device has; the handlers of equations that hold jaxprs.

A handler takes the partitioner, an equation of whole arrays and its operands, and returns the results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.partitioner.equations import Handler, Partitioner, Value
from jpipe.partitioner.rule_result import aval_of
from jpipe.partitioner.shardings import REPLICATED, Shard, Sharding, is_possible, replicated, settled
from jpipe.seam.inside import called_by, scan_counts
from jpipe.seam.jaxpr_types import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jpipe.seam.primitives import CALLS


def _call(partitioner: Partitioner, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """A jaxpr that is only called: as if its equations stood in the caller's place."""
    return partitioner.run(called_by(equation), operands)


def _on_parts(
    partitioner: Partitioner, jaxpr: ClosedJaxpr | Jaxpr, arguments: Sequence[Sharding], results: Sequence[Sharding]
) -> Callable[..., list[jax.Array]]:
    """A jaxpr of whole arrays as a function of this device's parts; arguments and results lie so."""
    return lambda *parts: partitioner.parts_of(partitioner.run(jaxpr, partitioner.values(parts, arguments)), results)


def _combined(now: Sharding, other: Sharding) -> Sharding:
    """The first sharding, but along the axes where it is replicated the other."""
    return tuple(b if a == REPLICATED else a for a, b in zip(now, other, strict=True))


def _loop_shardings(
    partitioner: Partitioner,
    body: ClosedJaxpr | Jaxpr,
    consts: list[Sharding],
    carry: list[Sharding],
    slices: list[Sharding],
    fixed: Collection[int],
) -> tuple[list[Sharding], list[Sharding]]:
    """How a loop's carry lies before and after every iteration, and how all results of its body lie by themselves.

    Found by trying: what an iteration leaves split, or partial, has to lie so from the start. Each part of the carry
    changes at most once for each axis, so that this ends. Constants and slices are never partial: a body may use them
    often.

    Args:
      partitioner: the partitioner.
      body: (constants, carry, slices) -> (carry, ...).
      consts: how the constants lie.
      carry: how the carry lies before the loop.
      slices: how the slices lie.
      fixed: the indices of the parts of the carry that stay as they lie before the loop.
    """
    avals = [aval_of(v) for v in (body.jaxpr if isinstance(body, ClosedJaxpr) else body).invars]
    shapes = [aval.shape for aval in avals[len(consts) : len(consts) + len(carry)]]
    while True:
        results = partitioner.shardings_of(body, avals, [*consts, *carry, *slices])
        new = [_combined(now, left) for now, left in zip(carry, results, strict=False)]
        keeps = [i in fixed or not is_possible(shapes[i], s, partitioner.axes) for i, s in enumerate(new)]
        new = [a if keep else b for a, b, keep in zip(carry, new, keeps, strict=True)]
        if new == carry:
            return carry, results
        carry = new


def _scan(partitioner: Partitioner, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """A loop over the first dimension, which is gathered; other dimensions stay split.

    Operands: constants, carry, stacked slices `[length, ...]`. Results: carry, stacked results `[length, ...]`.
    """
    p = equation.params
    (num_consts, num_carry), jaxpr = scan_counts(equation), p["jaxpr"]
    first_slice = num_consts + num_carry
    shardings = [settled(value.sharding) for value in operands]
    consts, stacked = shardings[:num_consts], [_first_gathered(s) for s in shardings[first_slice:]]
    slices = [_with_dims_moved(s, -1) for s in stacked]
    carry, results = _loop_shardings(partitioner, jaxpr, consts, shardings[num_consts:first_slice], slices, ())
    of_each = results[num_carry:]
    parts = partitioner.parts_of(operands, [*consts, *carry, *stacked])
    body = _on_parts(partitioner, jaxpr, [*consts, *carry, *slices], [*carry, *of_each])

    def iteration(state: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        found = body(*parts[:num_consts], *state, *xs)
        return found[:num_carry], found[num_carry:]

    state, ys = lax.scan(
        iteration,
        parts[num_consts:first_slice],
        parts[first_slice:],
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    return partitioner.values([*state, *ys], [*carry, *[_with_dims_moved(s, 1) for s in of_each]])


def _first_gathered(sharding: Sharding) -> Sharding:
    """The sharding of an array once its first dimension isn't split any more."""
    return tuple(REPLICATED if isinstance(s, Shard) and s.dim == 0 else s for s in sharding)


def _with_dims_moved(sharding: Sharding, by: int) -> Sharding:
    """The sharding of an array with one more dimension in front (by=1), or without the first, unsplit one (by=-1)."""
    return tuple(Shard(s.dim + by, s.outer) if isinstance(s, Shard) else s for s in sharding)


def _while(partitioner: Partitioner, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """A loop whose condition looks at replicated values alone.

    Operands: constants of the condition, constants of the body, carry. Results: carry.
    """
    p = equation.params
    first_carry = p["cond_nconsts"] + p["body_nconsts"]
    body_consts = slice(p["cond_nconsts"], first_carry)
    whole = replicated(partitioner.axes)
    condition = p["cond_jaxpr"].jaxpr
    many = condition.outvars[0].aval.shape != ()  # several loops at once, as `jax.vmap` makes them
    fixed = set(range(len(operands) - first_carry)) if many else _looked_at(condition, p["cond_nconsts"])
    shardings = [settled(value.sharding) for value in operands]
    consts = shardings[body_consts]
    carry = [whole if i in fixed else s for i, s in enumerate(shardings[first_carry:])]
    carry, _ = _loop_shardings(partitioner, p["body_jaxpr"], consts, carry, [], fixed)
    cond_shardings = [whole] * p["cond_nconsts"]
    parts = partitioner.parts_of(operands, [*cond_shardings, *consts, *carry])
    test = _on_parts(partitioner, p["cond_jaxpr"], [*cond_shardings, *carry], [whole])
    body = _on_parts(partitioner, p["body_jaxpr"], [*consts, *carry], carry)
    goes_on = lambda state: partitioner.agreed(test(*parts[: p["cond_nconsts"]], *state)[0], [*consts, *carry])

    def iteration(state: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        going, old = state
        new = body(*parts[body_consts], *old)
        if many:  # those that have ended stay as they are
            spread = lambda x: lax.broadcast_in_dim(going, x.shape, range(going.ndim))
            new = [jnp.where(spread(a), a, b) for a, b in zip(new, old, strict=True)]
        return goes_on(new), new

    start = parts[first_carry:]
    state = lax.while_loop(lambda state: jnp.any(state[0]), iteration, (goes_on(start), start))[1]
    return partitioner.values(state, carry)


def _looked_at(condition: Jaxpr, num_consts: int) -> set[int]:
    """The indices of the parts of the carry that the condition of a loop looks at."""
    used = [v for e in condition.eqns for v in e.invars] + list(condition.outvars)
    known = {v for v in used if not isinstance(v, Literal)}
    return {i for i, v in enumerate(condition.invars[num_consts:]) if v in known}


def _cond(partitioner: Partitioner, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Branches on a replicated index; where they leave a result lying differently, it is brought together.

    Operands: the index of the branch, the operands of all branches.
    """
    branches = equation.params["branches"]
    index, *rest = operands
    whole, shardings = replicated(partitioner.axes), [settled(value.sharding) for value in rest]
    avals = [aval_of(v) for v in equation.invars[1:]]
    by_branch = [partitioner.shardings_of(branch, avals, shardings) for branch in branches]
    results = []
    for v, by_result in zip(equation.outvars, zip(*by_branch, strict=True), strict=True):
        common = reduce(_combined, by_result)
        results.append(common if is_possible(aval_of(v).shape, common, partitioner.axes) else whole)
    runs = [_on_parts(partitioner, branch, shardings, results) for branch in branches]
    which = partitioner.agreed(index.part(whole, partitioner.axes), [*shardings, *results])
    return partitioner.values(lax.switch(which, runs, *partitioner.parts_of(rest, shardings)), results)


CONTROL_FLOW: dict[str, Handler] = {**dict.fromkeys(CALLS, _call), "scan": _scan, "while": _while, "cond": _cond}
"""The handlers of equations that hold jaxprs, by the name of the primitive."""
