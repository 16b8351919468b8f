"""Predicts the bytes that a training step holds on a device, by part, from plan and trace; compiles nothing.

What a function holds while it runs follows from the lives of its arrays. Operations count as fused where compilers fuse
them. So the result of an elementwise operation, or of a move of elements, is an array only if another kind of operation
reads it, such as a product on CPU. Until then its operands live on.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import optax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, Mesh

from jpipe.execution.programs import narrow_dtypes, weight_uses
from jpipe.jax.flat_jaxpr import without_calls
from jpipe.jax.in_place import HOST
from jpipe.jax.inside import needed_part, with_axis_types, with_named_axes
from jpipe.jax.primitives import ELEMENTWISE, MOVES, REDUCTIONS, ClosedJaxpr, JaxprEqn, Literal, Var, shapes_of
from jpipe.jax.trees import accumulator_dtype, bytes_of, is_float
from jpipe.memory.at_work import WorkLayout
from jpipe.memory.buffers import FlatBuffer
from jpipe.model.groups import GRADIENT
from jpipe.model.layer_function import LayerFunction
from jpipe.model.random_keys import key_shape
from jpipe.model.traced_layer import DeviceLayer
from jpipe.partitioner.shardings import part_structs
from jpipe.planning.plan import Plan
from jpipe.planning.planner import Planner
from jpipe.planning.step import Step
from jpipe.tools.chips import UNKNOWN, Chip, chip_of
from jpipe.tools.step_cost import Parts
from jpipe.training.train_state import TrainState, abstract_state
from jpipe.types import Batch, Leaf, PyTree

_COSTLY = frozenset(["cos", "div", "erf", "expm1", "log", "log1p", "logistic", "pow", "rsqrt", "sin", "sqrt", "tanh"])
"""Elementwise operations that compilers carry out once, however many read their result."""
_FUSED = ELEMENTWISE | MOVES | {"dynamic_slice"}


def _reads_fused(equation: JaxprEqn, chip: Chip) -> bool:
    """Whether an equation need not have an array to read: what it reads may be computed where it reads it."""
    name = equation.primitive.name
    return name in _FUSED or name in REDUCTIONS or (name == "dot_general" and chip.fuses)


def _is_fused(equation: JaxprEqn) -> bool:
    """Whether what an equation gives is no array of its own: single numbers are scattered in place."""
    name = equation.primitive.name
    numbers = name.startswith("scatter") and not equation.params["dimension_numbers"].update_window_dims
    return name in _FUSED or numbers


class _Held:
    """Arrays that are held at a time, on the chip while there is room."""

    def __init__(self, near: int):
        self._near, self._sizes, self._far = near, dict[Var, int](), set[Var]()

    def begin(self, arrays: Iterable[Var], copies: int = 1) -> None:
        """Begins the lives of arrays, on the chip while they fit."""
        for v in arrays:
            self._sizes[v] = bytes_of_value(v) * copies
            if sum(size for other, size in self._sizes.items() if other not in self._far) > self._near:
                self._far.add(v)

    def end(self, last: Mapping[Var, int], i: int) -> None:
        """Ends the lives of the values that equation i reads last."""
        self._sizes = {v: size for v, size in self._sizes.items() if last[v] > i}

    @property
    def bytes(self) -> int:
        """The bytes of what is held in memory, off the chip."""
        return sum(size for v, size in self._sizes.items() if v in self._far)


def working_bytes(closed: ClosedJaxpr, copied: Collection[int] = (), chip: Chip = UNKNOWN) -> int:
    """The most bytes of arrays that a function's equations hold at one time, its operands not counted.

    Results count only while they are made: whoever calls the function says where they go.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> working_bytes(jax.make_jaxpr(lambda x: jax.numpy.tanh(x @ x) @ x)(x))  # tanh, in the product's place; a product
    512

    Args:
      closed: the function.
      copied: indices of operands that are slices of larger arrays: each operation that isn't fused reads a copy of its
        own, which is made at the start.
      chip: the device, whose compiler decides what is fused. Half of a TPU's vector memory is taken to be for these
        arrays, the other half for what is fetched ahead.
    """
    kept = [True] * len(closed.jaxpr.invars)
    jaxpr = without_calls(needed_part(closed, [True] * len(closed.jaxpr.outvars), keep=kept)[0]).jaxpr
    equations, slices = jaxpr.eqns, [jaxpr.invars[i] for i in copied]
    readers: dict[Var, list[int]] = defaultdict(list)
    for i, equation in enumerate(equations):
        for v in _variables(equation):
            readers[v].append(i)
    made_of = _made_of(equations, slices, readers, chip)
    last: dict[Var, int] = defaultdict(lambda: -1)
    for v, parts in made_of.items():
        for part in parts:
            last[part] = max([last[part], *readers[v]])
    most, held = 0, _Held(chip.vector_memory // 2)
    for v in slices:
        held.begin([v], sum(not _reads_fused(equations[i], chip) for i in readers[v]))
    for i, equation in enumerate(equations):
        if equation.primitive.name in ELEMENTWISE and chip.in_place:
            held.end(last, i)
        held.begin(v for v in equation.outvars if v in made_of[v])
        most = max(most, held.bytes + _inside(equation, chip))
        held.end(last, i)
    return most


def _made_of(
    equations: Sequence[JaxprEqn], copied: Sequence[Var], readers: Mapping[Var, Sequence[int]], chip: Chip
) -> dict[Var, frozenset[Var]]:
    """The arrays that have to live until each value is read: itself alone, if it is one."""

    def is_read_whole(v: Var) -> bool:
        return not all(_reads_fused(equations[i], chip) for i in readers[v])

    made_of = {v: frozenset([v] if is_read_whole(v) else []) for v in copied}
    added = set[Var]()  # values that nothing reads but to make results of them
    for equation in reversed(equations if chip.fuses else ()):
        for v in equation.outvars:
            fused = all(equations[i].primitive.name in _FUSED for i in readers[v])
            if fused and all(added.issuperset(equations[i].outvars) for i in readers[v]):
                added.add(v)
    for equation in equations:
        name = equation.primitive.name
        if name == "optimization_barrier":  # its results are its operands
            operands = [frozenset() if isinstance(x, Literal) else made_of.get(x, frozenset()) for x in equation.invars]
            made_of.update(zip(equation.outvars, operands, strict=True))
            continue
        parts = frozenset[Var]().union(*(made_of.get(v, ()) for v in _variables(equation)))
        once = name in _COSTLY and not chip.fuses
        for v in equation.outvars:
            apart = not _is_fused(equation) or is_read_whole(v) or (once and len(readers[v]) > 1)
            made_of[v] = frozenset([v]) if apart and not (name == "dot_general" and v in added) else parts
    return made_of


def _inside(equation: JaxprEqn, chip: Chip) -> int:
    """Bytes that an equation needs by itself: a loop or a branch in its body, a product for operands that it turns."""
    if equation.primitive.name != "dot_general":
        bodies = jaxprs_in_params(equation.params)
        closed = [body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ()) for body in bodies]
        return max((working_bytes(body, (), chip) for body in closed), default=0)
    if chip.in_place:
        return 0
    contracted, batch = equation.params["dimension_numbers"]
    return sum(map(_turned_bytes, equation.invars, contracted, batch, (True, False)))


def _turned_bytes(operand: Var | Literal, contracted: Sequence[int], batch: Sequence[int], first: bool) -> int:
    """Bytes of a copy with the batch outermost and the contracted dimensions together, the first operand's last."""
    rest = [d for d in range(len(shapes_of([operand])[0].shape)) if d not in (*contracted, *batch)]
    orders = ([*batch, *rest, *contracted], *([] if first else [[*batch, *contracted, *rest]]))
    return 0 if any(order == sorted(order) for order in orders) else bytes_of_value(operand)


