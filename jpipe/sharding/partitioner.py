"""Carries out a traced program, equation by equation, on the parts of arrays that a device has.

What an equation does to shards is in `jpipe.sharding.rules`; equations that hold programs (loops, calls) are handed to
functions of their own, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jpipe.sharding.rule import Step
from jpipe.sharding.rules import RULES, local_params
from jpipe.sharding.shardings import (
    REPLICATED,
    Axis,
    Sharding,
    convert,
    is_possible,
    local_shape,
    local_struct,
    replicated,
    settled,
)

Axes = tuple[Axis, ...]


class Value:
    """An array as one device has it, in every sharding that was asked for."""

    def __init__(self, array: Any, sharding: Sharding):
        self.sharding = sharding
        self.forms = {sharding: array}

    def lying(self, sharding: Sharding, axes: Axes) -> Any:
        """The device's part under another sharding."""
        if sharding not in self.forms:
            self.forms[sharding] = convert(self.forms[self.sharding], axes, self.sharding, sharding)
            if sharding == settled(self.sharding):  # once added up, it needn't be added up again
                self.sharding = sharding
        return self.forms[sharding]


Special = Callable[["Partitioner", Any, list[Value]], list[Value]]
"""(partitioner, equation, operands) -> results."""


class Partitioner:
    """Carries out equations of whole arrays on the parts that a device has."""

    def __init__(self, axes: Axes, special: Mapping[str, Special]):
        self.axes = axes
        self.special = special

    def run(self, jaxpr: Jaxpr, constants: Sequence[Value], arguments: Sequence[Value]) -> list[Value]:
        """The results of a program."""
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
        read = lambda v: self._literal(v) if isinstance(v, Literal) else known[v]
        for equation in jaxpr.eqns:
            results = self.carry_out(equation, list(map(read, equation.invars)))
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def run_closed(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[Value]) -> list[Value]:
        """The results of a program that an equation holds."""
        jaxpr, constants = (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
        return self.run(jaxpr, [self.whole(_constant(c)) for c in constants], arguments)

    def carry_out(self, equation: Any, operands: list[Value]) -> list[Value]:
        """The results of one equation."""
        special = self.special.get(equation.primitive.name)
        if special:
            scope = str(equation.source_info.name_stack)
            with jax.named_scope(scope) if scope else nullcontext():
                return special(self, equation, operands)
        steps = self._steps(equation, operands)
        wanted = [tuple(step.wanted[i] for step in steps) for i in range(len(operands))]
        given = [tuple(step.given[i] for step in steps) for i in range(len(equation.outvars))]
        shapes = [local_shape(v.aval.shape, g, self.axes) for v, g in zip(equation.outvars, given, strict=True)]
        run = partial(_run, equation, shapes)
        for step, axis in zip(steps, self.axes, strict=True):
            run = step.around(run, axis) if step.around else run
        results = run(*self.arrays(operands, wanted))
        found = [(x.shape, x.dtype) for x in results]
        assert found == [(s, v.aval.dtype) for s, v in zip(shapes, equation.outvars, strict=True)], equation
        return self.values(results, given)

    def _literal(self, literal: Any) -> Value:
        return self.whole(np.asarray(literal.val, literal.aval.dtype))

    def whole(self, array: Any) -> Value:
        """An array that all devices have."""
        return Value(array, replicated(self.axes))

    def values(self, arrays: Sequence[Any], shardings: Sequence[Sharding]) -> list[Value]:
        """A device's parts as values."""
        return [Value(x, sharding) for x, sharding in zip(arrays, shardings, strict=True)]

    def arrays(self, values: Sequence[Value], shardings: Sequence[Sharding]) -> list[Any]:
        """A device's parts of values."""
        return [value.lying(sharding, self.axes) for value, sharding in zip(values, shardings, strict=True)]

    def agreed(self, decision: Any, shardings: Sequence[Sharding]) -> Any:
        """What decides whether devices run a program, if that works on values which lie in parts.

        Replicated values should be equal, but those that a callback or an unordered sum made may not be to the last
        bit; then one device would wait in a collective for others that never come.
        """
        whole = replicated(self.axes)
        if all(sharding == whole for sharding in shardings):
            return decision
        names = tuple(name for axis in self.axes for name in axis.names)
        return lax.pmax(decision.astype(jnp.int32), names).astype(decision.dtype)

    def shardings_of(self, program: Any, avals: Sequence[Any], shardings: Sequence[Sharding]) -> list[Sharding]:
        """How the results of a program lie by themselves; nothing is computed."""
        found: list[Sharding] = []

        def trace(*arrays: Any) -> list[Any]:
            results = self.run_closed(program, self.values(arrays, shardings))
            found[:] = [value.sharding for value in results]
            return [value.forms[value.sharding] for value in results]

        jax.eval_shape(trace, *[local_struct(a, s, self.axes) for a, s in zip(avals, shardings, strict=True)])
        return found

    def _steps(self, equation: Any, operands: list[Value]) -> list[Step]:
        """How an equation is carried out along each axis."""
        rule, steps = RULES.get(equation.primitive.name), []
        for i, axis in enumerate(self.axes):
            placements = [value.sharding[i] for value in operands]
            step = rule(equation, placements, axis) if rule else None
            whole = Step([REPLICATED] * len(operands), [REPLICATED] * len(equation.outvars))
            if step is None or not self._is_possible(equation, [*steps, step]):
                step = whole
            steps.append(step)
        return steps

    def _is_possible(self, equation: Any, steps: list[Step]) -> bool:
        """Whether operands and results can lie as the steps along the first axes want them."""
        axes, variables = self.axes[: len(steps)], (*equation.invars, *equation.outvars)
        shardings = zip(*[(*step.wanted, *step.given) for step in steps], strict=True)
        return all(is_possible(v.aval.shape, s, axes) for v, s in zip(variables, shardings, strict=True))


def _constant(array: Any) -> Any:
    """A constant without the mesh that it was made under, whose axes were of other types."""
    plain = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return np.asarray(array) if plain and not jnp.issubdtype(array.dtype, jax.dtypes.extended) else array


def _run(equation: Any, shapes: list[tuple[int, ...]], *operands: Any) -> list[Any]:
    """An equation, carried out on a device's own operands."""
    params = local_params(equation, operands, shapes)
    names = _names(len(operands))  # what they are called doesn't matter, nor of which shape they once were
    single = equation.replace(invars=names, params=params, ctx=_context(equation.ctx, jax.sharding.get_abstract_mesh()))
    jaxpr = _NOTHING.jaxpr.replace(invars=names, outvars=equation.outvars, eqns=[single], effects=equation.effects)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*operands)


@cache
def _context(context: Any, mesh: Any) -> Any:
    """The context of an equation (compute type and the like), but with another mesh."""
    with context.manager, jax.sharding.use_abstract_mesh(mesh):
        return jax.make_jaxpr(lambda x: x + 1)(0.0).jaxpr.eqns[0].ctx


_NOTHING = jax.make_jaxpr(lambda: ())()
_POOL: list[Any] = []


def _names(count: int) -> list[Any]:
    while len(_POOL) < count:
        _POOL.extend(jax.make_jaxpr(lambda *x: x)(*[0.0] * 32).jaxpr.invars)
    return _POOL[:count]
