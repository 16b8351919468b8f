"""The settings that a search may change, and its choices among them: how they are sorted, shown and advised on."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast, overload

import jax
import numpy as np
from jax.sharding import Mesh

from jpipe.mesh.axes import AXIS
from jpipe.model.remat import MODES, Policy
from jpipe.planning.request import ENDS, ON_DEVICES, Offload
from jpipe.processes.tables import Table, Tabular, bytes_in_words, ms_in_words
from jpipe.schedules.schedule import Schedule
from jpipe.tools.forecaster import Forecast
from jpipe.tools.step_cost import Parts, StepCost

WAYS = (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 4), ("v", 2))
"""Schedules with V. "gpipe" takes the time of "1f1b" and more memory."""
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
    offload: Offload = ON_DEVICES

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
    """

    num_devices: int
    data_axes: tuple[str, ...]
    others: tuple[str, ...]
    batch_size: int
    num_layers: int
    pinned: Mapping[str, object]

    def starts(self) -> list[Setting]:
        """A setting of each way to share the devices out, to be improved; those first whose layers are split least."""
        starts = []
        for axes in shared_out(self.num_devices, (AXIS, *self.data_axes, *self.others)):
            setting = Setting(axes, 1)
            num_stages, counts, ways = setting.num_stages, self._counts(setting), self._ways(setting.num_stages)
            most = MICROBATCHES_A_STAGE * num_stages
            if self.pinned.get("num_stages", num_stages) == num_stages and counts and ways:
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
        yield [*self.beside(setting, -1), setting, *self.beside(setting, 1)]
        yield [
            self._with_pinned(replace(setting, schedule=name, num_chunks=V, remat=remat))
            for name, V in self._ways(setting.num_stages)
            for remat in MODES
        ]

    def beside(self, setting: Setting, steps: int) -> list[Setting]:
        """The setting with the M that is so many divisors of the batch further; none beyond the last."""
        counts = self._counts(setting)
        at = counts.index(setting.num_microbatches) + steps
        return [replace(setting, num_microbatches=counts[at])] if 0 <= at < len(counts) else []

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
        ways = [way for way in WAYS if name in (None, way[0]) and count in (None, way[1])]
        if num_stages == 1 and name is None and count is None:
            ways = [WAYS[0]]
        ways = ways or [(name or "interleaved", V) for V in ([count] if count else (1, 2, 4))]
        return [(name, V) for name, V in ways if V * num_stages <= self.num_layers]

    def _counts(self, setting: Setting) -> list[int]:
        """The M that there can be."""
        shards = math.prod(dict(setting.axes)[name] for name in self.data_axes)
        counts = (m for m in divisors(self.batch_size) if self.pinned.get("num_microbatches", m) == m)
        return [m for m in counts if self.batch_size % (m * shards) == 0]

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


# --- choices ----------------------------------------------------------------------------------------------------------


LIMITS = {"computation": "compute", "collectives": "links"}
LARGE_BUBBLE = 0.1
SMALL = 0.9
"""Layers whose time shrinks below this part with twice the examples a micro-batch didn't fill the device."""


@dataclass(frozen=True)
class Choice:
    """A setting, and what the models predict of it.

    Attributes:
      setting: the sizes of mesh axes, and the options that were searched.
      options: arguments of `jpipe.Pipeline`, those that `plan` was given too. A mesh is among them where this process
        has as many devices; else `setting.axes` says its sizes.
      cost: seconds of the step and bytes of a device, predicted.
      fits: whether these, and those on its host, are no more than there are.
      compiled: the forecast of the compiled step, if it was asked for.
    """

    setting: Setting
    options: dict[str, object]
    cost: StepCost
    fits: bool
    compiled: Forecast | None = None

    @property
    def time(self) -> Parts[float]:
        """The predicted seconds of a step, by part."""
        return self.cost.seconds

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.cost.step

    @property
    def bubble_fraction(self) -> float:
        """The share of the time in which a stage waits, predicted; ends that all stages share are work."""
        return self.time.bubble / ((self.time.bubble + self.time.computation) or 1.0)

    @property
    def bytes(self) -> dict[str, int]:
        """The predicted bytes on a device, by part."""
        return dict(self.cost.bytes)

    @property
    def total_bytes(self) -> int:
        """The predicted bytes on a device."""
        return self.cost.bytes.total

    @property
    def limit(self) -> str:
        """The part that takes longest, "compute", "bubble", "links" or "update"; "memory" if it doesn't fit."""
        slowest = max(self.time, key=lambda name: self.time[name])
        return LIMITS.get(slowest, slowest) if self.fits else "memory"

    @property
    def words(self) -> str:
        """Its settings in a line."""
        chosen = self.setting
        axes = ", ".join(f"{name}={size}" for name, size in chosen.axes if size > 1 or name == AXIS)
        schedule = word_of(chosen.schedule) + f" V={chosen.num_chunks}" * (chosen.num_chunks > 1)
        over = f", shard_over={'+'.join(chosen.shard_over)}" * bool(chosen.shard_over)
        remat, hosted = word_of(chosen.remat), f", offload={_of_shares(chosen.offload)}" * bool(chosen.offload)
        return f"{axes}, M={chosen.num_microbatches}, {schedule}, remat={remat}, ends={chosen.ends}{over}{hosted}"

    def column(self) -> dict[str, str]:
        """The entries of this choice in a table."""
        rows: dict[str, str] = {name: str(size) for name, size in self.setting.axes}
        rows |= {"M": str(self.setting.num_microbatches), "schedule": word_of(self.setting.schedule)}
        rows |= {"V": str(self.setting.num_chunks), "remat": word_of(self.setting.remat), "ends": self.setting.ends}
        rows |= {"shard_over": ", ".join(self.setting.shard_over) or "-", "layers": _of_stages(self.options["balance"])}
        rows |= {"offload": _of_shares(self.setting.offload)} if self.setting.offload else {}
        rows |= {"ms a step": ms_in_words(self.seconds), "bubble": f"{self.bubble_fraction:.1%}"}
        rows |= dict([*self.cost.rows_of_seconds(digits=1)[:-1], ("a device", bytes_in_words(self.total_bytes))])
        rows |= dict([("limit", self.limit), *self.cost.rows_of_bytes()[:-1], *self.cost.rows_on_host()])
        if self.compiled is not None:
            size, seconds = self.compiled.total_bytes, self.compiled.seconds
            rows |= {"compiled": "fits" if self.compiled.fits else "doesn't fit"}
            rows |= {"compiled bytes": bytes_in_words(size), "bytes were off by": _off(self.total_bytes, size)}
            if seconds is not None and self.compiled.seconds_by == "cycles":  # else they are the same prediction
                rows |= {"compiled ms": ms_in_words(seconds), "ms were off by": _off(self.seconds, seconds)}
        return rows


