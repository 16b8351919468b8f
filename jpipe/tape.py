"""A layer's forward and backward, traced once, with the residuals between them in plain sight.

`jax.vjp` returns a pytree: its leaves are what the backward needs. They are sorted into those at hand anyway in the
backward action (parameters, state, the batch, the key), those that follow from parameters alone (a cast kernel), which
are computed again, and the rest, which has to be stored. Forward and backward are kept as programs and replayed: so
both agree on the residuals wherever they run, and a layer's Python code runs once for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jpipe.tracing import depends_on, only_needed, replay


@dataclass(frozen=True)
class _Source:
    """Where a leaf of the vjp comes from in the backward action: index into what is known, derived or stored."""

    kind: str
    index: int


@dataclass(frozen=True, eq=False)
class Tape:
    """A traced layer.

    Attributes:
      forwards: (what is given, inputs) -> (outcome, leaves of the vjp).
      derive: (what is given, inputs) -> those of these leaves that are computed again.
      backwards: (leaves of the vjp, cotangents of the outputs) -> (gradients, cotangents of the inputs).
      sources: for each leaf of the vjp.
      stored_at: which leaves are stored.
      stored: their shapes.
      inputs: shapes of the inputs.
      outputs: shapes of the outputs that have cotangents.
    """

    forwards: Callable[..., Any]
    derive: Callable[..., Any]
    backwards: Callable[..., Any]
    sources: tuple[_Source, ...]
    stored_at: tuple[int, ...]
    stored: tuple[jax.ShapeDtypeStruct, ...]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]

    def forward(self, given: Any, x: list[Any]) -> tuple[Any, list[Any]]:
        """(outcome, the residuals to store for `backward`)."""
        outcome, leaves = self.forwards(given, x)
        return outcome, [leaves[i] for i in self.stored_at]

    def backward(self, given: Any, stored: list[Any], cotangents: list[Any]) -> tuple[list, list]:
        """(gradients of the parameters, cotangents of the floating-point inputs)."""
        unseen = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.inputs]
        pools = {"known": jax.tree.leaves(given), "derived": self.derive(given, unseen), "stored": stored}
        return self.backwards([pools[source.kind][source.index] for source in self.sources], cotangents)


def make_tape(differentiate: Callable[..., Any], has_cotangent: Callable, given: Any, inputs: list[Any]) -> Tape:
    """Traces a layer from shapes alone.

    Args:
      differentiate: (given, inputs) -> (outcome, vjp).
      has_cotangent: outcome -> the outputs that have cotangents.
      given: the shapes of what forward and backward are given alike, a NamedTuple whose first field is `params`.
      inputs: the shapes of the inputs.
    """
    structures: list[Any] = []

    def run(given: Any, inputs: list[Any]) -> Any:
        outcome, vjp = differentiate(given, inputs)
        structures.append(jax.tree.structure(vjp))
        return outcome, jax.tree.leaves(vjp)

    program, (outcome, leaves) = jax.make_jaxpr(run, return_shape=True)(given, inputs)
    num_outcome = len(jax.tree.leaves(outcome))
    sources, stored_at, derived_at = _sort(program, num_outcome, len(given.params), len(jax.tree.leaves(given)))
    again = program.jaxpr.replace(outvars=[program.jaxpr.outvars[num_outcome + i] for i in derived_at])
    outputs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in has_cotangent(outcome)]
    transpose = lambda leaves, cotangents: jax.tree.unflatten(structures[0], leaves)(cotangents)
    transposed, result = jax.make_jaxpr(transpose, return_shape=True)(leaves, outputs)
    return Tape(
        forwards=replay(program, (outcome, leaves)),
        derive=replay(only_needed(ClosedJaxpr(again, program.consts)), [leaves[i] for i in derived_at]),
        backwards=replay(transposed, result),
        sources=sources,
        stored_at=stored_at,
        stored=tuple(jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in stored_at),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


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
