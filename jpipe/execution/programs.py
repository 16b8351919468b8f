"""The programs of a pipeline: initialisation, training (loss and gradients), evaluation.

Each wraps what one device does into one function of global arrays, on all stages, and labels the results with their
layouts. `Pipeline` jits them; all are traceable, so that they run inside a user's own `jax.jit` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jpipe.execution.batches import join_microbatches, split_microbatches
from jpipe.execution.executor import run_inference, run_training
from jpipe.execution.planner import Planner
from jpipe.execution.shared_weights import send_shared
from jpipe.execution.stage import AsUsed, Stage
from jpipe.execution.step import Step
from jpipe.jax_tools.dtypes import accumulator_dtype
from jpipe.jax_tools.indexing import take_row
from jpipe.jax_tools.random_keys import init_key, key_shape
from jpipe.jax_tools.tracing import replay
from jpipe.memory.buffers import Index
from jpipe.memory.layout import StageTree, add_stage_axis, device_index, drop_stage_axis
from jpipe.memory.storage import Buffers
from jpipe.mesh.axes import rest_axes
from jpipe.mesh.on_stages import on_stages, shapes_only
from jpipe.model.groups import LayerGroup
from jpipe.model.trace import trace_init
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import of_spec, replicated, to_spec
from jpipe.planning.plan import Plan
from jpipe.terminal.first_calls import compiles
from jpipe.types import Batch, Leaf, PyTree

T = TypeVar("T")


def init_variables(plan: Plan, key: jax.Array, ready: dict[str, Buffers]) -> dict[str, StageTree]:
    """New variables: each stage makes those of its own layers.

    Args:
      plan: cuts and layout.
      key: a random key; see `jpipe.jax_tools.random_keys.init_key`.
      ready: buffers by collection that hold the values of layers that come with their own; may lack collections.
    """
    specs = _specs(plan)
    layouts, mesh, model = plan.layouts, plan.request.mesh, plan.model
    compiles(model.described())

    def body(key: jax.Array, ready: dict[str, Buffers]) -> dict[str, Buffers]:
        """One device's part: its buffers `[1, ...]` by collection."""

        def maker(v: int, instance: Index, _: Index) -> Index:
            """The index of the layer that makes an instance of a set of variables."""
            return take_row(jnp.asarray([users[0] for users in model.variable_sets[v].users], jnp.int32), instance)

        def visit(v: int, instance: Index, layer: Index, buffers: dict[str, Buffers]) -> dict[str, Buffers]:
            group = model.groups[model.variable_sets[v].group]
            if group.layer.ready is not None:
                return buffers
            made = _init_layer(plan, group)(init_key(key, layer))
            return buffers | {
                name: layouts[name].storage.write(buffers[name], v, instance, leaves) for name, leaves in made.items()
            }

        buffers = {name: layout.zeros() for name, layout in layouts.items()} | drop_stage_axis(ready)
        return add_stage_axis(layouts["params"].storage.for_each_local(maker, visit, device_index(mesh), buffers))

    run = on_stages(body, mesh, (PartitionSpec(), {name: specs[name] for name in ready}), specs)
    return {name: StageTree(tree, layouts[name]) for name, tree in run(key, ready).items()}


def _init_layer(plan: Plan, group: LayerGroup) -> Callable[[jax.Array], dict[str, list[Leaf]]]:
    """random key -> the leaves of a new layer's variables by collection, each device's own parts."""
    mesh = plan.request.mesh
    axes = rest_axes(mesh)

    def run(key: jax.Array) -> dict[str, list[Leaf]]:
        with shapes_only(mesh):
            jaxpr, made = trace_init(group.layer, key_shape(key), group.takes, plan.traced.batch)
        wanted = [of_spec(spec, axes) for name in sorted(made) for spec in group.specs[name]]
        local = jaxpr_per_device(jaxpr, axes, [replicated(axes)], [lambda _, s=s: s for s in wanted])
        leaves = {name: jax.tree.leaves(tree) for name, tree in made.items()}
        return replay(local.jaxpr, leaves)(key)

    return run


