"""`Ends`: decides when all stages compute the two ends together (`ends="shared"`); refuses ends that can't be split.

Each stage has a part of their weights, as of a vocabulary, and computes that part of them for every micro-batch
(arXiv 2411.05288 does so for cross-entropy). So no stage carries a table or a head alone. They run in turns that all
stages take at the same time, beside the slots of a tick, and send each other what the partitioner finds
(`jpipe.partitioner`), along `stage` as along any other axis. With 1F1B and K=2:

    slot       F             B          F                B
    stage 0    F0            .          F1               .
    stage 1    .             .          F0               B0
    all     enter(0)                 enter(1)  leave(0)

*Enter*: the first layer, before the slot in which the first stage goes on with what it gives. *Leave*: the last layer,
the loss and their backward, after the slot in which the last stage gave what they take. *Back*: the first layer's
backward, after the slot in which the first stage gave the cotangents of the first layer's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple

import jax
import numpy as np

from jpipe.jax.inside import line_of
from jpipe.jax.primitives import shapes_of
from jpipe.memory.layout import Layout
from jpipe.model.groups import LayerGroup, Model
from jpipe.model.layer_function import LayerFunction
from jpipe.model.traced_layer import DeviceLayer, TracedLayer
from jpipe.partitioner.axes import AXIS, on_all_stages
from jpipe.schedules.schedule import Schedule
from jpipe.schedules.ticks import SlotTable, TickTable
from jpipe.schedules.waiting import Column


class Turns(NamedTuple, Generic[Column]):
    """The micro-batches whose ends all stages compute around one slot of each tick: int32 `[T]`; of a tick, numbers.

    It is -1 for none. `jpipe.execution.executor` takes them: enter before the slot; leave, then back, after it.

    Attributes:
      enter: whose first layer they compute before the slot.
      leave: whose last layer and loss they compute after it.
      back: whose first layer's backward they compute after it.
    """

    enter: Column
    leave: Column
    back: Column


@dataclass(frozen=True, eq=False)
class Ends:
    """How a step runs its first and its last layer. By default each runs on its own stage, as other layers do.

    Attributes:
      sets: the sets of variables of which each stage has a part, and computes with it.
      turns: for each slot of a tick the turns that all stages take together; none if each end runs on its own stage.
    """

    sets: frozenset[int] = frozenset()
    turns: tuple[Turns[np.ndarray], ...] = ()


def make_shared_ends(model: Model, schedule: Schedule, table: TickTable, *, keep_inputs: bool) -> Ends:
    """Decides when the ends of a model run under a schedule, if all stages compute them together.

    Args:
      model: its layers.
      schedule: the order of actions.
      table: that lowered.
      keep_inputs: whether the first stage's backward reads again what the first layer gave.
    """
    first, last = schedule.placement.ends
    chunk = schedule.num_chunks - 1  # of the last virtual stage, on its stage

    def whose(slot: SlotTable, kinds: str, stage: int, chunk: int) -> np.ndarray:
        """The micro-batch of which a stage does an action of some kinds on a chunk, `[T]`."""
        is_one = np.isin(slot.kind[:, stage], slot.codes(kinds)) & (slot.chunk[:, stage] == chunk)
        return np.where(is_one, slot.microbatch[:, stage], -1).astype(np.int32)

    def turns(slot: SlotTable) -> Turns[np.ndarray]:
        enter = whose(slot, "FRBI" if keep_inputs else "F", first, 0)
        return Turns(enter, leave=whose(slot, "F", last, chunk), back=whose(slot, "BI", first, 0))

    # A set that a layer between uses too lies whole on one stage (`make_layouts`), so that stages have no parts of it.
    in_others = {group.variable_set for group in model.groups[1 : model.last]}
    sets = (model.groups[g].variable_set for g in (0, model.last))
    return Ends(frozenset(v for v in sets if v is not None and v not in in_others), tuple(map(turns, table.slots)))


def as_they_lie(
    model: Model, layouts: dict[str, Layout], functions: Sequence[LayerFunction], trained: Sequence[TracedLayer]
) -> tuple[list[LayerFunction], list[TracedLayer]]:
    """Functions and traced layers of all groups, those of the ends with weights that are split as at rest.

    A group's own specs don't name `stage`; the layouts' specs of its variables do.
    """
    lying = list(functions)
    for g, group in ((0, model.groups[0]), (model.last, model.groups[model.last])):
        if (v := group.variable_set) is not None:
            specs = {name: list(layouts[name].storage.record_types[v].specs) for name in group.specs}
            lying[g] = replace(lying[g], group=replace(group, specs=specs))
    # `trained` is empty if the step is forward only.
    return lying, [replace(layer, function=function) for layer, function in zip(trained, lying, strict=False)]


def check_end(group: LayerGroup, layer: DeviceLayer) -> None:
    """Checks that stages share the work of an end that all of them compute together.

    Raises:
      ValueError: no weight of it is split over the stages, or all of them compute with whole ones, or with whole
        outputs; naming the operation.
    """
    name = f"ends='shared': {group.in_words}"
    specs = [spec for of_collection in group.specs.values() for spec in of_collection]
    if specs and not any(map(on_all_stages, specs)):
        raise ValueError(f"{name} has no weights to share; pad the vocabulary to a multiple of K, or use ends='spread'")
    # An operation counts if one of its operands has at least as many elements as the layer's largest weight or its
    # largest output, whichever is smaller; smaller ones are let pass.
    size = lambda leaf: math.prod(leaf.shape)
    both = group.leaves(group.names), jax.tree.leaves(group.gives)
    enough = min(max(map(size, leaves), default=0) for leaves in both)
    for (equation, callers, *_), _, along in [*layer.forward.unsplit, *layer.unsplit]:
        if AXIS in along and max(map(size, shapes_of(equation.invars)), default=0) >= enough:
            what = f"{equation.primitive.name} ({line_of(equation, callers) or 'of no line'})"
            raise ValueError(f"{name}: {what} has to see whole arrays; use ends='spread', or cross-entropy as the loss")
