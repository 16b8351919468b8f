"""Predicts the seconds of a step, by part, on a chip that need not be there; compiles nothing.

`roofline` gives the times of layers, from their traced forwards and backwards; nothing is fitted to steps. The compiled
steps of `benchmarks/time_model.py` show how far it is off (`docs/time-model.md`).

GPUs of a host are joined by links. A TPU has a link to each neighbour on a torus. A collective goes both ways round a
ring, so it sends over two links at once where the devices of an axis lie on a ring:

    2 in a line                   o-o             1 link
    4 in a line, no wraparound    o-o-o-o         1 link     the device at an end has no other
    4 in a square                 o-o             2 links
                                  o-o
    4 or more, wraparound         (o-o-o-o)       2 links
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jpipe.execution.stage import send_shared
from jpipe.jax.inside import needed_part
from jpipe.jax.primitives import ClosedJaxpr
from jpipe.jax.trees import accumulator_dtype, bytes_of, is_float
from jpipe.memory.layout import device_index
from jpipe.mesh.axes import AXIS, on_stages
from jpipe.model.groups import WEIGHTS
from jpipe.model.traced_layer import DeviceLayer
from jpipe.partitioner.conversions import Sent, ring_bytes, sent_in
from jpipe.planning.planner import Planner
from jpipe.planning.step import Step
from jpipe.schedules.simulate import Work, busy_times, in_time
from jpipe.tools.chips import CLOSED_AT, IN_CUBES, Chip
from jpipe.tools.memory_model import holdings, optimizer_bytes
from jpipe.tools.roofline import pass_seconds, roofline
from jpipe.tools.step_cost import Parts, StepCost
from jpipe.types import Batch

ALONE = frozenset(["permute", "all_to_all"])
"""Collectives in which each device sends to others by itself: nothing goes round a ring of all."""


@dataclass(frozen=True)
class Network:
    """The links between the devices of a mesh, and the network between hosts.

    Attributes:
      chip: the kind of the devices.
      sizes: (name, number of devices) of each mesh axis.
      coordinates: where each TPU is on its torus, in the order of the mesh; empty of others, and of TPUs that nobody
        has placed yet: there four and more along an axis are taken to lie on a ring.
      hosts: the number of each device's host, in the order of the mesh; empty if links join all devices.
    """

    chip: Chip
    sizes: tuple[tuple[str, int], ...]
    coordinates: tuple[tuple[int, ...], ...] = ()
    hosts: tuple[int, ...] = ()

    @classmethod
    def of(cls, chip: Chip, mesh: Mesh) -> Network:
        """The network of a mesh of such chips.

        JAX calls a host of GPUs that are at hand a slice, and takes one process for each host of GPUs that aren't.
        """
        devices, sizes = mesh.devices.flatten().tolist(), tuple(mesh.shape.items())
        if not chip.network_bandwidth:
            are_placed = all(hasattr(device, "coords") for device in devices)
            return cls(chip, sizes, tuple(tuple(device.coords) for device in devices) if are_placed else ())
        at_hand = devices[0] in jax.devices()
        hosts = (getattr(device, "slice_index", 0) if at_hand else device.process_index for device in devices)
        return cls(chip, sizes, hosts=tuple(hosts))

    def bandwidth(self, axes: Collection[str], collective: str = "all_reduce") -> float:
        """bytes/s one way that a device has along mesh axes: those of its links, if all devices along them share one.

        Else they are the network's. A ring leaves a host over the adapters of all the devices that it has there.
        """
        if not self.chip.network_bandwidth:
            links = 1 if AXIS in axes and collective == "permute" else self._links(axes)
            return links * self.chip.link_bandwidth
        groups = self._groups(axes)
        hosts = np.broadcast_to(self.hosts or 0, groups.size)[groups]
        counts = [np.unique(of_group, return_counts=True)[1] for of_group in hosts]
        apart = [int(count.min()) for count in counts if len(count) > 1]
        if not apart:
            return self.chip.link_bandwidth
        adapters = 1 if collective in ALONE else min(apart)
        return min(self.chip.link_bandwidth, adapters * self.chip.network_bandwidth)

    def _groups(self, axes: Collection[str]) -> np.ndarray:
        """`[groups, devices of a group]`: the numbers of the devices that mesh axes join, in the order of the mesh."""
        sizes = [n for _, n in self.sizes]
        along = [i for i, (name, _) in enumerate(self.sizes) if name in axes]
        numbers = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), along, range(-len(along), 0))
        return numbers.reshape(-1, math.prod(sizes[i] for i in along))

    def _links(self, axes: Collection[str]) -> int:
        """The links of a TPU over which a collective along mesh axes sends at once: of the group with the fewest."""
        if not self.coordinates:
            return 2 if math.prod(n for name, n in self.sizes if name in axes) >= 4 else 1
        places, cube = np.asarray(self.coordinates), CLOSED_AT.get(self.chip.name, 0)
        extents = _extents(places)
        is_linked = lambda n: cube > 0 and all(m % cube == 0 for m in (extents if self.chip.name in IN_CUBES else [n]))

        def of_group(group: np.ndarray) -> int:
            """Two along a dimension of which the group has all chips, if the last is linked to the first; else one."""
            dims = zip(_extents(group), extents, strict=True)
            return sum(2 if n == size and is_linked(size) else 1 for n, size in dims if n > 1)

        return max(1, min(map(of_group, places[self._groups(axes)])))

    def seconds(self, sent: Iterable[Sent]) -> float:
        """Seconds in which a device waits for what a program's collectives send, one after the other."""
        return sum(math.prod(one.loops) * one.bytes / self.bandwidth(one.axes, one.collective) for one in sent)


