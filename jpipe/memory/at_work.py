"""Brings weights from where they lie at rest (FSDP, `ends="spread"`) to where a step uses them, and gradients back.

    at rest                  stage 0  1  2  3       at work             stage 0  1  2  3
    blocks                         a  b  c  d       the same                  a  b  c  d
    of the first stage, w          w0 w1 w2 w3      one buffer, as large      w  -  -  h
    of the last stage, h           h0 h1 h2 h3      as the larger needs

Once a step weights are gathered along data axes, unless layers do that at each use, and what lies split over all stages
(`ends="spread"`) is brought to the stage that uses it. Gradients are added up in buffers like those at work, and what
was brought together is scattered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jpipe.jax_tools.dtypes import accumulator_dtype
from jpipe.memory.layout import Layout, device_index, part_zeros
from jpipe.memory.scattered import ScatteredLeaf
from jpipe.memory.storage import Buffers, Storage, build_storage
from jpipe.mesh.specs import gather_axes, on_all_stages, scatter_axes, split_by, within_stage
from jpipe.partitioner.shardings import names_in


@dataclass(frozen=True, eq=False)
class WorkLayout:
    """Where the variables of one collection lie in a step.

    Attributes:
      rest: where they lie between steps.
      gathers: the data axes that they are gathered along once a step.
      brings: leaves that are split over all stages are brought to the stage that uses them; else all use their parts.
    """

    rest: Layout
    gathers: tuple[str, ...]
    brings: bool = True

    @cached_property
    def storage(self) -> Storage:
        """The places within a stage, with the record types of `rest`."""
        if not self.brings:
            return self.rest.storage
        rest, types = self.rest.storage, self.rest.storage.record_types
        spread = [[i for i, spec in enumerate(known.specs) if on_all_stages(spec)] for known in types]
        ends = build_storage(
            [[known.leaves[i] for i in own] for known, own in zip(types, spread, strict=True)],
            [known.devices for known in types],
            device_of=range(self.rest.num_stages),
            specs=[[within_stage(known.specs[i]) for i in own] for known, own in zip(types, spread, strict=True)],
        )
        found = []
        for known, own, new in zip(types, spread, ends.record_types, strict=True):
            buffers, entries = list(known.buffers), list(known.entries)
            for n, i in enumerate(own):
                buffers[i], entries[i] = _of_ends(new.buffers[n]), new.entries[n]
            specs = tuple(map(within_stage, known.specs))
            found.append(replace(known, specs=specs, buffers=tuple(buffers), entries=tuple(entries)))
        kept = [(name, buffer) for name, buffer in rest.named_buffers if not on_all_stages(buffer.spec)]
        added = [(_of_ends(name), buffer) for name, buffer in ends.named_buffers]
        return replace(rest, record_types=tuple(found), named_buffers=(*kept, *added))

    @cached_property
    def brought(self) -> set[int]:
        """The record types of which something is brought from all stages to one."""
        return {v for _, _, (v, _, _) in self._spread()}

    def zeros(self, dtype_of: Callable[[np.dtype], np.dtype] = lambda dtype: dtype) -> Buffers:
        """A device's own part of zero buffers, inside of a program on all devices.

        Args:
          dtype_of: a buffer's dtype -> that of its array here.
        """
        at = lambda spec: split_by(spec, lambda name: name not in self.gathers)
        make = lambda a: part_zeros(a.shape, at(a.spec), self.rest.mesh, dtype_of(a.dtype))
        return {name: make(buffer) for name, buffer in self.storage.named_buffers}

    def gathered(self, buffers: Buffers) -> Buffers:
        """A device's buffers at work, from those at rest.

        Along `stage` first, then along data axes: where both split a dimension, `stage` splits each data device's run
        (`ScatteredLeaf.sharding`), so that the other order would mix up the parts. It sends less between stages too.
        """
        mesh, places = self.rest.mesh, self.storage.named_buffers
        found = {n: buffers[n] if n in buffers else part_zeros(a.shape, a.spec, mesh, a.dtype) for n, a in places}
        for leaf, device, place in self._spread():
            whole = leaf.unscatter(self.rest.storage.read_leaf(buffers, *place))
            whole = jnp.where(device == device_index(mesh), whole, self.storage.read_leaf(found, *place))
            found = self.storage.write_leaf(found, *place, whole)
        return {name: gather_axes(found[name], known.spec, self.gathers) for name, known in places}

    def reduced(self, buffers: Buffers, over: Mapping[str, Sequence[str]]) -> Buffers:
        """A device's buffers at rest, from its partial sums of those at work: the inverse order, data before stage.

        Args:
          buffers: split only over those axes of their specs that they aren't partial along.
          over: for each buffer the mesh axes that it is partial along.
        """

        def reduced(array: jax.Array, spec: PartitionSpec, over: Sequence[str]) -> jax.Array:
            split = {name for entry in spec for name in names_in(entry)}
            others = tuple(name for name in over if name not in split)
            array = scatter_axes(array, spec, over)
            return jax.lax.psum(array, others) if others else array

        mesh, places = self.rest.mesh, self.rest.storage.named_buffers
        done = {n: reduced(buffers[n], known.spec, over[n]) for n, known in self.storage.named_buffers}
        made = lambda a: part_zeros(a.shape, a.spec, mesh, accumulator_dtype(a.dtype))
        found = {name: done[name] if name in done else made(buffer) for name, buffer in places}
        for leaf, device, place in self._spread():
            part = leaf.scatter(self.storage.read_leaf(done, *place), device == device_index(mesh))
            found = self.rest.storage.write_leaf(found, *place, part)
        return found

    def _spread(self) -> Iterator[tuple[ScatteredLeaf, int, tuple[int, int, int]]]:
        """The leaves that are split over all stages at rest: (leaf, who uses it, (record type, which leaf, record))."""
        for v, known in enumerate(self.rest.storage.record_types if self.brings else ()):
            for i, (leaf, spec) in enumerate(zip(known.leaves, known.specs, strict=True)):
                for j, device in enumerate(known.devices if on_all_stages(spec) else ()):
                    yield ScatteredLeaf(leaf, within_stage(spec), self.rest.mesh), device, (v, i, j)


def _of_ends(buffer: str) -> str:
    """The name of a buffer for what the first and the last stage use: none that others use."""
    return f"ends_{buffer}"
