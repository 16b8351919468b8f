"""A layer's forward and backward, traced once, with the residuals between them in plain sight.

`jax.vjp` returns a pytree: its leaves are what the backward needs. They are sorted into those at hand anyway in the
backward action (parameters, state, the batch, the key), those that follow from parameters alone (a cast kernel), which
are computed again, and the rest, which has to be stored. Forward and backward are kept as programs and replayed: so
both agree on the residuals wherever they run, and a layer's Python code runs once for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jpipe.jax_tools.jaxprs import depends_on, only_needed, without_roundings
from jpipe.jax_tools.tracing import replay, trace
from jpipe.sharding.shardings import Axis, Sharding, settled
from jpipe.sharding.spmd import LocalProgram, partition_program


@dataclass(frozen=True)
class _Source:
    """Where a leaf of the vjp comes from in the backward action: index into what is known, derived or stored."""

    kind: str
    index: int


Choose = Callable[[Sharding], Sharding]
"""How a result lies by itself -> how it has to lie."""


@dataclass(frozen=True)
class LayerShardings:
    """How what a layer works on lies on the devices of its stage, leaf by leaf.

    Attributes:
      axes: what arrays are split over.
      given: what forward and backward are given alike.
      inputs: the inputs.
      outcome: what the forward returns (a pytree) -> how its leaves have to lie.
      cotangents: the cotangents of the outputs that have some.
      gradients: what the backward returns: gradients of the parameters, then cotangents of the inputs.
    """

    axes: tuple[Axis, ...]
    given: Sequence[Sharding]
    inputs: Sequence[Sharding]
    outcome: Callable[[Any], Sequence[Choose]]
    cotangents: Sequence[Sharding]
    gradients: Sequence[Choose]


@dataclass(frozen=True, eq=False)
class Forward:
    """A layer's forward, as one device runs it.

    Attributes:
      run: (what is given, inputs) -> (outcome, leaves of the vjp).
      stored_at: which of these leaves are residuals to store.
      outcome: shapes of what the layer returns (a pytree).
      outcome_at: how its leaves lie.
    """

    run: Callable[..., Any]
    stored_at: tuple[int, ...]
    outcome: Any
    outcome_at: list[Sharding]

    def __call__(self, given: Any, x: list[Any]) -> tuple[Any, list[Any]]:
        """(outcome, the residuals to store for `Tape.backward`)."""
        outcome, leaves = self.run(given, x)
        return outcome, [leaves[i] for i in self.stored_at]


@dataclass(frozen=True, eq=False)
class Tape:
    """A traced layer.

    Attributes:
      forward: what is given and inputs -> outcome and residuals.
      derive: (what is given, inputs) -> those leaves of the vjp that are computed again.
      backwards: (leaves of the vjp, cotangents of the outputs) -> (gradients, cotangents of the inputs).
      sources: for each leaf of the vjp.
      stored: the shapes of the residuals.
      inputs: shapes of the inputs.
      outputs: shapes of the outputs that have cotangents.
      program: what `forward` replays.
      stored_at: which of the program's results are the residuals.
    """

    forward: Forward
    derive: Callable[..., Any]
    backwards: Callable[..., Any]
    sources: tuple[_Source, ...]
    stored: tuple[jax.ShapeDtypeStruct, ...]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    program: ClosedJaxpr
    stored_at: tuple[int, ...]

    def backward(self, given: Any, stored: list[Any], cotangents: list[Any]) -> tuple[list, list]:
        """(gradients of the parameters, cotangents of the floating-point inputs)."""
        unseen = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.inputs]
        pools = {"known": jax.tree.leaves(given), "derived": self.derive(given, unseen), "stored": stored}
        return self.backwards([pools[source.kind][source.index] for source in self.sources], cotangents)


def make_forward(function: Callable[..., Any], given: Any, inputs: list[Any], shardings: LayerShardings) -> Forward:
    """Traces a layer's forward alone: `function(given, inputs) -> outcome`, from shapes."""
    program, outcome = trace(lambda *arguments: (function(*arguments), []), given, inputs)
    local = partition_program(
        program, shardings.axes, [*shardings.given, *shardings.inputs], shardings.outcome(outcome[0])
    )
    return _forward(local, outcome, ())


def _forward(local: LocalProgram, result: Any, stored_at: tuple[int, ...]) -> Forward:
    """The forward of a program that returns (outcome, leaves of the vjp)."""
    structure, count = jax.tree.structure(result[0]), len(jax.tree.leaves(result[0]))
    outcome = jax.tree.unflatten(structure, _shapes(local.program.out_avals[:count]))
    return Forward(replay(local.program, result), stored_at, outcome, local.shardings[:count])


