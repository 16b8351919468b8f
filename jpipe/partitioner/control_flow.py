"""Loops, branches and calls on the parts of arrays that a device has; the handlers of equations that hold jaxprs.

A handler takes the interpreter, an equation of whole arrays and its operands, and returns the results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.jax_tools.jaxprs import uses
from jpipe.partitioner.parts_interpreter import Axes, DeviceValue, Handler, PartsInterpreter
from jpipe.partitioner.rule import aval_of
from jpipe.partitioner.shardings import REPLICATED, Shape, Shard, Sharding, is_possible, replicated, settled
from jpipe.seam.inside import called_by, scan_counts
from jpipe.seam.jaxpr_types import ClosedJaxpr, JaxprEqn
from jpipe.seam.primitives import CALLS


def _call(interpreter: PartsInterpreter, equation: JaxprEqn, operands: list[DeviceValue]) -> list[DeviceValue]:
    """A jaxpr that is only called: as if its equations stood in the caller's place."""
    return interpreter.run(called_by(equation), operands)


def _on_parts(
    interpreter: PartsInterpreter, jaxpr: ClosedJaxpr, arguments: list[Sharding], results: list[Sharding]
) -> Callable[..., list[jax.Array]]:
    """A jaxpr of whole arrays as a function of this device's parts; arguments and results lie so."""
    return lambda *parts: interpreter.parts_of(interpreter.run(jaxpr, interpreter.values(parts, arguments)), results)


def _combined(now: Sharding, other: Sharding, shape: Shape, axes: Axes) -> Sharding:
    """The first sharding, but along the axes where it is replicated the other, if an array of the shape can lie so."""
    both = tuple(b if a == REPLICATED else a for a, b in zip(now, other, strict=True))
    return both if is_possible(shape, both, axes) else now


def _loop_shardings(
    interpreter: PartsInterpreter,
    body: ClosedJaxpr,
    consts: list[Sharding],
    carry: list[Sharding],
    slices: list[Sharding],
    fixed: Collection[int],
) -> tuple[list[Sharding], list[Sharding]]:
    """How a loop's carry lies before and after every iteration, and how all results of its body lie by themselves.

    Found by trying: what an iteration leaves split, or partial, has to lie so from the start. For the body
    (a, b, c) -> (b, c, c @ w) with w split along its second dimension, and all replicated before the loop:

        a           b           c           an iteration leaves
        replicated  replicated  replicated  replicated  replicated  Shard(1)
        replicated  replicated  Shard(1)    replicated  Shard(1)    Shard(1)
        replicated  Shard(1)    Shard(1)    Shard(1)    Shard(1)    Shard(1)
        Shard(1)    Shard(1)    Shard(1)    Shard(1)    Shard(1)    Shard(1)    as it was: found

    Each part of the carry changes at most once for each axis, from replicated to something else, so that this ends.
    What it doesn't leave so in the end (a Shard(0) where it lies as Shard(1)) is converted in each iteration. Constants
    and slices are never partial: a body may use them often.

    Args:
      interpreter: of the equation around it.
      body: (constants, carry, slices) -> (carry, ...).
      consts: how the constants lie.
      carry: how the carry lies before the loop.
      slices: how the slices lie.
      fixed: the indices of the parts of the carry that stay as they lie before the loop.
    """
    shapes = [aval_of(v).shape for v in body.jaxpr.invars[len(consts) : len(consts) + len(carry)]]
    while True:
        results = interpreter.shardings_of(body, [*consts, *carry, *slices])
        known = enumerate(zip(carry, results, shapes, strict=False))
        new = [a if i in fixed else _combined(a, b, shape, interpreter.axes) for i, (a, b, shape) in known]
        if new == carry:
            return carry, results
        carry = new