def _variables(equation: JaxprEqn) -> set[Var]:
    return {v for v in equation.invars if not isinstance(v, Literal)}


def bytes_of_value(v: Var | Literal) -> int:
    """The bytes of a value in a jaxpr."""
    return bytes_of(shapes_of([v]))


# --- what stages have -------------------------------------------------------------------------------------------------


class Amount(NamedTuple):
    """How much there is: elements of arrays, and their bytes."""

    elements: int
    bytes: int


def bytes_at_rest(state: TrainState) -> Parts[int]:
    """The bytes of each device's parts of a training state, or of its shapes and shardings, without those on hosts."""
    params, others = state.variables["params"], {n: tree for n, tree in state.variables.items() if n != "params"}
    trees = {"parameters": params, "optimizer": state.opt_state, "other_variables": others}
    return Parts({name: bytes_of(_parts(tree)) for name, tree in trees.items()})


def _parts(tree: PyTree, *, on_hosts: bool = False) -> list[Leaf]:
    """A device's parts of the arrays that lie on devices, or of those on hosts."""
    is_there = lambda a: (a.sharding is not None and a.sharding.memory_kind == HOST) == on_hosts
    part = lambda a: a if a.sharding is None else jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype)
    return [part(a) for a in jax.tree.leaves(tree) if is_there(a)]