def _extents(group: np.ndarray) -> list[int]:
    """How many chips of each dimension a group takes; its coordinates are `[devices, dimensions]`."""
    return [len(np.unique(column)) for column in group.T]


ByKind = dict[str, np.ndarray]
"""By kind of action the seconds of kernels and those of transfers, `[2]`; of all layers `[N, 2]`."""


# --- the time of a step -----------------------------------------------------------------------------------------------


def predict_time(
    planner: Planner, batch: Batch, chip: Chip, *, tx: optax.GradientTransformation | None = None
) -> StepCost:
    """Predicts how long a step of training takes; nothing is compiled, and nothing said of bytes.

    The slices are `computation` (the stages' actions, of a stage on average, and ends that all compute together),
    `bubble` (what stages wait: for each other, and for what crosses boundaries), `collectives` (what devices wait for
    transfers that have no work beside them: of layers, of ends that all stages compute together, and once a step),
    and `update` (the optimiser's, by the bytes that it reads and writes). With `offload=` there is `host`, too: what
    devices wait for rows and the optimiser's state on their way to the hosts and back; a note says how long they travel
    in all. The timeline is in seconds.

    Args:
      planner: the pipeline's.
      batch: a batch `[B, ...]`, or its ShapeDtypeStructs.
      chip: one device (`jpipe.tools.chips.CHIPS`).
      tx: the optimiser, of whose state the bytes count; default: one without state.
    """
    step = planner.training_step(planner.for_training(batch))
    plan, schedule, network = step.plan, step.schedule, Network.of(chip, planner.request.mesh)
    work, links, ends = _work(step, network)
    shared, of_ends = schedule.num_microbatches * ends
    apart = of_ends + _sent_once(step, network)
    if step.ends.shared:
        apart += schedule.num_microbatches * _sent_to_all(step) / network.bandwidth([AXIS])
    crossing = jax.eval_shape(lambda: step.activations.crossing(step.activations.empty()))
    # All stages wait for the slowest hop: between two hosts, if stages are on several.
    hop, moves = bytes_of(crossing) / network.bandwidth([AXIS], "permute"), _moves(step, chip)
    timeline = in_time(schedule, work, hop, moves)
    alone = in_time(schedule, work, hop) if any(moves) else timeline
    busy, of_layers = float(np.mean(timeline.busy)), float(np.mean(busy_times(schedule, links)))
    passes = _update_passes(step)
    held, hosted = optimizer_bytes(planner, batch, tx)
    update = (passes * holdings(plan).device["params"].bytes + 2 * (held + hosted)) / chip.pass_bandwidth
    goes, of_state = step.table.num_ticks * sum(moves), _on_link(hosted, chip)
    waits = timeline.makespan - alone.makespan + max(0.0, of_state - update)
    computation, collectives = busy - of_layers + float(shared), of_layers + float(apart)
    seconds = Parts(computation=computation, bubble=alone.makespan - busy, collectives=collectives, update=update)
    if goes or of_state:
        seconds = Parts(seconds, host=waits)
    said = f"of {1e3 * (goes + of_state):,.1f} ms of moves to and from the host {1e3 * waits:,.1f} are waited for"
    return StepCost("predicted", seconds, Parts(), timeline, notes=(said,) * bool(goes or of_state))


