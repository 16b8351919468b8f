"""The settings that a search may change: sizes of mesh axes, M, schedule and V, remat, where weights lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh

from jpipe.mesh.axes import AXIS
from jpipe.model.remat import MODES, Policy
from jpipe.planning.request import ENDS, NOTHING, Offload
from jpipe.schedules.schedule import Schedule

WAYS = (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 4), ("v", 2))
"""Schedules with V. "gpipe" takes the time of "1f1b" and more memory; those of papers gain nothing in lockstep."""
OVERLAPPED = (("overlapped", 1), ("overlapped", 2), ("overlapped-v", 2))
"""Further ones for GPUs whose layers send: that travels beside the other pass (`jpipe.planning.layer_loops`)."""
MICROBATCHES_A_STAGE = 4
"""M is K times this at first: the bubble is negligible then (GPipe, section 2.3)."""
PINNED = ("num_stages", "num_microbatches", "schedule", "num_chunks", "remat", "ends", "shard_over", "offload")
"""The pipeline's arguments that a search varies; where one is given, it stays as it is."""
COUNTS = ("num_stages", "num_microbatches", "num_chunks")
"""Those of them that are numbers."""
HEAVY = tuple(name for name, mode in MODES.items() if mode.keep_inputs)
"""The modes of remat that compute most anew, and keep least."""


@dataclass(frozen=True)
class Setting:
    """A way to train a model on some devices.

    Attributes:
      axes: (name, devices) of each mesh axis, `stage` first.
      num_microbatches: M.
      schedule: its name, or the user's own.
      num_chunks: V.
      remat: its name, or a policy.
      ends: where the weights of the first and the last layer lie.
      shard_over: data axes that parameters are split over.
      offload: what lies on the hosts.
    """

    axes: tuple[tuple[str, int], ...]
    num_microbatches: int
    schedule: str | Schedule = "1f1b"
    num_chunks: int = 1
    remat: str | Policy = "layer"
    ends: str = "own"
    shard_over: tuple[str, ...] = ()
    offload: Offload = NOTHING

    @property
    def num_stages(self) -> int:
        """K."""
        return dict(self.axes)[AXIS]

    @property
    def options(self) -> dict[str, object]:
        """The arguments of `jpipe.Pipeline`, but for its mesh."""
        return {**{name: getattr(self, name) for name in PINNED}, "offload": self.offload.shares}


