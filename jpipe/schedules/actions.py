"""Defines actions and their kinds: what each kind depends on, and where it sends its result.

K is the number of stages, M of micro-batches, V of chunks a stage.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from jpipe.schedules.placement import Placement


@dataclass(frozen=True)
class ActionKind:
    """A kind of action: which actions it depends on, and where it sends its result.

    Attributes:
      flow: the direction in which results of this kind cross boundaries. +1: from each virtual stage to the one after
        it (activations). -1: to the one before it (cotangents). 0: they cross none.
      after: the kinds that must have run before it on its own virtual stage, for the same micro-batch, if they are
        there at all.
    """

    flow: int
    after: str


ACTION_KINDS = {
    "F": ActionKind(flow=+1, after=""),
    "R": ActionKind(flow=0, after="F"),
    "B": ActionKind(flow=-1, after="FR"),
    "I": ActionKind(flow=-1, after="FR"),
    "W": ActionKind(flow=0, after="I"),
}
"""F: the forward. Then either B, the whole backward, or it in two parts: I, the gradients of the inputs, for which the
stage before waits, and W, the gradients of the weights, for which nobody does (arXiv 2401.10241). R is recomputation
ahead of the cotangent (torchgpipe's early recomputation), which B otherwise does itself where remat needs it."""

FLOWS = {+1: "F", -1: "BI"}
"""The kinds that send in each direction."""


def admitted(slot: str) -> str:
    """The kinds that may run in a slot of that name: those that it names, and "I" where it names "B".

    >>> admitted("F"), admitted("B"), admitted("FW")
    ('F', 'BI', 'FW')
    """
    return slot if "I" in slot else slot.replace("B", "BI")


class Action(NamedTuple):
    """One piece of a stage's work (`ACTION_KINDS`) for one micro-batch through one chunk.

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
      slots: the slots of a tick, each named by the kinds of action that it admits (`admitted`).
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
    def placed(self) -> frozenset[Placed]:
        """All actions, each with its stage."""
        return frozenset((stage, action) for stage, order in enumerate(self.actions) for action in order)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds that occur."""
        return frozenset(action.kind for order in self.actions for action in order)

    @cached_property
    def placement(self) -> Placement:
        """Which virtual stage each chunk of each stage is."""
        return Placement(self.num_stages, self.num_chunks, self.style)
