"""Goes through the layers of a virtual stage, group by group: which layers, in which order, by which loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jpipe.jax.in_place import Carry, Index, each, look_up, take_slice
from jpipe.memory.storage import Row
from jpipe.planning.step import Step

Reads = TypeVar("Reads")
T = TypeVar("T")
Written = TypeVar("Written")
Counts = jax.Array | bool
"""True, or a traced bool: whether what a stage computes counts. It doesn't where the stage only computes along."""


class Job(NamedTuple):
    """The subject of an action, and of each layer in it.

    Attributes:
      microbatch: the micro-batch's index.
      rows: the rows of what the action keeps for later ones, or reads, by `ROWS` of `jpipe.schedules.ticks`; empty if
        it keeps nothing.
      counts: False if the stage idles, and only computes along (`jpipe.planning.layer_loops`), or doesn't have the
        layer. Then nothing is added to sums, and what is kept is written to a free row.
      virtual_stage: whose layers an action runs.
      g, position: which layer, in the job of one: the group, and the position in it.
    """

    microbatch: Index
    rows: dict[str, Row]
    counts: Counts = True
    virtual_stage: Index = 0
    g: int = 0
    position: Index = 0

    @property
    def layer(self) -> tuple[int, Index]:
        """(its group, its position there)."""
        return self.g, self.position

    def chosen(self, new: T, old: T) -> T:
        """`new` if the job counts, else `old`, of the same structure."""
        return new if self.counts is True else jax.tree.map(lambda a, b: jnp.where(self.counts, a, b), new, old)

    def chosen_for(self, buffers: Written, new: T, old: T) -> tuple[T, Written]:
        """`chosen`, and the buffers that `old` was read from, to be written into.

        All of `old` is read before. A compiler copies the buffers if it may read one leaf after another is written.
        """
        old, buffers = jax.lax.optimization_barrier((old, buffers))
        return self.chosen(new, old), buffers

    def or_zeros(self, array: jax.Array) -> jax.Array:
        """`array` if the job counts, else zeros."""
        return array if self.counts is True else jnp.where(self.counts, array, jnp.zeros_like(array))


