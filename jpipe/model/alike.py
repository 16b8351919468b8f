"""Decides whether a layer joins a group, compiled once: if it `is_same`, or by its trace is so but for numbers.

Two layers that are made of the same things but for numbers may compute the same function of these numbers, or not: a
rate of zero may leave an operation out, a width is a shape. So both are traced, as they are initialised, trained and
evaluated. Where the traces are of one kind, the same but for scalars, the layers are one function, and the scalars are
its `Constants`. Parts of one trace, such as the blocks of a model, are of one kind alike.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, flatten, jaxpr_of
from jpipe.jax.primitives import CALLS, PLAIN_CALLS, ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jpipe.jax.tracing import depends_on, equations_in, trace
from jpipe.jax.trees import is_float
from jpipe.layers.base import AnyLayer, is_same, may_differ_in_numbers
from jpipe.layers.calls import CACHE, decoding
from jpipe.layers.fingerprint import same_value
from jpipe.model.groups import (
    DECODE,
    EVALUATION,
    INIT,
    TRAIN,
    Constants,
    LayerGroup,
    bits,
    differing,
    is_scalar,
    scalar_places,
    scalars_of,
    strong,
)
from jpipe.model.layer_function import trace_call, trace_init
from jpipe.model.random_keys import key_shape
from jpipe.types import Shapes


@dataclass(frozen=True, eq=False)
class LayerTraces:
    """The traces of a layer, and the scalars in them.

    Attributes:
      jaxprs: by mode, its trace without plain calls; a mode that it can't be called in is missing.
      scalars: by mode, the scalars of that trace.
      results: by mode, the shapes of its results: (outputs, new variables by collection).
      rest: everything besides scalars: layers that differ in scalars alone have the same.
    """

    jaxprs: Mapping[str, ClosedJaxpr]
    scalars: Mapping[str, list[np.ndarray]]
    results: Mapping[str, tuple[Shapes, dict[str, Shapes]]]
    rest: object

    def dependent(self, mode: str, constants: Constants) -> set[str]:
        """Finds the collections whose new values depend on constants."""
        outputs, new = self.results[mode]
        names = [name for name in sorted(new) for _ in jax.tree.leaves(new[name])]
        depend = outputs_that_depend(self.jaxprs[mode], constants.places)[len(jax.tree.leaves(outputs)) :]
        return {name for name, is_dependent in zip(names, depend, strict=True) if is_dependent}


def trace_modes(layer: AnyLayer, group: LayerGroup, batch: Shapes, kinds: Kinds) -> LayerTraces:
    """Traces a layer.

    Args:
      layer: the layer.
      group: layers that take the same.
      batch: the shapes of the micro-batch `[b, ...]`.
      kinds: of the model's jaxprs so far.

    Raises:
      Exception: whatever the layer raises, but for evaluation, which it may refuse.
    """
    jaxprs: dict[str, ClosedJaxpr] = {}
    # `ready` are values that the layer came with: it isn't initialised, so there is no INIT to compare.
    made, results = layer.ready, dict[str, tuple[Shapes, dict[str, Shapes]]]()
    if made is None:
        jaxprs[INIT], made, _ = trace_init(layer, key_shape(), group.takes, batch)
        results[INIT] = (), made
    variables = strong(jax.eval_shape(lambda v: v, made if layer.shared is None else group.variables))
    call = partial(trace_call, layer, variables, group.takes, batch)
    jaxprs[TRAIN], results[TRAIN] = call(key_shape())
    with suppress(Exception):
        jaxprs[EVALUATION], results[EVALUATION] = call(None)
    # Decode mode isn't traced in `generate`'s own trace, whose rules name `CACHE`: there the layers are in it already.
    first = next(iter(jax.tree.leaves(group.takes)), None)
    if first is not None and first.ndim > 1 and group.rules.get(CACHE) != CACHE and layer.keeps_cache:
        with suppress(Exception):  # it can't decode such sequences, which `generate` will say
            decoder = decoding(layer, group.takes, *first.shape[:2])
            jaxprs[DECODE], made, _ = trace_init(decoder, key_shape(), group.takes, batch)
            results[DECODE] = (), made
    flat = {mode: flatten(jaxpr, calls=PLAIN_CALLS) for mode, jaxpr in jaxprs.items()}
    found = {mode: kinds.part(one, one.equations, one.arguments, one.results).kind for mode, one in flat.items()}
    jaxprs = {m: jaxpr_of(one, one.equations, one.arguments, one.results, [*one.constants]) for m, one in flat.items()}
    scalars = {mode: scalars_of(jaxpr) for mode, jaxpr in jaxprs.items()}
    structures = jax.tree.structure(variables), {mode: jax.tree.structure(shapes) for mode, shapes in results.items()}
    return LayerTraces(jaxprs, scalars, results, (found, structures, layer.partition_specs(variables)))


class Alike:
    """Finds layers of a model that differ in numbers alone; each that may do so is traced once.

    Args:
      layers: all layers.
      batch: the shapes of the micro-batch `[b, ...]`.
    """

    def __init__(self, layers: Sequence[AnyLayer], batch: Shapes):
        self._layers, self._batch, self._kinds = layers, batch, Kinds()
        self._traces: dict[int, LayerTraces | None] = {}

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
        layer, other = self._layers[first], self._layers[index]
        if is_same(layer, other) and not group.constants:
            return replace(group, indices=together)
        if not may_differ_in_numbers(layer, other):
            return None
        traces = {i: layer_traces for i in together if (layer_traces := self._traced(group, i)) is not None}
        if len(traces) < len(together) or not same_value(traces[first].rest, traces[index].rest):
            return None
        # `places` of a mode are the indices of the scalars in its trace that differ between these layers.
        known = {mode: group.constants.get(mode, Constants()) for mode in traces[first].scalars}
        constants = {
            mode: differing({i: layer_traces.scalars[mode] for i, layer_traces in traces.items()}, first, of_mode)
            for mode, of_mode in known.items()
        }
        if not before and not any(of_mode.places for of_mode in constants.values()):
            return None  # at these shapes their numbers do nothing; at others they may
        depend = {
            mode: traces[first].dependent(mode, of_mode)
            for mode, of_mode in constants.items()
            if of_mode.places != known[mode].places
        }
        # A group has one rate of running averages, and its caches start from one number.
        if "moments" in map(group.rules.get, depend.get(TRAIN, ())) or any(
            CACHE in depend.get(m, ()) for m in (INIT, DECODE)
        ):
            return None
        return replace(group, indices=together, constants=constants)

    def _traced(self, group: LayerGroup, index: int) -> LayerTraces | None:
        """Traces a layer; None if it raises an error, which it raises again where it is run."""
        if index not in self._traces:
            layer = self._layers[index]
            twin = next((i for i in group.indices if i in self._traces and is_same(self._layers[i], layer)), None)
            known = self._traces.get(twin) if twin is not None else self._with_scalars(layer, group.indices[0])
            self._traces[index] = known
            if known is None and twin is None:
                with suppress(Exception):
                    self._traces[index] = trace_modes(layer, group, self._batch, self._kinds)
        return self._traces[index]

    def _with_scalars(self, layer: AnyLayer, first: int) -> LayerTraces | None:
        """A layer's traces by those of another one, which is made of the same but for numbers, if both say these."""
        traces, said = self._traces.get(first), self._layers[first].scalars
        if traces is None or said is None or layer.scalars is None or said.keys() != traces.scalars.keys():
            return None
        scalars: dict[str, list[np.ndarray]] = {}
        for mode, numbers in traces.scalars.items():
            before = len(numbers) - len(said[mode])  # what a layer is called with has numbers, too
            if before < 0 or list(map(bits, numbers[before:])) != list(map(bits, said[mode])):
                return None
            scalars[mode] = [*numbers[:before], *layer.scalars[mode]]
        return replace(traces, scalars=scalars)