@dataclass(frozen=True)
class Choices(Tabular, Sequence[Choice]):
    """The best choices, the fastest first; printed, or shown in a notebook, they are a table.

    Attributes:
      title: what the plans are for.
      choices: the choices.
      advice: remarks on the first choice.
    """

    title: str
    choices: tuple[Choice, ...]
    advice: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.choices)

    @overload
    def __getitem__(self, index: int) -> Choice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Choice, ...]: ...
    def __getitem__(self, index: int | slice) -> Choice | tuple[Choice, ...]:
        return self.choices[index]

    def _table(self) -> Table:
        columns = [choice.column() for choice in self.choices]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
        return Table(self.title, ("", *(f"{i + 1}." for i in range(len(columns)))), rows, {}, self.advice)


def _off(predicted: float, real: float) -> str:
    """The relative error of a prediction, in words; "-" where there is nothing to compare with.

    >>> _off(9.0, 10.0), _off(9.0, 0.0)
    ('-10.0%', '-')
    """
    return f"{predicted / real - 1:+.1%}" if real else "-"


def _of_stages(counts: object) -> str:
    """How many layers virtual stages have; of more than eight the fewest and the most.

    >>> _of_stages([3, 2, 2, 1]), _of_stages([2] * 15 + [1])
    ('3,2,2,1', '1 to 2')
    """
    assert isinstance(counts, list)
    return ",".join(map(str, counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)}"


def _of_shares(offload: Offload) -> str:
    """The shares of what lies on the hosts, in words.

    >>> _of_shares(Offload(residuals=0.5, optimizer=1))
    'residuals 50%, optimizer'
    """
    return ", ".join(word + f" {share:.0%}" * (share < 1) for word, share in offload.shares.items())


def sorted_out(choices: Iterable[Choice]) -> list[Choice]:
    """Sorts choices by time, and keeps those that take less memory than all faster ones."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.seconds, choice.total_bytes)):
        if not kept or choice.total_bytes < kept[-1].total_bytes:
            kept.append(choice)
    return kept


def advice_on(choice: Choice, rated: Sequence[Choice], remarks: Iterable[str]) -> tuple[str, ...]:
    """Advises on a choice: its bubble, the size of its micro-batches, whether to pipeline, what planning it remarked.

    Args:
      choice: the choice.
      rated: all choices that were rated.
      remarks: the warnings that planning it gave.
    """
    advice, setting = [], choice.setting
    count, microbatch = setting.num_microbatches, f"micro-batches of its M={setting.num_microbatches}"
    if choice.bubble_fraction > LARGE_BUBBLE:
        advice.append(
            f"stages wait {choice.bubble_fraction:.0%} of the time at M={count} on {setting.num_stages} stages; a "
            "larger batch of more micro-batches would have them wait less"
        )
    half = next((one for one in rated if one.setting == replace(setting, num_microbatches=count // 2)), None)
    if count > 1 and half is not None and half.time.computation < SMALL * choice.time.computation:
        less = 1 - half.time.computation / choice.time.computation
        advice.append(
            f"{microbatch} are too small to fill the device: of twice the size (M={count // 2}) layers take {less:.0%} "
            f"less time, and stages wait {half.bubble_fraction:.0%} of the time"
        )
    apart = [one for one in rated if one.fits and one.setting.num_stages > 1]
    if setting.num_stages == 1 and apart:
        other = min(apart, key=lambda one: one.seconds)
        advice.append(
            f"no pipeline is fastest here: the best of several stages ({other.words}) takes "
            f"{ms_in_words(other.seconds)} ms a step"
        )
    return tuple(dict.fromkeys([*advice, *remarks]))
