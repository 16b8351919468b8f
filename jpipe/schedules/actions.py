"""Defines actions and their kinds: what each kind depends on, and where it sends its result.

K is the number of stages, M of micro-batches, V of chunks a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


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


def crosses_beside(slots: Sequence[str], flow: int, slot: int) -> bool:
    """Whether the values that a slot's actions send cross their boundaries while the next slot runs, not before it.

    They may if the next slot admits no action that receives along this flow. Only such an action could need them.

    Args:
      slots: the slots of a tick, by the kinds that each admits.
      flow: +1 for activations, -1 for cotangents.
      slot: the index of the slot in which the senders run.
    """
    return not set(FLOWS[flow]) & set(admitted(slots[(slot + 1) % len(slots)]))


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