def held_by_stages(plan: Plan, collection: str) -> list[Amount]:
    """`[K*V]`, what the layers of each virtual stage have in a collection, before mesh axes split it.

    What layers share counts once, where it lies: with the first of them.
    """
    layout = plan.layouts[collection]
    records = zip(layout.storage.record_types, layout.users, strict=True)
    leaves_of = {users[0]: record.leaves for record, instances in records for users in instances}
    bounds = plan.partition.bounds
    return [_amount(leaf for i in range(*bound) for leaf in leaves_of.get(i, ())) for bound in bounds]


def held_by_device(plan: Plan) -> dict[str, Amount]:
    """The elements and bytes that each device holds at rest, by collection.

    The arrays of all stages have one shape, so every device holds as much, whatever its stage has: room for the most of
    each type of leaf that any stage has (`jpipe.memory.storage`).
    """
    return {name: _amount(_parts(tree)) for name, tree in plan.shapes.items()}


def _amount(arrays: Iterable[Leaf]) -> Amount:
    arrays = list(arrays)
    return Amount(sum(math.prod(array.shape) for array in arrays), bytes_of(arrays))


# --- a training step --------------------------------------------------------------------------------------------------


def predict_memory(
    planner: Planner, batch: Batch, tx: optax.GradientTransformation | None = None, chip: Chip | None = None
) -> tuple[Parts[int], Parts[int]]:
    """Predicts the bytes that a training step will hold on each device: all hold as much, whatever their stage.

    The parts are `parameters` at rest, the state of the `optimizer`, the sums of `gradients` as they are at work,
    `other_variables` (other collections and their sums; parameters that are gathered, or brought to their stage), the
    device's `batch` (all micro-batches), `boundaries` (activations and cotangents: the stage's own, those that wait,
    those on their way), `residuals` (what actions keep for later ones), `work` (the most that a layer's forward or
    backward holds besides, what it computes anew included), and `casts` (narrow copies of parameters, made once a
    step).

    Args:
      planner: the pipeline's; its mesh may be of devices that aren't there.
      batch: a batch `[B, ...]`, or its shapes.
      tx: the optimiser; default: one without state.
      chip: the kind of the devices (default: that of the mesh).

    Returns:
      The bytes on each device, and those on the hosts for each device: `residuals` that wait there, and the state of
      the `optimizer`, each only if there are some.

    Raises:
      ValueError, TypeError: as `Pipeline.abstract_state`.
    """
    chip = chip or chip_of(planner.request.mesh.devices.flat[0]) or UNKNOWN
    step, splits = planner.training_step(planner.for_training(batch)), planner.request.splits
    plan, is_apart = step.plan, not splits.on_cpu  # the hosts' memory is another but on CPUs
    state = abstract_state(plan.shapes, tx or optax.identity(), key_shape(), plan.known_loss().of_batch)
    at_rest, state_away = bytes_at_rest(state), bytes_of(_parts(state.opt_state, on_hosts=True))
    away = step.kept.away.values()
    rows_away, back = sum(s.host_rows * s.row_bytes for s in away), sum(s.row_bytes for s in away)  # one comes back
    layouts = plan.at_work
    sums = {n: bytes_of(jax.eval_shape(partial(layout.zeros, accumulator_dtype))) for n, layout in layouts.items()}
    of_state = sum(sums[name] for name in step.collections("state", GRADIENT))
    casts, whole = _narrow_copies(step)
    brought = sum(_brought(layout, whole if name == "params" else None) for name, layout in layouts.items())
    leaves = jax.tree.leaves(step.model.batch)
    micro = bytes_of(part_structs(leaves, [splits.of_examples(a.shape[0]) for a in leaves], splits.axes))
    with planner.tracing():
        work = max(_of_layer(step, g, planner.request.mesh, chip) for g in range(len(step.layers)))
    device = Parts(
        parameters=at_rest["parameters"],
        optimizer=at_rest["optimizer"],
        gradients=sums["params"],
        other_variables=at_rest["other_variables"] + brought + of_state,
        batch=step.schedule.num_microbatches * micro,
        boundaries=boundary_bytes(step, chip),
        residuals=bytes_of(jax.eval_shape(step.kept.empty)) + back + (0 if is_apart else rows_away),
        work=work,
        casts=casts,
    )
    hosted = {"residuals": rows_away, "optimizer": state_away} if is_apart else {}
    return device, Parts({name: size for name, size in hosted.items() if size})


