"""Decides whether a layer joins a group, compiled once: by its traces, as it is initialised, trained and evaluated.

Where the traces of two layers are of one kind, the same but for scalars, the layers are one function, and the scalars
are its `Constants`. So a block may be written, or made, in any way: a rate of zero that leaves an operation out, or a
width, makes another function, a residual scale doesn't. Parts of one trace, such as the blocks of a model that is one
module, are compared in the same way (`Kinds`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, flatten, jaxpr_of
from jpipe.jax.primitives import CALLS, PLAIN_CALLS, ClosedJaxpr, Jaxpr, JaxprEqn
from jpipe.jax.tracing import depends_on, equations_in, trace
from jpipe.jax.trees import is_float, same_value
from jpipe.layers.base import AnyLayer
from jpipe.layers.calls import CACHE, decoding
from jpipe.model.groups import (
    DECODE,
    EVALUATION,
    INIT,
    SAMPLING,
    TRAIN,
    Constants,
    LayerGroup,
    LayerTrace,
    bits,
    differing,
    is_scalar,
    same_type,
    scalar_places,
    scalars_of,
)
from jpipe.model.layer_function import trace_call, trace_init
from jpipe.model.random_keys import key_shape
from jpipe.types import Shapes

MODES = (TRAIN, INIT, EVALUATION, DECODE)
"""The functions by which layers are compared, one after the other."""


class _Function(NamedTuple):
    """A function of a layer.

    Attributes:
      trace: without plain calls, with all scalars as constants.
      collections: the collections of its last results, which are variables.
    """

    trace: PartJaxpr
    collections: Sequence[str]

    def dependent(self, constants: Constants) -> set[str]:
        """Finds the collections whose new values depend on constants."""
        closed = self.trace.closed
        at = scalar_places(closed)
        depend = depends_on(closed, [closed.jaxpr.constvars[at[place]] for place in constants.places])
        return {name for name, is_dependent in zip(self.collections[::-1], depend[::-1], strict=False) if is_dependent}


class Alike:
    """Finds layers of a model that differ in numbers alone; each that may do so is traced once.

    Args:
      layers: all layers.
      batch: the shapes of the micro-batch `[b, ...]`.
      traces: by index, the layers' calls as traced so far.
      same: by index, the first layer that `is_same` as one of those traced so far.
    """

    def __init__(
        self, layers: Sequence[AnyLayer], batch: Shapes, traces: Mapping[int, LayerTrace], same: Mapping[int, int]
    ):
        self._layers, self._batch, self._traces, self._same = layers, batch, traces, same
        self._kinds, self._functions = Kinds(), dict[tuple[int, str], _Function | None]()

    def joined(self, group: LayerGroup, index: int, *, before: bool = False) -> LayerGroup | None:
        """Adds a layer that takes the same to a group; returns None if it is another function.

        `trace_model` asks it for each layer but the last and each earlier group that takes the same; the first group
        that doesn't answer None is joined.

        Args:
          group: the layers.
          index: the index of the layer that is added.
          before: whether they are one group at the shapes of the first batch.
        """
        first, together = group.indices[0], (*group.indices, index)
        if {self._same[i] for i in together} == {self._same[first]}:
            return replace(group, indices=together)
        if not self._may_join(group, index):
            return None
        functions = {mode: {i: self._function(group, i, mode) for i in together} for mode in MODES}
        found = {mode: {i: one for i, one in of_mode.items() if one} for mode, of_mode in functions.items()}
        known = {mode: group.constants.get(mode, Constants()) for mode in MODES if found[mode]}
        # `places` of a mode are the indices of the scalars in its trace that differ between these layers.
        constants = {
            mode: differing({i: scalars_of(one.trace.closed) for i, one in found[mode].items()}, first, of_mode)
            for mode, of_mode in known.items()
        }
        if not before and not any(of_mode.places for of_mode in constants.values()):
            return None  # at these shapes what they differ in does nothing; at others it may
        depend = {
            mode: found[mode][first].dependent(of_mode)
            for mode, of_mode in constants.items()
            if of_mode.places != known[mode].places
        }
        # A group has one rate of running averages, and its caches start from one number.
        begin = {*depend.get(INIT, ()), *depend.get(DECODE, ())}
        if "moments" in map(group.rules.get, depend.get(TRAIN, ())) or CACHE in begin:
            return None
        sampled = cache(partial(self._sampled, group, together))
        return replace(group, indices=together, constants=constants, sampled=sampled)

    def _sampled(self, group: LayerGroup, together: Sequence[int]) -> Constants:
        """The constants of layers of a group in evaluation with a random key, for which few ask.

        Raises:
          ValueError: they are several functions there.
        """
        functions = {i: self._function(group, i, SAMPLING) for i in together}
        if len({one and one.trace.kind for one in functions.values()}) > 1:
            fault = f"layers {', '.join(map(str, together))} are one function without a random key in evaluation, and"
            raise ValueError(f"{fault} several with one; evaluate without a key, or have them differ in training too")
        found = {i: scalars_of(one.trace.closed) for i, one in functions.items() if one}
        return differing(found, together[0]) if found else Constants()

    def _may_join(self, group: LayerGroup, index: int) -> bool:
        """Whether a layer's functions are of the same kinds as those of a group; one after the other is traced."""
        first, layer, trace = group.indices[0], self._layers[index], self._traces[index]
        if layer.shared is not group.layer.shared or not same_type(trace[1:3], self._traces[first][1:3]):
            return False
        if layer.partition_specs(trace.variables) != group.layer.partition_specs(group.variables):
            return False
        pairs = ([self._function(group, i, mode) for i in (first, index)] for mode in MODES)
        return all((a and a.trace.kind) == (b and b.trace.kind) for a, b in pairs)

    def _function(self, group: LayerGroup, index: int, mode: str) -> _Function | None:
        """A function of a layer that takes what a group takes; None if it has none."""
        key = self._same[index], mode
        if key not in self._functions:
            self._functions[key] = None
            with suppress(Exception):  # it refuses evaluation, or such sequences, which is told where it is run
                if traced := self._traced(group, index, mode):
                    flat = flatten(traced[0], calls=PLAIN_CALLS)
                    part = self._kinds.part(flat, flat.equations, flat.arguments, flat.results)
                    self._functions[key] = _Function(part, traced[1])
        return self._functions[key]

    def _traced(self, group: LayerGroup, index: int, mode: str) -> tuple[ClosedJaxpr, Sequence[str]] | None:
        """(The trace of a function of a layer, the collections of its last results); None if it has none."""
        layer, trace, takes = self._layers[index], self._traces[index], group.takes
        first = next(iter(jax.tree.leaves(takes)), None)
        if mode == TRAIN:
            return trace.jaxpr, trace.updated
        if mode in (EVALUATION, SAMPLING):
            key = None if mode == EVALUATION else key_shape()
            return trace_call(layer, trace.variables, takes, self._batch, key, train=False)[0], ()
        if mode == DECODE:
            # It isn't traced in `generate`'s own trace, whose rules name `CACHE`: there the layers are in it already.
            if first is None or first.ndim < 2 or group.rules.get(CACHE) == CACHE or not layer.keeps_cache:
                return None
            layer = decoding(layer, takes, *first.shape[:2])
        elif layer.ready is not None:  # it came with its values, and isn't initialised
            return None
        made = trace_init(layer, key_shape(), takes, self._batch, train=trace.init_trains and mode == INIT)
        return made.jaxpr, [name for name in sorted(made.variables) for _ in jax.tree.leaves(made.variables[name])]


