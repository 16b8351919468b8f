"""`Splits`: which mesh axes split weights, at rest and at work (`shard_over=`, `gather=`), and examples.

At rest, between the computations of its layer, a weight is split as the layer's metadata says, and over the mesh axes
that the pipeline was told to split all weights over (`shard_over`, as in FSDP). At work, as its layer is given it, it
is gathered along the data axes and remains split over the others, if weights are gathered once a step; if they are
gathered at each use, it lies as at rest, and the layer gathers what it needs whole (`jpipe.partitioner.choice`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jpipe.partitioner.axes import AXIS, check_batch_axes, spec_of, split_by, stage_axes
from jpipe.partitioner.shardings import REPLICATED, Axis, Shape, Sharding, names_in, of_spec
from jpipe.types import Shapes

_WHEN = ("step", "use")
SMALLEST = 1024
"""The fewest elements of a weight that is split over `shard_over`: for a smaller one, a collective costs more."""


@dataclass(frozen=True)
class Splits:
    """The mesh and data axes that split the arrays of one stage.

    Attributes:
      mesh: all devices; one without axes stands for one device a stage, where nothing is split.
      batch_axes: the mesh's data axes: a micro-batch `[b, ...]` is split over all of them jointly.
      shard_over: data axes that parameters are split over at rest, besides the axes that their metadata names.
      gather: parameters are gathered along data axes once a "step", or at each "use".
      over_stages: all stages compute together, and their arrays may be split over `stage` too.
    """

    mesh: Mesh | AbstractMesh
    batch_axes: tuple[str, ...]
    shard_over: tuple[str, ...] = ()
    gather: str = "step"
    over_stages: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are known, and are CPUs."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    @property
    def on_gpu(self) -> bool:
        """Whether the devices are known, and are GPUs."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "gpu"

    @property
    def num_shards(self) -> int:
        """The number of parts that a micro-batch is split into."""
        return self._devices(self.batch_axes)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that arrays are split over at work: the data axes, and each of the others (`stage_axes`).

        The data axes are one, unless weights are gathered at each use: then some of them may split a layer's arguments.
        """
        return stage_axes(self.mesh, self.batch_axes, jointly=self.gather == "step", over_stages=self.over_stages)

    def of_examples(self, size: int) -> Sharding:
        """How arrays `[size, ...]` of a micro-batch lie: a shard of the examples if the data axes divide `size`."""
        return of_spec(PartitionSpec(self.batch_axes if size % self.num_shards == 0 else None), self.axes)

    def at_work(self, spec: PartitionSpec) -> Sharding:
        """The sharding at work of a weight that is split by `spec` (of `at_rest`) at rest."""
        return of_spec(spec, self.axes) if self.gather == "use" else self.gathered(spec)

    def gathered(self, spec: PartitionSpec) -> Sharding:
        """The sharding of a weight that is split by `spec` (of `at_rest`) at rest, gathered along the data axes.

        Split by `("fsdp", "model")` at rest, one dimension is in two runs then: `Shard(0, outer=2)` along `model`.
        """
        axes = stage_axes(self.mesh, (), over_stages=self.over_stages)
        at_rest = {axis.names: along for axis, along in zip(axes, of_spec(spec, axes), strict=True)}
        return tuple(REPLICATED if axis.is_data else at_rest[axis.names] for axis in self.axes)

    def at_rest(
        self,
        name: str,
        variables: Mapping[str, Shapes],
        specs: Mapping[str, Sequence[PartitionSpec]],
        weights: Collection[str],
    ) -> dict[str, list[PartitionSpec]]:
        """The specs that split each leaf of a layer's variables at rest.

        Args:
          name: the layer's name, for errors.
          variables: collection -> pytree of ShapeDtypeStructs.
          specs: collection -> for each leaf the PartitionSpec that the layer's metadata asks for.
          weights: the collections that don't change within a step.

        Returns:
          Collection -> for each leaf its PartitionSpec, of mesh axes with several devices. Weights may be split over
          data axes, other collections aren't, since they aren't gathered before their layer computes.

        Raises:
          ValueError: axes that don't divide a dimension, or one named twice; layer, leaf and axes are named.
        """
        at_rest: dict[str, list[PartitionSpec]] = {}
        splitting = {axis for axis, size in self.mesh.shape.items() if axis != AXIS and size > 1}
        for collection, tree in variables.items():
            at_rest[collection] = []
            axes, more = (splitting, self.shard_over) if collection in weights else (splitting - {*self.batch_axes}, ())
            for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(tree), specs[collection], strict=True):
                spec = split_by(spec, axes.__contains__)
                what = f"{name} asks for {collection}{jax.tree_util.keystr(path)} of shape {leaf.shape} to be split"
                self._check(what, leaf.shape, spec)
                at_rest[collection].append(self._split_over(more, leaf.shape, spec))
        return at_rest

    def idle(self, names: Collection[str]) -> list[str]:
        """The mesh axes of several devices that split no examples, and that aren't among `names`."""
        used = (AXIS, *self.batch_axes, *names)
        return [name for name, size in self.mesh.shape.items() if size > 1 and name not in used]

    def _check(self, what: str, shape: Shape, spec: PartitionSpec) -> None:
        """Checks that a leaf `what` of a shape can be split by a spec; errors as of `at_rest`."""
        seen: set[str] = set()
        if len(spec) > len(shape):
            raise ValueError(f"{what} by {spec}, which has more dimensions; change its partitioning")
        for size, entry in zip(shape, spec, strict=False):
            names = names_in(entry)
            if twice := [name for name in names if name in seen or names.count(name) > 1]:
                raise ValueError(f"{what} twice over the mesh axis {twice[0]!r}; name it once")
            seen.update(names)
            if size % (count := self._devices(names)):
                raise ValueError(f"{what} over {names} of {count} devices, which don't divide {size}; resize it")

    def _devices(self, names: Sequence[str]) -> int:
        """The number of parts into which these mesh axes split a dimension."""
        return math.prod(self.mesh.shape[name] for name in names)

    def _split_over(self, more: Sequence[str], shape: Shape, spec: PartitionSpec) -> PartitionSpec:
        """A weight's spec that also splits it over more mesh axes, each along the dimension of the largest parts left.

        A weight that is small, or that has no dimension which the axis divides, isn't split over it.
        """
        entries = [list(names_in(entry)) for entry in spec] + [[] for _ in shape[len(spec) :]]
        for name in more if math.prod(shape) >= SMALLEST else ():
            if self._devices([name]) == 1 or any(name in entry for entry in entries):
                continue
            parts = [n // self._devices(entry) for n, entry in zip(shape, entries, strict=True)]
            if fitting := [dim for dim, n in enumerate(parts) if n % self._devices([name]) == 0]:
                entries[max(fitting, key=lambda dim: parts[dim])].append(name)
        return spec_of(entries)


WHOLE = Splits(AbstractMesh((), ()), ())
"""One device a stage: nothing is split."""


def make_splits(mesh: Mesh, batch_axes: object, shard_over: str | Sequence[str] | None, gather: str = "step") -> Splits:
    """Checks the splits that the user asks for.

    Args:
      mesh: all devices.
      batch_axes: the axes that split examples, a name or several names.
      shard_over: None, a name or several names.
      gather: as of `Splits`.

    Raises:
      TypeError, ValueError: as `check_batch_axes`; an unknown `gather`; or `shard_over` names an axis that isn't one of
        the data axes.
    """
    if gather not in _WHEN:
        raise ValueError(f"gather={gather!r} is unknown; use one of {list(_WHEN)}")
    data = check_batch_axes(mesh, batch_axes)
    names = (shard_over,) if isinstance(shard_over, str) else tuple(shard_over or ())
    for name in names:
        if name not in data:
            raise ValueError(f"shard_over={names!r} names {name!r}; the data axes are {list(data)} (batch_axes=)")
    return Splits(mesh, data, names, gather)
