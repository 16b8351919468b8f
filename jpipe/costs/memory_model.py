"""Predicts the bytes that a training step holds on a device, by part, from plan and trace; compiles nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import jax
import optax
from jax.sharding import AxisType, Mesh

from jpipe.arrays.dtypes import accumulator_dtype, is_float
from jpipe.arrays.trees import bytes_of
from jpipe.costs.chips import Chip, chip_of
from jpipe.costs.holdings import holdings, optimizer_bytes
from jpipe.costs.liveness import Compiler, working_bytes
from jpipe.costs.step_cost import Parts
from jpipe.execution.programs import narrow_dtypes, weight_uses
from jpipe.memory.at_work import WorkLayout
from jpipe.memory.buffers import FlatBuffer
from jpipe.model.groups import GRADIENT
from jpipe.model.layer_function import LayerFunction
from jpipe.model.traced_layer import DeviceLayer
from jpipe.partitioner.shardings import part_structs
from jpipe.planning.planner import Planner
from jpipe.planning.step import Step
from jpipe.seam.inside import with_axis_types, with_named_axes
from jpipe.seam.jaxpr_types import shapes_of
from jpipe.types import Batch


def predict_memory(
    planner: Planner, batch: Batch, tx: optax.GradientTransformation | None = None, chip: Chip | None = None
) -> Parts[int]:
    """Predicts the bytes that a training step will hold on each device: all hold as much, whatever their stage.

    The parts are `parameters` at rest, the state of the `optimizer`, the sums of `gradients` as they are at work,
    `other_variables` (other collections and their sums; parameters that are gathered, or brought to their stage), the
    device's `batch` (all micro-batches), `boundaries` (activations and cotangents: the stage's own, those that wait,
    those on their way), `residuals` (what actions keep for later ones), `work` (the most that a layer's forward or
    backward holds besides, what it computes anew included), and `casts` (narrow copies of parameters, made once a
    step). What lies on the hosts (`offload=`) counts in `predict_host_memory`.

    Args:
      planner: the pipeline's; its mesh may be of devices that aren't there.
      batch: a batch `[B, ...]`, or its shapes.
      tx: the optimiser; default: one without state.
      chip: the kind of the devices (default: that of the mesh).

    Raises:
      ValueError, TypeError: as `Pipeline.abstract_state`.
    """
    optimizer, hosted = optimizer_bytes(planner, batch, tx)
    step = planner.training_step(planner.for_training(batch))
    at_rest = {name: held.bytes for name, held in holdings(step.plan).device.items()}
    layouts = step.plan.at_work
    at_work = {name: jax.eval_shape(partial(layout.zeros, accumulator_dtype)) for name, layout in layouts.items()}
    casts, whole = _narrow_copies(step)
    chip = chip or chip_of(planner.request.mesh.devices.flat[0])
    compiler = compiler_for(chip)
    with planner.tracing():
        work = max(_of_layer(step, g, planner.request.mesh, compiler) for g in range(len(step.layers)))
    return Parts(
        parameters=at_rest.pop("params"),
        optimizer=optimizer + hosted * (not host_is_apart(planner, chip)),
        gradients=bytes_of(at_work["params"]),
        other_variables=sum(at_rest.values())
        + sum(_brought(layout, whole if name == "params" else None) for name, layout in layouts.items())
        + sum(bytes_of(at_work[name]) for name in step.collections("state", GRADIENT)),
        batch=step.schedule.num_microbatches * _batch_part(step),
        boundaries=boundary_bytes(step, compiler),
        residuals=_residuals(step, apart=host_is_apart(planner, chip)),
        work=work,
        casts=casts,
    )


def predict_host_memory(
    planner: Planner, batch: Batch, tx: optax.GradientTransformation | None = None, chip: Chip | None = None
) -> Parts[int]:
    """Predicts the bytes that a training step will hold on the hosts for each device; arguments as `predict_memory`'s.

    The parts are `residuals` that wait there, and the state of the `optimizer`; each only if there are some.
    """
    if not host_is_apart(planner, chip or chip_of(planner.request.mesh.devices.flat[0])):
        return Parts()
    step = planner.training_step(planner.for_training(batch))
    of_state = optimizer_bytes(planner, batch, tx)[1] if planner.request.options.offload.optimizer else 0
    held = {"residuals": _on_hosts(step), "optimizer": of_state}
    return Parts({name: size for name, size in held.items() if size})


def host_is_apart(planner: Planner, chip: Chip | None) -> bool:
    """Whether the hosts' memory is another than that of the devices: as of all but CPUs."""
    return bool(chip and chip.host.memory) or not planner.request.splits.on_cpu


def _on_hosts(step: Step) -> int:
    """Bytes of the rows on the host of a device."""
    return sum(storage.host_rows * storage.row_bytes for storage in step.kept.away.values())


def _residuals(step: Step, *, apart: bool) -> int:
    """Bytes of what actions keep on a device; of rows that go to the host, what is there, and one that comes back."""
    back = sum(storage.row_bytes for storage in step.kept.away.values())
    return bytes_of(jax.eval_shape(step.kept.empty)) + back + _on_hosts(step) * (not apart)


