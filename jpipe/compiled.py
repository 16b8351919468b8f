"""The three programs that a pipeline compiles: initialisation, training (loss and gradients) and forward only.

Each wraps what one stage does into one program on all stages, and labels the results with their layouts. All are
traceable: they run inside a user's own `jax.jit`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jpipe.batches import join_microbatches, split_microbatches
from jpipe.executor import run_forward, run_training, send_shared
from jpipe.indexing import take_row
from jpipe.layers import positional
from jpipe.layout import StageTree, constrain_buffers, device_index, local, stacked
from jpipe.meshes import batch_axes, constrain, on_stages, pin_batch
from jpipe.plan import Plan
from jpipe.program import Program
from jpipe.stages import Stage, init_key
from jpipe.steps import given_shapes
from jpipe.tracing import without_mesh


def init_variables(plan: Plan, key: Any, ready: dict[str, Any]) -> dict[str, StageTree]:
    """New variables: each stage makes those of its own layers.

    Args:
      plan: cuts and layout.
      key: a random key; see `jpipe.stages.init_key`.
      ready: buffers by collection that hold the values of layers that come with their own; may lack collections.
    """
    specs = _specs(plan)
    layouts, mesh, homes = plan.layouts, plan.mesh, plan.model.homes

    def body(key: Any, ready: Any) -> Any:
        """One stage's part: its buffers `[1, ...]` by collection."""

        def index_of(c: int, member: Any, _: Any) -> Any:
            return take_row(jnp.asarray([shown[0] - plan.model.first for shown in homes[c].members], jnp.int32), member)

        def visit(c: int, member: Any, index: Any, buffers: dict[str, Any]) -> dict[str, Any]:
            kind = plan.model.kinds[homes[c].kind]
            if kind.layer.ready is not None or not kind.variables:
                return buffers
            zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (kind.takes, plan.batch))
            init = lambda k, x, b: kind.layer.init(k, positional(x), b)
            made = without_mesh(init, init_key(key, index), *zeros)
            return buffers | {
                name: layouts[name].storage.write(buffers[name], c, member, jax.tree.leaves(tree))
                for name, tree in made.items()
            }

        empty = {name: layout.storage.zeros() for name, layout in layouts.items()} | local(ready)
        buffers = {name: constrain_buffers(tree, layouts[name].storage, mesh) for name, tree in empty.items()}
        return stacked(layouts["params"].storage.for_each_local(index_of, visit, device_index(mesh), buffers))

    run = on_stages(body, mesh, (PartitionSpec(), {name: specs[name] for name in ready}), specs)
    return {name: StageTree(tree, layouts[name]) for name, tree in run(key, ready).items()}


def value_and_grad(plan: Plan, program: Program, variables: dict[str, StageTree], batch: Any, key: Any) -> Any:
    """`((loss, updates), grads)` of a batch `[B, ...]`."""
    key = jax.random.key(0) if key is None else key  # then no layer draws from it
    layouts, mesh = plan.layouts, plan.mesh

    def body(variables: Any, batch: Any, key: Any) -> Any:
        constrain_grads = lambda buffers: constrain_buffers(buffers, layouts["params"].storage, mesh)
        loss, updates, grads = run_training(program, _stage(program, mesh, variables, batch, key), constrain_grads)
        return loss, stacked(updates), stacked(grads)

    specs = _specs(plan)
    state_specs = {name: tree for name, tree in specs.items() if name != "params"}
    run = on_stages(
        body, mesh, (specs, _everywhere(batch), _everywhere(key)), (PartitionSpec(), state_specs, specs["params"])
    )
    run = _not_differentiable(run, "pipe.value_and_grad gives the gradients itself; use its second result, grads")
    loss, updates, grads = run({name: dict(variables[name]) for name in layouts}, batch, key)
    updates = {name: StageTree(tree, layouts[name]) for name, tree in updates.items()}
    return (loss, updates), StageTree(grads, layouts["params"])


def forward(plan: Plan, program: Program, variables: dict[str, StageTree], batch: Any) -> Any:
    """The outputs of a batch `[B, ...]`, or its loss if the program has one."""

    def body(variables: Any, batch: Any) -> Any:
        return run_forward(program, _stage(program, plan.mesh, variables, batch, None))

    run = on_stages(body, plan.mesh, (_specs(plan), _everywhere(batch)), _everywhere(list(program.outputs)))
    remedy = "pipe.apply and pipe.evaluate are forward only; use pipe.value_and_grad(variables, batch, key)"
    leaves = _not_differentiable(run, remedy)({name: dict(variables[name]) for name in plan.layouts}, batch)
    if program.final.loss_fn is not None:
        return leaves[0] / leaves[1]
    return jax.tree.unflatten(jax.tree.structure(program.final.kind.gives), list(map(join_microbatches, leaves)))


def _not_differentiable(function: Any, remedy: str) -> Any:
    """`function`, which raises a TypeError with the remedy if somebody differentiates it."""
    wrapped = jax.custom_jvp(function)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(f"a pipeline can't be differentiated from outside: {remedy}")

    wrapped.defjvp(refuse)
    return wrapped


def _stage(program: Program, mesh: Mesh, variables: Any, batch: Any, key: Any) -> Stage:
    micro = split_microbatches(batch, program.schedule.num_microbatches)
    axes = batch_axes(mesh)
    spec = PartitionSpec(None, axes) if axes else PartitionSpec()
    micro = constrain(micro, jax.tree.map(lambda _: spec, micro), mesh)
    variables, device = local(variables), device_index(mesh)
    shared = send_shared(program, variables, device)
    rates = [] if key is None else _state_rates(program)
    return Stage(program, variables, micro, key, shared, rates, device, lambda leaves: pin_batch(leaves, mesh))


def _state_rates(program: Program) -> list[list[Any]]:
    """How fast the running averages of each kind move."""
    return [
        step.state_rates(given_shapes(step, program.batch), [mean for mean, _ in merging.moments])
        for step, merging in zip(program.steps, program.mergings, strict=True)
    ]


def _specs(plan: Plan) -> dict[str, Any]:
    return {name: dict(layout.specs) for name, layout in plan.layouts.items()}


def _everywhere(tree: Any) -> Any:
    return jax.tree.map(lambda _: PartitionSpec(), tree)
