"""What stages do: actions, their kinds, and the order in which each stage does its own, as plain data.

K is the number of stages, M of micro-batches, V of chunks a stage.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from jpipe.schedules.placement import Placement


@dataclass(frozen=True)
class ActionKind:
    """What an action of this kind depends on, and where it sends its result.

    Attributes:
      flow: the direction in which results of this kind cross boundaries. +1: from each virtual stage to the one after
        it (activations). -1: to the one before it (cotangents). 0: they cross none.
      after: the kinds that must have run before it on its own virtual stage, for the same micro-batch.
    """

    flow: int
    after: str


ACTION_KINDS = {
    "F": ActionKind(flow=+1, after=""),
    "B": ActionKind(flow=-1, after="F"),
}


@dataclass(frozen=True)
class Action:
    """One piece of a stage's work: the forward "F" or backward "B" of one micro-batch through one chunk.

    >>> print(Action("F", 3), Action("B", 3, 1))
    F3 B3.1
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Placed: TypeAlias = tuple[int, Action]  # a stage, and an action that it does


@dataclass(frozen=True)
class Orders:
    """Each stage's order of actions, not checked yet; `jpipe.Schedule` is one that is known to be valid.

    Attributes:
      actions: K orders, the actions of each stage from first to last.
      slots: the slots of a tick, each named by the kinds of action that it admits.
      style: how virtual stages are dealt out to stages, "loop" or "v" (`jpipe.schedules.placement`).
    """

    actions: tuple[tuple[Action, ...], ...]
    slots: tuple[str, ...]
    style: str = "loop"

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        return len(self.actions)

    @cached_property
    def num_microbatches(self) -> int:
        """M, one more than the highest micro-batch."""
        return 1 + max(action.microbatch for order in self.actions for action in order)

    @cached_property
    def num_chunks(self) -> int:
        """V, one more than the highest chunk."""
        return 1 + max(action.chunk for order in self.actions for action in order)

    @property
    def sizes(self) -> dict[str, int]:
        """K, M and V by their names."""
        return {name: getattr(self, name) for name in ("num_stages", "num_microbatches", "num_chunks")}

    @cached_property
    def placement(self) -> Placement:
        """Which virtual stage each chunk of each stage is."""
        return Placement(self.num_stages, self.num_chunks, self.style)
