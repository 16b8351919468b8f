"""What travels from layer to layer and from stage to stage: any pytree, in one common shape.

A `Carrier` turns the values at every boundary of the model into one type. If all boundaries have the same type already
(a run of Transformer blocks) or there is one stage only, values stay as they are. If not, leaves are flattened into
one buffer a dtype, as large as the largest boundary needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np


class Carrier(Protocol):
    """One common type for the values at all boundaries."""

    def zeros(self) -> Any:
        """An empty carrier."""
        ...

    def pack(self, carrier: Any, leaves: list[Any]) -> Any:
        """The carrier with `leaves` in it."""
        ...

    def unpack(self, carrier: Any, leaves: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        """The leaves of the given shapes that were packed."""
        ...


@dataclass(frozen=True)
class TypedCarrier:
    """All boundaries have these leaves: nothing is moved."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]

    def zeros(self) -> list[Any]:
        """Zeros of each shape."""
        return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def pack(self, carrier: Any, leaves: list[Any]) -> list[Any]:
        """As they are."""
        del carrier
        return leaves

    def unpack(self, carrier: Any, leaves: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        """As they are."""
        del leaves
        return carrier


@dataclass(frozen=True)
class FlatCarrier:
    """Boundaries differ: `{dtype: [shards, size]}`, leaves end to end. `shards` are split over the data axes."""

    sizes: tuple[tuple[str, int], ...]
    shards: int

    def zeros(self) -> dict[str, Any]:
        """Zeros of each dtype."""
        return {name: jnp.zeros((self.shards, size), name) for name, size in self.sizes}

    def pack(self, carrier: dict[str, Any], leaves: list[Any]) -> dict[str, Any]:
        """Writes each leaf at its offset."""
        buffers, ends = dict(carrier), dict.fromkeys(carrier, 0)
        for leaf in leaves:
            name, flat = leaf.dtype.name, leaf.reshape(self.shards, -1)
            buffers[name] = jax.lax.dynamic_update_slice(buffers[name], flat, (0, ends[name]))
            ends[name] += flat.shape[1]
        return buffers

    def unpack(self, carrier: dict[str, Any], leaves: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        """Reads each leaf from its offset."""
        ends, result = dict.fromkeys(carrier, 0), []
        for leaf in leaves:
            name, size = leaf.dtype.name, int(np.prod(leaf.shape)) // self.shards
            start = ends[name]
            result.append(carrier[name][:, start : start + size].reshape(leaf.shape))
            ends[name] = start + size
        return result


def make_carrier(boundaries: Sequence[Sequence[jax.ShapeDtypeStruct]], *, shards: int, single_stage: bool) -> Carrier:
    """The carrier for a model's boundaries.

    Args:
      boundaries: the leaves of the value between each pair of neighbouring layers.
      shards: how many devices a micro-batch is split over.
      single_stage: nothing crosses a stage boundary, and values keep their own types.
    """
    types = {tuple((leaf.shape, leaf.dtype) for leaf in boundary) for boundary in boundaries}
    if single_stage or len(types) <= 1:
        return TypedCarrier(tuple(boundaries[0]) if boundaries else ())
    if any(not leaf.shape or leaf.shape[0] % shards for boundary in boundaries for leaf in boundary):
        shards = 1
    sizes: dict[str, int] = {}
    for boundary in boundaries:
        used: dict[str, int] = {}
        for leaf in boundary:
            used[leaf.dtype.name] = used.get(leaf.dtype.name, 0) + int(np.prod(leaf.shape)) // shards
        sizes = {name: max(sizes.get(name, 0), used.get(name, 0)) for name in {**sizes, **used}}
    return FlatCarrier(tuple(sorted(sizes.items())), shards)
