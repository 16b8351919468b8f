"""Decides where virtual stages lie: on which stage, as which chunk, and who sends to whom.

A model is cut into a chain of K*V virtual stages, and each of K stages runs V of them, its chunks. How the chain is
dealt out to the stages decides who sends to whom. It is known here and nowhere else.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

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
    [[(0, 1), (1, 2)], [(1, 0), (2, 1)], [(2, 2)]]
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
        """Divides `hops` into lists, the routes, by each of which a stage receives from one stage at most.

        In a loop they are one list. In a "v" a stage receives from both sides, and the last one from itself where the
        chain turns: the first route goes up the stages, the second goes down, and the last is the turn.
        """
        hops = self.hops(flow)
        if self.style == "loop":
            return [hops] if hops else []
        return [route for way in (1, -1, 0) if (route := [(a, b) for a, b in hops if np.sign(b - a) == way])]

    def hops(self, flow: int) -> list[tuple[int, int]]:
        """All (from stage, to stage) between which values of this flow cross a boundary: `jax.lax.ppermute`'s pairs.

        Each pair is there once, in sorted order. In a loop of one chunk the pairs are a line. With more chunks they are
        a ring, since the last stage then sends to the first.
        """
        return sorted({(source, stage) for (way, stage, _), (source, _) in self.sources.items() if way == flow})
