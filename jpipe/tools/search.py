"""`jpipe.plan`: searches for the settings that train a model fastest, by the models of time and memory."""

from __future__ import annotations  # the pages show annotations as they are written

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

import jax
import optax

from jpipe.memory.batches import batch_size, cut_for_evaluation
from jpipe.model.loss import LossFn
from jpipe.model.remat import MODES, Policy
from jpipe.partitioner.axes import AXIS, BATCH_AXES
from jpipe.partitioner.users_mesh import make_mesh
from jpipe.pipeline import Pipeline
from jpipe.planning.request import ENDS
from jpipe.processes.progress import task
from jpipe.processes.tables import Table, Tabular, bytes_in_words
from jpipe.schedules.schedule import Schedule
from jpipe.tools.chips import Chip, check_one, chip_of, measure_chip, mesh_of_nowhere, parse_topology, stand_ins_of
from jpipe.tools.step_cost import Parts, Predicted
from jpipe.tools.time_model import layer_seconds, predict_time
from jpipe.types import Batch, Device, Shapes
from jpipe.users_numbers import as_integer, as_number

SURE = 0.9
"""The part of a device's memory that is planned with if none is given: the model of memory errs by up to a tenth."""
SHOWN = 5
"""The most choices that there are."""
IMPROVED = 8
"""The number of ways to share out the devices of which the settings are varied: the best by their first settings."""
FAR = 1.2
"""Settings that take so many times as long as the best even without their bubble are dropped: M and remat gain less."""


def plan(
    layers: object,
    loss_fn: LossFn,
    batch: Batch,
    tx: optax.GradientTransformation,
    *,
    topology: str | None = None,
    devices: Sequence[Device] | None = None,
    memory: float | None = None,
    axes: str | Sequence[str] = (),
    **options: object,
) -> Choices:
    """The settings that should train a model fastest, of those that fit; predicted, and nothing is compiled.

    For each way to share the devices out to mesh axes, `stage` the first, M, V, schedule, remat, ends and FSDP are
    varied, one after the other, as long as that gains. All devices are used. The model is cut by the layers' predicted
    times, unless `balance` is given. Nothing lies on the hosts but what `offload=` says.
    The same arguments give the same choices, at most five; each further one is slower and takes less memory.
    Layers are traced once for all sizes of `stage` and of data axes: one whose code asks for these sizes, such as for
    as many groups of tokens, is rated as on the first mesh; then compare some by `jpipe.forecast`.

        best = jpipe.plan(layers, loss_fn, batch, tx, topology="v5e:4x4")[0]
        pipe = jpipe.Pipeline(layers, loss_fn, **best.options)

    Args:
      layers, loss_fn: the arguments of `jpipe.Pipeline`.
      batch: a batch `[B, ...]`, or its ShapeDtypeStructs.
      tx: any optax transformation.
      topology: a slice of TPUs, such as "v5e:4x4", or GPUs, such as "h100:8"; they need not be there.
      devices: instead of it, devices at hand; default: all. Of a kind that isn't known (`CHIPS`) a product and a copy
        are timed.
      memory: bytes that a device has for a step, such as 16e9; default: nine tenths of its memory.
      axes: name, or names, of the other mesh axes; default: those that the layers' metadata names, and one of examples.
      **options: further arguments of `jpipe.Pipeline`; of those that are searched, one that is given stays as it is.

    Raises:
      ValueError: an unknown topology; nothing fits, and the least memory that would do; no setting is possible, and why
        the first isn't.
      TypeError: `jpipe.Pipeline` raises it.
    """
    if "mesh" in options:
        raise ValueError("mesh= is what is searched; pass topology= or devices=, and num_stages= to keep K")
    room = None if memory is None else int(as_number("memory", memory, "give the bytes of a device", positive=True))
    check_one(topology, devices)
    at_hand = list(jax.devices() if devices is None else devices)
    where, number, chip, targets = _hardware(topology, at_hand)
    room = int(SURE * chip.room) if room is None else room
    shapes = cut_for_evaluation(batch, 1, 1).shapes  # of the whole batch, checked
    unsearched = {name: value for name, value in options.items() if name not in (*PINNED, "balance")}
    search = Search(partial(Pipeline, layers, loss_fn, **unsearched), shapes, tx, chip, room, options, targets)
    rated = search.run(number, axes)
    if not (chosen := sorted_out(choice for choice in rated if choice.fits)[:SHOWN]):
        raise ValueError(search.nothing_fits(where, rated))
    makes = partial(make_mesh, devices=at_hand[:number], axis_types=None)
    mesh_of = lambda axes: {"mesh": makes(**dict(axes))} if len(at_hand) >= number else {}
    chosen = [replace(one, options={**options, **one.options, **mesh_of(one.setting.axes)}) for one in chosen]
    title = f"Plans for {where}, {bytes_in_words(room)} a device: {len(rated)} settings compared"
    why = [f"1. is ahead of 2. by {chosen[0].cost.gain_over(second.cost)}" for second in chosen[1:2]]
    return Choices(title, tuple(chosen), (*why, *chosen[0].cost.notes))