@dataclass(frozen=True, eq=False)
class Sweep(Generic[Carry, Reads]):
    """Goes through the layers of a virtual stage: `carry = visit(job, reads(job, carry), carry)` for each.

    A forward goes from the first layer to the last, all others from the last to the first. A pass goes once through
    all groups, in order, and runs a range of positions of each, by a loop:

        layers   A A A B B A C        of the groups A, B, C
        pass 0   A[0:3] B[0:2] C[0:0]
        pass 1   A[3:4] B[2:2] C[0:1]

    `ranges.most[g]` is the most layers of group g that a virtual stage has. Where `always_one[p, g]`, every virtual
    stage has exactly one in pass p, which needs no loop if there is no other pass. `passes_of[s]` counts the passes
    of virtual stage s.

    An empty range is a loop of zero trips. `each` (`jax/in_place.py`) ties what the loop reads to its trips by an
    `optimization_barrier`; else a compiler could move work out of the loop, and do it even for zero trips.
    Groups without a layer on any virtual stage that has actions of this `kind` have no loop. Those of
    `Step.idle_work` are run by all virtual stages, as many of their layers on each.

    Attributes:
      step: the step.
      job: that of the action.
      reads: a layer's job, the carry -> what the layer reads.
      visit: a layer's job, that, the carry -> the carry after the layer.
      kind: the kind of the action: "F" goes from the first layer to the last, the others back.
    """

    step: Step
    job: Job
    reads: Callable[[Job, Carry], Reads]
    visit: Callable[[Job, Reads, Carry], Carry]
    kind: str

    def run(self, carry: Carry) -> Carry:
        """The carry after all passes."""
        virtual_stage, ranges = self.job.virtual_stage, self.step.ranges
        num_passes = ranges.num_passes
        if num_passes > 1 and not isinstance(virtual_stage, int):
            stop = look_up(ranges.passes_of.tolist(), virtual_stage)
            return each(0, stop, (), lambda p, _, carry: self.run_pass(p, carry), carry, reverse=self.reverse)
        for p in reversed(range(num_passes)) if self.reverse else range(num_passes):
            carry = self.run_pass(p, carry)
        return carry

    @property
    def reverse(self) -> bool:
        """Whether it goes from the last layer to the first, as all kinds but the forward do."""
        return self.kind != "F"

    def run_pass(self, p: Index, carry: Carry) -> Carry:
        """Runs a range of the layers of each group that has a loop."""
        virtual_stage, ranges, groups = self.job.virtual_stage, self.step.ranges, self.step.model.groups
        if isinstance(virtual_stage, int):
            start, stop = ranges.start[virtual_stage, p].tolist(), ranges.stop[virtual_stage, p].tolist()
        else:
            table = jnp.asarray([ranges.start, ranges.stop])
            start, stop = take_slice(table, (0, virtual_stage, p), (2, 1, 1, len(groups))).reshape(2, len(groups))
        for g in self.step.groups_in(self.kind)[:: -1 if self.reverse else 1]:
            with jax.named_scope(groups[g].scope(g)):
                if g in self.step.idle_work.trips:
                    carry = self.run_along(g, start[g], stop[g], carry)
                else:
                    carry = self.run_range(g, start[g], stop[g], carry)
        return carry

    def run_range(self, g: int, start: Index, stop: Index, carry: Carry) -> Carry:
        """Runs the virtual stage's own layers of a group; none if it idles."""
        ranges, tied = self.step.ranges, self.tied
        if ranges.num_passes == 1 and ranges.always_one[0, g] and self.job.counts is True:
            return self.run_layer(g, start, tied, carry)
        if self.job.counts is not True:
            stop = jnp.where(self.job.counts, stop, start)
        if ranges.most[g] > 1:  # the trip is the position, which selects what is read
            return each(start, stop, tied, partial(self.run_layer, g), carry, reverse=self.reverse)
        # A stage has one of them or none, so that the trip selects nothing, and what is read is tied too.
        read = lambda position, tied, carry: (tied, self.reads(self.of_layer(g, position, tied), carry))
        body = lambda position, read, carry: self.visit(self.of_layer(g, position, read[0]), read[1], carry)
        return each(start, stop, tied, body, carry, reads=read, reverse=self.reverse)

    def run_along(self, g: int, start: Index, stop: Index, carry: Carry) -> Carry:
        """Runs as many layers of a group as every other virtual stage does.

        A layer counts if the job does, and the virtual stage has it.
        """
        trips, is_uneven = self.step.idle_work.trips[g], g in self.step.idle_work.uneven

        def body(i: Index, carry: Carry) -> Carry:
            counts, position = self.job.counts, start + (trips - 1 - i if self.reverse else i)
            if is_uneven:
                counts = counts & (jnp.asarray(stop) > position)
            return self.run_layer(g, position, self.tied, carry, counts)

        # Nothing is tied to the trips, which are as many on all stages. Besides, the GPU compiler fails on ties in some
        # loops whose trips it can compute (with K=1 and M=1).
        return body(0, carry) if trips == 1 else jax.lax.fori_loop(0, trips, body, carry)

    def run_layer(
        self, g: int, position: Index, tied: tuple[Index, dict[str, Row]], carry: Carry, counts: Counts = True
    ) -> Carry:
        """Runs one layer."""
        job = self.of_layer(g, position, tied, counts)
        return self.visit(job, self.reads(job, carry), carry)

    def of_layer(self, g: int, position: Index, tied: tuple[Index, dict[str, Row]], counts: Counts = True) -> Job:
        """The job of a layer; in a group of one layer the position is known."""
        position = 0 if len(self.step.model.groups[g].indices) == 1 else position
        return Job(*tied, counts, g=g, position=position)

    @property
    def tied(self) -> tuple[Index, dict[str, Row]]:
        """The part of the job that loops tie to their trips: the micro-batch and the rows."""
        return self.job.microbatch, self.job.rows
