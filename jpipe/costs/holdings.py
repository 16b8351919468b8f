"""Counts what stages have of a model's variables, and what their devices hold: for tables, pages and tools."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import optax
from jax.sharding import NamedSharding

from jpipe.arrays.host import HOST
from jpipe.arrays.trees import bytes_of
from jpipe.memory.layout import Layout, StageTree, may_go
from jpipe.mesh.axes import AXIS, split_by
from jpipe.model.random_keys import key_shape
from jpipe.planning.plan import Plan
from jpipe.planning.planner import Planner
from jpipe.training.train_state import abstract_state
from jpipe.types import Batch, Leaf, PyTree


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
      device: by collection, what each device holds at rest: its part of the room.
      shared: the indices of the layers that share variables, those of each set in order.
    """

    own: dict[str, tuple[Amount, ...]]
    room: dict[str, Amount]
    device: dict[str, Amount]
    shared: tuple[tuple[int, ...], ...]


def optimizer_bytes(planner: Planner, batch: Batch, tx: optax.GradientTransformation | None) -> tuple[int, int]:
    """The bytes of an optimiser's state for batches like this one: (each device's, its part of what goes to the hosts).

    With `offload=` that are those leaves which lie as the parameters do, of floats: not a count of steps.
    """
    if tx is None:
        return 0, 0
    plan = planner.plan_for(batch)
    variables = {name: layout.shapes for name, layout in plan.layouts.items()}
    state = abstract_state(variables, tx, key_shape(), plan.known_loss().of_batch).opt_state
    whole = _bytes_of_parts(jax.tree.leaves(state))
    if not planner.request.options.offload.optimizer:
        return whole, 0
    is_tree = lambda node: isinstance(node, StageTree)
    trees = filter(is_tree, jax.tree.leaves(state, is_leaf=is_tree))
    gone = _bytes_of_parts(
        leaf
        for tree in trees
        for name, buffer in tree.layout.shapes.items()
        for leaf in jax.tree.leaves(tree[name])
        if may_go(leaf, buffer, by_layer=tree.layout != plan.layouts["params"])
    )
    return whole - gone, gone


def on_device(tree: PyTree) -> int:
    """The bytes of each device's parts of arrays, or of arrays of such shapes and shardings; not of those on hosts."""
    on_host = lambda a: a.sharding is not None and a.sharding.memory_kind == HOST
    return _bytes_of_parts([a for a in jax.tree.leaves(tree) if not on_host(a)])


def _bytes_of_parts(arrays: Iterable[Leaf]) -> int:
    """The bytes of each device's parts, wherever they lie."""

    def part(a: Leaf) -> Leaf:
        return a if a.sharding is None else jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype)

    return bytes_of(list(map(part, arrays)))


def holdings(plan: Plan) -> Holdings:
    """Counts the variables that the stages of a plan have, and that their devices hold."""
    layouts = plan.layouts
    return Holdings(
        own={name: _own(plan, layout) for name, layout in layouts.items()},
        room={name: _amount(_parts(layout, lambda axis: axis == AXIS)) for name, layout in layouts.items()},
        device={name: _amount(_parts(layout, lambda axis: True)) for name, layout in layouts.items()},
        shared=tuple(variables.users[0] for variables in plan.traced.variable_sets if variables.shared),
    )


def _own(plan: Plan, layout: Layout) -> tuple[Amount, ...]:
    """Counts what the layers of each virtual stage have in a collection, `[K*V]`."""
    leaves_of = {
        users[0]: record.leaves
        for record, instances in zip(layout.storage.record_types, layout.users, strict=True)
        for users in instances
    }
    bounds = plan.partition.bounds
    return tuple(_amount(leaf for i in range(*bound) for leaf in leaves_of.get(i, ())) for bound in bounds)


def _parts(layout: Layout, along: Callable[[str], bool]) -> Iterator[jax.ShapeDtypeStruct]:
    """A device's parts of the global arrays, split over some mesh axes."""
    for name, array in layout.shapes.items():
        sharding = NamedSharding(layout.mesh, split_by(layout.specs[name], along))
        yield jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), array.dtype)


def _amount(arrays: Iterable[Leaf]) -> Amount:
    arrays = list(arrays)
    return Amount(sum(math.prod(array.shape) for array in arrays), bytes_of(arrays))