def boundary_bytes(step: Step, chip: Chip) -> int:
    """Bytes of activations and cotangents between layers and stages, on a device.

    A stage has one of each under way through its layers, those that have arrived and wait, and one on its way. A CPU's
    compiler copies activations that wait, where several do, once a tick.
    """
    total = 0
    for boundaries, name in ((step.activations, "activation"), (step.cotangents, "cotangent")):
        rows = step.table.rows_written(name)
        copied = rows if rows > 1 and name == "activation" and not chip.in_place else 0
        total += bytes_of(jax.eval_shape(boundaries.empty)) + boundaries.crossing_bytes * (rows + (rows > 0) + copied)
    if step.ends.turns:  # what the first layer gives, and the cotangents of what the last one takes
        first, last = (step.activations.record_types[i].leaves for i in (0, step.model.num_layers - 2))
        total += bytes_of([*first, *filter(is_float, last)])
    return total


def _narrow_copies(step: Step) -> tuple[int, set[str]]:
    """(bytes of narrow copies of parameters that are made once a step, the buffers that are needed as they are)."""
    params = jax.eval_shape(step.plan.at_work["params"].zeros)
    if step.plan.request.splits.on_gpu:
        narrow = narrow_dtypes(step)
        return sum(params[name].size * dtype.itemsize for name, dtype in narrow.items()), params.keys() - narrow.keys()
    casts = [(name, dtype) for name, uses in weight_uses(step).items() for _, dtype in uses]
    whole = {name for name, dtype in casts if dtype is None}
    return sum(params[name].size * dtype.itemsize for name, dtype in casts if dtype is not None), whole


def _brought(layout: WorkLayout, used: set[str] | None) -> int:
    """Bytes of variables that a step gathers or brings to their stage; of parameters those `used`: others are cast."""
    at_rest, at_work = jax.eval_shape(layout.rest.zeros), jax.eval_shape(layout.zeros)
    return bytes_of([a for n, a in at_work.items() if at_rest.get(n) != a and (used is None or n in used)])


def _of_layer(step: Step, g: int, mesh: Mesh, chip: Chip) -> int:
    """The most that a forward or a backward holds for one layer of a group."""
    # Where a buffer holds the weights of several layers, those of one layer are a slice of it.
    storage, v = step.plan.at_work["params"].storage, step.model.groups[g].variable_set
    places = [] if v is None else [storage.buffers[name] for name in storage.record_types[v].buffers]
    weights = tuple(i for i, place in enumerate(places) if isinstance(place, FlatBuffer) or place.size > 1)
    return _working(step.layers[g], step.functions[g], mesh, chip, weights)


@lru_cache(maxsize=256)  # a search asks for each under many schedules
def _working(layer: DeviceLayer, function: LayerFunction, mesh: Mesh, chip: Chip, weights: tuple[int, ...]) -> int:
    """The most bytes that a layer's forward or backward holds, if the weights of these indices are slices."""
    layer = replace(layer, rewrite=lambda closed: closed)  # not as the devices at hand compute it
    leaves, structure = shapes_of(layer.forward.jaxpr.jaxpr.invars), jax.tree.structure(function.arguments)
    arguments = jax.tree.unflatten(structure, leaves[: structure.num_leaves])
    outputs = function.differentiated(layer.forward.results.outputs)
    manual = with_axis_types(mesh.abstract_mesh, dict.fromkeys(mesh.axis_names, AxisType.Manual))
    with jax.sharding.use_abstract_mesh(manual):
        backward, _ = with_named_axes(layer.backward, mesh.shape)(arguments, layer.residuals, outputs)
    if chip.fuses:  # they read slices as they lie
        return max(working_bytes(jaxpr, (), chip) for jaxpr in (layer.forward.jaxpr, backward))
    # Residuals in a row are slices too.
    residuals = range(structure.num_leaves, structure.num_leaves + len(layer.residuals))
    forward = working_bytes(layer.forward.jaxpr, weights, chip)
    return max(forward, working_bytes(backward, [*weights, *residuals], chip))