def boundary_bytes(step: Step, compiler: Compiler) -> int:
    """Bytes of activations and cotangents between layers and stages, on a device.

    A stage has one of each under way through its layers, those that have arrived and wait, and one on its way. A CPU's
    compiler copies activations that wait, where several do, once a tick.
    """
    total = 0
    for boundaries, name in ((step.activations, "activation"), (step.cotangents, "cotangent")):
        on_stage = jax.eval_shape(boundaries.empty)
        crosses = bytes_of(jax.eval_shape(boundaries.crossing, on_stage))
        rows = step.table.rows_written(name)
        copied = rows if rows > 1 and name == "activation" and not compiler.in_place else 0
        total += bytes_of(on_stage) + crosses * (rows + (rows > 0) + copied)
    if step.ends.shared:  # what the first layer gives, and the cotangents of what the last one takes
        first, last = (step.activations.record_types[i].leaves for i in (0, step.model.num_layers - 2))
        total += bytes_of([*first, *filter(is_float, last)])
    return total


def _narrow_copies(step: Step) -> tuple[int, set[str]]:
    """(bytes of narrow copies of parameters that are made once a step, the buffers that are needed as they are)."""
    params = jax.eval_shape(step.plan.at_work["params"].zeros)
    if step.plan.request.splits.on_gpu:
        narrow = narrow_dtypes(step)
        return sum(params[name].size * dtype.itemsize for name, dtype in narrow.items()), params.keys() - narrow.keys()
    uses = weight_uses(step)
    return sum(params[name].size * dtype.itemsize for name, _, dtype in uses.casts), uses.whole


def _brought(layout: WorkLayout, used: set[str] | None) -> int:
    """Bytes of what is gathered, or brought to its stage, for the step; of parameters what isn't only cast."""
    at_rest, at_work = jax.eval_shape(layout.rest.zeros), jax.eval_shape(layout.zeros)
    return bytes_of([a for n, a in at_work.items() if at_rest.get(n) != a and (used is None or n in used)])


def _batch_part(step: Step) -> int:
    """Bytes of a device's part of a micro-batch."""
    splits, leaves = step.plan.request.splits, jax.tree.leaves(step.model.batch)
    return bytes_of(part_structs(leaves, [splits.of_examples(a.shape[0]) for a in leaves], splits.axes))


def compiler_for(chip: Chip | None) -> Compiler:
    """The habits of a chip's compiler; that of an unknown chip is taken for a CPU's.

    Half of a TPU's vector memory is taken to be for a layer's arrays, the other half for what is fetched ahead.
    """
    if chip is not None and chip.gpu is not None:
        return Compiler(in_place=True)
    if chip is not None and chip.vector_memory:
        return Compiler(into_products=True, near=chip.vector_memory // 2, in_place=True)
    return Compiler()


def _of_layer(step: Step, g: int, mesh: Mesh, compiler: Compiler) -> int:
    """The most that a forward or a backward holds for one layer of a group; if they run in pairs, what both hold."""
    # One of several layers' weights is a slice of a buffer.
    storage, v = step.plan.at_work["params"].storage, step.model.groups[g].variable_set
    places = [] if v is None else [storage.buffers[name] for name in storage.record_types[v].buffers]
    weights = tuple(i for i, place in enumerate(places) if isinstance(place, FlatBuffer) or place.size > 1)
    passes = _working(step.layers[g], step.functions[g], mesh, compiler, weights)
    return sum(passes) if g == step.paired_group else max(passes)


@lru_cache(maxsize=256)  # a search asks for each under many schedules
def _working(
    layer: DeviceLayer, function: LayerFunction, mesh: Mesh, compiler: Compiler, weights: tuple[int, ...]
) -> tuple[int, int]:
    """The bytes that a layer's forward holds, and its backward, if the weights of these indices are slices."""
    layer = replace(layer, backward_program=layer.backward_jaxpr)  # not as the devices at hand compute it
    leaves, structure = shapes_of(layer.forward.jaxpr.jaxpr.invars), jax.tree.structure(function.arguments)
    arguments = jax.tree.unflatten(structure, leaves[: structure.num_leaves])
    outputs = function.differentiated(layer.forward.results.outputs)
    manual = with_axis_types(mesh.abstract_mesh, dict.fromkeys(mesh.axis_names, AxisType.Manual))
    with jax.sharding.use_abstract_mesh(manual):
        backward, _ = with_named_axes(layer.backward, mesh.shape)(arguments, layer.residuals, outputs)
    if compiler.into_products:  # they read slices as they lie
        return working_bytes(layer.forward.jaxpr, (), compiler), working_bytes(backward, (), compiler)
    # Residuals in a row are slices too.
    residuals = range(structure.num_leaves, structure.num_leaves + len(layer.residuals))
    forward = working_bytes(layer.forward.jaxpr, weights, compiler)
    return forward, working_bytes(backward, [*weights, *residuals], compiler)
