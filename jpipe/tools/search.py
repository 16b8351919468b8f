"""`jpipe.plan`: searches for the settings that train a model fastest, by the models of time and memory."""

from __future__ import annotations  # the pages show annotations as they are written

import itertools
import math
import os
import timeit
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.jax.trees import bytes_of
from jpipe.memory.batches import batch_size, cut_for_evaluation
from jpipe.mesh.axes import AXIS, BATCH_AXES
from jpipe.mesh.users_mesh import make_mesh
from jpipe.model.groups import LayerGroup
from jpipe.model.loss import LossFn
from jpipe.pipeline import Pipeline
from jpipe.planning.request import Offload, as_offload
from jpipe.processes.progress import task
from jpipe.processes.tables import bytes_in_words
from jpipe.schedules.schedule import Schedule
from jpipe.tools import choices
from jpipe.tools.chips import Chip, Topology, chip_of, parse_topology, stand_ins_of
from jpipe.tools.choices import Choice, Choices, Setting, Space, advice_on, mesh_of_nowhere, sorted_out
from jpipe.tools.communication import words_of
from jpipe.tools.forecaster import check_one, forecast
from jpipe.tools.memory_model import predict_host_memory, predict_memory
from jpipe.tools.time_model import bearable_share, layer_seconds, predict_time
from jpipe.types import Batch, Device, Shapes
from jpipe.users_numbers import as_integer, as_number

WIDTH, COPIED, ROUNDS = 1024, 2**24, 3


