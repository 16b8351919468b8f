"""Bytes that a training step holds on a device, by part, from what is planned and traced: nothing is compiled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from jpipe.execution.step import Step
from jpipe.forecasting.liveness import working_bytes
from jpipe.jax_tools.dtypes import accumulator_dtype
from jpipe.jax_tools.trees import bytes_of
from jpipe.memory.at_work import WorkLayout
from jpipe.model.groups import GRADIENT
from jpipe.partitioner.flat_jaxpr import without_calls
from jpipe.partitioner.shardings import part_structs
from jpipe.pipeline import Pipeline
from jpipe.seam.inside import with_axis_types, with_named_axes
from jpipe.seam.jaxpr_types import shapes_of
from jpipe.types import Batch, PyTree


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on each device: all hold as much, whatever their stage (`planning.holdings`).

    Attributes:
      parameters: at rest.
      optimizer: the optimiser's state.
      gradients: their sums, as they are at work.
      other_variables: other collections and their sums; parameters that are gathered, or brought to their stage.
      batch: all micro-batches of the device.
      boundaries: activations and cotangents at boundaries: the stage's own, those that wait, those on their way.
      residuals: what actions keep for later ones.
      work: the most that a layer's forward or backward holds besides, what it computes anew included.
      casts: narrow copies of parameters, made once a step.
    """

    parameters: int
    optimizer: int
    gradients: int
    other_variables: int
    batch: int
    boundaries: int
    residuals: int
    work: int
    casts: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())


def predict_memory(pipe: Pipeline, batch: Batch, tx: optax.GradientTransformation) -> MemoryParts:
    """What a training step will hold on a device, in bytes.

    Args:
      pipe: the pipeline; its mesh may be of devices that aren't there.
      batch: a batch `[B, ...]`, or its shapes.
      tx: the optimiser.

    Raises:
      ValueError, TypeError: as `Pipeline.abstract_state`.
    """
    state = pipe.abstract_state(batch, tx)
    step = pipe.planner.training_step(batch)
    variables = {name: _on_device(tree) for name, tree in state.variables.items()}
    layouts = step.plan.at_work
    at_work = {name: jax.eval_shape(partial(layout.zeros, accumulator_dtype)) for name, layout in layouts.items()}
    with pipe.planner.tracing():
        work = _work(step, pipe.mesh)
    return MemoryParts(
        parameters=variables.pop("params"),
        optimizer=_on_device(state.opt_state),
        gradients=bytes_of(at_work["params"]),
        other_variables=sum(variables.values())
        + sum(map(_brought, layouts.values()))
        + sum(bytes_of(at_work[name]) for name in step.collections("state", GRADIENT)),
        batch=step.schedule.num_microbatches * _batch_part(step),
        boundaries=boundary_bytes(step),
        residuals=bytes_of(jax.eval_shape(step.kept.empty)),
        work=work,
        casts=_casts(step),
    )


def boundary_bytes(step: Step) -> int:
    """Bytes of activations and cotangents between layers and stages, on a device.

    A stage has one of each under way through its layers, those that have arrived and wait, and one on its way.
    """
    total = 0
    for boundaries, name in ((step.activations, "activation"), (step.cotangents, "cotangent")):
        own = jax.eval_shape(boundaries.empty)
        crosses = bytes_of(jax.eval_shape(boundaries.crossing, own))
        rows = step.table.rows_written(name)
        total += bytes_of(own) + crosses * (rows + (rows > 0))
    return total


def _on_device(tree: PyTree) -> int:
    """Bytes of a device's parts of arrays with shardings."""
    return bytes_of([jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype) for a in jax.tree.leaves(tree)])


def _brought(layout: WorkLayout) -> int:
    """Bytes of what is gathered, or brought to its stage, for the step."""
    at_rest, at_work = jax.eval_shape(layout.rest.zeros), jax.eval_shape(layout.zeros)
    return bytes_of([a for name, a in at_work.items() if at_rest.get(name) != a])


def _batch_part(step: Step) -> int:
    """Bytes of a device's part of a micro-batch."""
    splits, leaves = step.plan.request.splits, jax.tree.leaves(step.model.batch)
    return bytes_of(part_structs(leaves, [splits.of_examples(a.shape[0]) for a in leaves], splits.axes))


def _work(step: Step, mesh: Mesh) -> int:
    """The most that an action holds for one layer."""
    return max(_of_layer(step, g, mesh) for g in range(len(step.layers)))


def _of_layer(step: Step, g: int, mesh: Mesh) -> int:
    """The most that a forward or backward action holds for one layer of a group."""
    layer, function = step.layers[g], step.functions[g]
    leaves, structure = shapes_of(layer.forward.jaxpr.jaxpr.invars), jax.tree.structure(function.arguments)
    arguments = jax.tree.unflatten(structure, leaves[: structure.num_leaves])
    outputs = function.differentiated(layer.forward.results.outputs)
    manual = with_axis_types(mesh.abstract_mesh, dict.fromkeys(mesh.axis_names, AxisType.Manual))
    with jax.sharding.use_abstract_mesh(manual):
        backward, _ = with_named_axes(layer.backward, mesh.shape)(arguments, layer.residuals, outputs)
    # One of several layers' weights, and residuals in a row, are slices of buffers.
    weights = range(len(arguments.variables)) if step.ranges.most[g] > 1 else ()
    residuals = range(structure.num_leaves, structure.num_leaves + len(layer.residuals))
    return max(working_bytes(layer.forward.jaxpr, weights), working_bytes(backward, [*weights, *residuals]))


def _casts(step: Step) -> int:
    """Bytes of the copies of a stage's parameters in the dtypes that its layers compute in, made once a step."""
    if step.plan.request.options.cast != "step":
        return 0
    layout, copies = step.plan.at_work["params"], set[tuple[str, np.dtype]]()
    for g, layer in enumerate(step.layers):
        v, jaxpr = step.model.groups[g].variable_set, without_calls(layer.forward.jaxpr).jaxpr
        if v is None:
            continue
        params = dict(zip(jaxpr.invars, layout.storage.record_types[v].buffers, strict=False))
        for equation in jaxpr.eqns:
            if equation.primitive.name == "convert_element_type" and equation.invars[0] in params:
                copies.add((params[equation.invars[0]], shapes_of(equation.outvars)[0].dtype))
    buffers = jax.eval_shape(layout.zeros)
    return sum(buffers[name].size * dtype.itemsize for name, dtype in copies)
