"""Splits a leaf that one stage has over all stages, along the largest dimension that K divides.

So whole states go to another layout, to a checkpoint and back, while no device holds more than its part, and so leaves
of the first and the last stage may lie at rest (`jpipe.memory.layout`). A leaf without such a dimension is on all
stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.mesh.axes import AXIS, on_all_stages, spec_of
from jpipe.partitioner.shardings import names_in
from jpipe.types import Leaf


@dataclass(frozen=True)
class ScatteredLeaf:
    """How a leaf of one stage is shared out among all stages.

    Attributes:
      leaf: its shape.
      spec: how it is split over other mesh axes; if also over `stage`, every stage has its part already (`lies_so`).
      mesh: the devices.
    """

    leaf: jax.ShapeDtypeStruct
    spec: PartitionSpec
    mesh: Mesh

    @property
    def lies_so(self) -> bool:
        """Whether every stage has its part already."""
        return on_all_stages(self.spec)

    @property
    def dimension(self) -> int | None:
        """The dimension along which it is to be split over the stages, besides its other splits."""
        if self.lies_so:
            return None
        parts, num_stages = NamedSharding(self.mesh, self.spec).shard_shape(self.leaf.shape), self.mesh.shape[AXIS]
        fitting = [d for d, n in enumerate(parts) if n and n % num_stages == 0 and num_stages > 1]
        return max(fitting, key=lambda d: parts[d], default=None)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the leaf once it is shared out."""
        entries = [list(names_in(entry)) for entry in self.spec] + [[] for _ in self.leaf.shape[len(self.spec) :]]
        if self.dimension is not None:
            entries[self.dimension].append(AXIS)
        return NamedSharding(self.mesh, spec_of(entries))

    def scatter(self, leaf: jax.Array, is_mine: jax.Array | bool) -> jax.Array:
        """A device's part of the leaf, whichever stage has it (`is_mine` is true on that stage alone)."""
        if self.lies_so:
            return leaf
        if leaf.dtype == jnp.bool_:
            return self.scatter(leaf.astype(jnp.int8), is_mine).astype(jnp.bool_)
        leaf = jnp.where(is_mine, leaf, jnp.zeros_like(leaf))
        if self.dimension is not None:
            return jax.lax.psum_scatter(leaf, AXIS, scatter_dimension=self.dimension, tiled=True)
        return jax.lax.psum(leaf, AXIS)

    def unscatter(self, part: jax.Array) -> jax.Array:
        """The inverse of `scatter`: the leaf, as each stage has it, from a device's part."""
        return part if self.dimension is None else jax.lax.all_gather(part, AXIS, axis=self.dimension, tiled=True)

    def put(self, leaf: Leaf) -> jax.Array:
        """Shares a leaf out: each device gets its part, also of a leaf on the host or whole in this process.

        Raises:
          ValueError: it is split over other devices, and this process has only a part.
        """
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == self.sharding.device_set:
            return jax.device_put(leaf, self.sharding)
        if not is_whole(leaf):
            raise ValueError(
                f"an array {leaf.dtype}{list(leaf.shape)} is split over {len(leaf.sharding.device_set)} devices other "
                "than those of the pipeline's mesh, and this process has only a part; bring it to the hosts first: "
                "jax.experimental.multihost_utils.process_allgather(array, tiled=True)"
            )
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, self.sharding, lambda index: whole[index])


def is_whole(leaf: Leaf) -> bool:
    """Whether this process can read all of a leaf."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
