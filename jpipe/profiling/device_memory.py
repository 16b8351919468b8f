"""Reads the bytes that a compiled step holds on one device."""

from __future__ import annotations

import jax

from jpipe.costs.step_cost import Parts
from jpipe.profiling.measure import Program
from jpipe.training.train_state import TrainState
from jpipe.types import PyTree


def memory_of(program: Program, state: TrainState) -> Parts[int]:
    """The bytes that a step of this program holds with this state, on the fullest device of this process.

    `temporaries` are what the program holds besides while it runs, as its compiler says: residuals and activations of
    the micro-batches in flight, sums of gradients, whatever a layer needs.
    """
    params = state.variables["params"]
    rest = {name: tree for name, tree in state.variables.items() if name != "params"}
    return Parts(
        parameters=_on_a_device(params),
        other_variables=_on_a_device(rest),
        optimizer=_on_a_device(state.opt_state),
        gradients=_on_a_device(params),  # laid out and typed like them
        temporaries=program.temporary_bytes,
    )


def _on_a_device(tree: PyTree) -> int:
    """The bytes of a pytree of arrays on the device of this process that has the most of them."""
    held: dict[int, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return max(held.values(), default=0)
