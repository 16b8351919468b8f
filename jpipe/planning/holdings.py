"""Counts what stages have of a model's variables, and what their devices hold: for tables, pages and tools."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from jpipe.memory.layout import Layout
from jpipe.mesh.axes import AXIS
from jpipe.mesh.specs import split_by
from jpipe.planning.plan import Plan
from jpipe.types import Leaf


class Amount(NamedTuple):
    """How much there is: elements of arrays, and their bytes."""

    elements: int
    bytes: int


@dataclass(frozen=True)
class Holdings:
    """Variables by stage and by device. K is the number of stages, V of chunks a stage.

    The arrays of all stages have one shape, so every device holds as much, whatever its stage has: room for the most of
    each type of leaf that any stage has (`jpipe.memory.storage`).

    Attributes:
      own: by collection `[K*V]`, what each virtual stage's layers have, before mesh axes split it. What layers share
        counts once, where it lies: with the first of them.
      room: by collection, what the arrays of a stage have room for, before mesh axes split them.
      device: by collection, what each device holds at rest: its part of that.
      shared: the indices of the layers that share variables, those of each set in order.
    """

    own: dict[str, tuple[Amount, ...]]
    room: dict[str, Amount]
    device: dict[str, Amount]
    shared: tuple[tuple[int, ...], ...]


def holdings(plan: Plan) -> Holdings:
    """Counts the variables that the stages of a plan have, and that their devices hold."""
    layouts = plan.layouts
    return Holdings(
        own={name: _own(plan, layout) for name, layout in layouts.items()},
        room={name: _amount(_parts(layout, lambda axis: axis == AXIS)) for name, layout in layouts.items()},
        device={name: _amount(_parts(layout, lambda axis: True)) for name, layout in layouts.items()},
        shared=tuple(known.users[0] for known in plan.traced.variable_sets if known.shared),
    )


def _own(plan: Plan, layout: Layout) -> tuple[Amount, ...]:
    of_layer = {
        users[0]: _amount(known.leaves)
        for known, instances in zip(layout.storage.record_types, layout.users, strict=True)
        for users in instances
    }
    by_stage = [[of_layer[i] for i in range(*bound) if i in of_layer] for bound in plan.partition.bounds]
    return tuple(Amount(sum(a.elements for a in amounts), sum(a.bytes for a in amounts)) for amounts in by_stage)


def _parts(layout: Layout, along: Callable[[str], bool]) -> Iterator[jax.ShapeDtypeStruct]:
    """A device's parts of the global arrays, split over some mesh axes."""
    for name, array in layout.shapes.items():
        sharding = NamedSharding(layout.mesh, split_by(layout.specs[name], along))
        yield jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), array.dtype)


def _amount(arrays: Iterable[Leaf]) -> Amount:
    sizes = [(math.prod(array.shape), array.dtype.itemsize) for array in arrays]
    return Amount(sum(size for size, _ in sizes), sum(size * itemsize for size, itemsize in sizes))