@dataclass(frozen=True, eq=False)
class WholeTape:
    """A layer's forward and backward on whole arrays, as they were traced.

    Attributes:
      forward: (what is given, inputs) -> (outcome, leaves of the vjp), flat.
      derive: the same -> the leaves of the vjp that are computed again.
      backward: (leaves of the vjp, cotangents) -> (gradients, cotangents of the inputs), flat.
      outcome, leaves, gradients: the shapes of these results, as pytrees.
      num_given: leaves of what is given.
      sources: for each leaf of the vjp.
      stored_at, derived_at: which leaves are stored, and which computed again.
    """

    forward: ClosedJaxpr
    derive: ClosedJaxpr
    backward: ClosedJaxpr
    outcome: Any
    leaves: list[Any]
    gradients: Any
    num_given: int
    sources: tuple[_Source, ...]
    stored_at: tuple[int, ...]
    derived_at: tuple[int, ...]

    @property
    def stored(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of the residuals."""
        return _shapes(_chosen(self.leaves, self.stored_at))

    @property
    def inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of the inputs."""
        return _shapes(self.forward.in_avals[self.num_given :])

    @property
    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of the outputs that have cotangents."""
        return _shapes(self.backward.in_avals[len(self.leaves) :])


def trace_tape(differentiate: Callable[..., Any], has_cotangent: Callable, given: Any, inputs: list[Any]) -> WholeTape:
    """Traces a layer from shapes alone.

    Args:
      differentiate: (given, inputs) -> (outcome, vjp).
      has_cotangent: outcome -> the outputs that have cotangents.
      given: the shapes of what forward and backward are given alike, a NamedTuple whose first field is `params`.
      inputs: the shapes of the inputs.
    """
    structures: list[Any] = []  # of each time that it is traced: the last one's counts

    def run(given: Any, inputs: list[Any]) -> Any:
        outcome, vjp = differentiate(given, inputs)
        structures.append(jax.tree.structure(vjp))
        return outcome, jax.tree.leaves(vjp)

    program, (outcome, leaves) = trace(run, given, inputs)
    program = without_roundings(program)
    num_outcome, num_given = len(jax.tree.leaves(outcome)), len(jax.tree.leaves(given))
    sources, stored_at, derived_at = _sort(program, num_outcome, len(given.params), num_given)
    again = program.jaxpr.replace(outvars=[program.jaxpr.outvars[num_outcome + i] for i in derived_at])
    outputs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in has_cotangent(outcome)]
    transpose = lambda leaves, cotangents: jax.tree.unflatten(structures[-1], leaves)(cotangents)
    backward, gradients = trace(transpose, leaves, outputs)
    return WholeTape(
        forward=program,
        derive=only_needed(ClosedJaxpr(again, program.consts)),
        backward=backward,
        outcome=outcome,
        leaves=leaves,
        gradients=gradients,
        num_given=num_given,
        sources=sources,
        stored_at=stored_at,
        derived_at=derived_at,
    )


def partition_tape(whole: WholeTape, shardings: LayerShardings) -> Tape:
    """A traced layer as one device runs it, where what it works on lies as `shardings` says."""
    arguments, num_outcome = [*shardings.given, *shardings.inputs], len(jax.tree.leaves(whole.outcome))
    wanted = [*shardings.outcome(whole.outcome), *[settled] * len(whole.leaves)]
    forward = partition_program(whole.forward, shardings.axes, arguments, wanted)
    derive = partition_program(whole.derive, shardings.axes, arguments, [settled] * len(whole.derived_at))
    stored = _chosen(forward.shardings[num_outcome:], whole.stored_at)
    lying = {"known": shardings.given, "derived": derive.shardings, "stored": stored}
    at = [lying[source.kind][source.index] for source in whole.sources]
    backward = partition_program(whole.backward, shardings.axes, [*at, *shardings.cotangents], shardings.gradients)
    return Tape(
        forward=_forward(forward, (whole.outcome, whole.leaves), whole.stored_at),
        derive=replay(derive.program, _chosen(whole.leaves, whole.derived_at)),
        backwards=replay(backward.program, whole.gradients),
        sources=whole.sources,
        stored=_shapes(_chosen(forward.program.out_avals[num_outcome:], whole.stored_at)),
        inputs=_shapes(forward.program.in_avals[whole.num_given :]),
        outputs=_shapes(backward.program.in_avals[len(whole.leaves) :]),
        program=forward.program,
        stored_at=tuple(num_outcome + i for i in whole.stored_at),
    )


def _chosen(items: Sequence[Any], indices: Sequence[int]) -> list[Any]:
    return [items[i] for i in indices]


def _shapes(avals: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)


def _sort(
    program: ClosedJaxpr, num_outcome: int, num_params: int, num_given: int
) -> tuple[tuple[_Source, ...], tuple[int, ...], tuple[int, ...]]:
    """Where the leaves of the vjp come from; those to store, and those to derive, each once."""
    arguments, leaves = program.jaxpr.invars, program.jaxpr.outvars[num_outcome:]
    depends = depends_on(program, arguments[num_params:])[num_outcome:]
    places = {id(v): _Source("known", i) for i, v in enumerate(arguments[:num_given])}
    chosen: dict[str, list[int]] = {"stored": [], "derived": []}
    for i, (leaf, is_stored) in enumerate(zip(leaves, depends, strict=True)):
        kind = "stored" if is_stored else "derived"
        if id(leaf) not in places:
            places[id(leaf)] = _Source(kind, len(chosen[kind]))
            chosen[kind].append(i)
    return tuple(places[id(leaf)] for leaf in leaves), tuple(chosen["stored"]), tuple(chosen["derived"])