def _hardware(topology: str | None, at_hand: Sequence[Device]) -> tuple[str, int, Chip, list[Device]]:
    """Checks what is planned for; returns its name, the number of devices, one of them, and what stands for them."""
    if topology is None:
        if not at_hand:
            raise ValueError("devices=[] has nothing to plan for; pass devices such as jax.devices(), or topology=")
        chip = chip_of(at_hand[0]) or measure_chip(at_hand)
        return f"{len(at_hand)} devices at hand", len(at_hand), chip, stand_ins_of(at_hand)
    away = parse_topology(topology)
    return str(away), away.num_devices, away.chip, away.stand_ins()


PINNED = ("num_stages", "num_microbatches", "schedule", "num_chunks", "remat", "ends", "shard_over")
"""The pipeline's arguments that a search varies; where one is given, it stays as it is."""


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
    """

    axes: tuple[tuple[str, int], ...]
    num_microbatches: int
    schedule: str | Schedule = "1f1b"
    num_chunks: int = 1
    remat: str | Policy = "layer"
    ends: str = "own"
    shard_over: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        """K."""
        return dict(self.axes)[AXIS]

    @property
    def options(self) -> dict[str, object]:
        """The arguments of `jpipe.Pipeline`, but for its mesh."""
        return {name: getattr(self, name) for name in PINNED}

    @property
    def in_words(self) -> dict[str, str]:
        """The sizes of mesh axes, and the arguments, by name; K is the size of `stage`."""
        return {name: word_of(value) for name, value in [*self.axes, *self.options.items()] if name != "num_stages"}


def word_of(value: object) -> str:
    """The user's value as a word: a schedule or a policy by its name."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    return value.name if isinstance(value, Schedule) else getattr(value, "__name__", str(value))


@dataclass(frozen=True)
class Choice(Predicted):
    """A setting, and what the models predict of it.

    Attributes:
      setting: the sizes of mesh axes, and the options that were searched.
      options: arguments of `jpipe.Pipeline`, those that `plan` was given too. A mesh is among them where this process
        has as many devices; else `setting.axes` says its sizes.
      cost: seconds of the step and bytes of a device, predicted; with the warnings that planning it gave.
      fits: whether these, and those on its host, are no more than there are.
    """

    setting: Setting
    options: dict[str, object]

    @property
    def time(self) -> Parts[float]:
        """The predicted seconds of a step, by part."""
        return self.cost.seconds

    def column(self) -> dict[str, str]:
        """The entries of this choice in a table."""
        counts = cast("list[int]", self.options["balance"])  # of virtual stages
        layers = "-".join(map(str, sorted({min(counts), max(counts)})))
        rows = self.setting.in_words | {"layers a stage": layers, "bubble": f"{self.cost.bubble_fraction:.1%}"}
        return rows | {name: text for name, text, _ in self.cost.table().rows}


@dataclass(frozen=True)
class Choices(Tabular):
    """The best choices, the fastest first; printed, or shown in a notebook, they are a table.

    Attributes:
      title: what the plans are for.
      choices: the choices.
      advice: why the first is ahead of the second, and the warnings that planning it gave.
    """

    title: str
    choices: tuple[Choice, ...]
    advice: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.choices)

    def __getitem__(self, index: int) -> Choice:
        return self.choices[index]

    def _table(self) -> Table:
        columns = [choice.column() for choice in self.choices]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
        return Table(self.title, ("", *(f"{i + 1}." for i in range(len(columns)))), rows, self.advice)


