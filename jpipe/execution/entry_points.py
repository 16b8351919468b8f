"""What a pipeline jits: initialisation, training (loss and gradients) and forward only.

Each wraps what one stage does into one function of global arrays, on all stages, and labels the results with their
layouts. All are traceable: they run inside a user's own `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from jpipe.memory.storage import Leaf
from jpipe.mesh.axes import rest_axes
from jpipe.mesh.programs import on_stages, shapes_only
from jpipe.model.groups import LayerGroup
from jpipe.model.trace import trace_init
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import of_spec, replicated, to_spec
from jpipe.planning.plan import Plan
from jpipe.terminal.first_calls import compiles


def init_variables(plan: Plan, key: Any, ready: dict[str, Any]) -> dict[str, StageTree]:
    """New variables: each stage makes those of its own layers.

    Args:
      plan: cuts and layout.
      key: a random key; see `jpipe.jax_tools.random_keys.init_key`.
      ready: buffers by collection that hold the values of layers that come with their own; may lack collections.
    """
    specs = _specs(plan)
    layouts, mesh, model = plan.layouts, plan.mesh, plan.model
    compiles(model.described())

    def body(key: Any, ready: Any) -> Any:
        """One device's part: its buffers `[1, ...]` by collection."""

        def maker(v: int, instance: Index, _: Any) -> Index:
            """The index of the layer that makes an instance of a set of variables."""
            return take_row(jnp.asarray([users[0] for users in model.variable_sets[v].users], jnp.int32), instance)

        def visit(v: int, instance: Index, layer: Index, buffers: dict[str, Any]) -> dict[str, Any]:
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


def _init_layer(plan: Plan, group: LayerGroup) -> Callable[[Any], dict[str, list[Leaf]]]:
    """random key -> the leaves of a new layer's variables by collection, each device's own parts."""
    axes = rest_axes(plan.mesh)

    def run(key: Any) -> dict[str, list[Leaf]]:
        with shapes_only(plan.mesh):
            jaxpr, made = trace_init(group.layer, key_shape(key), group.takes, plan.batch)
        wanted = [of_spec(spec, axes) for name in sorted(made) for spec in group.specs[name]]
        local = jaxpr_per_device(jaxpr, axes, [replicated(axes)], [lambda _, s=s: s for s in wanted])
        leaves = {name: jax.tree.leaves(tree) for name, tree in made.items()}
        return replay(local.jaxpr, leaves)(key)

    return run


def value_and_grad(planner: Planner, variables: dict[str, StageTree], batch: Any, key: Any, only: Any = None) -> Any:
    """`((loss, updates, metrics), grads)` of a batch `[B, ...]`; for `only` see `run_training`."""
    plan, step = planner.known_plan(), planner.step(batch, train=True, with_loss=True, key=key)
    key = jax.random.key(0) if key is None else key  # then no layer draws from it
    layouts, mesh, params = plan.layouts, plan.mesh, plan.layouts["params"]

    def body(variables: Any, batch: Any, key: Any, only: Any) -> Any:
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
        mesh,
        (specs, _microbatch_specs(plan, step), PartitionSpec(), PartitionSpec()),
        ([PartitionSpec()] * len(step.outputs), state_specs, specs["params"]),
        before=lambda variables, batch, key, only: (variables, _split(step, batch), key, only),
    )
    run = _not_differentiable(run, "pipe.value_and_grad gives the gradients itself; use its second result, grads")
    sums, updates, grads = run({name: dict(variables[name]) for name in layouts}, batch, key, only)
    updates = {name: StageTree(tree, layouts[name]) for name, tree in updates.items()}
    loss, *metrics = [total / weight for total, weight in zip(sums[::2], sums[1::2], strict=True)]
    return (loss, updates, dict(zip(step.metrics, metrics, strict=True))), StageTree(grads, params)


def forward(
    planner: Planner, variables: dict[str, StageTree], batch: Any, *, with_loss: bool, bare: bool = False
) -> Any:
    """The outputs of a batch `[B, ...]` (or of its bare inputs) in evaluation mode, or its loss."""
    plan, step = planner.known_plan(), planner.step(batch, train=False, with_loss=with_loss, bare=bare)

    def body(variables: Any, batch: Any) -> Any:
        return run_inference(step, _stage(plan, step, drop_stage_axis(variables), batch, None))

    loses = step.spec.loss_fn is not None
    out = list(zip(step.outputs_at, step.outputs, strict=True))
    specs = [_stacked_spec(PartitionSpec() if loses else to_spec(s, plan.splits.axes, leaf.ndim)) for s, leaf in out]
    joined = [PartitionSpec(*spec[1:]) if len(spec) > 1 else PartitionSpec() for spec in specs]
    run = on_stages(
        body,
        plan.mesh,
        (_specs(plan), _microbatch_specs(plan, step)),
        [PartitionSpec()] * len(specs) if loses else specs,
        before=lambda variables, batch: (variables, _split(step, batch)),
        after=(lambda leaves: leaves) if loses else lambda leaves: list(map(join_microbatches, leaves)),
        result_specs=[PartitionSpec()] * len(specs) if loses else joined,
    )
    remedy = "pipe.apply and pipe.evaluate are forward only; use pipe.value_and_grad(variables, batch, key)"
    leaves = _not_differentiable(run, remedy)({name: dict(variables[name]) for name in plan.layouts}, batch)
    if loses:
        return leaves[0] / leaves[1]
    return jax.tree.unflatten(jax.tree.structure(step.model.outputs), leaves)


def _stacked_spec(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(None, *spec)


def _not_differentiable(function: Any, remedy: str) -> Any:
    """`function`, which raises a TypeError with the remedy if somebody differentiates it."""
    wrapped = jax.custom_jvp(function)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(f"a pipeline can't be differentiated from outside: {remedy}")

    wrapped.defjvp(refuse)
    return wrapped


def _stage(plan: Plan, step: Step, variables: Any, batch: Any, key: Any) -> Stage:
    """One device at the start of a step, its variables and micro-batches at hand."""
    params, device = plan.layouts["params"], device_index(plan.mesh)
    as_used: AsUsed = params.gathered_leaves
    if plan.options.gather == "step":
        variables = variables | {"params": params.gathered(variables["params"])}
        as_used = lambda variable_set, leaves: leaves
    shared = send_shared(step, variables, device, as_used)
    return Stage(step, variables, batch, key, shared, device, as_used, plan.options.cast == "use")


def _specs(plan: Plan) -> dict[str, Any]:
    return {name: dict(layout.specs) for name, layout in plan.layouts.items()}


def _split(step: Step, batch: Any) -> Any:
    return split_microbatches(batch, step.num_microbatches)


def _microbatch_specs(plan: Plan, step: Step) -> Any:
    """How all micro-batches `[M, b, ...]` are split."""
    spec = lambda a: _stacked_spec(to_spec(plan.splits.of_examples(a.shape[0]), plan.splits.axes, a.ndim))
    return jax.tree.map(spec, step.batch)
