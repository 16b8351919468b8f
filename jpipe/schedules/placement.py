"""Decides where virtual stages lie: on which stage, as which chunk, and who sends to whom.

A model is cut into a chain of K*V virtual stages, and each of K stages runs V of them, its chunks. How the chain is
dealt out to the stages decides who sends to whom. It is known here and nowhere else.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

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
    >>> placement.hops(+1), placement.hops(-1)
    ([(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)])
    >>> there_and_back = Placement(num_stages=3, num_chunks=2, style="v")
    >>> [(there_and_back.stage_of(s), there_and_back.chunk_of(s)) for s in range(6)]
    [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    >>> there_and_back.routes(+1)
    [[(0, 1), (1, 2)], [(1, 0), (2, 1), (2, 2)]]
    """

    num_stages: int
    num_chunks: int
    style: str = "loop"

    @property
    def num_virtual_stages(self) -> int:
        """K*V, the length of the chain."""
        return self.num_stages * self.num_chunks

    def virtual_stage(self, stage: Integer, chunk: Integer) -> Integer:
        """The virtual stage that is this chunk of this stage, counted along the chain from 0."""
        return chunk * self.num_stages + self._reflected(chunk, stage)

    def stage_of(self, virtual_stage: Integer) -> Integer:
        """The stage that runs a virtual stage."""
        return self._reflected(self.chunk_of(virtual_stage), virtual_stage % self.num_stages)

    def chunk_of(self, virtual_stage: Integer) -> Integer:
        """Which of its stage's chunks a virtual stage is."""
        return virtual_stage // self.num_stages

    def neighbour(self, virtual_stage: int, flow: int) -> int | None:
        """The virtual stage to which a value goes from this one; None at the end of the chain.

        Args:
          virtual_stage: the sender.
          flow: +1 for activations, which go up the chain, -1 for cotangents, which go down.
        """
        receiver = virtual_stage + flow
        return receiver if 0 <= receiver < self.num_virtual_stages else None

    @cached_property
    def sources(self) -> dict[tuple[int, int, int], tuple[int, int]]:
        """The stage and the chunk from which values come, by flow, stage and chunk; none at the end of the chain."""
        chain = [(s, flow, self.neighbour(s, -flow)) for flow in (+1, -1) for s in range(self.num_virtual_stages)]
        at = lambda virtual_stage: (self.stage_of(virtual_stage), self.chunk_of(virtual_stage))
        return {(flow, *at(s)): at(source) for s, flow, source in chain if source is not None}

    def _reflected(self, chunk: Integer, place: Integer) -> Integer:
        """A stage as its place in the chunk's run through the stages, and back: in a "v", odd chunks run backwards."""
        return place + (chunk % 2) * (self.num_stages - 1 - 2 * place) if self.style == "v" else place

    def routes(self, flow: int) -> list[list[tuple[int, int]]]:
        """`hops`, so that in each of the lists a stage hears from one other or from itself at most.

        In a loop they are one list. In a "v" a stage hears from both sides, and the last one from itself where the
        chain turns: one list goes up the stages, one goes down and has the turn.
        """
        hops = self.hops(flow)
        routes = (
            [hops] if self.style == "loop" else [[h for h in hops if h[0] < h[1]], [h for h in hops if h[0] >= h[1]]]
        )
        return [route for route in routes if route]

    def hops(self, flow: int) -> list[tuple[int, int]]:
        """All (from stage, to stage) between which values of this flow cross a boundary: `jax.lax.ppermute`'s pairs.

        Each pair is there once, in sorted order. In a loop of one chunk they are a line, of more a ring, since the last
        stage then sends to the first.
        """
        chain = range(self.num_virtual_stages)
        pairs = ((sender, self.neighbour(sender, flow)) for sender in chain)
        return sorted({(self.stage_of(a), self.stage_of(b)) for a, b in pairs if b is not None})
