"""Goes through the layers of a virtual stage, group by group: which layers, in which order, by which loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jpipe.jax.in_place import Carry, Index, each, look_up, take_slice
from jpipe.memory.storage import Row
from jpipe.planning.step import Step

Reads = TypeVar("Reads")
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
      g, position: in the job of one layer, its group and its position there.
    """

    microbatch: Index
    rows: dict[str, Row]
    counts: Counts = True
    virtual_stage: Index = 0
    g: int = 0
    position: Index = 0

    @property
    def layer(self) -> tuple[int, Index]:
        """(The layer's group, its position there)."""
        return self.g, self.position

    def chosen(self, new: jax.Array, old: jax.Array) -> jax.Array:
        """`new` if the job counts, else `old`."""
        return new if self.counts is True else jnp.where(self.counts, new, old)

    def or_zeros(self, array: jax.Array) -> jax.Array:
        """`array` if the job counts, else zeros."""
        return array if self.counts is True else jnp.where(self.counts, array, jnp.zeros_like(array))


Reader = Callable[[Job, Carry], Reads]
"""A layer's job, the carry -> what the layer reads."""
Visitor = Callable[[Job, Reads, Carry], Carry]
"""A layer's job, what it reads, the carry -> the carry after the layer."""


def sweep(
    step: Step, job: Job, kind: str, reads: Reader[Carry, Reads], visit: Visitor[Reads, Carry], carry: Carry
) -> Carry:
    """The carry after `carry = visit(layer, reads(layer, carry), carry)` for the job of each layer of a virtual stage.

    A forward goes from the first layer to the last, all others from the last to the first. A pass goes once through
    all groups, in order, and runs a range of positions of each, by a loop:

        layers   A A A B B A C        of the groups A, B, C
        pass 0   A[0:3] B[0:2] C[0:0]
        pass 1   A[3:4] B[2:2] C[0:1]

    `ranges.most[g]` is the most layers of group g that a virtual stage has. A group of which
    every virtual stage has exactly one needs no loop, if there is one pass. `passes_of[s]` counts the passes of virtual
    stage s.

    An empty range is a loop of zero trips. `each` (`jax/in_place.py`) ties what the loop reads to its trips by an
    `optimization_barrier`; else a compiler could move work out of the loop, and do it even for zero trips.
    Groups without a layer on any virtual stage that has actions of this `kind` have no loop. Those of
    `Step.idle_work` are run by all virtual stages, as many of their layers on each.

    Args:
      step: the step.
      job: that of the action, with the virtual stage.
      kind: the kind of the action: "F" goes from the first layer to the last, the others back.
      reads, visit: of each layer.
      carry: what the layers read and write.
    """
    virtual_stage, ranges, way = job.virtual_stage, step.ranges, 1 if kind == "F" else -1

    def run_pass(p: Index, _: tuple[()], carry: Carry) -> Carry:
        """Runs a range of the layers of each group that has a loop."""
        if isinstance(virtual_stage, int):
            start, stop = ranges.start[virtual_stage, p].tolist(), ranges.stop[virtual_stage, p].tolist()
        else:
            table, count = jnp.asarray([ranges.start, ranges.stop]), len(step.model.groups)
            start, stop = take_slice(table, (0, virtual_stage, p), (2, 1, 1, count)).reshape(2, count)
        for g in step.groups_in(kind)[::way]:
            with jax.named_scope(step.model.groups[g].scope(g)):
                carry = _run_group(step, job._replace(g=g), (start[g], stop[g]), way, reads, visit, carry)
        return carry

    if ranges.num_passes > 1 and not isinstance(virtual_stage, int):
        stop = look_up(ranges.passes_of.tolist(), virtual_stage)
        return each(0, stop, (), run_pass, carry, reverse=way < 0)
    for p in range(ranges.num_passes)[::way]:
        carry = run_pass(p, (), carry)
    return carry


def _run_group(
    step: Step,
    job: Job,
    own: tuple[Index, Index],
    way: int,
    reads: Reader[Carry, Reads],
    visit: Visitor[Reads, Carry],
    carry: Carry,
) -> Carry:
    """Runs the virtual stage's own layers of the job's group, none if it idles; or as many as all others run."""
    (start, stop), g, ranges, tied = own, job.g, step.ranges, (job.microbatch, job.rows)  # `tied`: to the loops' trips
    is_alone = len(step.model.groups[g].indices) == 1
    run = lambda job, carry: visit(job, reads(job, carry), carry)

    def layer(position: Index, tied: tuple[Index, dict[str, Row]], counts: Counts = True) -> Job:
        return Job(*tied, counts, g=g, position=0 if is_alone else position)

    if trips := step.idle_work.trips.get(g):

        def along(i: Index, carry: Carry) -> Carry:
            counts, position = job.counts, start + (trips - 1 - i if way < 0 else i)
            if g in step.idle_work.uneven:  # a layer counts if the job does, and the virtual stage has it
                counts = counts & (jnp.asarray(stop) > position)
            return run(layer(position, tied, counts), carry)

        # Nothing is tied to the trips, which are as many on all stages. Besides, the GPU compiler fails on ties in some
        # loops whose trips it can compute (with K=1 and M=1).
        return along(0, carry) if trips == 1 else jax.lax.fori_loop(0, trips, along, carry)
    if ranges.num_passes == 1 and ((ranges.stop - ranges.start)[:, 0, g] == 1).all() and job.counts is True:
        return run(layer(start, tied), carry)
    if job.counts is not True:
        stop = jnp.where(job.counts, stop, start)
    if ranges.most[g] > 1:  # the trip is the position, which selects what is read
        body = lambda position, tied, carry: run(layer(position, tied), carry)
        return each(start, stop, tied, body, carry, reverse=way < 0)
    # A stage has one of them or none, so that the trip selects nothing, and what is read is tied too.
    read = lambda position, tied, carry: (tied, reads(layer(position, tied), carry))
    body = lambda position, read, carry: visit(layer(position, read[0]), read[1], carry)
    return each(start, stop, tied, body, carry, reads=read, reverse=way < 0)
