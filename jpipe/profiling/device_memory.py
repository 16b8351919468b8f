"""Reads the bytes that a compiled step holds on one device."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import jax

from jpipe.profiling.measure import Program
from jpipe.terminal.tables import Table
from jpipe.training.train_state import TrainState
from jpipe.types import PyTree

MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device of this process.

    Attributes:
      parameters: the parameters.
      other_variables: other collections.
      optimizer: the optimiser's state.
      gradients: the gradients, laid out and typed like the parameters.
      temporaries: what the program holds besides while it runs, as its compiler says: residuals and activations of the
        micro-batches in flight, sums of gradients, whatever a layer needs.
    """

    parameters: int
    other_variables: int
    optimizer: int
    gradients: int
    temporaries: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())

    def table(self) -> Table:
        """A row for each part."""
        rows = [(name.replace("_", " "), f"{size / MIB:,.1f}") for name, size in asdict(self).items()]
        return Table("Memory of a device", ("part", "MiB"), [*rows, ("all", f"{self.total / MIB:,.1f}")], {})


def memory_of(program: Program, state: TrainState) -> Memory:
    """The bytes that a step of this program holds with this state."""
    params = state.variables["params"]
    rest = {name: tree for name, tree in state.variables.items() if name != "params"}
    return Memory(
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