# --- kinds of jaxprs ---


class PartJaxpr(NamedTuple):
    """A part of a trace as a jaxpr of its own.

    Attributes:
      closed: the jaxpr, with its constants.
      kind: a number, the same for all parts that are the same but for scalars.
    """

    closed: ClosedJaxpr
    kind: int

    @property
    def scalars(self) -> list[np.ndarray]:
        """Its scalars in the order in which they are read: those of a trace of it (`scalars_of`)."""
        jaxpr = self.closed.jaxpr
        scalars = {jaxpr.constvars[i]: np.asarray(self.closed.consts[i]) for i in scalar_places(self.closed)}
        read = [*(v for equation in jaxpr.eqns for v in equation.invars), *jaxpr.outvars]
        return [scalars[v] for v in read if not isinstance(v, Literal) and v in scalars]


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
        read = dict.fromkeys([*(n for equation in equations for n in equation.reads), *gives])
        constants = [number for number in read if number in flat.constants]
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
            self._jaxprs[key] = len(self._jaxprs), jaxpr_of(flat, equations, takes, gives, constants).jaxpr
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
    if not has_custom_derivatives([one.equation]):
        return described(sorted(one.equation.params.items()))
    reads, makes = dict.fromkeys(n for n in one.reads), dict.fromkeys(one.makes)
    run = jaxpr_as_fun(jaxpr_of(flat, [one], list(reads), list(makes), []))
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


def outputs_that_depend(flat: ClosedJaxpr, places: Collection[int]) -> list[bool]:
    """For each output of a trace, whether it depends on the scalars in these places."""
    at = scalar_places(flat)
    return depends_on(flat, [flat.jaxpr.constvars[at[place]] for place in places])


def has_custom_derivatives(equations: Iterable[JaxprEqn]) -> bool:
    """Whether equations, or some within them, call something that has a say in how it is differentiated.

    That is a `jax.custom_jvp`, a `jax.custom_vjp` or a `jax.checkpoint`.
    """
    return any(equation.primitive.name in CALLS - PLAIN_CALLS for equation in equations_in(equations))


def described(value: object) -> object:
    """Describes a trace, or an equation's parameter, for `same_value`: jaxprs with all of their numbers."""
    if isinstance(value, ClosedJaxpr):
        return _jaxpr_described(value)
    if isinstance(value, Jaxpr):
        return _jaxpr_described(ClosedJaxpr(value, ()))
    if isinstance(value, np.ndarray | jax.Array):
        return bits(value)
    return list(map(described, value)) if isinstance(value, tuple | list) else value


def _jaxpr_described(closed: ClosedJaxpr) -> object:
    """Describes a jaxpr by nested lists.

    Calls are replaced by what they call: their parameters are names and derivative rules.
    """
    flat = flatten(closed)
    constants = list(map(bits, flat.constants.values()))
    equations = [(e.primitive.name, described(sorted(e.params.items())), *numbers) for e, _, *numbers in flat.equations]
    return list(map(str, flat.avals)), list(flat.constants), constants, flat.arguments, equations, flat.results