# --- kinds of jaxprs ---


class PartJaxpr(NamedTuple):
    """A part of a trace as a jaxpr of its own.

    Attributes:
      closed: the jaxpr, with its constants.
      kind: a number, the same for all parts that are the same but for scalars.
    """

    closed: ClosedJaxpr
    kind: int


class Kinds:
    """The kinds of jaxprs that were made of traces so far."""

    def __init__(self):
        self._operations: dict[Hashable, list[object]] = {}  # by name and shapes
        self._known: dict[int, tuple[JaxprEqn, Hashable]] = {}  # by identity, of an equation that is kept here
        self._jaxprs: dict[Hashable, tuple[int, Jaxpr]] = {}

    def part(
        self, flat: FlatJaxpr, equations: Sequence[FlatEquation], takes: Sequence[int], gives: Sequence[int]
    ) -> PartJaxpr:
        """Some equations as a jaxpr; arguments as of `jaxpr_of`."""
        constants = flat.constants_of(equations, takes, gives)
        made = (n for equation in equations for n in equation.makes)
        local = {n: i for i, n in enumerate(dict.fromkeys([*takes, *constants, *made]))}
        within = lambda numbers: tuple(local[n] for n in numbers)
        key = (
            tuple((flat.avals[n].shape, flat.avals[n].dtype) for n in (*takes, *constants)),
            tuple(None if is_scalar(flat.constants[n]) else bits(flat.constants[n]) for n in constants),
            tuple((self._operation(flat, e), within(e.reads), within(e.makes)) for e in equations),
            within(takes),
            within(gives),
        )
        if key not in self._jaxprs:
            self._jaxprs[key] = len(self._jaxprs), jaxpr_of(flat, equations, takes, gives).jaxpr
        kind, jaxpr = self._jaxprs[key]
        return PartJaxpr(ClosedJaxpr(jaxpr, [flat.constants[n] for n in constants]), kind)

    def _operation(self, flat: FlatJaxpr, one: FlatEquation) -> Hashable:
        """Names what an equation does with its operands: equal for two that do the same, and have one derivative."""
        if id(one.equation) not in self._known:
            shapes = tuple((flat.avals[n].shape, flat.avals[n].dtype) for n in (*one.reads, *one.makes))
            name = one.equation.primitive.name, shapes
            alike, new = self._operations.setdefault(name, []), _equation_described(flat, one)
            index = next((i for i, other in enumerate(alike) if same_value(other, new)), len(alike))
            if index == len(alike):
                alike.append(new)
            self._known[id(one.equation)] = one.equation, (name, index)
        return self._known[id(one.equation)][1]


