"""Where virtual stages lie: which stage and chunk each of them is, and between which stages values travel.

A model is cut into a chain of K*V virtual stages, and each of K stages runs V of them, its chunks. How the chain is
dealt out to the stages decides who sends to whom. It is known here and nowhere else.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

Integer: TypeAlias = Any  # an int, or integers of NumPy or (traced) JAX: plain arithmetic works on all of them


@dataclass(frozen=True)
class Placement:
    """Virtual stages dealt out to the stages in turn: chunk v of stage k is virtual stage v*K + k.

    So a micro-batch goes through all stages once for each chunk (Megatron-LM, arXiv 2104.04473, section 2.2).

    A V-shaped placement, whose odd chunks run from the last stage back to the first, would change `virtual_stage` and
    `stage_of`, and `hops` would be more than one `ppermute`, since a stage then hears from both sides.

    Attributes:
      num_stages: K.
      num_chunks: V, the virtual stages of each stage.

    >>> placement = Placement(num_stages=3, num_chunks=2)
    >>> [(placement.stage_of(s), placement.chunk_of(s)) for s in range(placement.num_virtual_stages)]
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    >>> placement.hops(+1), placement.hops(-1)
    ([(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)])
    """

    num_stages: int
    num_chunks: int

    @property
    def num_virtual_stages(self) -> int:
        """K*V, the length of the chain."""
        return self.num_stages * self.num_chunks

    def virtual_stage(self, stage: Integer, chunk: Integer) -> Integer:
        """The virtual stage that is this chunk of this stage, counted along the chain from 0."""
        return chunk * self.num_stages + stage

    def stage_of(self, virtual_stage: Integer) -> Integer:
        """The stage that runs a virtual stage."""
        return virtual_stage % self.num_stages

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

    def hops(self, flow: int) -> list[tuple[int, int]]:
        """All (from stage, to stage) between which values of this flow cross a boundary: `jax.lax.ppermute`'s pairs.

        Each pair is there once, in sorted order. With one chunk they are a line, with more a ring, since the last
        stage then sends to the first.
        """
        chain = range(self.num_virtual_stages)
        pairs = ((sender, self.neighbour(sender, flow)) for sender in chain)
        return sorted({(self.stage_of(a), self.stage_of(b)) for a, b in pairs if b is not None})