def measure_chip(devices: Sequence[Device]) -> Chip:
    """Measures one of several equal devices: the best times of float32 matrix products, of copies and of passes.

    A pass is one that takes an exponential of each number, as those of softmax and activations do. All devices work at
    the same time, as in a pipeline: those that a host simulates have its cores in common, and its memory. A transfer
    is taken to go at the speed of a copy.
    """
    product = _seconds(lambda x: x @ x, WIDTH, devices)
    copied, passed = (_seconds(function, COPIED // WIDTH, devices) for function in (lambda x: x + 1, jnp.exp))
    reported = (devices[0].memory_stats() or {}).get("bytes_limit")
    memory = reported or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    name, speed = devices[0].device_kind, 8 * COPIED / copied
    flops, counted = 2 * WIDTH**3 / product, 8 * COPIED / passed
    return Chip(name, flops, memory, speed, speed, clock=None, counted=counted)


def _seconds(function: Callable[[jax.Array], jax.Array], rows: int, devices: Sequence[Device]) -> float:
    """Times a function of an array `[rows, WIDTH]` a device, in place; the least of some rounds after the first counts.

    Outputs that are allocated anew would be timed with what their pages take.
    """
    place = NamedSharding(Mesh(np.asarray(devices), ("device",)), PartitionSpec("device"))
    run = jax.jit(jax.vmap(function), donate_argnums=0, out_shardings=place)
    x = jax.device_put(jnp.zeros((len(devices), rows, WIDTH), jnp.float32), place)

    def turn() -> None:
        nonlocal x
        x = jax.block_until_ready(run(x))

    return min(timeit.repeat(turn, repeat=ROUNDS + 1, number=1)[1:])


# --- the search -------------------------------------------------------------------------------------------------------


SURE = 0.9
"""The part of a device's memory that is planned with if none is given: the model of memory errs by up to a tenth."""
SHOWN = 5
OFFLOADED = 4
"""The number of settings that are tried with `offload=`: the fastest of those that may fit so."""
IMPROVED = 8
"""The number of ways to share out the devices of which the settings are varied: the best by their first settings."""
FAR = 1.2
"""Settings that take so many times as long as the best without their bubble are left: M and remat gain less."""


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
    compiled: int = 0,
    **options: object,
) -> Choices:
    """The settings that should train a model fastest, of those that fit; predicted, and nothing is compiled.

    For each way to share the devices out to mesh axes, `stage` the first, M, V, schedule, remat, ends and FSDP are
    varied, one after the other, as long as that gains. What is faster but doesn't fit is tried with `offload=`, with as
    many residuals on the hosts as their links bear without a longer tick. All devices are used. The model is cut by the
    layers' predicted times, unless `balance` is given.
    The same arguments give the same choices, at most five; each further one is slower and takes less memory.
    Layers are traced once for all sizes of `stage` and of data axes: one whose code asks for these sizes, such as for
    as many groups of tokens, is rated as on the first mesh; then compare some by `compiled`.

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
      compiled: the number of choices that are compiled (`jpipe.forecast`), which says how far the predictions are off.
        Choices that turn out not to fit come last.
      **options: further arguments of `jpipe.Pipeline`; of those that are searched, one that is given stays as it is.

    Raises:
      ValueError: an unknown topology, or one without the devices that `compiled` or `balance="time"` need; nothing
        fits, and the least memory that would do; no setting is possible, and why the first isn't.
      TypeError, ImportError: `jpipe.Pipeline` or `jpipe.forecast` raises it.
    """
    if "mesh" in options:
        raise ValueError("mesh= is what is searched; pass topology= or devices=, and num_stages= to keep K")
    room = None if memory is None else int(as_number("memory", memory, "give the bytes of a device", positive=True))
    compiled = as_integer("compiled", compiled, "give how many choices are compiled, 0 for none", least=0)
    at_hand = list(jax.devices() if devices is None else devices)
    away = _slice(topology, devices, compiled, options.get("balance"))
    number, where = (away.num_devices, str(away)) if away else (len(at_hand), f"{len(at_hand)} devices at hand")
    chip = away.chip if away else chip_of(at_hand[0]) or measure_chip(at_hand)
    room = int(SURE * chip.room) if room is None else room
    shapes = cut_for_evaluation(batch, 1, 1).shapes  # of the whole batch, checked
    targets = away.stand_ins() if away else stand_ins_of(at_hand)
    unsearched = {name: value for name, value in options.items() if name not in (*choices.PINNED, "balance")}
    search = Search(partial(Pipeline, layers, loss_fn, **unsearched), shapes, tx, chip, room, options, targets)
    rated = search.run(number, axes)
    fitting = [choice for choice in rated if choice.fits]
    if not fitting:
        raise ValueError(search.nothing_fits(where))
    chosen = sorted_out(fitting)[:SHOWN]
    for i in range(min(compiled, len(chosen))):
        pipe = search.pipeline(chosen[i].setting, chosen[i].options["balance"])
        proof = forecast(pipe, shapes, tx, topology=topology, devices=None if away else at_hand)
        chosen[i] = replace(chosen[i], compiled=proof)
    chosen.sort(key=lambda choice: choice.compiled is not None and not choice.compiled.fits)
    advice = advice_on(chosen[0], rated, search.remarks[chosen[0].setting])
    chosen = [replace(one, options={**options, **one.options, **_mesh(one, at_hand, number)}) for one in chosen]
    title = f"Plans for {where}, {bytes_in_words(room)} a device: {len(rated)} settings compared"
    return Choices(title, tuple(chosen), advice)


def _slice(topology: str | None, devices: Sequence[Device] | None, compiled: int, balance: object) -> Topology | None:
    """Checks what is planned for, and returns the slice; None for devices at hand."""
    check_one(topology, devices)
    if devices is not None and len(devices) == 0:
        raise ValueError("devices=[] has nothing to plan for; pass devices such as jax.devices(), or topology=")
    if topology is None:
        return None
    away = parse_topology(topology)
    if compiled:
        away.devices()  # raises an error before the search, if their compiler isn't there
    if isinstance(balance, str) and balance == "time":
        raise ValueError(
            f'balance="time" measures layers on a device, and topology={topology!r} has none at hand; use '
            'balance="flops", or pass one cost a layer as floats'
        )
    return away


def _mesh(choice: Choice, devices: Sequence[Device], number: int) -> dict[str, object]:
    """The mesh of a choice, if there are so many devices."""
    if len(devices) < number:
        return {}
    return {"mesh": make_mesh(devices=devices[:number], axis_types=None, **dict(choice.setting.axes))}


def _pinned(options: Mapping[str, object]) -> dict[str, object]:
    """The searched arguments that are given; a schedule of the user's own was made for its sizes."""
    pinned = {name: value for name, value in options.items() if name in choices.PINNED}
    if "shard_over" in pinned:
        names = cast("str | Sequence[str] | None", pinned["shard_over"])
        pinned["shard_over"] = (names,) if isinstance(names, str) else tuple(names or ())
    pinned |= {name: as_integer(name, pinned[name], "use 1 or more") for name in choices.COUNTS if name in pinned}
    if "offload" in pinned:
        pinned["offload"] = as_offload(cast("str | Sequence[str]", pinned["offload"]))
    schedule = options.get("schedule")
    return (schedule.sizes if isinstance(schedule, Schedule) else {}) | pinned


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
      remarks: by setting, the warnings that its planning gave.
    """

    make: Callable[..., Pipeline]
    batch: Shapes
    tx: optax.GradientTransformation
    chip: Chip
    room: int
    options: Mapping[str, object]
    devices: Sequence[Device] = ()
    remarks: dict[Setting, list[str]] = field(default_factory=dict, init=False)
    _rated: dict[Setting, Choice | None] = field(default_factory=dict, init=False)
    _traced: dict[tuple[object, ...], Pipeline] = field(default_factory=dict, init=False)
    _costs: dict[tuple[object, ...], list[float]] = field(default_factory=dict, init=False)
    _groups: tuple[LayerGroup, ...] = field(default=(), init=False)
    _refusal: Exception | None = field(default=None, init=False)

    def run(self, num_devices: int, axes: str | Sequence[str] = ()) -> list[Choice]:
        """All that could be rated on so many devices, on meshes of `stage` and these axes, or those that layers name.

        Raises:
          ValueError: none could.
        """
        space, possible = self._space(num_devices, [axes] if isinstance(axes, str) else axes), list[Setting]()
        starts = space.starts()
        with task("comparing meshes", total=len(starts), unit="meshes") as advance:
            for start in starts:
                others = () if self._rate(start) else space.instead(start)
                for first in list(filter(self._rate, [start, *others]))[:1]:
                    possible.append(min([first, *self._possible(space.ends(first))], key=self._rank))
                advance()
        ranked = sorted(possible, key=self._rank)[:IMPROVED]
        with task("varying settings", total=len(ranked), unit="meshes") as advance:
            improved = list[Setting]()
            for start in ranked:
                best = min(improved or [start], key=self._rank)
                improved.append(self._improve(start, best, space))
                advance()
        self._offload(space)
        if not possible:
            why = self._refusal or space.why_empty()
            raise ValueError(f"no setting is possible: {why}") from self._refusal
        return [choice for choice in self._rated.values() if choice is not None]

    def nothing_fits(self, where: str) -> str:
        """The message where no setting fits."""
        least = min((choice for choice in self._rated.values() if choice), key=lambda choice: choice.total_bytes)
        held = least.cost.bytes
        part = max(held, key=lambda part: held[part])
        with_others = 2 + held.optimizer / max(1, held.parameters)  # gradients, and the optimiser's
        size, layer = max((bytes_of(group.variables.get("params")), words_of(group)) for group in self._groups)
        remedy = "pass more devices, or a batch that can be cut into smaller micro-batches"
        if (alone := int(size * with_others)) > self.room:
            remedy = (
                f"{layer} alone takes {bytes_in_words(alone)} with its gradients and optimiser, so give its weights a "
                "tensor axis (nn.with_partitioning)"
            )
        return (
            f"no plan fits in {bytes_in_words(self.room)} a device on {where}; the smallest takes "
            f"{bytes_in_words(held.total)} ({least.words}), {bytes_in_words(held[part])} of it "
            f"{part.replace('_', ' ')}; {remedy}"
        )

    def pipeline(self, setting: Setting, balance: object) -> Pipeline:
        """The pipeline of a setting, on devices that aren't there."""
        axes = dict(setting.axes)
        mesh = make_mesh(devices=self.devices, axis_types=None, **axes) if self.devices else mesh_of_nowhere(axes)
        return self.make(mesh=mesh, balance=balance, **setting.options)

    def _space(self, num_devices: int, axes: Sequence[str]) -> Space:
        """All settings; which axes there may be follows from the layers' metadata, if the user names none."""
        mesh = mesh_of_nowhere({AXIS: 1, **dict.fromkeys(axes, 1)})
        whole = self.make(num_stages=1, num_microbatches=1, mesh=mesh)
        with warnings.catch_warnings(action="ignore"):
            self._groups = whole.planner.plan_for(self.batch).traced.groups
        named = {name for group in self._groups for name in group.asked_axes | group.constrained}
        names = ({*axes} or named) - {AXIS}
        request = whole.planner.request
        data = request.splits.batch_axes or tuple(name for name in BATCH_AXES if name in names) or ("data",)
        others = tuple(sorted(names.difference(data)))
        return Space(num_devices, data, others, batch_size(self.batch), len(request.layers), _pinned(self.options))

    def _improve(self, setting: Setting, best: Setting, space: Space) -> Setting:
        """Varies a setting in one way after the other, until nothing gains.

        It is left where it stays far behind the best so far: with fewer, larger micro-batches, which small layers need,
        and wherever its parameters lie.
        """
        is_better = lambda one, than: self._rank(one) < self._rank(than)
        while fewer := [one for one in self._possible(space.beside(setting, -1)) if is_better(one, setting)]:
            (setting,) = fewer
        before = None
        while before != setting:
            before = setting
            for others in space.moves(setting):
                setting = min([setting, *self._possible(others)], key=self._rank)
                if self._is_far(setting, best):
                    return setting
        return setting

    def _possible(self, settings: Iterable[Setting]) -> Iterator[Setting]:
        """Those that are possible. Modes of remat that compute most anew are left where another one fits."""
        fit = set[Setting]()  # whatever their remat
        for setting in settings:
            alike = replace(setting, remat="")
            if setting.remat in choices.HEAVY and alike in fit:
                continue
            if choice := self._rate(setting):
                fit.update([alike] * choice.fits)
                yield setting

    def _is_far(self, setting: Setting, best: Setting) -> bool:
        """Whether a setting takes much longer than the best so far, or on its mesh nothing fits, nor on that one's."""
        one, other = self._rate(setting), self._rate(best)
        assert one is not None and other is not None
        if other.fits:
            return one.seconds - one.time.bubble > FAR * other.seconds
        held, is_apart = one.cost.bytes, bool(self.chip.host.memory)
        least = held.parameters + held.gradients + held.optimizer * (not is_apart)
        return setting.axes != best.axes and least > self.room

    def _offload(self, space: Space) -> None:
        """Tries with `offload=` what is faster than all that fits, and would fit without what can go to the hosts."""
        if "offload" in space.pinned or not self.chip.host.memory:
            return
        ranked = sorted(filter(None, self._rated.values()), key=lambda choice: choice.seconds)
        faster = [*itertools.takewhile(lambda choice: not choice.fits, ranked)]
        for parts in (["optimizer"], ["optimizer", "residuals"]):
            least = lambda held, parts=parts: held.total - sum(held[part] for part in parts)
            would_fit = [choice for choice in faster if least(choice.cost.bytes) <= self.room][:OFFLOADED]
            if ranked and len(faster) == len(ranked):  # nothing fits: the least memory is to be known
                would_fit.append(min(ranked, key=lambda choice: least(choice.cost.bytes)))
            for choice in would_fit:
                share = self._bearable(choice.setting) if "residuals" in parts else 0.0
                for state in (0, 1) if share else (1,):
                    self._rate(replace(choice.setting, offload=Offload(residuals=share, optimizer=state)))

    def _bearable(self, setting: Setting) -> float:
        """The share of a setting's residuals that can go to the hosts without a longer tick, in hundredths."""
        share, part = 1.0, 0.0
        while share and part < 1.0:  # which residuals a share means follows from their sizes
            choice = self._rate(replace(setting, offload=Offload(residuals=share)))
            if choice is None or "residuals" not in choice.cost.host:
                return 0.0
            planner = self._like_others(choice.setting, choice.options["balance"]).planner
            part = bearable_share(planner, self.batch, self.chip)
            share = share if part == 1.0 else math.floor(100 * share * part) / 100
        return share

    def _rank(self, setting: Setting) -> tuple[bool, float]:
        """Less is better: settings that fit by their time, before all others by their memory."""
        choice = self._rated[setting]
        assert choice is not None
        return not choice.fits, choice.seconds if choice.fits else float(choice.total_bytes)

    def _rate(self, setting: Setting) -> Choice | None:
        """Rates a setting by the models; None if it isn't possible."""
        if setting not in self._rated:
            try:
                with warnings.catch_warnings(record=True, action="always") as caught:
                    self._rated[setting] = self._predict(setting)
                self.remarks[setting] = [str(warning.message) for warning in caught]
            except (ValueError, TypeError) as error:
                self._rated[setting], self._refusal = None, self._refusal or error
        return self._rated[setting]

    def _predict(self, setting: Setting) -> Choice:
        balance = self.options.get("balance")
        pipe = self._like_others(setting, self._predicted_costs(setting) if balance is None else balance)
        held = predict_memory(pipe.planner, self.batch, self.tx, self.chip)
        hosted = predict_host_memory(pipe.planner, self.batch, self.tx, self.chip)
        cost = replace(predict_time(pipe.planner, self.batch, self.chip, tx=self.tx), bytes=held, host=hosted)
        counts, fits = list(pipe.partition.counts), held.total <= self.room
        has_room = not self.chip.host.memory or hosted.total <= SURE * self.chip.host.memory
        return Choice(setting, {**setting.options, "balance": counts}, cost, fits and has_room)

    def _predicted_costs(self, setting: Setting) -> list[float]:
        """Each layer's predicted seconds, by which the model is cut."""
        alike = *_alike(setting), setting.ends
        if alike not in self._costs:
            with warnings.catch_warnings(action="ignore"):  # of another cut
                self._costs[alike] = layer_seconds(self._like_others(setting, "flops").planner, self.batch, self.chip)
        return self._costs[alike]

    def _like_others(self, setting: Setting, balance: object) -> Pipeline:
        """The pipeline of a setting; it takes over what those of settings like it trace, first of the least like it."""
        pipe = self.pipeline(setting, balance)
        of_examples = AXIS, *pipe.planner.request.splits.batch_axes
        splitting = tuple(pair for pair in setting.axes if pair[0] not in of_examples)
        on_mesh = setting.axes, setting.num_microbatches
        for alike in (splitting, on_mesh, (*on_mesh, setting.shard_over), _alike(setting)):
            pipe.planner.trace_like(self._traced.setdefault(alike, pipe).planner)
        return pipe


def _alike(setting: Setting) -> tuple[object, ...]:
    """The settings that decide which programs devices run; how weights lie; and remat, which the forward hasn't."""
    return setting.axes, setting.num_microbatches, setting.shard_over, setting.remat