def _equation_described(flat: FlatJaxpr, one: FlatEquation) -> object:
    """Describes what an equation does, for `same_value`: its parameters, or what it calls, and its derivative.

    Functions among the parameters, such as rules of derivatives, are made anew in each trace. So it is differentiated.
    """
    # Calls of a `jax.custom_jvp`, a `jax.custom_vjp` or a `jax.checkpoint` have a say in how they are differentiated.
    if all(inner.primitive.name not in CALLS - PLAIN_CALLS for inner in equations_in([one.equation])):
        return described(sorted(one.equation.params.items()))
    reads, makes = dict.fromkeys(n for n in one.reads), dict.fromkeys(one.makes)
    run = jaxpr_as_fun(jaxpr_of(flat, [one], list(reads), list(makes)))
    shapes = [jax.ShapeDtypeStruct(flat.avals[n].shape, flat.avals[n].dtype) for n in reads]
    floats = [i for i, shape in enumerate(shapes) if is_float(shape)]

    def differentiated(*arguments: jax.Array) -> object:
        def of_floats(*leaves: jax.Array) -> list[jax.Array]:
            filled = dict(enumerate(arguments)) | dict(zip(floats, leaves, strict=True))
            return [leaf for leaf in run(*filled.values()) if is_float(leaf)]

        results, back = jax.vjp(of_floats, *(arguments[i] for i in floats))
        return results, back(jax.tree.map(jnp.ones_like, results))

    with suppress(Exception):  # a loop without a known number of turns has no derivative: it is like no other
        return described(trace(run, *shapes)[0]), described(trace(differentiated, *shapes)[0])
    return one.equation


# --- comparing traces ---


def described(value: object) -> object:
    """Describes a trace, or an equation's parameter, for `same_value`: jaxprs as nested lists, with all numbers.

    Calls are replaced by what they call: their parameters are names and derivative rules.
    """
    if isinstance(value, ClosedJaxpr):  # asked first, since newer JAX has one class for both
        flat = flatten(value)
        constants = list(map(bits, flat.constants.values()))
        each = [(e.primitive.name, described(sorted(e.params.items())), *numbers) for e, _, *numbers in flat.equations]
        return list(map(str, flat.avals)), list(flat.constants), constants, flat.arguments, each, flat.results
    if isinstance(value, Jaxpr):
        return described(ClosedJaxpr(value, ()))
    if isinstance(value, np.ndarray | jax.Array):
        return bits(value)
    return list(map(described, value)) if isinstance(value, tuple | list) else value
