"""Defines actions and their kinds, where they run (`Placement`), and when, as early as their order allows (`Orders`).

K is the number of stages, M of micro-batches, V of chunks a stage. A model is cut into a chain of K*V virtual stages,
and each stage runs V of them, its chunks. How the chain is dealt out to the stages decides who sends to whom. It is
known here and nowhere else.

Stages work in lockstep ticks. A tick is a sequence of slots, and in each slot a stage does one action or idles. What
is sent at the end of a slot can be used from the next slot on. With the slots ("F", "B") a forward's hop to the next
stage therefore costs a tick, while on the last stage the backward follows its own forward in the same tick.

A *slot time* counts slots from the start: slot time tau is slot `tau % len(slots)` of tick `tau // len(slots)`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np


@dataclass(frozen=True)
class ActionKind:
    """A kind of action: which actions it depends on, and where it sends its result.

    Attributes:
      name: its name in pictures, in words.
      flow: the direction in which results of this kind cross boundaries. +1: from each virtual stage to the one after
        it (activations). -1: to the one before it (cotangents). 0: they cross none.
      after: the kinds that must have run before it on its own virtual stage, for the same micro-batch, if they are
        there at all.
    """

    name: str
    flow: int
    after: str


ACTION_KINDS = {
    "F": ActionKind("forward", flow=+1, after=""),
    "R": ActionKind("recomputation", flow=0, after="F"),
    "B": ActionKind("backward", flow=-1, after="FR"),
    "I": ActionKind("input gradient", flow=-1, after="FR"),
    "W": ActionKind("weight gradient", flow=0, after="I"),
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

# --- where actions run ------------------------------------------------------------------------------------------------


Integer: TypeAlias = Any  # an int, or integers of NumPy or (traced) JAX: plain arithmetic works on all of them


STYLES = ("loop", "v")


@dataclass(frozen=True)
class Placement:
    """Virtual stages dealt out to the stages, by one of two styles.

    "loop": in turn, so that chunk v of stage k is virtual stage v*K + k, and a micro-batch goes through all stages once
    for each chunk (Megatron-LM, arXiv 2104.04473, section 2.2). "v": there and back, so that chunk 1 of stage k is
    virtual stage 2K-1-k (arXiv 2405.15362): the chain turns on the last stage, and ends where it began.

    Attributes:
      num_stages: K.
      num_chunks: V, the virtual stages of each stage; 2 if the style is "v".
      style: "loop" or "v".

    >>> placement = Placement(num_stages=3, num_chunks=2)
    >>> [(placement.stage_of(s), placement.chunk_of(s)) for s in range(placement.num_virtual_stages)]
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    >>> placement.routes(+1), placement.routes(-1)
    ([[(0, 1), (1, 2), (2, 0)]], [[(0, 2), (1, 0), (2, 1)]])
    >>> there_and_back = Placement(num_stages=3, num_chunks=2, style="v")
    >>> [(there_and_back.stage_of(s), there_and_back.chunk_of(s)) for s in range(6)]
    [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    >>> there_and_back.routes(+1)
    [[(0, 1), (1, 2)], [(1, 0), (2, 1)], [(2, 2)]]
    """

    num_stages: int
    num_chunks: int
    style: str = "loop"

    @property
    def num_virtual_stages(self) -> int:
        """K*V, the length of the chain."""
        return self.num_stages * self.num_chunks

    @property
    def ends(self) -> tuple[int, int]:
        """The stages that have the first and the last virtual stage."""
        return self.stage_of(0), self.stage_of(self.num_virtual_stages - 1)

    def virtual_stage(self, stage: Integer, chunk: Integer) -> Integer:
        """The virtual stage that is this chunk of this stage, counted along the chain from 0."""
        return chunk * self.num_stages + self._reflected(chunk, stage)

    def stage_of(self, virtual_stage: Integer) -> Integer:
        """The stage that runs a virtual stage."""
        return self._reflected(self.chunk_of(virtual_stage), virtual_stage % self.num_stages)

    def chunk_of(self, virtual_stage: Integer) -> Integer:
        """Which of its stage's chunks a virtual stage is."""
        return virtual_stage // self.num_stages

    @cached_property
    def sources(self) -> dict[tuple[int, int, int], tuple[int, int]]:
        """The stage and the chunk from which values come, by flow, stage and chunk; missing at the end of the chain.

        Flow +1 is that of activations, which go up the chain; -1 that of cotangents, which go down.
        """
        chain = [(self.stage_of(s), self.chunk_of(s)) for s in range(self.num_virtual_stages)]
        down = list(pairwise(chain))
        up = [(after, before) for before, after in down]
        return {(flow, *at): source for flow, pairs in ((+1, up), (-1, down)) for at, source in pairs}

    def _reflected(self, chunk: Integer, place: Integer) -> Integer:
        """Turns a stage into its place in the chunk's run, or back: in a "v" odd chunks run backwards."""
        return place + (chunk % 2) * (self.num_stages - 1 - 2 * place) if self.style == "v" else place

    def routes(self, flow: int) -> list[list[tuple[int, int]]]:
        """The hops by which values of this flow cross boundaries, (from stage, to stage): `jax.lax.ppermute`'s pairs.

        They are in lists, the routes, by each of which a stage receives from one stage at most. Each pair is there
        once, in sorted order. In a loop of one chunk the pairs are a line. With more chunks they are a ring, since the
        last stage then sends to the first. In a "v" a stage receives from both sides, and the last one from itself
        where the chain turns: the first route goes up the stages, the second goes down, and the last is the turn.
        """
        hops = sorted({(source, stage) for (way, stage, _), (source, _) in self.sources.items() if way == flow})
        if self.style == "loop":
            return [hops] if hops else []
        return [route for way in (1, -1, 0) if (route := [(a, b) for a, b in hops if np.sign(b - a) == way])]


# --- when actions run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Orders:
    """Each stage's order of actions, not checked yet; `jpipe.Schedule` is one that is known to be valid.

    Attributes:
      actions: K orders, the actions of each stage from first to last.
      slots: the slots of a tick, each named by the kinds of action that it admits (`admitted`).
      style: how virtual stages are dealt out to stages, "loop" or "v" (`Placement`).
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

    @cached_property
    def slot_times(self) -> dict[Placed, int]:
        """The slot time of every action of every stage, as early as can be, in the order of time.

        Raises:
          ValueError: the orders deadlock; the message names an action, what it waits for, and the remedy.
        """
        return _slot_times(self)


def needs(orders: Orders, stage: int, action: Action) -> list[Placed]:
    """The actions that must have run in an earlier slot.

    First come those on the action's own virtual stage. The last is the one whose result it receives over a boundary, if
    it isn't at the end of the chain: for a backward the B or the I of the virtual stage after it, whichever there is.
    """
    kind, microbatch, chunk = action
    flow, kinds = ACTION_KINDS[kind].flow, orders.kinds
    actions = [(stage, Action(before, microbatch, chunk)) for before in ACTION_KINDS[kind].after if before in kinds]
    if source := orders.placement.sources.get((flow, stage, chunk)):
        actions += [(source[0], Action(sent, microbatch, source[1])) for sent in FLOWS[flow] if sent in kinds]
    # Only where a backward may be whole or in parts, or an R be there or not, does a kind that occurs not say enough.
    return [placed for placed in actions if placed in orders.placed] if len(kinds) > 3 or "R" in kinds else actions


def _slot_times(orders: Orders) -> dict[Placed, int]:
    """Lets each stage run its actions in order, until one needs an action that hasn't run, for which it waits."""
    times: dict[Placed, int] = {}
    waiting = [list(reversed(order)) for order in orders.actions]  # a stage's next action is the last of its list
    before = [-1] * orders.num_stages  # the slot time of each stage's latest action
    waiters: dict[Placed, list[int]] = {}  # for each action, the stages that wait for it
    ready = list(range(orders.num_stages))
    while ready:
        stage = ready.pop()
        rest = waiting[stage]
        while rest:
            needed = needs(orders, stage, rest[-1])
            needed_times = [times.get(need, -1) for need in needed]
            if -1 in needed_times:
                waiters.setdefault(needed[needed_times.index(-1)], []).append(stage)
                break
            placed = stage, rest.pop()
            after = max([before[stage], *needed_times])
            before[stage] = times[placed] = after + _wait(orders.slots, placed[1].kind, after % len(orders.slots))
            ready += waiters.pop(placed, ())
    if any(waiting):
        raise ValueError(_deadlock(orders, times, waiting))
    return dict(sorted(times.items(), key=lambda entry: (entry[1], entry[0][0])))


@cache
def _wait(slots: tuple[str, ...], kind: str, slot: int) -> int:
    """Counts the slots from this one to the next one that admits a kind."""
    return next(wait for wait in itertools.count(1) if kind in admitted(slots[(slot + wait) % len(slots)]))


def _deadlock(orders: Orders, times: dict[Placed, int], waiting: list[list[Action]]) -> str:
    """Makes the message for orders that deadlock.

    Every stage with actions left waits for an action of some stage that has not run. Going from stage to stage along
    these waits leads into a cycle. Not every stage of the cycle can wait for the next action of another: dependencies
    alone have no cycle. So one waits for an action that comes later in its stage's order, and the message names it.

    Args:
      orders: the orders of all stages.
      times: the slot times of the actions that have run.
      waiting: for each stage the actions that have not run, the next one last.
    """

    def wanted(stage: int) -> Placed:
        return next(need for need in needs(orders, stage, waiting[stage][-1]) if need not in times)

    stage = next(stage for stage, rest in enumerate(waiting) if rest)
    seen: list[int] = []
    while stage not in seen:
        seen.append(stage)
        stage = wanted(stage)[0]
    kinds = list(ACTION_KINDS)  # forwards first: one that comes too late is the usual reason, and the easier to see
    cycle = sorted(seen[seen.index(stage) :], key=lambda stage: (kinds.index(waiting[stage][-1].kind), stage))
    stage = next(stage for stage in cycle if waiting[wanted(stage)[0]][-1] != wanted(stage)[1])
    source, late = wanted(stage)
    blocker = waiting[source][-1]
    return (
        f"stage {stage} waits forever at {waiting[stage][-1]}: it needs {late} of stage {source}, which comes after "
        f"{blocker} there, and {blocker} cannot run before it; put {late} before {blocker} on stage {source}"
    )
