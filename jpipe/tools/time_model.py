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
from jpipe.mesh.users_mesh import Torus
from jpipe.model.groups import WEIGHTS
from jpipe.model.traced_layer import DeviceLayer
from jpipe.partitioner.conversions import Sent, ring_bytes, sent_in
from jpipe.partitioner.rings import HIDDEN
from jpipe.planning.planner import Planner
from jpipe.planning.step import Step
from jpipe.schedules.simulate import Work, busy_times, in_time
from jpipe.tools.chips import Chip
from jpipe.tools.memory_model import ledger
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
      torus: the axes of the mesh; of TPUs, where they are on their torus.
      hosts: the number of each device's host, in the order of the mesh; empty if links join all devices.
    """

    chip: Chip
    torus: Torus
    hosts: tuple[int, ...] = ()

    @classmethod
    def of(cls, chip: Chip, mesh: Mesh) -> Network:
        """The network of a mesh of such chips.

        JAX calls a host of GPUs that are at hand a slice, and takes one process for each host of GPUs that aren't.
        """
        devices, torus = mesh.devices.flatten().tolist(), Torus.of(chip.name, mesh)
        if not chip.network_bandwidth:
            return cls(chip, torus)
        at_hand = devices[0] in jax.devices()
        hosts = (getattr(device, "slice_index", 0) if at_hand else device.process_index for device in devices)
        return cls(chip, torus, tuple(hosts))

    def bandwidth(self, axes: Collection[str], collective: str = "all_reduce") -> float:
        """bytes/s one way that a device has along mesh axes: those of its links, if all devices along them share one.

        Else they are the network's. A ring leaves a host over the adapters of all the devices that it has there.
        """
        links = self.chip.link_bandwidth
        if not self.chip.network_bandwidth:
            return links * (1 if AXIS in axes and collective == "permute" else self.torus.links(axes))
        groups = self.torus.groups(axes)
        hosts = np.broadcast_to(self.hosts or 0, groups.size)[groups]
        counts = [np.unique(of_group, return_counts=True)[1] for of_group in hosts]
        adapters = min((int(count.min()) for count in counts if len(count) > 1), default=0)
        if not adapters:
            return links
        return min(links, (1 if collective in ALONE else adapters) * self.chip.network_bandwidth)

    def seconds(self, sent: Iterable[Sent]) -> float:
        """Seconds in which a device waits for what a program's collectives send, one after the other.

        Those that go by rings are for the most part beside products. These are a layer's permutations: a user's own are
        carried out as gathers (`jpipe.partitioner.handlers`).
        """

        def waited(one: Sent) -> float:
            by_ring = one.collective == "permute" and AXIS not in one.axes
            return math.prod(one.loops) * one.bytes * (1 - HIDDEN if by_ring else 1.0)

        return sum(waited(one) / self.bandwidth(one.axes, one.collective) for one in sent)


# --- the time of a step -----------------------------------------------------------------------------------------------


def predict_time(
    planner: Planner, batch: Batch, chip: Chip, *, tx: optax.GradientTransformation | None = None
) -> StepCost:
    """Predicts what a step of training takes, in seconds and, as `predict_memory`, in bytes; nothing is compiled.

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
    held = ledger(planner, batch, tx, chip)
    schedule, bounds, network = step.schedule, step.plan.partition.bounds, Network.of(chip, planner.request.mesh)
    of_layers, of_links, ends = _work(step, network)
    work, links = of_layers.summed(bounds), of_links.summed(bounds)
    crossing = jax.eval_shape(lambda: step.activations.crossing(step.activations.empty()))
    # All stages wait for the slowest hop: between two hosts, if stages are on several.
    hop, moves = bytes_of(crossing) / network.bandwidth([AXIS], "permute"), _moves(step, chip)
    timeline = in_time(schedule, work, hop, moves)
    alone = in_time(schedule, work, hop) if any(moves) else timeline
    busy, waited = float(np.mean(timeline.busy)), float(np.mean(busy_times(schedule, links)))
    computed, sent = (schedule.num_microbatches * ends).tolist()
    hosted = held.host.get("optimizer", 0)
    moved = _update_passes(step) * held.device.parameters + 2 * (held.device.optimizer + hosted)
    seconds = Parts(
        computation=busy - waited + computed,
        bubble=alone.makespan - busy,
        collectives=waited + sent + _sent_apart(step, network),
        update=moved / chip.pass_bandwidth,
    )
    of_state = _on_link(hosted, chip)
    travels, notes = step.table.num_ticks * sum(moves) + of_state, ()
    if travels:
        waits = timeline.makespan - alone.makespan + max(0.0, of_state - seconds.update)
        notes = (f"of {1e3 * travels:,.1f} ms of moves to and from the host {1e3 * waits:,.1f} are waited for",)
        seconds = Parts(seconds, host=waits)
    return StepCost("predicted", seconds, held.device, timeline, notes, held.host)


def bearable_share(planner: Planner, batch: Batch, chip: Chip) -> float:
    """The part of the residuals that go now that could go while no tick in which all stages work takes longer."""
    step = planner.training_step(planner.for_training(batch))
    of_layers, *_ = _work(step, Network.of(chip, planner.request.mesh))
    work = of_layers.summed(step.plan.partition.bounds)
    *beside, after = _moves(step, chip)
    longest = {kind: max(np.add(times, work.anew) if kind in "BI" else times) for kind, times in work.times.items()}
    slots = [min(longest[kind] for kind in slot.kinds) for slot in step.table.slots]
    return min([0.0 if after else 1.0, *(slot / move for slot, move in zip(slots, beside, strict=True) if move)])


