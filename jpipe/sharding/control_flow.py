"""Loops, branches and calls on the parts of arrays that a device has: how what they carry lies, trip after trip."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jpipe.jax_tools.jaxprs import scan_counts
from jpipe.sharding.partitioner import Partitioner, Special, Value
from jpipe.sharding.shardings import REPLICATED, Shard, Sharding, is_possible, replicated, settled


def _call(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """A program that is only called: as if it stood in the caller's place."""
    params = equation.params
    return parts.run_closed(params.get("jaxpr", params.get("call_jaxpr")), operands)


def _meet(now: Sharding, new: Sharding) -> Sharding:
    """How a value that a loop carries has to lie from the start, if a trip leaves it lying so."""
    return tuple(b if a == REPLICATED else a for a, b in zip(now, new, strict=True))


def _body(parts: Partitioner, program: Any, shardings: Sequence[Sharding], given: Sequence[Sharding]) -> Callable:
    """A program as a function of a device's parts; its results lie as `given`."""
    return lambda *arrays: parts.arrays(parts.run_closed(program, parts.values(arrays, shardings)), given)


def _loop_shardings(
    parts: Partitioner,
    program: Any,
    before: list[Sharding],
    carry: list[Sharding],
    after: list[Sharding],
    fixed: Collection[int],
) -> tuple[list[Sharding], list[Sharding]]:
    """How the carried values of a loop lie in every trip, and how all results of its body lie by themselves.

    Found by trying: a carried value that a trip leaves split, or partial, has to lie so from the start. Each is changed
    at most once for each axis, so that this ends. Constants and slices are never partial: a body may use them often.

    Args:
      parts: the partitioner.
      program: the body, of (constants, carried values, slices).
      before: how its constants lie.
      carry: how the carried values lie at first.
      after: how the slices lie.
      fixed: the indices of carried values that have to be replicated.
    """
    avals = [v.aval for v in (program.jaxpr if isinstance(program, ClosedJaxpr) else program).invars]
    while True:
        results = parts.shardings_of(program, avals, [*before, *carry, *after])
        new = [
            now
            if i in fixed or not is_possible(avals[len(before) + i].shape, _meet(now, r), parts.axes)
            else _meet(now, r)
            for i, (now, r) in enumerate(zip(carry, results, strict=False))
        ]
        if new == carry:
            return carry, results
        carry = new


def _scan(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """A loop over the first dimension, which is gathered; other dimensions stay split."""
    p = equation.params
    (num_consts, num_carry), body = scan_counts(equation), p["jaxpr"]
    shardings = [settled(value.sharding) for value in operands]
    consts, carry = shardings[:num_consts], shardings[num_consts : num_consts + num_carry]
    stacked = [_moved(s, 0) for s in shardings[num_consts + num_carry :]]
    slices = [_moved(s, -1) for s in stacked]
    carry, results = _loop_shardings(parts, body, consts, carry, slices, ())
    out = results[num_carry:]
    arrays = parts.arrays(operands, [*consts, *carry, *stacked])
    run = _body(parts, body, [*consts, *carry, *slices], [*carry, *out])

    def trip(state: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        found = run(*arrays[:num_consts], *state, *xs)
        return found[:num_carry], found[num_carry:]

    state, ys = lax.scan(
        trip,
        arrays[num_consts : num_consts + num_carry],
        arrays[num_consts + num_carry :],
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    return parts.values([*state, *ys], [*carry, *[_moved(s, 1) for s in out]])


def _moved(sharding: Sharding, by: int) -> Sharding:
    """The sharding of an array with one more dimension in front (by=1), one less (-1), or that one gathered (0)."""
    keep = lambda p: Shard(p.dim + by, p.outer) if p.dim or by > 0 else REPLICATED
    return tuple(keep(p) if isinstance(p, Shard) else p for p in sharding)


def _while(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """A loop whose condition looks at replicated values alone."""
    p = equation.params
    num_cond, num_body = p["cond_nconsts"], p["body_nconsts"]
    whole = replicated(parts.axes)
    condition = p["cond_jaxpr"].jaxpr
    each = condition.outvars[0].aval.shape != ()  # of several loops at once, as `jax.vmap` makes them
    count = len(operands) - num_cond - num_body
    fixed = set(range(count)) if each else _looked_at(condition, num_cond)
    shardings = [settled(value.sharding) for value in operands]
    consts = shardings[num_cond : num_cond + num_body]
    carry = [whole if i in fixed else s for i, s in enumerate(shardings[num_cond + num_body :])]
    carry, _ = _loop_shardings(parts, p["body_jaxpr"], consts, carry, [], fixed)
    arrays = parts.arrays(operands, [*[whole] * num_cond, *consts, *carry])
    test = _body(parts, p["cond_jaxpr"], [*[whole] * num_cond, *carry], [whole])
    body = _body(parts, p["body_jaxpr"], [*consts, *carry], carry)
    goes_on = lambda state: parts.agreed(test(*arrays[:num_cond], *state)[0], [*consts, *carry])

    def trip(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        going, old = state
        new = body(*arrays[num_cond : num_cond + num_body], *old)
        if each:  # those that have ended stay as they are
            spread = lambda x: lax.broadcast_in_dim(going, x.shape, range(going.ndim))
            new = [jnp.where(spread(a), a, b) for a, b in zip(new, old, strict=True)]
        return goes_on(new), new

    start = arrays[num_cond + num_body :]
    state = lax.while_loop(lambda state: jnp.any(state[0]), trip, (goes_on(start), start))[1]
    return parts.values(state, carry)


def _looked_at(condition: Jaxpr, num_consts: int) -> set[int]:
    """The carried values that the condition of a loop looks at."""
    used = [v for e in condition.eqns for v in e.invars] + list(condition.outvars)
    known = {v for v in used if not isinstance(v, Literal)}
    return {i for i, v in enumerate(condition.invars[num_consts:]) if v in known}


def _cond(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """Branches on a replicated index; where they leave a result lying differently, it is brought together."""
    branches = equation.params["branches"]
    index, *rest = operands
    shardings = [settled(value.sharding) for value in rest]
    avals = [v.aval for v in equation.invars[1:]]
    found = [parts.shardings_of(branch, avals, shardings) for branch in branches]
    given = []
    for v, (first, *others) in zip(equation.outvars, zip(*found, strict=True), strict=True):
        for other in others:
            first = _meet(first, other)
        given.append(first if is_possible(v.aval.shape, first, parts.axes) else replicated(parts.axes))
    runs = [_body(parts, branch, shardings, given) for branch in branches]
    (which,) = parts.arrays([index], [replicated(parts.axes)])
    which = parts.agreed(which, [*shardings, *given])
    return parts.values(lax.switch(which, runs, *parts.arrays(rest, shardings)), given)


_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
LOOPS: dict[str, Special] = {**dict.fromkeys(_CALLS, _call), "scan": _scan, "while": _while, "cond": _cond}
"""Equations that hold programs."""
