"""The programs that `Pipeline` jits: initialisation, training, evaluation, outputs; brings weights to work.

Each wraps what one device does into one function of global arrays, on all stages, and labels the results with their
layouts. `Pipeline` jits them; all are traceable, so that they run inside a user's own `jax.jit` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jpipe.execution.before_ticks import joined_outputs, known_to_loss
from jpipe.execution.executor import run_inference, run_training
from jpipe.execution.stage import Stage, send_shared
from jpipe.jax.flat_jaxpr import without_calls
from jpipe.jax.in_place import Index
from jpipe.jax.primitives import ClosedJaxpr, Var, shapes_of
from jpipe.jax.tracing import replay
from jpipe.memory.batches import split_microbatches
from jpipe.memory.layout import StageTree, add_stage_axis, device_index, drop_stage_axis
from jpipe.memory.records import Leaves, Records
from jpipe.memory.storage import Buffers
from jpipe.model.groups import GRADIENT, INIT, WEIGHTS, Constants
from jpipe.model.layer_function import trace_group_init
from jpipe.model.random_keys import Key, init_key, key_shape
from jpipe.partitioner.axes import on_stages, shapes_only
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import AxisSharding, replicated, to_spec
from jpipe.planning.plan import Plan
from jpipe.planning.step import Step
from jpipe.processes.progress import compiles
from jpipe.types import Batch, Leaf, PyTree


def weight_uses(step: Step) -> dict[str, set[tuple[bool, np.dtype | None]]]:
    """Finds how a step's layers use its parameters.

    A narrow copy of those that are only cast to a narrower type is made once a step. A TPU's compiler does so by
    itself, as it moves casts out of loops. That for GPUs leaves a cast in the loop over layers, which takes up to half
    as long as the layer's products. So there `_stage` makes the copies, ahead of the ticks.

    Returns:
      For each buffer, (whether its leaves are turned for the layer, the dtype to which these are cast; None of those
      that are used otherwise).
    """
    storage, uses = step.storages["params"], dict[str, set[tuple[bool, np.dtype | None]]]()
    for g, group in enumerate(step.model.groups):
        if (v := group.variable_set) is None:
            continue
        record = storage.record_types[v]
        leaves = zip(record.buffers, record.leaves, strict=True)
        buffers = [(name, storage.buffers[name].shape[1:] != leaf.shape) for name, leaf in leaves]
        for closed, params, num_results in _programs(step, g, len(buffers)):
            for i, dtype in _readers(closed, num_results):
                if i in params:
                    name, is_turned = buffers[params[i]]
                    uses.setdefault(name, set()).add((is_turned, dtype))
    return uses


@lru_cache(maxsize=256)  # a search asks for each under many schedules
def _readers(closed: ClosedJaxpr, num_results: int) -> frozenset[tuple[int, np.dtype | None]]:
    """Finds what reads each argument: (its index, the dtype of a cast; None of what isn't one, such as a result)."""
    jaxpr = without_calls(closed).jaxpr
    index = {v: i for i, v in enumerate(jaxpr.invars)}
    readers = set[tuple[int, np.dtype | None]]((index[v], None) for v in jaxpr.outvars[:num_results] if v in index)
    for equation in jaxpr.eqns:
        is_cast = equation.primitive.name == "convert_element_type"
        dtype = shapes_of(equation.outvars)[0].dtype if is_cast else None
        readers |= {(index[v], dtype) for v in equation.invars if isinstance(v, Var) and v in index}
    return frozenset(readers)


def narrow_dtypes(step: Step) -> dict[str, np.dtype]:
    """The dtype of each buffer of parameters that a step on GPUs copies ahead of the ticks, to one narrower dtype.

    All leaves of such a buffer are only cast.
    """
    if not step.plan.request.splits.on_gpu:
        return {}
    buffers, narrow = step.storages["params"].buffers, dict[str, np.dtype]()
    for name, uses in weight_uses(step).items():
        dtype, *others = {dtype for _, dtype in uses}
        if dtype is not None and not others and dtype.itemsize < buffers[name].dtype.itemsize:
            narrow[name] = dtype
    return narrow


def _programs(step: Step, g: int, num_params: int) -> Iterator[tuple[ClosedJaxpr, dict[int, int], int]]:
    """Yields what a layer of a group runs: (jaxpr, index of an argument -> a parameter's number, number of results)."""
    first = {i: i for i in range(num_params)}  # parameters are the first arguments
    layer = step.layers[g] if step.layers else None
    for one in dict.fromkeys([step.forwards[g], layer.forward]) if layer else [step.forwards[g]]:
        yield one.jaxpr, first, len(jax.tree.leaves(one.results))
    if layer:
        arguments = {i: source.number for i, source in enumerate(layer.sources) if source.where == "argument"}
        params = {i: number for i, number in arguments.items() if number < num_params}
        yield layer.backward_jaxpr, params, len(layer.backward_jaxpr.out_avals)


def init_variables(plan: Plan, key: jax.Array, ready: dict[str, Buffers]) -> dict[str, StageTree]:
    """New variables: each stage makes those of its own layers.

    Args:
      plan: cuts and layout.
      key: a random key; see `jpipe.model.random_keys.init_key`.
      ready: buffers by collection that hold the values of layers that come with their own; may lack collections.
    """
    specs = _specs(plan)
    layouts, mesh, model = plan.layouts, plan.request.mesh, plan.model
    compiles(model.described())
    if plan.cut is not None and plan.cut.whole.init is not None:
        with shapes_only(mesh):
            plan.cut.whole.init.check(plan.cut.whole.layer.name)

    records = Records(layouts)

    def body(key: jax.Array, ready: dict[str, Buffers]) -> dict[str, Buffers]:
        """One device's part: its buffers `[1, ...]` by collection."""

        def make(v: int, layer: Index, _: Leaves) -> Leaves:
            group = model.groups[model.variable_sets[v].group]
            if group.layer.ready is not None:
                return {}
            layer_key = init_key(key, layer, of_model=group.layer.has_model_key)
            arguments = [layer_key, *group.constants.get(INIT, Constants()).of(layer)]
            with shapes_only(mesh):
                jaxpr, made = trace_group_init(group, key_shape(layer_key), plan.model.batch)[:2]
            axes, lying = records.lying(v)
            wanted = [lambda _, s=sharding: s for name in sorted(made) for sharding in lying[name]]
            local = jaxpr_per_device(jaxpr, axes, [replicated(axes)] * len(arguments), wanted)
            return replay(local.jaxpr, {name: jax.tree.leaves(tree) for name, tree in made.items()})(arguments)

        buffers = {name: layout.zeros() for name, layout in layouts.items()} | drop_stage_axis(ready)
        return add_stage_axis(records.updated(make, buffers, ()))

    run = on_stages(body, mesh, (PartitionSpec(), {name: specs[name] for name in ready}), specs)
    return {name: StageTree(tree, layouts[name]) for name, tree in run(key, ready).items()}


def value_and_grad(
    step: Step, variables: dict[str, StageTree], batch: Batch, key: jax.Array | None, only: jax.Array | None = None
) -> tuple[tuple[jax.Array, dict[str, StageTree], dict[str, jax.Array]], StageTree]:
    """`((loss, updates, metrics), grads)` of a batch `[B, ...]`; for `only` see `Stage`."""
    key = jax.random.key(0) if key is None else key  # then no layer draws from it
    layouts, specs = step.plan.layouts, _specs(step.plan)
    state_specs = {name: specs[name] for name in step.collections("state", GRADIENT)}
    out_specs = PartitionSpec(), state_specs, specs["params"]
    sums, updates, grads = run_step(step, run_training, (variables, batch, key, only), out_specs)
    updates = {name: StageTree(tree, layouts[name]) for name, tree in updates.items()}
    assert step.loss is not None
    loss, metrics = step.loss.means(sums)
    return (loss, updates, metrics), StageTree(grads, layouts["params"])


def evaluate(step: Step, variables: dict[str, StageTree], batch: Batch, key: jax.Array | None = None) -> jax.Array:
    """The loss of a batch `[B, ...]` in evaluation mode."""
    assert step.loss is not None
    return step.loss.means(run_step(step, run_inference, (variables, batch, key, None), PartitionSpec()))[0]


def apply(
    step: Step, joins: tuple[AxisSharding, ...], variables: dict[str, StageTree], batch: Batch, key: Leaf | None = None
) -> PyTree:
    """The outputs `[B, ...]` of a batch, or of its bare inputs, in evaluation mode.

    Args:
      step: forward only.
      joins: how a micro-batch lies in each leaf of the outputs of all.
      variables, batch, key: all collections; what the step was made for.
    """
    specs = [to_spec(at, step.model.axes, leaf.ndim) for at, leaf in zip(step.outputs_at, step.outputs, strict=True)]
    leaves = run_step(
        step,
        run_inference,
        (variables, batch, key, None),
        [PartitionSpec(None, *spec) for spec in specs],
        after=lambda leaves: joined_outputs(leaves, joins),
        result_specs=specs,
    )
    return jax.tree.unflatten(jax.tree.structure(step.model.groups[-1].gives), leaves)


def run_step(
    step: Step,
    work: Callable[[Stage], PyTree],
    arguments: tuple[dict[str, StageTree], Batch, jax.Array | None, jax.Array | None],
    out_specs: PyTree,
    fill: Callable[[Batch], Batch] = lambda batch: batch,
    also: Sequence[Step] = (),
    **results: PyTree,
) -> PyTree:
    """Runs `work` on each device, for its part of a batch.

    Args:
      step: the step.
      work: what a device does.
      arguments: all variables, the batch `[B, ...]`, and of `Stage` its key and `only`.
      out_specs, results: as of `on_stages`.
      fill: what is cut into micro-batches, from the batch; on whole arrays.
      also: other steps that `work` does with the same weights.

    Raises:
      TypeError: somebody differentiates it.
    """
    compiles(step.described())
    mesh, splits, count = step.plan.request.mesh, step.plan.request.splits, step.schedule.num_microbatches
    of_examples = lambda a: PartitionSpec(None, *to_spec(splits.of_examples(a.shape[0] // count), splits.axes, a.ndim))
    rows = jax.tree.map(of_examples, jax.eval_shape(fill, arguments[1]))
    in_specs = _specs(step.plan), rows, PartitionSpec(), PartitionSpec()
    on_device = lambda *parts: work(_stage((step, *also), *parts))
    # Micro-batches are cut inside of `on_stages`: a mesh with Explicit axes allows that reshape nowhere else.
    cut = lambda tree, batch, *others: (tree, split_microbatches(fill(batch), count), *others)
    run = jax.custom_jvp(on_stages(on_device, mesh, in_specs, out_specs, cut, **results))

    def refuse(primals: PyTree, tangents: PyTree) -> NoReturn:
        raise TypeError("pipelines can't be differentiated; use grads of pipe.value_and_grad(variables, batch, key)")

    run.defjvp(refuse)
    variables, *others = arguments
    return run({name: dict(variables[name]) for name in step.plan.layouts}, *others)


def _stage(
    steps: Sequence[Step], variables: dict[str, Buffers], batch: Batch, key: Key | None, only: jax.Array | None
) -> Stage:
    """Makes this device's `Stage` of the first of `steps`: casts parameters, gathers weights, sends shared ones.

    The others run with the same weights, so that a parameter is cast only to a dtype to which all of them cast it.
    """
    step, mesh, at_work = steps[0], steps[0].plan.request.mesh, steps[0].plan.at_work
    variables, device = drop_stage_axis(variables), device_index(mesh)
    narrow = dict(set.intersection(*({*narrow_dtypes(one).items()} for one in steps)))
    cast = lambda buffers: {name: array.astype(narrow.get(name, array.dtype)) for name, array in buffers.items()}
    variables |= {"params": cast(variables["params"])}  # before they are gathered, which sends less then
    variables |= {name: at_work[name].gathered(variables[name]) for name in step.collections(*WEIGHTS)}
    variables |= {"params": cast(variables["params"])}  # of the ends, what has been joined
    known, shared = known_to_loss(step, batch, key), send_shared(step, variables, device)
    return Stage(step, variables, batch, key, only=only, known=known, shared=shared, device=device)


def _specs(plan: Plan) -> dict[str, dict[str, PartitionSpec]]:
    return {name: layout.specs for name, layout in plan.layouts.items()}