@dataclass(frozen=True)
class Space:
    """All settings that are searched.

    Attributes:
      num_devices: the devices of the mesh.
      data_axes: names of axes that split examples.
      others: names of further axes, which split layers.
      batch_size: B.
      num_layers: N.
      pinned: the pipeline's arguments of `PINNED` that the user gave.
      overlaps: whether the schedules `OVERLAPPED` are among them.
    """

    num_devices: int
    data_axes: tuple[str, ...]
    others: tuple[str, ...]
    batch_size: int
    num_layers: int
    pinned: Mapping[str, object]
    overlaps: bool

    def starts(self) -> list[Setting]:
        """A setting of each way to share the devices out, to be improved; those first whose layers are split least."""
        starts = []
        for axes in shared_out(self.num_devices, (AXIS, *self.data_axes, *self.others)):
            setting = Setting(axes, 1)
            counts, ways = self._counts(setting), self._ways(setting.num_stages)
            most = MICROBATCHES_A_STAGE * setting.num_stages
            if setting.num_stages in self._allowed("num_stages", range(1, self.num_layers + 1)) and counts and ways:
                count, (name, V) = max([m for m in counts if m <= most] or counts[:1]), ways[0]
                starts.append(self._with_pinned(replace(setting, num_microbatches=count, schedule=name, num_chunks=V)))
        return sorted(starts, key=lambda start: math.prod(dict(start.axes)[name] for name in self.others))

    def instead(self, start: Setting) -> list[Setting]:
        """Settings to begin with where a start isn't possible: a pinned schedule may need another V or remat."""
        return list(self.moves(start))[2] if {"schedule", "num_chunks"} & self.pinned.keys() else []

    def ends(self, setting: Setting) -> list[Setting]:
        """Settings that differ in where the first and the last layer run."""
        words = ENDS if setting.num_stages > 1 else ENDS[:1]
        return list(dict.fromkeys(self._with_pinned(replace(setting, ends=word)) for word in words))

    def moves(self, setting: Setting) -> Iterator[list[Setting]]:
        """Settings that differ in where parameters lie; in M, by one divisor of the batch; in schedule and remat."""
        splitting = tuple(name for name in self.data_axes if dict(setting.axes)[name] > 1)
        over = [replace(setting, shard_over=names) for names in dict.fromkeys([(), splitting])]
        yield [other for one in over for other in self.ends(one)]
        yield [*self.fewer(setting), setting, *self._beside(setting, 1)]
        yield [
            self._with_pinned(replace(setting, schedule=name, num_chunks=V, remat=remat))
            for name, V in self._ways(setting.num_stages)
            for remat in MODES
        ]

    def fewer(self, setting: Setting) -> list[Setting]:
        """The setting with the next smaller M; none below."""
        return self._beside(setting, -1)

    def _beside(self, setting: Setting, steps: int) -> list[Setting]:
        """The setting with the M that is so many divisors of the batch further; none beyond the last."""
        counts = self._counts(setting)
        at = counts.index(setting.num_microbatches) + steps
        return [replace(setting, num_microbatches=counts[at])] if 0 <= at < len(counts) else []

    def splits_more(self, setting: Setting, other: Setting) -> bool:
        """Whether a setting, of as many stages, splits layers over as many devices of each axis as another, or more."""
        mine, others = dict(setting.axes), dict(other.axes)
        return mine[AXIS] == others[AXIS] and all(mine[name] >= others[name] for name in self.others)

    def why_empty(self) -> str:
        """Why there is no setting, in words."""
        kept = ", ".join(f"{name}={word_of(value)}" for name, value in self.pinned.items()) or "nothing kept"
        return (
            f"a batch of {self.batch_size} can be cut into {divisors(self.batch_size)} micro-batches, and "
            f"{self.num_layers} layers lie on {self.num_layers} stages at most; with {kept}, none suits "
            f"{self.num_devices} devices"
        )

    def _ways(self, num_stages: int) -> list[tuple[str | Schedule, int]]:
        """Schedules with V that there are layers for; of those that aren't known, any V that may suit."""
        pinned = self.pinned.get("schedule"), self.pinned.get("num_chunks")
        name, count = cast("tuple[str | Schedule | None, int | None]", pinned)
        known = WAYS + (OVERLAPPED if self.overlaps else ())
        ways = [way for way in known if name in (None, way[0]) and count in (None, way[1])]
        if num_stages == 1 and name is None and count is None:
            ways = [way for way in ways if way in (WAYS[0], OVERLAPPED[0])]
        ways = ways or [(name or "interleaved", V) for V in ([count] if count else (1, 2, 4))]
        return [(name, V) for name, V in ways if V * num_stages <= self.num_layers]

    def _counts(self, setting: Setting) -> list[int]:
        """The M that there can be."""
        shards = math.prod(dict(setting.axes)[name] for name in self.data_axes)
        counts = self._allowed("num_microbatches", divisors(self.batch_size))
        return [m for m in counts if self.batch_size % (m * shards) == 0]

    def _allowed(self, name: str, values: Iterable[int]) -> list[int]:
        """The values that an argument may have: the user's alone, if it is pinned."""
        return [value for value in values if self.pinned.get(name, value) == value]

    def _with_pinned(self, setting: Setting) -> Setting:
        """Replaces the searched settings that the user gave."""
        return replace(setting, **{name: value for name, value in self.pinned.items() if name != "num_stages"})


def word_of(value: object) -> str:
    """The user's value as a word: a schedule or a policy by its name."""
    return value.name if isinstance(value, Schedule) else getattr(value, "__name__", str(value))


def shared_out(count: int, names: Sequence[str]) -> list[tuple[tuple[str, int], ...]]:
    """All ways in which the product of the axes' sizes is the number of devices.

    >>> shared_out(4, ["stage", "data"])
    [(('stage', 1), ('data', 4)), (('stage', 2), ('data', 2)), (('stage', 4), ('data', 1))]
    """
    if not names:
        return [()] if count == 1 else []
    return [((names[0], n), *rest) for n in divisors(count) for rest in shared_out(count // n, names[1:])]


def divisors(number: int) -> list[int]:
    """The divisors in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0]


def mesh_of_nowhere(axes: Mapping[str, int]) -> Mesh:
    """A mesh of these sizes on devices that aren't there: one CPU stands for all of them. Nothing can run on it."""
    shape = tuple(axes.values())
    return Mesh(np.full(math.prod(shape), jax.local_devices(backend="cpu")[0]).reshape(shape), tuple(axes))