def sorted_out(choices: Iterable[Choice]) -> list[Choice]:
    """Sorts choices by time, and keeps those that take less memory than all faster ones."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.cost.step, choice.total_bytes)):
        if not kept or choice.total_bytes < kept[-1].total_bytes:
            kept.append(choice)
    return kept


Word = TypeVar("Word")
WAYS = (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 4), ("v", 2))
"""Schedules with V. "gpipe" takes the time of "1f1b" and more memory."""
MICROBATCHES_A_STAGE = 4
"""M is K times this at first: the bubble is negligible then (GPipe, section 2.3)."""
HEAVY = tuple(name for name, mode in MODES.items() if mode.keep_inputs)
"""The modes of remat that compute most anew, and keep least."""


def pinned_by(options: Mapping[str, object]) -> dict[str, object]:
    """The searched arguments that a user gave, checked; a schedule of the user's own was made for its sizes."""
    pinned = {name: value for name, value in options.items() if name in PINNED}
    if "shard_over" in pinned:
        names = cast("str | Sequence[str] | None", pinned["shard_over"])
        pinned["shard_over"] = (names,) if isinstance(names, str) else tuple(names or ())
    for name in {"num_stages", "num_microbatches", "num_chunks"} & pinned.keys():
        pinned[name] = as_integer(name, pinned[name], "use 1 or more")
    schedule = options.get("schedule")
    return (schedule.sizes if isinstance(schedule, Schedule) else {}) | pinned


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
        starts, fixed = [], {name: value for name, value in self.pinned.items() if name != "num_stages"}
        for axes in shared_out(self.num_devices, (AXIS, *self.data_axes, *self.others)):
            setting = Setting(axes, 1)
            K, counts, ways = setting.num_stages, self._counts(setting), self._ways(setting)
            if K in self._of("num_stages", K) and counts and ways:
                few = [m for m in counts if m <= MICROBATCHES_A_STAGE * K]
                name, V = ways[0]
                setting = replace(setting, num_microbatches=max(few or counts[:1]), schedule=name, num_chunks=V)
                starts.append(replace(setting, **fixed))
        return sorted(starts, key=lambda start: math.prod(dict(start.axes)[name] for name in self.others))

    def ends(self, setting: Setting) -> list[Setting]:
        """Settings that differ in where the first and the last layer run."""
        words = ENDS if setting.num_stages > 1 else ENDS[:1]
        return [replace(setting, ends=word) for word in self._of("ends", *words)]

    def ways(self, setting: Setting) -> list[Setting]:
        """Settings that differ in schedule and remat."""
        pairs = itertools.product(self._ways(setting), self._of("remat", *MODES))
        return [replace(setting, schedule=name, num_chunks=V, remat=remat) for (name, V), remat in pairs]

    def moves(self, setting: Setting) -> Iterator[list[Setting]]:
        """Settings that differ in where parameters lie; in M, by one divisor of the batch; in schedule and remat."""
        splitting = tuple(name for name in self.data_axes if dict(setting.axes)[name] > 1)
        over = dict.fromkeys(self._of("shard_over", (), splitting))
        yield [other for names in over for other in self.ends(replace(setting, shard_over=names))]
        yield [*self.beside(setting, -1), setting, *self.beside(setting, 1)]
        yield self.ways(setting)

    def beside(self, setting: Setting, steps: int) -> list[Setting]:
        """The setting with an M that is so many divisors of the batch away; none if there is no such M."""
        counts = self._counts(setting)
        at = counts.index(setting.num_microbatches) + steps
        return [replace(setting, num_microbatches=counts[at])] if 0 <= at < len(counts) else []

    def _of(self, name: str, *words: Word) -> tuple[Word, ...]:
        """The values of an argument that are searched: these, or the one that is pinned."""
        return (cast("Word", self.pinned[name]),) if name in self.pinned else words

    def _ways(self, setting: Setting) -> list[tuple[str | Schedule, int]]:
        """Schedules with V that there are layers for; of those that aren't known, any V that may suit."""
        pinned = self.pinned.get("schedule"), self.pinned.get("num_chunks")
        name, count = cast("tuple[str | Schedule | None, int | None]", pinned)
        ways = [way for way in WAYS if name in (None, way[0]) and count in (None, way[1])]
        if setting.num_stages == 1 and name is None and count is None:
            ways = [WAYS[0]]
        ways = ways or [(name or "interleaved", V) for V in ([count] if count else (1, 2, 4))]
        return [(name, V) for name, V in ways if V * setting.num_stages <= self.num_layers]

    def _counts(self, setting: Setting) -> list[int]:
        """The M that there can be."""
        shards = math.prod(dict(setting.axes)[name] for name in self.data_axes)
        counts = [m for m in range(1, self.batch_size + 1) if self.batch_size % (m * shards) == 0]
        return [m for m in counts if m in self._of("num_microbatches", m)]