def _scan(interpreter: PartsInterpreter, equation: JaxprEqn, operands: list[DeviceValue]) -> list[DeviceValue]:
    """A loop over the first dimension, which is gathered; other dimensions stay split.

    Operands: constants, carry, stacked slices `[length, ...]`. Results: carry, stacked results `[length, ...]`.
    """
    p = equation.params
    (num_consts, num_carry), jaxpr = scan_counts(equation), p["jaxpr"]
    first_slice = num_consts + num_carry
    shardings = [settled(value.sharding) for value in operands]
    consts, slices = shardings[:num_consts], [_of_slice(s) for s in shardings[first_slice:]]
    carry, results = _loop_shardings(interpreter, jaxpr, consts, shardings[num_consts:first_slice], slices, ())
    of_each = results[num_carry:]
    parts = interpreter.parts_of(operands, [*consts, *carry, *map(_of_stacked, slices)])
    body = _on_parts(interpreter, jaxpr, [*consts, *carry, *slices], [*carry, *of_each])

    def iteration(state: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        found = body(*parts[:num_consts], *state, *xs)
        return found[:num_carry], found[num_carry:]

    options = {name: p[name] for name in ("length", "reverse", "unroll")}
    state, ys = lax.scan(iteration, parts[num_consts:first_slice], parts[first_slice:], **options)
    return interpreter.values([*state, *ys], [*carry, *map(_of_stacked, of_each)])


def _of_slice(stacked: Sharding) -> Sharding:
    """The sharding of the slices `[...]` of an array `[length, ...]` whose first dimension is gathered."""
    without_first = lambda s: Shard(s.dim - 1, s.outer) if s.dim else REPLICATED
    return tuple(without_first(s) if isinstance(s, Shard) else s for s in stacked)


def _of_stacked(slices: Sharding) -> Sharding:
    """The sharding of slices stacked along a new first dimension: the reverse of `_of_slice`."""
    return tuple(Shard(s.dim + 1, s.outer) if isinstance(s, Shard) else s for s in slices)


def _while(interpreter: PartsInterpreter, equation: JaxprEqn, operands: list[DeviceValue]) -> list[DeviceValue]:
    """A loop whose condition looks at replicated values alone.

    Operands: constants of the condition, constants of the body, carry. Results: carry.
    """
    p = equation.params
    first_carry = p["cond_nconsts"] + p["body_nconsts"]
    body_consts = slice(p["cond_nconsts"], first_carry)
    whole = replicated(interpreter.axes)
    many = p["cond_jaxpr"].out_avals[0].shape != ()  # several loops at once, as `jax.vmap` makes them
    looked_at = uses(p["cond_jaxpr"])[p["cond_nconsts"] :]
    fixed = [i for i, is_looked_at in enumerate(looked_at) if many or is_looked_at]
    shardings = [settled(value.sharding) for value in operands]
    consts = shardings[body_consts]
    carry = [whole if i in fixed else s for i, s in enumerate(shardings[first_carry:])]
    carry, _ = _loop_shardings(interpreter, p["body_jaxpr"], consts, carry, [], fixed)
    cond_shardings = [whole] * p["cond_nconsts"]
    parts = interpreter.parts_of(operands, [*cond_shardings, *consts, *carry])
    test = _on_parts(interpreter, p["cond_jaxpr"], [*cond_shardings, *carry], [whole])
    body = _on_parts(interpreter, p["body_jaxpr"], [*consts, *carry], carry)
    goes_on = lambda state: interpreter.agreed(test(*parts[: p["cond_nconsts"]], *state)[0], [*consts, *carry])

    def iteration(state: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        going, old = state
        new = body(*parts[body_consts], *old)
        if many:  # those that have ended stay as they are
            spread = lambda x: lax.broadcast_in_dim(going, x.shape, range(going.ndim))
            new = [jnp.where(spread(a), a, b) for a, b in zip(new, old, strict=True)]
        return goes_on(new), new

    start = parts[first_carry:]
    state = lax.while_loop(lambda state: jnp.any(state[0]), iteration, (goes_on(start), start))[1]
    return interpreter.values(state, carry)


def _cond(interpreter: PartsInterpreter, equation: JaxprEqn, operands: list[DeviceValue]) -> list[DeviceValue]:
    """Branches on a replicated index; where they leave a result lying differently, it is brought together.

    Operands: the index of the branch, the operands of all branches.
    """
    branches = equation.params["branches"]
    index, *rest = operands
    whole, shardings = replicated(interpreter.axes), [settled(value.sharding) for value in rest]
    results, *others = [interpreter.shardings_of(branch, shardings) for branch in branches]
    for found in others:
        pairs = zip(results, found, equation.outvars, strict=True)
        results = [_combined(a, b, aval_of(v).shape, interpreter.axes) for a, b, v in pairs]
    runs = [_on_parts(interpreter, branch, shardings, results) for branch in branches]
    which = interpreter.agreed(index.part(whole, interpreter.axes), [*shardings, *results])
    return interpreter.values(lax.switch(which, runs, *interpreter.parts_of(rest, shardings)), results)


CONTROL_FLOW: dict[str, Handler] = {**dict.fromkeys(CALLS, _call), "scan": _scan, "while": _while, "cond": _cond}
"""The handlers of equations that hold jaxprs, by the name of the primitive."""
