"""Which layers differ in numbers alone, so that they are one group: their traces tell.

Two layers that are made of the same things but for numbers may compute the same function of these numbers, or not: a
rate of zero may leave an operation out, a width is a shape. So both are traced, as they are initialised, trained and
evaluated, and forward and backward too, since a custom derivative shows nowhere else. Where the traces are the same but
for scalars, the layers are one function, and the scalars its `Constants`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from jpipe.jax_tools.random_keys import key_shape
from jpipe.layers.base import AnyLayer, LayerVariables, is_same, may_differ_in_numbers
from jpipe.layers.decode_mode import CACHE
from jpipe.layers.fingerprint import same_value
from jpipe.model.constants import Constants, differing, outputs_that_depend, scalars_of, skeleton, whole
from jpipe.model.groups import EVALUATION, INIT, TRAIN, LayerGroup, same_type
from jpipe.model.layer_function import LayerFunction, trace_init
from jpipe.model.remat import MODES
from jpipe.model.traced_layer import trace_layer
from jpipe.seam.jaxpr_types import ClosedJaxpr
from jpipe.types import PyTree, Shapes


@dataclass(frozen=True, eq=False)
class LayerTraces:
    """What a layer computes, and with which scalars.

    Attributes:
      made: the shapes of its variables.
      jaxprs: by mode, its trace; one that it can't be called in is missing.
      gives: by mode, the collection of each output of the trace, "" for its activation's.
      rest: the traces without their scalars, and the mesh axes that its metadata names.
    """

    made: PyTree
    jaxprs: Mapping[str, ClosedJaxpr]
    gives: Mapping[str, Sequence[str]]
    rest: object

    def same(self, other: LayerTraces) -> bool:
        """Whether both are the same but for scalars."""
        structures = jax.tree.structure(self.made) == jax.tree.structure(other.made)
        return structures and same_type(self.made, other.made) and same_value(self.rest, other.rest)


def trace_modes(layer: AnyLayer, group: LayerGroup, batch: Shapes) -> LayerTraces:
    """Traces a layer that takes what a group's layers take.

    Raises:
      Exception: whatever the layer raises, but for evaluation, which it may refuse.
    """
    jaxprs: dict[str, ClosedJaxpr] = {}
    gives: dict[str, list[str]] = {}
    structures: list[object] = []
    made = layer.ready
    if made is None:
        jaxprs[INIT], made = trace_init(layer, key_shape(), group.takes, batch)
        gives[INIT] = _collections(made)
    group = replace(group, layer=layer, constants={})
    function = LayerFunction(group, key_shape(), MODES["none"], batch)
    for mode, own in ((TRAIN, function), (EVALUATION, replace(function, key=None))):
        try:
            jaxprs[mode], (outputs, updates) = own.trace_call()
            gives[mode] = [""] * len(jax.tree.leaves(outputs)) + _collections(updates)
            structures.append(jax.tree.structure((outputs, updates)))
        except Exception:
            if mode == TRAIN:
                raise
    scalars = scalars_of(jaxprs[TRAIN])
    every = Constants(scalars, tuple(range(len(scalars))))
    traced = trace_layer(replace(function, group=replace(group, constants={TRAIN: every})))
    both = [whole(traced.forward), whole(traced.backward)]
    alone = [skeleton(jaxprs[mode]) for mode in (INIT, EVALUATION) if mode in jaxprs]
    rest = [list(jaxprs), structures, both, alone, layer.partition_specs(group.variables)]
    return LayerTraces(made, jaxprs, gives, rest)


def _collections(variables: LayerVariables) -> list[str]:
    """The collection of each leaf."""
    return [name for name in sorted(variables) for _ in jax.tree.leaves(variables[name])]


class Alike:
    """Finds layers of a model that differ in numbers alone; each that may do so is traced once.

    Args:
      layers: all layers.
      batch: the shapes of the micro-batch `[b, ...]`.
    """

    def __init__(self, layers: Sequence[AnyLayer], batch: Shapes):
        self._layers, self._batch = layers, batch
        self._traces: dict[int, LayerTraces | None] = {}

    def joined(self, group: LayerGroup, index: int) -> LayerGroup | None:
        """The group with one more layer, which takes the same; None if it is another function.

        Args:
          group: the layers.
          index: of the layer.
        """
        first, together = group.indices[0], (*group.indices, index)
        layers = {i: self._layers[i] for i in together}
        if is_same(layers[first], layers[index]) and not group.constants:
            return replace(group, indices=together)
        if not may_differ_in_numbers(layers[first], layers[index]):
            return None
        traces = {i: found for i in together if (found := self._traced(group, i)) is not None}
        if len(traces) < len(together) or not traces[first].same(traces[index]):
            return None
        by_mode = {
            mode: {i: scalars_of(own.jaxprs[mode]) for i, own in traces.items()} for mode in traces[first].jaxprs
        }
        constants = {mode: differing(scalars, first) for mode, scalars in by_mode.items()}
        depend = {mode: _dependent(traces[first], mode, constants[mode]) for mode in constants}
        # A group has one rate of running averages, and its caches start from one number.
        moved = {group.rules.get(name) for name in depend[TRAIN]}
        if "moments" in moved or CACHE in depend.get(INIT, ()):
            return None
        return replace(group, indices=together, constants=constants)

    def _traced(self, group: LayerGroup, index: int) -> LayerTraces | None:
        """A layer's traces; None if it can't be traced, which whoever runs it will be told."""
        if index not in self._traces:
            twin = next((i for i in self._traces if is_same(self._layers[i], self._layers[index])), None)
            try:
                found = self._traces[twin] if twin is not None else trace_modes(self._layers[index], group, self._batch)
            except Exception:
                found = None
            self._traces[index] = found
        return self._traces[index]


def _dependent(traces: LayerTraces, mode: str, constants: Constants) -> set[str]:
    """The collections whose new values depend on constants."""
    depend = outputs_that_depend(traces.jaxprs[mode], constants.places)
    return {name for name, is_dependent in zip(traces.gives[mode], depend, strict=True) if is_dependent}