def layer_seconds(planner: Planner, batch: Batch, chip: Chip) -> list[float]:
    """`[N]`, what each layer takes in a step's actions for one micro-batch: costs to cut the model by.

    0 of a first and a last layer that all stages compute together.
    """
    step = planner.training_step(planner.for_training(batch))
    work, *_ = _work(step, Network.of(chip, planner.request.mesh))
    return [sum(seconds) for seconds in zip(work.times["F"], work.times["B"], work.anew, strict=True)]


def _work(step: Step, network: Network) -> tuple[Work, Work, np.ndarray]:
    """The layers' work, `[N]`; that part of it in which they wait for transfers; and what ends take, `[2]`.

    Ends that all stages compute together take the seconds of kernels and those of transfers for each micro-batch, and
    nothing among the layers.
    """
    layers = zip(step.model.traced_as, step.layers, strict=True)
    of_group = {g: _layer_seconds(layer, network, step.stores_residuals) for g, layer in layers}
    table = np.stack([of_group[g] for g in step.plan.traced.group_of], axis=1)  # [kinds, N, 2]
    ends = np.zeros(2)
    if step.ends.shared:
        ends = table[:3, [0, -1]].sum(axis=(0, 1))
        table[:, [0, -1]] = 0.0
    tables = table.sum(axis=2), table[..., 1]
    whole, links = (dict(zip(KINDS, seconds.tolist(), strict=True)) for seconds in tables)
    return Work(whole, whole["R"]), Work(links, links["R"]), ends


KINDS = "FRBIW"
"""The kinds of actions of which layers have seconds: R is what is computed anew before a backward."""


@lru_cache(maxsize=256)  # a search asks for each under many schedules
def _layer_seconds(on_device: DeviceLayer, network: Network, stores_residuals: bool) -> np.ndarray:
    """`[kinds, 2]`: the seconds of a layer's kernels on a device, and of its transfers to the others of its stage.

    R is nothing where stages store residuals. I is a backward but for that part W which only gradients of parameters
    need, and writes down what W reads.
    """
    forward, backward = on_device.forward, on_device.backward_jaxpr
    results, params = (len(jax.tree.leaves(tree)) for tree in (forward.results, on_device.gradients.params))
    numbers, gradients = range(len(forward.jaxpr.out_avals)), range(len(backward.out_avals))

    def seconds(jaxpr: ClosedJaxpr, wanted: list[bool]) -> np.ndarray:
        part, _ = needed_part(jaxpr, wanted)
        sent = sent_in(part.jaxpr, dict(network.torus.sizes))
        return np.array([roofline(part, network.chip), network.seconds(sent)])

    keeping = seconds(forward.jaxpr, [i < results or i in forward.residual_indices for i in numbers])
    first = keeping if stores_residuals else seconds(forward.jaxpr, [i < results for i in numbers])
    again = np.zeros(2) if stores_residuals else keeping
    whole, inputs = (seconds(backward, [i >= start for i in gradients]) for start in (0, params))
    written = pass_seconds(on_device.split.w_inputs if on_device.split is not None else (), network.chip)
    return np.stack([first, again, whole, inputs + np.array([written, 0.0]), whole - inputs])


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


def _sent_apart(step: Step, network: Network) -> float:
    """Seconds of what a device sends besides its layers: weights on their way to where they are used, gradients back.

    Where all stages compute the ends together, a stage sends to all for each micro-batch what the last layer takes, and
    the first one's cotangents.
    """
    mesh, layouts, params = step.plan.request.mesh, step.plan.at_work, step.plan.at_work["params"]

    def program() -> list[jax.Array]:
        weights = step.collections(*WEIGHTS)
        there = {name: layouts[name].gathered(layouts[name].rest.zeros()) for name in weights}
        shared = send_shared(step, there, device_index(mesh))
        back = [jax.lax.psum(leaves["params"], AXIS) for v, leaves in shared.items() if v not in step.ends.sets]
        sums = params.reduced(params.zeros(accumulator_dtype), step.gradient_sums.partial_along)
        return jax.tree.leaves((there, shared, back, sums))

    traced = jax.make_jaxpr(on_stages(program, mesh, (), PartitionSpec(AXIS)))()
    once = network.seconds(sent_in(traced.jaxpr, mesh.shape))
    if not step.ends.shared:
        return once
    first, last = (step.activations.record_types[i].leaves for i in (0, step.model.num_layers - 2))
    to_all = ring_bytes("all_reduce", bytes_of([*filter(is_float, first), *last]), step.schedule.num_stages)
    return once + step.schedule.num_microbatches * to_all / network.bandwidth([AXIS])


def _update_passes(step: Step) -> int:
    """How often the parameters' bytes are read or written once a step.

    Sums of gradients are filled with zeros and their norm is taken, a pass each; parameters are read, written and read
    with their gradients; and narrow copies of them are made, where layers compute in a narrower dtype.
    """
    activations = jax.tree.leaves([layer.forward.results.outputs for layer in step.layers])
    narrow = any(leaf.dtype.itemsize < 4 for leaf in activations)
    return 7 + 2 * (narrow and step.plan.request.options.cast == "step")