def shared_out(count: int, names: Sequence[str]) -> list[tuple[tuple[str, int], ...]]:
    """All ways in which the product of the axes' sizes is the number of devices.

    >>> shared_out(4, ["stage", "data"])
    [(('stage', 1), ('data', 4)), (('stage', 2), ('data', 2)), (('stage', 4), ('data', 1))]
    """
    if not names:
        return [()] if count == 1 else []
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    return [((names[0], n), *rest) for n in sizes for rest in shared_out(count // n, names[1:])]


# --- the search -------------------------------------------------------------------------------------------------------


def _rank(choice: Choice) -> tuple[bool, float]:
    """Less is better: choices that fit by their time, before all others by their memory."""
    return not choice.fits, choice.cost.step if choice.fits else float(choice.total_bytes)


@dataclass
class Search:
    """Rates settings by the models, each once.

    Attributes:
      make: makes a pipeline of the options that are searched.
      batch: the shapes of a batch, `[B, ...]`.
      tx: the optimiser.
      chip: one device.
      room: the bytes that a device has for a step.
      options: the user's arguments of the pipeline.
      devices: GPUs, or what stands for GPUs and TPUs; none if it doesn't matter which devices they are.
    """

    make: Callable[..., Pipeline]
    batch: Shapes
    tx: optax.GradientTransformation
    chip: Chip
    room: int
    options: Mapping[str, object]
    devices: Sequence[Device] = ()
    _rated: dict[Setting, Choice | None] = field(default_factory=dict, init=False)
    _known: dict[tuple[object, ...], object] = field(default_factory=dict, init=False)
    _costs: dict[tuple[object, ...], list[float]] = field(default_factory=dict, init=False)
    _refusal: Exception | None = field(default=None, init=False)

    def run(self, num_devices: int, axes: str | Sequence[str] = ()) -> list[Choice]:
        """All that could be rated on so many devices, on meshes of `stage` and these axes, or those that layers name.

        Raises:
          ValueError: none could.
        """
        space = self._space(num_devices, [axes] if isinstance(axes, str) else axes)
        starts, possible, improved = space.starts(), list[Choice](), list[Choice]()
        with task("comparing meshes", total=len(starts), unit="meshes") as advance:
            for start in starts:  # a pinned schedule may need another V or remat
                others = space.ways(start) if {"schedule", "num_chunks"} & space.pinned.keys() else []
                if first := next(self._possible([start, *others]), None):
                    possible.append(min([first, *self._possible(space.ends(first.setting))], key=_rank))
                advance()
        ranked = sorted(possible, key=_rank)[:IMPROVED]
        with task("varying settings", total=len(ranked), unit="meshes") as advance:
            for start in ranked:
                improved.append(self._improve(start, min(improved, key=_rank, default=start), space))
                advance()
        if not possible:
            kept = ", ".join(f"{name}={word_of(value)}" for name, value in space.pinned.items()) or "nothing kept"
            suits = f"of a batch of {space.batch_size} and {space.num_layers} layers, with {kept}, none suits"
            why = self._refusal or f"{suits} {num_devices} devices; keep less, or use another number of devices"
            raise ValueError(f"no setting is possible: {why}") from self._refusal
        return [choice for choice in self._rated.values() if choice is not None]

    def nothing_fits(self, where: str, rated: Sequence[Choice]) -> str:
        """The message where none of the settings fits."""
        least = min(rated, key=lambda choice: choice.total_bytes)
        words = ", ".join(f"{name}={word}" for name, word in least.setting.in_words.items())
        return (
            f"no plan fits in {bytes_in_words(self.room)} a device on {where}; the smallest takes "
            f"{bytes_in_words(least.total_bytes)} ({words}); pass more devices, offload=, or a batch that can be "
            "cut into smaller micro-batches, or give the weights of large layers a tensor axis (nn.with_partitioning)"
        )

    def _space(self, num_devices: int, axes: Sequence[str]) -> Space:
        """All settings; which axes there may be follows from the layers' metadata, if the user names none."""
        mesh = mesh_of_nowhere({AXIS: 1, **dict.fromkeys(axes, 1)})
        planner = self.make(num_stages=1, num_microbatches=1, mesh=mesh).planner
        with warnings.catch_warnings(action="ignore"):
            groups = planner.plan_for(self.batch).model.groups
        named = {name for group in groups for name in group.asked_axes | group.constrained}
        names = ({*axes} or named) - {AXIS}
        data = planner.request.splits.batch_axes or tuple(name for name in BATCH_AXES if name in names) or ("data",)
        others, num_layers = tuple(sorted(names.difference(data))), len(planner.known_plan().layers)
        return Space(num_devices, data, others, batch_size(self.batch), num_layers, pinned_by(self.options))

    def _improve(self, choice: Choice, best: Choice, space: Space) -> Choice:
        """Varies a setting in one way after the other, until nothing gains.

        It is dropped where it stays far behind the best so far: with fewer, larger micro-batches, which small layers
        need, and wherever its parameters lie.
        """
        while fewer := [o for o in self._possible(space.beside(choice.setting, -1)) if _rank(o) < _rank(choice)]:
            (choice,) = fewer
        before = None
        while before is not choice:
            before = choice
            for others in space.moves(choice.setting):
                choice = min([choice, *self._possible(others)], key=_rank)
                if self._is_far(choice, best):
                    return choice
        return choice

    def _possible(self, settings: Iterable[Setting]) -> Iterator[Choice]:
        """Those that are possible. Modes of remat that compute most anew are left out where another one fits."""
        fit = set[Setting]()  # whatever their remat
        for setting in settings:
            alike = replace(setting, remat="")
            if setting.remat in HEAVY and alike in fit:
                continue
            if choice := self.what_if(setting):
                fit.update([alike] * choice.fits)
                yield choice

    def _is_far(self, one: Choice, best: Choice) -> bool:
        """Whether a choice takes much longer than the best so far; while none fits, whether nothing can on its mesh."""
        if best.fits:
            return one.cost.step - one.time["bubble"] > FAR * best.cost.step
        held = one.cost.bytes
        least = held["parameters"] + held["gradients"] + held["optimizer"]
        return one.setting.axes != best.setting.axes and least > self.room

    def what_if(self, setting: Setting) -> Choice | None:
        """Predicts what a step takes with a setting; None if that isn't possible."""
        if setting not in self._rated:
            balance, host = self.options.get("balance"), self.chip.host.memory
            try:
                with warnings.catch_warnings(record=True, action="always") as caught:
                    pipe = self._like_others(setting, self._predicted_costs(setting) if balance is None else balance)
                    cost = predict_time(pipe.planner, self.batch, self.chip, tx=self.tx)
            except (ValueError, TypeError) as error:
                self._rated[setting], self._refusal = None, self._refusal or error
                return None
            cost = replace(cost, notes=tuple(dict.fromkeys(str(warning.message) for warning in caught)))
            fits = cost.bytes.total <= self.room and (not host or cost.host.total <= SURE * host)
            options = {**setting.options, "balance": list(pipe.partition.counts)}
            self._rated[setting] = Choice(fits, cost, setting, options)
        return self._rated[setting]

    def _predicted_costs(self, setting: Setting) -> list[float]:
        """Each layer's predicted seconds, by which the model is cut."""
        alike = setting.axes, setting.num_microbatches, setting.shard_over, setting.remat, setting.ends
        if alike not in self._costs:
            with warnings.catch_warnings(action="ignore"):  # of another cut
                self._costs[alike] = layer_seconds(self._like_others(setting, "flops").planner, self.batch, self.chip)
        return self._costs[alike]

    def _like_others(self, setting: Setting, balance: object) -> Pipeline:
        """The pipeline of a setting, on devices that aren't there; what it traces, all of the search have in common."""
        axes, devices = dict(setting.axes), self.devices
        mesh = make_mesh(devices=devices, axis_types=None, **axes) if devices else mesh_of_nowhere(axes)
        pipe = self.make(mesh=mesh, balance=balance, **setting.options)
        pipe.planner.known = self._known
        return pipe