def bearable_share(planner: Planner, batch: Batch, chip: Chip) -> float:
    """The part of the residuals that go now that could go while no tick in which all stages work takes longer."""
    step = planner.training_step(planner.for_training(batch))
    work, *_ = _work(step, Network.of(chip, planner.request.mesh))
    *beside, after = _moves(step, chip)
    longest = {kind: max(np.add(times, work.anew) if kind in "BI" else times) for kind, times in work.times.items()}
    slots = [min(longest[kind] for kind in slot.kinds) for slot in step.table.slots]
    return min([0.0 if after else 1.0, *(slot / move for slot, move in zip(slots, beside, strict=True) if move)])


def layer_seconds(planner: Planner, batch: Batch, chip: Chip) -> list[float]:
    """`[N]`, what each layer takes in a step's actions for one micro-batch: costs to cut the model by.

    0 of a first and a last layer that all stages compute together.
    """
    step = planner.training_step(planner.for_training(batch))
    by_kind, _ = _by_layer(step, Network.of(chip, planner.request.mesh))
    return np.sum([by_kind[kind].sum(axis=1) for kind in "FBR"], axis=0).tolist()


def _work(step: Step, network: Network) -> tuple[Work, Work, np.ndarray]:
    """The times of the stages' actions, those of their transfers alone; and those of the ends, as of `_by_layer`."""
    by_kind, ends = _by_layer(step, network)
    by_kind["I"] = by_kind["B"] - by_kind["W"] + by_kind.pop("w_input")

    def work(columns: slice) -> Work:
        sums = lambda seconds: [float(seconds[slice(*bound), columns].sum()) for bound in step.plan.partition.bounds]
        times = {kind: sums(seconds) for kind, seconds in by_kind.items()}
        return Work(times, times["R"])

    return work(slice(2)), work(slice(1, 2)), ends


def _moves(step: Step, chip: Chip) -> list[float]:
    """`[slots + 1]`: how long rows of residuals travel beside each slot of a tick, and after the last; 0 for none.

    A row leaves beside the slot after its own, while another comes back: a link has as much each way.
    """
    slots = step.table.slots
    moves = np.zeros((2, len(slots) + 1))
    for name, storage in step.kept.away.items():
        seconds = _on_link(storage.row_bytes, chip)
        for i, slot in enumerate(slots):
            moves[0, i] += seconds * bool((slot.away[name].returns >= 0).any())
            moves[1, i + 1] += seconds * bool((slot.away[name].sent_to >= 0).any())
    return moves.max(axis=0).tolist()


def _on_link(size: int, chip: Chip) -> float:
    """Seconds in which so many bytes go to the host, or come back; 0 if its link isn't known."""
    return size / chip.host.bandwidth if chip.host.bandwidth else 0.0


