"""Brings weights from where they lie at rest (FSDP, `ends="spread"`) to where a step uses them, and gradients back.

    at rest                  stage 0  1  2  3       at work             stage 0  1  2  3
    blocks                         a  b  c  d       the same                  a  b  c  d
    of the first stage, w          w0 w1 w2 w3      one buffer, as large      w  -  -  h
    of the last stage, h           h0 h1 h2 h3      as the larger needs

At rest means between steps; at work means within a step. A `WorkLayout` says for one collection where its leaves lie at
work. Once a step, `gathered` makes the buffers at work from those at rest: leaves that are split over all stages are
joined on the stage that uses them, then all are gathered along data axes (unless layers do that at each use).
Gradients are added up in buffers like those at work. At the end of the step `reduced` does the inverse: it adds them up
over devices, and scatters the leaves that were joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jpipe.jax.trees import accumulator_dtype
from jpipe.memory.layout import Layout, ScatteredLeaf, device_index, part_zeros
from jpipe.memory.storage import Buffers, Storage, build_storage
from jpipe.partitioner.axes import gather_axes, on_all_stages, scatter_axes, split_by, within_stage
from jpipe.partitioner.shardings import names_in


@dataclass(frozen=True, eq=False)
class WorkLayout:
    """Where the variables of one collection lie in a step.

    Attributes:
      rest: where they lie between steps.
      gathers: the data axes that they are gathered along once a step.
      joins: whether leaves that are split over all stages are joined on the stage that uses them. If not, every stage
        uses its part (`ends="shared"`).
    """

    rest: Layout
    gathers: tuple[str, ...]
    joins: bool = True

    @cached_property
    def storage(self) -> Storage:
        """The places at work within a stage, with the record types of `rest`.

        Leaves that aren't joined have their places at rest. The others have places in buffers of their own, which no
        other leaf shares: those of a storage for these leaves alone.
        """
        if not self.joins:
            return self.rest.storage
        types = self.rest.storage.record_types
        joined = [[i for i, spec in enumerate(one.specs) if on_all_stages(spec)] for one in types]
        leaves = [[one.leaves[i] for i in indices] for one, indices in zip(types, joined, strict=True)]
        specs = [[within_stage(one.specs[i]) for i in indices] for one, indices in zip(types, joined, strict=True)]
        ends = build_storage(leaves, [one.devices for one in types], device_of=range(self.rest.num_stages), specs=specs)
        buffer_name = lambda name: f"ends_{name}"  # no buffer at rest is called so
        record_types = []
        for at_rest, indices, at_end in zip(types, joined, ends.record_types, strict=True):
            buffers, entries = list(at_rest.buffers), list(at_rest.entries)
            for n, i in enumerate(indices):
                buffers[i], entries[i] = buffer_name(at_end.buffers[n]), at_end.entries[n]
            at_work = tuple(map(within_stage, at_rest.specs))
            record_types.append(replace(at_rest, specs=at_work, buffers=tuple(buffers), entries=tuple(entries)))
        others = [(name, buffer) for name, buffer in self.rest.storage.named_buffers if not on_all_stages(buffer.spec)]
        added = [(buffer_name(name), buffer) for name, buffer in ends.named_buffers]
        return replace(self.rest.storage, record_types=tuple(record_types), named_buffers=(*others, *added))

    def zeros(self, dtype_of: Callable[[np.dtype], np.dtype] = lambda dtype: dtype) -> Buffers:
        """A device's own part of zero buffers at work, inside of a program on all devices.

        Args:
          dtype_of: a buffer's dtype -> the dtype of its array here, such as that of sums.
        """
        spec_at_work = lambda spec: split_by(spec, lambda name: name not in self.gathers)
        make = lambda a: part_zeros(a.shape, spec_at_work(a.spec), self.rest.mesh, dtype_of(a.dtype))
        return {name: make(buffer) for name, buffer in self.storage.named_buffers}

    def gathered(self, buffers: Buffers) -> Buffers:
        """A device's buffers at work, from those at rest.

        The order matters: leaves are joined along `stage` first, buffers are gathered along data axes second. At rest
        data axes cut a dimension into runs and `stage` cuts each run (`ScatteredLeaf.sharding`), so the parts that
        stages have join into a run. And what crosses between stages is a run, not the whole leaf.
        """
        mesh, named = self.rest.mesh, self.storage.named_buffers
        at_work = {n: buffers[n] if n in buffers else part_zeros(a.shape, a.spec, mesh, a.dtype) for n, a in named}
        for leaf, user, place in self._joined_leaves():
            whole = leaf.unscatter(self.rest.storage.read_leaf(buffers, *place))
            # All devices run this; those that don't use the leaf write back what lies in its place.
            value = jnp.where(user == device_index(mesh), whole, self.storage.read_leaf(at_work, *place))
            at_work = self.storage.write_leaf(at_work, *place, value)
        return {name: gather_axes(at_work[name], buffer.spec, self.gathers) for name, buffer in named}

    def reduced(self, buffers: Buffers, over: Mapping[str, Sequence[str]]) -> Buffers:
        """A device's buffers at rest, from its partial sums of those at work.

        The order is the inverse of that in `gathered`, for the same reasons: data axes first, `stage` second.

        Args:
          buffers: split only over those axes of their specs that they aren't partial along.
          over: for each buffer the mesh axes that it is partial along.
        """
        mesh = self.rest.mesh
        sums = {n: _added_up(buffers[n], buffer.spec, over[n]) for n, buffer in self.storage.named_buffers}
        zeros = lambda a: part_zeros(a.shape, a.spec, mesh, accumulator_dtype(a.dtype))
        at_rest = {n: sums[n] if n in sums else zeros(buffer) for n, buffer in self.rest.storage.named_buffers}
        for leaf, user, place in self._joined_leaves():
            part = leaf.scatter(self.storage.read_leaf(sums, *place), user == device_index(mesh))
            at_rest = self.rest.storage.write_leaf(at_rest, *place, part)
        return at_rest

    def _joined_leaves(self) -> Iterator[tuple[ScatteredLeaf, int, tuple[int, int, int]]]:
        """The leaves that are joined: (leaf, the stage that uses it, (record type, index of the leaf, record))."""
        for t, record_type in enumerate(self.rest.storage.record_types if self.joins else ()):
            for i, (leaf, spec) in enumerate(zip(record_type.leaves, record_type.specs, strict=True)):
                for record, user in enumerate(record_type.devices if on_all_stages(spec) else ()):
                    yield ScatteredLeaf(leaf, within_stage(spec), self.rest.mesh), user, (t, i, record)


def _added_up(array: jax.Array, spec: PartitionSpec, over: Sequence[str]) -> jax.Array:
    """Adds up a device's partial sums along the axes `over`; along those that split the array it keeps its part."""
    others = tuple(name for name in over if not any(name in names_in(entry) for entry in spec))
    array = scatter_axes(array, spec, over)
    return jax.lax.psum(array, others) if others else array
