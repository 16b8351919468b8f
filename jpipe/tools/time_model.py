"""Predicts the seconds of a step, by part, on a chip that need not be there; compiles nothing.

`roofline` gives the times of layers, from their traced forwards and backwards; nothing is fitted to steps. The compiled
steps of `benchmarks/time_model.py` show how far it is off (`docs/time-model.md`).

A kernel is a product of matrices, a reduction, or what gives a result; moves and elementwise operations are fused into
the kernels that read them, except on chips whose products are calls of a library. Kernels run one after the other:

- A product takes its FLOPs, of dimensions padded to the matrix unit's, at the chip's peak, and the bytes that it reads
  and writes, but for those of arrays made here that fit on the chip. A convolution reads and writes all of them: on a
  TPU its images lie with channels along the lanes and examples along the sublanes, and are padded to these.
- A *pass* reads and writes each element once, as 32 bits on a TPU whatever its dtype. A reduction takes one, shared by
  all of the same arrays; none, if it can be done while a product makes its operand; half of one on a GPU, as it writes
  next to nothing. Each result takes one: it is written to a buffer of residuals, added to a sum of gradients, or
  copied. An array whose last dimension doesn't fill the lanes takes one where a product has to turn it.
- However small, a product or a reduction takes the time that a kernel takes to start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import jax
import numpy as np
import optax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from jpipe.execution.stage import send_shared
from jpipe.jax.flat_jaxpr import without_calls
from jpipe.jax.flops import flops_of
from jpipe.jax.inside import needed_part
from jpipe.jax.primitives import ELEMENTWISE, MOVES, REDUCTIONS, ClosedJaxpr, JaxprEqn, Literal, Var, shapes_of
from jpipe.jax.trees import accumulator_dtype, bytes_of, is_float
from jpipe.memory.layout import LANES, device_index
from jpipe.model.groups import WEIGHTS
from jpipe.model.traced_layer import DeviceLayer
from jpipe.partitioner.axes import AXIS, on_stages
from jpipe.partitioner.conversions import ring_bytes, sent_in
from jpipe.planning.planner import Planner
from jpipe.planning.step import Step
from jpipe.schedules.simulate import Work, busy_times, in_time
from jpipe.tools.chips import Chip, Network
from jpipe.tools.memory_model import bytes_of_value, predict_memory
from jpipe.tools.step_cost import Parts, StepCost
from jpipe.types import Batch

# --- the time of a step -----------------------------------------------------------------------------------------------


def predict_time(
    planner: Planner, batch: Batch, chip: Chip, *, tx: optax.GradientTransformation | None = None
) -> StepCost:
    """Predicts what a step of training takes, in seconds and, as `predict_memory`, in bytes; nothing is compiled.

    The slices are `computation` (the stages' actions, of a stage on average, and ends that all compute together),
    `bubble` (what stages wait: for each other, and for what crosses boundaries), `collectives` (what devices wait for
    transfers that have no work beside them: of layers, of ends that all stages compute together, and once a step),
    and `update` (the optimiser's, by the bytes that it reads and writes). With `offload=` there is `host`, too: what
    devices wait for rows and the optimiser's state on their way to the hosts and back. The timeline is in seconds.

    Args:
      planner: the pipeline's.
      batch: a batch `[B, ...]`, or its ShapeDtypeStructs.
      chip: one device (`jpipe.tools.chips.CHIPS`).
      tx: the optimiser, of whose state the bytes count; default: one without state.
    """
    step = planner.training_step(planner.for_training(batch))
    held, hosts = predict_memory(planner, batch, tx, chip)
    schedule, bounds, network = step.schedule, step.plan.partition.bounds, Network.of(chip, planner.request.mesh)
    of_layers, of_links, (ends_compute, ends_send) = _work(step, network)
    work, links = of_layers.summed(bounds), of_links.summed(bounds)
    # All stages wait for the slowest hop: between two hosts, if stages are on several.
    hop, moves = step.activations.crossing_bytes / network.bandwidth([AXIS], "permute"), _moves(step, chip)
    timeline = in_time(schedule, work, hop, moves)
    alone = in_time(schedule, work, hop) if any(moves) else timeline
    bubble, waited = alone.bubble_fraction * alone.makespan, float(np.mean(busy_times(schedule, links)))
    hosted = hosts.get("optimizer", 0)
    # Sums of gradients are filled with zeros, and their norm is taken: a pass each. Parameters are read, written, and
    # read with their gradients. Narrow copies of them are made, if there are some.
    passes = 7 + 2 * bool(held["casts"])
    moved = passes * held["parameters"] + 2 * (held["optimizer"] + hosted)
    seconds = Parts(
        computation=alone.makespan - bubble - waited + schedule.num_microbatches * ends_compute,
        bubble=bubble,
        collectives=waited + schedule.num_microbatches * ends_send + _sent_apart(step, network),
        update=moved / chip.pass_bandwidth,
    )
    of_state = _on_link(hosted, chip)
    if any(moves) or of_state:
        waits = timeline.makespan - alone.makespan + max(0.0, of_state - seconds["update"])
        seconds = Parts(seconds, host=waits)
    return StepCost("predicted", seconds, held, timeline, host=hosts)


def layer_seconds(planner: Planner, batch: Batch, chip: Chip) -> list[float]:
    """`[N]`, what each layer takes in a step's actions for one micro-batch: costs to cut the model by.

    0 of a first and a last layer that all stages compute together.
    """
    step = planner.training_step(planner.for_training(batch))
    work, *_ = _work(step, Network.of(chip, planner.request.mesh))
    return [sum(seconds) for seconds in zip(work.times["F"], work.times["B"], work.anew, strict=True)]


def _work(step: Step, network: Network) -> tuple[Work, Work, list[float]]:
    """The layers' work, `[N]`; the part of it in which they wait for links; and the seconds of shared ends.

    Ends that all stages compute together take nothing among the layers. Their seconds are (kernels, links) for each
    micro-batch.
    """
    of_group = [_layer_seconds(layer, network, step.stores_residuals) for layer in step.layers]
    by_layer = [of_group[g] for g in step.model.group_of]
    table = {kind: np.array([seconds[kind] for seconds in by_layer]) for kind in "FRBIW"}  # [N, (kernels, links)]
    ends = np.zeros(2)
    if step.ends.turns:
        ends = np.sum([table[kind][[0, -1]] for kind in "FRB"], axis=(0, 1))
        for seconds in table.values():
            seconds[[0, -1]] = 0.0
    whole = {kind: seconds.sum(axis=1).tolist() for kind, seconds in table.items()}
    waits = {kind: seconds[:, 1].tolist() for kind, seconds in table.items()}
    return Work(whole, whole["R"]), Work(waits, waits["R"]), ends.tolist()


@lru_cache(maxsize=256)  # a search asks for each under many schedules
def _layer_seconds(layer: DeviceLayer, network: Network, stores_residuals: bool) -> dict[str, np.ndarray]:
    """The seconds of a layer's kernels on a device, and of its transfers to others of its stage, by kind of action.

    R is what is computed anew before a backward: nothing where stages store residuals. I is a backward but for that
    part W which only gradients of parameters need, and writes down what W reads.
    """
    forward, backward = layer.forward, layer.backward_jaxpr
    num_results, num_params = (len(jax.tree.leaves(tree)) for tree in (forward.results, layer.gradients.params))
    results, gradients = range(len(forward.jaxpr.out_avals)), range(len(backward.out_avals))
    part_for = lambda jaxpr, wanted: needed_part(jaxpr, wanted)[0]
    storing = part_for(forward.jaxpr, [i < num_results or i in forward.residual_indices for i in results])
    parts = {
        "F": storing if stores_residuals else part_for(forward.jaxpr, [i < num_results for i in results]),
        "B": part_for(backward, [True for _ in gradients]),
        "I": part_for(backward, [i >= num_params for i in gradients]),  # gradients of parameters come first
    }
    if not stores_residuals:
        parts["R"] = storing
    sent = lambda part: network.seconds(sent_in(part.jaxpr, dict(network.torus.sizes)))
    seconds = {kind: np.array([roofline(part, network.chip), sent(part)]) for kind, part in parts.items()}
    written = pass_seconds(layer.split.w_inputs if layer.split is not None else (), network.chip)
    whole, inputs = seconds["B"], seconds["I"]
    return {"R": np.zeros(2), **seconds, "W": whole - inputs, "I": inputs + np.array([written, 0.0])}


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
    if not step.ends.turns:
        return once
    first, last = (step.activations.record_types[i].leaves for i in (0, step.model.num_layers - 2))
    to_all = ring_bytes("all_reduce", bytes_of([*filter(is_float, first), *last]), step.schedule.num_stages)
    return once + step.schedule.num_microbatches * to_all / network.bandwidth([AXIS])


# --- kernels ----------------------------------------------------------------------------------------------------------


PRODUCTS = frozenset(["dot_general", "ragged_dot_general", "conv_general_dilated", "pallas_call"])
_FUSED = ELEMENTWISE | MOVES
_SWEEPS = ("approx_top_k", "argm", "cum", "reduce", "sort", "top_k")
_WHOLE = ("fft", "select_and_")  # read each operand and write each result, as the backward of a max-pool does
_SMALL = 8  # an array of so many times fewer elements than another is nothing beside it
_SUBLANES = 8
"""The rows of a TPU's tiles of 32-bit numbers."""


def roofline(closed: ClosedJaxpr, chip: Chip) -> float:
    """Seconds of a function on one device.

    >>> import jax
    >>> from jpipe.tools.chips import CHIPS
    >>> x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    >>> f"{1e3 * roofline(jax.make_jaxpr(lambda x: x @ x)(x), CHIPS['v5e']):.2f} ms"  # 2 * 4096**3 / 197e12, and bytes
    '1.00 ms'

    Args:
      closed: the function.
      chip: the device.
    """
    needed, _ = needed_part(closed, [True] * len(closed.jaxpr.outvars))
    return _Kernels(without_calls(needed), chip).seconds


def pass_seconds(arrays: Iterable[jax.ShapeDtypeStruct], chip: Chip) -> float:
    """Seconds of reading and writing each element of arrays once."""
    return sum(2 * a.size * (4 if chip.tile > 1 else a.dtype.itemsize) for a in arrays) / chip.pass_bandwidth


class _Kernels:
    """Adds up the seconds of a function's kernels, equation by equation.

    Attributes:
      seconds: the sum so far.
      roots: by value, the arrays that are read to compute it: itself alone, if it is an array.
      depth: by value, the number of reductions between it and the product or input that it comes from.
      padding: by the shape of a convolution's image, how many times as large it is when it is padded.
    """

    def __init__(self, closed: ClosedJaxpr, chip: Chip):
        jaxpr = closed.jaxpr
        self.chip, self.inputs, self.seconds = chip, {*jaxpr.invars, *jaxpr.constvars}, 0.0
        self.roots = {v: frozenset([v]) for v in self.inputs}
        self.depth: dict[Var, int] = {}
        self.of_products, self.turned = set[Var](), set[Var]()
        self.swept = set[tuple[frozenset[Var], int]]()
        convolutions = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated" and chip.fuses]
        images = [image for e in convolutions for image in _images(e)]
        self.padding = {shape: _growth(shape[n], _SUBLANES) * _growth(shape[c], LANES) for shape, n, c in images}
        readers = [(v, e.primitive.name) for e in jaxpr.eqns for v in e.invars if isinstance(v, Var)]
        self.by_product = {v for v, name in readers if name not in _FUSED and name not in REDUCTIONS}
        # In order: sums are the same each time.
        self.results = dict.fromkeys(v for v in jaxpr.outvars if isinstance(v, Var))
        self.kept = set(self.results)  # and the values that results are made of without a kernel between
        for equation in reversed(jaxpr.eqns):
            if equation.primitive.name in _FUSED and not self.kept.isdisjoint(equation.outvars):
                self.kept |= {v for v in equation.invars if isinstance(v, Var)}
        for equation in jaxpr.eqns:
            self._add(equation)
        self.seconds += sum(self._pass(v) for v in self.results)

    def _add(self, equation: JaxprEqn) -> None:
        """Adds an equation's kernel, if it is one, and notes what its results are computed from."""
        name, operands = equation.primitive.name, [v for v in equation.invars if isinstance(v, Var)]
        roots = frozenset[Var]().union(*(self.roots[v] for v in operands))
        depth = max((self.depth.get(v, 0) for v in operands), default=0)
        narrow = name == "convert_element_type" and not self.inputs.isdisjoint(operands)
        for v in equation.outvars:
            apart = name not in _FUSED or (narrow and bytes_of_value(v) < bytes_of_value(operands[0]))
            self.roots[v] = frozenset([v]) if apart else roots
            self.depth[v] = 0 if name in PRODUCTS else depth + (name in REDUCTIONS)
            if not self.chip.fuses and name in ELEMENTWISE and v in self.by_product and v not in self.results:
                self.roots[v] = frozenset([v])
                self.seconds += self._pass(v)
        if name in PRODUCTS:
            self._product(equation)
        elif name.startswith(_SWEEPS):
            self._sweep(equation, roots, depth)
        elif name.startswith(("gather", "scatter")):  # of the operand only the rows that are asked for
            self.seconds += self._pass((equation.invars[2:3] or equation.outvars)[0])
        elif name.startswith(_WHOLE):
            self.seconds += sum(map(self._pass, [*operands, *equation.outvars])) / 2
        elif name not in _FUSED:
            self.seconds += _inner(equation, self.chip)

    def _product(self, equation: JaxprEqn) -> None:
        """A product: FLOPs, and bytes that aren't on the chip."""
        self.of_products |= set(equation.outvars)
        self.seconds += self.chip.start
        if equation.primitive.name == "conv_general_dilated" and self.chip.fuses:
            moved = sum(bytes_of_value(v) * self._padded(v) for v in [*equation.invars, *equation.outvars])
            self.seconds += _convolution_flops(equation) / self.chip.flops + moved / self.chip.memory_bandwidth
            return
        # The arrays are read that an operand v is made of: of each as many elements as v has, at most all of them.
        operands = [(root, v) for v in equation.invars if isinstance(v, Var) for root in self.roots[v]]
        fetched = [(root, v) for root, v in operands if not self._on_chip(root)]
        read = sum(min(_size(root), _size(v)) * shapes_of([root])[0].dtype.itemsize for root, v in fetched)
        written = sum(bytes_of_value(v) for v in equation.outvars if not self._on_chip(v))
        self.seconds += _product_flops(equation, self.chip) / self.chip.flops
        self.seconds += (read + written) / self.chip.pass_bandwidth
        if self.chip.tile > 1 and equation.primitive.name == "dot_general":
            turned = [v for v in dict.fromkeys(_turned(equation)) if v not in self.turned]
            self.turned |= {*turned}
            self.seconds += sum(map(self._pass, turned))

    def _sweep(self, equation: JaxprEqn, roots: frozenset[Var], depth: int) -> None:
        """A reduction, or another operation that goes over all of an array."""
        size = _size(equation.invars[0])
        large = frozenset(v for v in roots if _SMALL * _size(v) > size)
        if (large, depth) in self.swept:
            return
        self.swept.add((large, depth))
        self.seconds += self.chip.start
        if len(large) == 1:  # in the product that makes it; after another reduction, in one that reads it
            free = depth == 0 or self.kept.isdisjoint(equation.outvars)
        else:
            free = all(map(self._on_chip, large))
        if not (free and self.chip.fuses and large <= self.of_products):
            self.seconds += self._pass(equation.invars[0]) * (0.5 if self.chip.gpu else 1.0)

    def _on_chip(self, v: Var) -> bool:
        """Whether a value is made here and stays in the vector memory."""
        return v not in self.inputs and bytes_of_value(v) <= self.chip.on_chip

    def _pass(self, v: Var | Literal) -> float:
        """Seconds of reading and writing each element of a value once."""
        return pass_seconds(shapes_of([v]), self.chip) * self._padded(v)

    def _padded(self, v: Var | Literal) -> float:
        return self.padding.get(shapes_of([v])[0].shape, 1.0)


def _inner(equation: JaxprEqn, chip: Chip) -> float:
    """Seconds of an equation's jaxprs: of a loop as often as it turns, of branches the longest, of all shards."""
    closed = (j if isinstance(j, ClosedJaxpr) else ClosedJaxpr(j, ()) for j in jaxprs_in_params(equation.params))
    inner, params = [roofline(jaxpr, chip) for jaxpr in closed], equation.params
    if equation.primitive.name == "cond":
        return max(inner)
    if equation.primitive.name == "shard_map":
        return sum(inner) * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return sum(inner) * (params["length"] if equation.primitive.name == "scan" else 1)


def _product_flops(equation: JaxprEqn, chip: Chip) -> float:
    """FLOPs with the dimensions of one operand, which the matrix unit holds, padded to its tiles."""
    if equation.primitive.name != "dot_general":
        return flops_of(equation)
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    shapes = [a.shape for a in shapes_of(equation.invars)]
    common = math.prod(shapes[0][d] for d in batch)
    depth = math.prod(shapes[0][d] for d in contracted)
    rows, columns = (math.prod(shape) // (common * depth) for shape in shapes)
    padded = lambda size: math.ceil(size / chip.tile) * chip.tile
    return 2.0 * common * padded(depth) * min(rows * padded(columns), padded(rows) * columns)


def _images(equation: JaxprEqn) -> list[tuple[tuple[int, ...], int, int]]:
    """The two arrays of a convolution that have pixels: (shape, dimension of examples, of channels) of each.

    The third, with the fewest pixels, are the weights or, in a backward, their gradient; then examples are summed over.
    """
    numbers, arrays = equation.params["dimension_numbers"], [*equation.invars[:2], *equation.outvars]
    specs = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    shapes = [a.shape for a in shapes_of(arrays)]
    pixels = [math.prod(shape[d] for d in spec[2:]) for shape, spec in zip(shapes, specs, strict=True)]
    weights = pixels.index(min(pixels))
    at = 0 if weights == 1 else 1  # where a spec that isn't of weights names the examples
    return [(shapes[i], specs[i][at], specs[i][1 - at]) for i in range(3) if i != weights]


def _convolution_flops(equation: JaxprEqn) -> float:
    """FLOPs of a convolution, with padded examples and channels; without padding if its channels are in groups."""
    (left, examples, channels), (right, _, others) = _images(equation)
    flops = flops_of(equation)
    if equation.params["feature_group_count"] * equation.params["batch_group_count"] > 1:
        return flops
    grown = _growth(left[channels], LANES) * _growth(right[others], LANES)
    return flops * grown * _growth(left[examples], _SUBLANES)


def _growth(size: int, tile: int) -> float:
    """How many times as large a dimension is when it is padded to a multiple of the tile."""
    return math.ceil(size / tile) * tile / size


def _turned(equation: JaxprEqn) -> list[Var]:
    """The arrays that a product has to turn: it joins dimensions of them, and the last one doesn't fill the lanes."""
    contracted, batch = equation.params["dimension_numbers"]
    turned, free = list[Var | Literal](), list[int]()
    for v, of_sum, of_batch in zip(equation.invars, contracted, batch, strict=True):
        shape = shapes_of([v])[0].shape
        free = [d for d in range(len(shape)) if d not in (*of_sum, *of_batch) and shape[d] > 1]
        joined = [[d for d in of_sum if shape[d] > 1], free]
        if any(len(dims) > 1 and dims[-1] == len(shape) - 1 for dims in joined) and shape[-1] % LANES:
            turned.append(v)
    shape = shapes_of(equation.outvars)[0].shape
    if shape and shape[-1] % LANES and len(free) > 1:  # the second operand's are the last of the result
        turned.append(equation.outvars[0])
    return [v for v in turned if isinstance(v, Var)]


def _size(v: Var | Literal) -> int:
    return math.prod(shapes_of([v])[0].shape)