def _by_layer(step: Step, network: Network) -> tuple[ByKind, np.ndarray]:
    """`_layer_seconds` of all layers; and, `[2]`, those of the two ends, where all stages compute them together."""
    layers = zip(step.model.traced_as, step.layers, strict=True)
    of_group = {g: _layer_seconds(layer, network, step.stores_residuals) for g, layer in layers}
    of_layers, ends = [of_group[g] for g in step.plan.traced.group_of], np.zeros(2)
    by_kind = {kind: np.stack([seconds[kind] for seconds in of_layers]) for kind in of_layers[0]}
    if step.ends.shared:
        ends += sum(by_kind[kind][[0, -1]].sum(axis=0) for kind in "FBR")
        for seconds in by_kind.values():
            seconds[[0, -1]] = 0.0
    return by_kind, ends


@lru_cache(maxsize=256)  # a search asks for each under many schedules
def _layer_seconds(on_device: DeviceLayer, network: Network, stores_residuals: bool) -> ByKind:
    """`[2]` by kind: the seconds of a layer's kernels on a device, and of its transfers to the others of its stage.

    R is what is computed anew before a backward where stages keep their inputs alone, W that part of the backward which
    only gradients of parameters need, and "w_input" what a split backward writes down in between.
    """
    forward, backward = on_device.forward, on_device.backward_jaxpr
    results, params = (len(jax.tree.leaves(tree)) for tree in (forward.results, on_device.gradients.params))
    numbers, gradients = range(len(forward.jaxpr.out_avals)), range(len(backward.out_avals))

    def seconds(jaxpr: ClosedJaxpr, wanted: list[bool]) -> np.ndarray:
        part, _ = needed_part(jaxpr, wanted)
        sent = sent_in(part.jaxpr, dict(network.sizes))
        return np.array([roofline(part, network.chip), network.seconds(sent)])

    keeping = seconds(forward.jaxpr, [i < results or i in forward.residual_indices for i in numbers])
    first = keeping if stores_residuals else seconds(forward.jaxpr, [i < results for i in numbers])
    again = np.zeros(2) if stores_residuals else keeping
    whole, inputs = (seconds(backward, [i >= start for i in gradients]) for start in (0, params))
    w_input = pass_seconds(on_device.split.w_inputs if on_device.split is not None else (), network.chip)
    return {"F": first, "R": again, "B": whole, "W": whole - inputs, "w_input": np.array([w_input, 0.0])}


def _sent_once(step: Step, network: Network) -> float:
    """Seconds of what a device sends once a step: weights on their way to where they are used, gradients back."""
    mesh, layouts, params = step.plan.request.mesh, step.plan.at_work, step.plan.at_work["params"]

    def program() -> list[jax.Array]:
        weights = step.collections(*WEIGHTS)
        there = {name: layouts[name].gathered(layouts[name].rest.zeros()) for name in weights}
        shared = send_shared(step, there, device_index(mesh))
        back = [jax.lax.psum(leaves["params"], AXIS) for v, leaves in shared.items() if v not in step.ends.sets]
        sums = params.reduced(params.zeros(accumulator_dtype), step.gradient_sums.partial_along)
        return jax.tree.leaves((there, shared, back, sums))

    traced = jax.make_jaxpr(on_stages(program, mesh, (), PartitionSpec(AXIS)))()
    return network.seconds(sent_in(traced.jaxpr, mesh.shape))


def _sent_to_all(step: Step) -> float:
    """Bytes that a stage sends to all for each micro-batch: what the last layer takes, the first one's cotangents."""
    first, last = (step.activations.record_types[i].leaves for i in (0, step.model.num_layers - 2))
    return ring_bytes("all_reduce", bytes_of([*filter(is_float, first), *last]), step.schedule.num_stages)


def _update_passes(step: Step) -> int:
    """How often the parameters' bytes are read or written once a step.

    Sums of gradients are filled with zeros and their norm is taken, a pass each; parameters are read, written and read
    with their gradients; and narrow copies of them are made, where layers compute in a narrower dtype.
    """
    activations = jax.tree.leaves([layer.forward.results.outputs for layer in step.layers])
    narrow = any(leaf.dtype.itemsize < 4 for leaf in activations)
    return 7 + 2 * (narrow and step.plan.request.options.cast == "step")
