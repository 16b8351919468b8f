"""Lays out the values that travel from layer to layer and from stage to stage: any pytree, in buffers.

Boundaries have leaves of their own shapes, while one program passes them on in all stages. So the activation at any
boundary is a record of one storage (`jpipe.memory.storage`), and a device holds one of these records at a time. Leaves
lie row-major in it, so that no two loops disagree on their layout; several of one type have buffers of their own, so
that one can be read while another is written. Boundaries with equal leaves have equal places, so that a loop over a
group of layers may use the first one's boundary for all. Only the first entries of a buffer cross between stages: as
many as the largest activation at any cut needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jpipe.jax.in_place import put_slice
from jpipe.memory.buffers import FlatBuffer
from jpipe.memory.storage import Buffers, Storage, build_storage

WASTE_AT_BOUNDARIES = 1.0
"""How much more memory (as a share) stacked leaves may take than flat ones would: a device holds one set of these
buffers, and a copy of the part that crosses for each micro-batch that waits. What stacking saves is the copy that
flattening a leaf makes on an accelerator."""


@dataclass(frozen=True)
class Boundaries(Storage):
    """The common format of the activations (or of their cotangents) at all boundaries of a model.

    Record type i is boundary i (what layer i gives and layer i + 1 takes), with a single record; for cotangents, of the
    floating-point leaves only.

    Attributes:
      crossing_sizes: for each buffer that crosses between stages, how many of its entries do, from the first on: leaves
        of a stacked buffer, elements of a flat one.
    """

    crossing_sizes: tuple[tuple[str, int], ...]

    def crossing(self, buffers: Buffers) -> Buffers:
        """The part of the buffers that crosses from stage to stage."""
        whole = lambda name, size: buffers[name].shape[0] == size
        return {n: buffers[n] if whole(n, size) else buffers[n][:size] for n, size in self.crossing_sizes}

    def with_crossed(self, buffers: Buffers, part: Buffers) -> Buffers:
        """The buffers with a part that crossed, as `crossing` gives it, written to their first entries."""
        whole = lambda name, array: buffers[name].shape == array.shape
        return buffers | {n: a if whole(n, a) else put_slice(buffers[n], a, (0,)) for n, a in part.items()}


def make_boundaries(boundaries: Sequence[Sequence[jax.ShapeDtypeStruct]], crossed: Sequence[int]) -> Boundaries:
    """The common format for a model's boundaries.

    All boundaries are records of one row on one device, since a device holds one activation at a time; each begins at
    entry 0 of every buffer. What crosses is then a run from entry 0 on, as long as the largest one needs. Here layers 0
    to 3 give x [4, 3], (x, mask [4]), (x, y [4, 3]) and x, and virtual stages end after layers 0 and 1:

        boundary            0    1    2    3        crossing_sizes, the most at boundaries 0 and 1
        float32_4x3         x    x    x    x        1
        bool_4                  mask                1
        float32_4x3_of_1              y             none: `y` is the second of its type, in a buffer of its own

    Args:
      boundaries: for each boundary between a layer and the next, its leaves as one device has them.
      crossed: the indices of the boundaries whose values have to have room in what crosses: those between two virtual
        stages.
    """
    count = len(boundaries)
    storage = build_storage(
        boundaries,
        [[i] for i in range(count)],
        device_of=[0] * count,  # all use the same places
        orders=[[tuple(range(leaf.ndim)) for leaf in leaves] for leaves in boundaries],
        labels=list(map(_occurrences, boundaries)),
        waste=WASTE_AT_BOUNDARIES,
    )
    sizes: dict[str, int] = {}
    for i in crossed:
        boundary = storage.record_types[i]
        for leaf, name, (entry,) in zip(boundary.leaves, boundary.buffers, boundary.entries, strict=True):
            length = leaf.size if isinstance(storage.buffers[name], FlatBuffer) else 1
            sizes[name] = max(sizes.get(name, 0), entry + length)
    return Boundaries(storage.record_types, storage.named_buffers, storage.num_devices, tuple(sorted(sizes.items())))


def _occurrences(leaves: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[int, ...]]:
    """For each leaf `(n,)` if it is the n-th of its type, counted from 0.

    `()` for the first, whose buffer then has the plain name of its type.
    """
    types = [(leaf.shape, leaf.dtype) for leaf in leaves]
    return [(types[:i].count(types[i]),) if types[i] in types[:i] else () for i in range(len(leaves))]
