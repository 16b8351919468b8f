"""What travels from layer to layer and from stage to stage: any pytree, in one common type.

Every boundary of a model has leaves of its own shapes, while one program passes them on in all stages. A `Carrier`
holds any of them. A `SlotCarrier` has a place for each type of leaf and moves nothing, which suits models whose
boundaries are (nearly) alike. A `FlatCarrier` lays leaves end to end in one buffer a dtype, as large as the largest
boundary, which suits models with many different ones. Only what some cut between stages needs crosses over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.jax_tools.indexing import put_slice
from jpipe.jax_tools.memory_order import row_major

Leaves = Sequence[jax.ShapeDtypeStruct]

OWN_SLOTS, CROSSING_SLOTS = 4, 2
"""How much larger than flat buffers slots may be, which move nothing: on a device, and in what crosses."""


class Carrier(Protocol):
    """One common type for the values at all boundaries."""

    def empty(self) -> Any:
        """A carrier with nothing in it, of any values."""
        ...

    def pack(self, carrier: Any, leaves: list[Any]) -> Any:
        """The carrier with `leaves` in it."""
        ...

    def unpack(self, carrier: Any, leaves: Leaves) -> list[Any]:
        """The leaves of the given shapes that were packed."""
        ...

    def crossing(self, carrier: Any) -> Any:
        """The part that crosses from stage to stage."""
        ...

    def arrived(self, carrier: Any, part: Any) -> Any:
        """The carrier with a part that crossed in it."""
        ...


@dataclass(frozen=True)
class SlotCarrier:
    """A list of arrays, one for each type of leaf (several where a boundary has several of that type)."""

    slots: tuple[jax.ShapeDtypeStruct, ...]
    crosses: tuple[bool, ...]

    def empty(self) -> list[Any]:
        """An array of each type."""
        return [jax.lax.empty(slot.shape, slot.dtype) for slot in self.slots]

    def pack(self, carrier: list[Any], leaves: list[Any]) -> list[Any]:
        """Puts each leaf into its slot."""
        carrier = list(carrier)
        for index, leaf in zip(self._indices(leaves), leaves, strict=True):
            carrier[index] = row_major(leaf)
        return carrier

    def unpack(self, carrier: list[Any], leaves: Leaves) -> list[Any]:
        """Takes each leaf out of its slot."""
        return [row_major(carrier[index]) for index in self._indices(leaves)]

    def crossing(self, carrier: list[Any]) -> list[Any]:
        """The slots that some cut needs."""
        return [slot for slot, crosses in zip(carrier, self.crosses, strict=True) if crosses]

    def arrived(self, carrier: list[Any], part: list[Any]) -> list[Any]:
        """Puts them back."""
        rest = iter(part)
        return [next(rest) if crosses else slot for slot, crosses in zip(carrier, self.crosses, strict=True)]

    def _indices(self, leaves: Sequence[Any]) -> list[int]:
        """The n-th leaf of a type is in the n-th slot of that type."""
        types, seen, indices = list(map(_type, self.slots)), Counter(), []
        for leaf in leaves:
            indices.append(types.index(_type(leaf)) + seen[_type(leaf)])
            seen[_type(leaf)] += 1
        return indices


@dataclass(frozen=True)
class FlatCarrier:
    """`{dtype: [size]}`, leaves end to end."""

    sizes: tuple[tuple[str, int], ...]
    crossing_sizes: tuple[tuple[str, int], ...]

    def empty(self) -> dict[str, Any]:
        """A buffer of each dtype."""
        return {name: jax.lax.empty((size,), jnp.dtype(name)) for name, size in self.sizes}

    def pack(self, carrier: dict[str, Any], leaves: list[Any]) -> dict[str, Any]:
        """Writes each leaf at its offset."""
        carrier, ends = dict(carrier), dict.fromkeys(carrier, 0)
        for leaf in leaves:
            name, flat = leaf.dtype.name, leaf.reshape(-1)
            carrier[name] = put_slice(carrier[name], flat, (ends[name],))
            ends[name] += flat.size
        return carrier

    def unpack(self, carrier: dict[str, Any], leaves: Leaves) -> list[Any]:
        """Reads each leaf from its offset."""
        ends, result = dict.fromkeys(carrier, 0), []
        for leaf in leaves:
            name, size = leaf.dtype.name, int(np.prod(leaf.shape))
            start = ends[name]
            result.append(carrier[name][start : start + size].reshape(leaf.shape))
            ends[name] = start + size
        return result

    def crossing(self, carrier: dict[str, Any]) -> dict[str, Any]:
        """As much of each buffer as the largest cut needs."""
        return {name: carrier[name][:size] for name, size in self.crossing_sizes}

    def arrived(self, carrier: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """Writes it back."""
        return carrier | {name: put_slice(carrier[name], flat, (0,)) for name, flat in part.items()}


def make_carrier(boundaries: Sequence[Leaves], cuts: Sequence[int]) -> Carrier:
    """The carrier for a model's boundaries.

    Slots are used in a single stage (no cuts), and where they take little more than a flat buffer would: `OWN_SLOTS`
    times the largest boundary, of which a device has one, and `CROSSING_SLOTS` times the largest that crosses, of which
    it has a row for each micro-batch in flight.

    Args:
      boundaries: the leaves between each layer and the next, as one device has them.
      cuts: the indices of the boundaries between two stages.
    """
    counts = [Counter(map(_type, boundary)) for boundary in boundaries]
    slots = _largest(counts)
    crossing = _largest([counts[i] for i in cuts])
    types = [kind for kind, count in slots.items() for _ in range(count)]
    bytes_of = lambda count: sum(_bytes(_shape(kind)) * n for kind, n in count.items())
    largest = lambda counters: max(map(bytes_of, counters), default=0)
    if not cuts or (
        bytes_of(slots) <= OWN_SLOTS * largest(counts)
        and bytes_of(crossing) <= CROSSING_SLOTS * largest([counts[i] for i in cuts])
    ):
        crosses = tuple(n < crossing[kind] for kind, count in slots.items() for n in range(count))
        return SlotCarrier(tuple(map(_shape, types)), crosses)
    used = list(map(_sizes, boundaries))
    return FlatCarrier(tuple(sorted(_largest(used).items())), tuple(sorted(_largest([used[i] for i in cuts]).items())))


def _largest(counters: Sequence[Counter]) -> Counter:
    """The largest count of each entry."""
    result: Counter = Counter()
    for counter in counters:
        result |= counter
    return result


def _sizes(leaves: Leaves) -> Counter:
    sizes: Counter = Counter()
    for leaf in leaves:
        sizes[leaf.dtype.name] += int(np.prod(leaf.shape))
    return sizes


def _type(leaf: Any) -> tuple:
    return tuple(leaf.shape), np.dtype(leaf.dtype)


def _shape(kind: tuple) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(*kind)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(leaf.shape)) * leaf.dtype.itemsize
