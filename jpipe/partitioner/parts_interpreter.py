"""Carries out a jaxpr of whole arrays, equation by equation, on the parts of arrays that a device has.

What an equation does to shards is in `jpipe.partitioner.rules`. Equations that hold jaxprs (loops, calls), and those by
which users speak of devices, are handed to functions of their own: handlers, by the name of the primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jpipe.partitioner.conversions import convert
from jpipe.partitioner.rule import Operation, RuleResult, aval_of
from jpipe.partitioner.rules import RULES, part_params
from jpipe.partitioner.shardings import (
    REPLICATED,
    Axis,
    Sharding,
    is_possible,
    part_shape,
    part_structs,
    replicated,
    settled,
)
from jpipe.seam.inside import carry_out, scope_of
from jpipe.seam.jaxpr_types import ClosedJaxpr, JaxprEqn, Literal, shapes_of
from jpipe.types import Leaf

Axes = tuple[Axis, ...]


class DeviceValue:
    """A value of a jaxpr as one device has it: its parts in every sharding that was asked for.

    Attributes:
      sharding: how the value lies by itself; other shardings are made from this one.
      parts: sharding -> this device's part.
    """

    def __init__(self, part: jax.Array, sharding: Sharding):
        self.sharding = sharding
        self.parts = {sharding: part}

    def part(self, sharding: Sharding, axes: Axes) -> jax.Array:
        """This device's part under a sharding."""
        if sharding not in self.parts:
            self.parts[sharding] = convert(self.parts[self.sharding], axes, self.sharding, sharding)
            if sharding == settled(self.sharding):  # once added up, it needn't be added up again
                self.sharding = sharding
        return self.parts[sharding]


Handler = Callable[["PartsInterpreter", JaxprEqn, list[DeviceValue]], list[DeviceValue]]
"""(interpreter, equation of whole arrays, its operands) -> its results."""


class PartsInterpreter:
    """Carries out equations of whole arrays on the parts that a device has.

    Attributes:
      axes: what arrays are split over.
      handlers: name of a primitive -> what carries out its equations; for all others there are rules.
    """

    def __init__(self, axes: Axes, handlers: Mapping[str, Handler]):
        self.axes = axes
        self.handlers = handlers

    def run(self, closed: ClosedJaxpr, arguments: Sequence[DeviceValue]) -> list[DeviceValue]:
        """The results of a jaxpr of whole arrays."""
        jaxpr = closed.jaxpr
        inputs = [*[self.whole(_without_mesh(c)) for c in closed.consts], *arguments]
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
        read = lambda v: self.whole(np.asarray(v.val, aval_of(v).dtype)) if isinstance(v, Literal) else known[v]
        for equation in jaxpr.eqns:
            results = self.results_of(equation, list(map(read, equation.invars)))
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def results_of(self, equation: JaxprEqn, operands: list[DeviceValue]) -> list[DeviceValue]:
        """The results of one equation."""
        handler = self.handlers.get(equation.primitive.name)
        if handler:
            with scope_of(equation):
                return handler(self, equation, operands)
        along_axes = self._apply_rules(equation, operands)
        wanted = [tuple(along.operands[i] for along in along_axes) for i in range(len(operands))]
        found = [tuple(along.results[i] for along in along_axes) for i in range(len(equation.outvars))]
        avals = [aval_of(v) for v in equation.outvars]
        shapes = [part_shape(aval.shape, sharding, self.axes) for aval, sharding in zip(avals, found, strict=True)]
        operation: Operation = lambda *parts: carry_out(
            equation, parts, part_params(equation, [np.shape(x) for x in parts], shapes)
        )
        for along in along_axes:
            operation = along.wrap(operation) if along.wrap else operation
        results = operation(*self.parts_of(operands, wanted))
        types = [(x.shape, x.dtype) for x in results]
        assert types == [(shape, aval.dtype) for shape, aval in zip(shapes, avals, strict=True)], equation
        return self.values(results, found)

    def whole(self, array: Leaf) -> DeviceValue:
        """A value that all devices have as a whole."""
        return DeviceValue(array, replicated(self.axes))

    def values(self, parts: Sequence[jax.Array], shardings: Sequence[Sharding]) -> list[DeviceValue]:
        """Values from this device's parts of them."""
        return [DeviceValue(part, sharding) for part, sharding in zip(parts, shardings, strict=True)]

    def parts_of(self, values: Sequence[DeviceValue], shardings: Sequence[Sharding]) -> list[jax.Array]:
        """This device's parts of values, each under a sharding."""
        return [value.part(sharding, self.axes) for value, sharding in zip(values, shardings, strict=True)]

    def agreed(self, decision: jax.Array, shardings: Sequence[Sharding]) -> jax.Array:
        """A decision, such as whether a loop goes on, that is the same on all devices along the axes.

        Replicated values should be equal, but those that a callback or an unordered sum made may not be to the last
        bit; then one device would wait in a collective for others that never come.

        Args:
          decision: a replicated bool or integer.
          shardings: of the values that the decided jaxpr works on: if all are replicated, it has no collectives.
        """
        whole = replicated(self.axes)
        if all(sharding == whole for sharding in shardings):
            return decision
        names = tuple(name for axis in self.axes for name in axis.names)
        return lax.pmax(decision.astype(jnp.int32), names).astype(decision.dtype)

    def shardings_of(self, closed: ClosedJaxpr, shardings: Sequence[Sharding]) -> list[Sharding]:
        """How the results of a jaxpr of whole arrays lie by themselves, for arguments that lie so; computes nothing."""
        found: list[Sharding] = []

        def trace(*parts: jax.Array) -> None:
            found[:] = [value.sharding for value in self.run(closed, self.values(parts, shardings))]

        jax.eval_shape(trace, *part_structs(shapes_of(closed.jaxpr.invars), shardings, self.axes))
        return found

    def _apply_rules(self, equation: JaxprEqn, operands: list[DeviceValue]) -> list[RuleResult]:
        """How an equation is carried out along each axis; where there is no way, operands are whole."""
        rule = RULES.get(equation.primitive.name)
        whole = RuleResult([REPLICATED] * len(operands), [REPLICATED] * len(equation.outvars))
        along_axes: list[RuleResult] = []
        for i, axis in enumerate(self.axes):
            along = rule(equation, [value.sharding[i] for value in operands], axis) if rule else None
            if along is None or not self._is_possible(equation, [*along_axes, along]):
                along = whole
            along_axes.append(along)
        return along_axes

    def _is_possible(self, equation: JaxprEqn, along_axes: list[RuleResult]) -> bool:
        """Whether operands and results can lie so along the first axes."""
        axes, variables = self.axes[: len(along_axes)], (*equation.invars, *equation.outvars)
        shardings = zip(*[(*along.operands, *along.results) for along in along_axes], strict=True)
        return all(is_possible(aval_of(v).shape, s, axes) for v, s in zip(variables, shardings, strict=True))


def _without_mesh(constant: Leaf) -> Leaf:
    """A constant without the mesh that it was made under, whose axes were of other types."""
    plain = isinstance(constant, jax.Array) and not isinstance(constant, Tracer)
    return np.asarray(constant) if plain and not jnp.issubdtype(constant.dtype, jax.dtypes.extended) else constant