def value_and_grad(
    planner: Planner,
    variables: dict[str, StageTree],
    batch: Batch,
    key: jax.Array | None,
    only: jax.Array | None = None,
) -> tuple[tuple[jax.Array, dict[str, StageTree], dict[str, jax.Array]], StageTree]:
    """`((loss, updates, metrics), grads)` of a batch `[B, ...]`; for `only` see `run_training`."""
    plan, step = planner.known_plan(), planner.training_step(batch, key)
    compiles(step.described())
    key = jax.random.key(0) if key is None else key  # then no layer draws from it
    layouts, params = plan.layouts, plan.layouts["params"]

    def body(variables: dict[str, Buffers], batch: Batch, key: jax.Array, only: jax.Array | None) -> tuple[PyTree, ...]:
        variables = drop_stage_axis(variables)
        stage = _stage(plan, step, variables, batch, key)
        sums, updates, grads = run_training(step, stage, params.zeros(accumulator_dtype, at_work=True), only)
        # loss = sum_m loss_sum_m / W and grads = sum_m d loss_sum_m / W, where W = sum_m weight_sum_m is a constant;
        # sums are [loss_sum, W, then a sum and a weight for each metric].
        divide = lambda leaf, old: (leaf / sums[1].astype(leaf.dtype)).astype(old.dtype)
        with jax.named_scope("reduce"):
            grads = jax.tree.map(divide, params.reduced(grads), variables["params"])
        return sums, add_stage_axis(updates), add_stage_axis(grads)

    specs = _specs(plan)
    # Micro-batches are cut inside of `on_stages`: a mesh with Explicit axes allows that reshape nowhere else.
    state_specs = {name: tree for name, tree in specs.items() if name != "params"}
    run = on_stages(
        body,
        plan.request.mesh,
        (specs, _microbatch_specs(plan, step), PartitionSpec(), PartitionSpec()),
        ([PartitionSpec()] * len(step.outputs), state_specs, specs["params"]),
        before=lambda variables, batch, key, only: (variables, _split(step, batch), key, only),
    )
    run = _not_differentiable(run, "pipe.value_and_grad gives the gradients itself; use its second result, grads")
    sums, updates, grads = run({name: dict(variables[name]) for name in layouts}, batch, key, only)
    updates = {name: StageTree(tree, layouts[name]) for name, tree in updates.items()}
    names = planner.loss(planner.for_training(batch)).metrics
    loss, *metrics = [total / weight for total, weight in zip(sums[::2], sums[1::2], strict=True)]
    return (loss, updates, dict(zip(names, metrics, strict=True))), StageTree(grads, params)


def evaluate(planner: Planner, variables: dict[str, StageTree], batch: Batch) -> jax.Array:
    """The loss of a batch `[B, ...]` in evaluation mode."""
    plan, step = planner.known_plan(), planner.evaluation_step(batch, with_loss=True)
    loss_sum, weight_sum, *_ = _forward(plan, step, variables, batch, [PartitionSpec()] * len(step.outputs))
    return loss_sum / weight_sum


def apply(planner: Planner, variables: dict[str, StageTree], batch: Batch, *, bare: bool) -> PyTree:
    """The outputs `[B, ...]` of a batch, or of its bare inputs, in evaluation mode."""
    plan, step = planner.known_plan(), planner.evaluation_step(batch, with_loss=False, bare=bare)
    axes = plan.request.splits.axes
    specs = [to_spec(at, axes, leaf.ndim) for at, leaf in zip(step.outputs_at, step.outputs, strict=True)]
    joined = {"after": lambda leaves: list(map(join_microbatches, leaves)), "result_specs": specs}
    leaves = _forward(plan, step, variables, batch, list(map(_stacked_spec, specs)), **joined)
    return jax.tree.unflatten(jax.tree.structure(step.model.outputs), leaves)


def _forward(
    plan: Plan,
    step: Step,
    variables: dict[str, StageTree],
    batch: Batch,
    out_specs: list[PartitionSpec],
    **results: Any,
) -> list[jax.Array]:
    """What the stages give for a batch forward only; `out_specs` and `results` go to `on_stages`."""
    compiles(step.described())

    def body(variables: dict[str, Buffers], batch: Batch) -> list[jax.Array]:
        return run_inference(step, _stage(plan, step, drop_stage_axis(variables), batch, None))

    before = lambda variables, batch: (variables, _split(step, batch))
    run = on_stages(
        body, plan.request.mesh, (_specs(plan), _microbatch_specs(plan, step)), out_specs, before, **results
    )
    remedy = "pipe.apply and pipe.evaluate are forward only; use pipe.value_and_grad(variables, batch, key)"
    return _not_differentiable(run, remedy)({name: dict(variables[name]) for name in plan.layouts}, batch)


def _stacked_spec(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(None, *spec)


def _not_differentiable(function: Callable[..., T], remedy: str) -> Callable[..., T]:
    """`function`, which raises a TypeError with the remedy if somebody differentiates it."""
    wrapped = jax.custom_jvp(function)

    def refuse(primals: PyTree, tangents: PyTree) -> NoReturn:
        raise TypeError(f"a pipeline can't be differentiated from outside: {remedy}")

    wrapped.defjvp(refuse)
    return wrapped


def _stage(plan: Plan, step: Step, variables: dict[str, Buffers], batch: Batch, key: jax.Array | None) -> Stage:
    """One device at the start of a step, its variables and micro-batches at hand."""
    params, options, device = plan.layouts["params"], plan.request.options, device_index(plan.request.mesh)
    as_used: AsUsed = params.gathered_leaves
    if options.gather == "step":
        variables = variables | {"params": params.gathered(variables["params"])}
        as_used = lambda variable_set, leaves: leaves
    shared = send_shared(step, variables, device, as_used)
    return Stage(step, variables, batch, key, shared, device, as_used, options.cast == "use")


def _specs(plan: Plan) -> dict[str, dict[str, PartitionSpec]]:
    return {name: dict(layout.specs) for name, layout in plan.layouts.items()}


def _split(step: Step, batch: Batch) -> Batch:
    return split_microbatches(batch, step.num_microbatches)


def _microbatch_specs(plan: Plan, step: Step) -> PyTree:
    """How all micro-batches `[M, b, ...]` are split."""
    splits = plan.request.splits
    spec = lambda a: _stacked_spec(to_spec(splits.of_examples(a.shape[0]), splits.axes, a.ndim))
    return jax.tree.map(spec, step.model.batch)
