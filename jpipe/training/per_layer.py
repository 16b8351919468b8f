"""`per_layer`: shows an optax transformation one layer's parameters at a time.

Under a layout, leaves of many layers lie together in buffers. Elementwise transformations and global norms don't
notice. Those that look at shapes, paths or norms of single parameters do, so `per_layer` shows them each layer's own
tree, on the device where it lies. A model that is one module is shown as one tree, and what the transformation does
is cut by parameters (`jpipe.training.by_parameter`): the layers that were found in it are no matter of the optimiser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jpipe.jax.in_place import Index
from jpipe.jax.tracing import no_mesh, replay
from jpipe.memory.layout import Layout, PerLayerError, StageTree, add_stage_axis, drop_stage_axis
from jpipe.memory.records import Arrays, Leaves, Records
from jpipe.memory.storage import Buffers, build_storage
from jpipe.mesh.axes import on_stages
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import replicated
from jpipe.training.by_parameter import ByParameter, StateTree, model_shapes
from jpipe.training.optimizers import check_is_optimizer, not_tried
from jpipe.types import PyTree, Shapes

Trees = dict[str, PyTree]
"""One layer's trees by name: its `params`, an optimiser's `state` for it."""
OnTrees = Callable[[Trees, PyTree], Trees]
"""`(one layer's trees, arguments that are the same for all layers) -> its new trees`."""
OnDevice = Callable[[int, Index, Leaves, Records, PyTree], Leaves]
"""`(set of variables, layer, a device's parts of its leaves by tree, all records, arguments that are the same for all
layers) -> parts of its new leaves`."""
Layouts = dict[str, Layout]
PROGRAM = "jpipe_per_layer"
"""The name of what runs for all layers, in jaxprs."""


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Shows a transformation each layer's own tree, as `layer_variables` gives it, instead of the stage's buffers.

    Of a model that is one module it shows the model's own tree, as `model_variables` gives it without metadata boxes,
    so that masks and labels by path are those of the plain model; of parameters that a scan stacks, a slice each.

    It is for transformations that look at one parameter's shape, path or norm: adafactor, lamb, muon, weight-decay
    masks, `optax.multi_transform`. A sum over a tree (a clipped norm) is then a sum over one layer, and in a model that
    is one module an error; keep global norms outside:
    `optax.chain(optax.clip_by_global_norm(1.0), jpipe.per_layer(optax.adamw(1e-3, mask=mask)))`. Keep
    `optax.apply_if_finite` outside too: inside, each layer would skip updates for itself.

    Args:
      tx: any optax transformation.

    Returns:
      A transformation of parameters that a `jpipe.Pipeline` made. Its state lies where the layers do.

    Raises:
      TypeError: if `tx` is no transformation; in `init`, if the parameters are not a pipeline's.
      ValueError: in `init` and `update`, of a model that is one module: an update follows from several parameters.
    """
    check_is_optimizer(tx)
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> PyTree:
        layout = _layout_of(params)
        if layout.model_tree is not None:
            return _init_by_parameter(inner, layout, params)
        layouts = {"params": layout, "state": _state_layout(inner, layout)}
        make = lambda trees, _: {"state": inner.init(trees["params"])}
        (state,) = _for_each_layer(partial(_on_trees, make), layouts, {"params": params}, {}, ("state",))
        return state

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree) -> tuple[PyTree, PyTree]:
        if _layout_of(updates).model_tree is not None:
            return _update_by_parameter(inner, updates, state, params, extra)
        trees = {"updates": updates, "state": state} | ({} if params is None else {"params": params})
        layouts = {"updates": _layout_of(updates), "state": _layout_of(state), "params": _layout_of(updates)}

        def make(trees: Trees, extra: PyTree) -> Trees:
            updates, state = inner.update(trees["updates"], trees["state"], trees.get("params"), **extra)
            return {"updates": updates, "state": state}

        changes, new = _for_each_layer(partial(_on_trees, make), layouts, trees, extra, ("updates", "state"))
        return changes, new

    return not_tried(optax.GradientTransformationExtraArgs(init, update))


class PerParameterState(NamedTuple):
    """The state of `per_layer` for a model that is one module.

    Attributes:
      shared: the leaves that belong to no parameter, such as counts, in nested dicts by the path in the inner state.
      own: the others, which lie with their parameters.
    """

    shared: PyTree
    own: StageTree


def _init_by_parameter(tx: optax.GradientTransformation, layout: Layout, params: StageTree) -> PerParameterState:
    state = _state_tree(tx, layout)
    cut = ByParameter(lambda params: (tx.init(params),), state, ("params",), ("state",))
    layouts = {"params": layout, "state": state.layout_of_own}
    (own,) = _for_each_layer(cut.on_device, layouts, {"params": params}, [], ("state",))
    return PerParameterState(state.by_path(cut.of_shared([])), own)


def _update_by_parameter(
    tx: optax.GradientTransformationExtraArgs,
    updates: StageTree,
    before: PerParameterState,
    params: StageTree | None,
    extra: dict[str, PyTree],
) -> tuple[StageTree, PerParameterState]:
    layout = _layout_of(updates)
    state = _state_tree(tx, layout)
    trees = {"updates": updates, "state": before.own} | ({} if params is None else {"params": params})

    def function(updates: PyTree, old: PyTree, *rest: PyTree) -> tuple[PyTree, PyTree]:
        return tx.update(updates, old, rest[0] if params is not None else None, **rest[-1])

    cut = ByParameter(function, state, tuple(trees), ("updates", "state"), jax.eval_shape(lambda x: x, extra))
    shared = [*state.in_order(before.shared), *jax.tree.leaves(extra)]
    layouts = {"updates": layout, "state": state.layout_of_own, "params": layout}
    changes, own = _for_each_layer(cut.on_device, layouts, trees, shared, ("updates", "state"))
    return changes, PerParameterState(state.by_path(cut.of_shared(shared)), own)


def _state_tree(tx: optax.GradientTransformation, layout: Layout) -> StateTree:
    """The state of a transformation for the tree of a whole model."""
    with no_mesh():
        shapes = jax.eval_shape(tx.init, model_shapes(layout))
    _check_numbers(shapes)
    return StateTree(layout, shapes)


def _for_each_layer(
    function: OnDevice, layouts: Layouts, trees: dict[str, StageTree], extra: PyTree, results: tuple[str, ...]
) -> tuple[StageTree, ...]:
    """Runs a function of one layer's whole trees for all layers, each on the devices of its stage.

        buffers of a stage                one layer's leaves           its whole trees, only while tracing
        {"params": {"float32_8x8": ..}}   {"params": [kernel, bias]}   {"params": {"kernel": .., "bias": ..}}
                        --storage.read-->               --unflatten--> function of `_on_trees`
                        <-storage.write--  {"state": [..]}  <----------- {"state": ..}

    The loop over layers carries all buffers, so that a layer's results replace its old trees in place.

    Args:
      function: of a device's parts of one layer's leaves; `_on_trees` makes it of a function of trees.
      layouts: the layout of each tree that the function takes or returns.
      trees: the trees that it takes, of all layers.
      extra: its other arguments, the same for all layers and on all devices.
      results: names of trees that it returns; those that it doesn't take begin as zeros.
    """
    records = Records(layouts)

    def body(arrays: Arrays, extra: PyTree) -> tuple[Buffers, ...]:
        """One device's part: its buffers `[1, size, ...]` by tree -> new ones."""
        taken = drop_stage_axis(arrays)
        carry = {name: layouts[name].zeros_of_state() for name in results if name not in taken} | taken
        updated = records.updated(lambda v, i, leaves: function(v, i, leaves, records, extra), carry, taken)
        return add_stage_axis(tuple(updated[name] for name in results))

    specs = records.specs
    in_specs = {name: specs[name] for name in trees}, jax.tree.map(lambda _: PartitionSpec(), extra)
    run = on_stages(body, records.layout.mesh, in_specs, tuple(specs[name] for name in results))
    new = _program(run)({name: dict(tree) for name, tree in trees.items()}, extra)
    return tuple(StageTree(tree, layouts[name]) for name, tree in zip(results, new, strict=True))


def _program(run: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A function under `jax.jit`, called `PROGRAM`: one equation of whatever calls it."""
    call = lambda *arguments: run(*arguments)
    call.__name__ = PROGRAM
    return jax.jit(call)


def _on_trees(function: OnTrees, v: int, layer: Index, leaves: Leaves, records: Records, extra: PyTree) -> Leaves:
    """Runs a device's part of `function` for one layer.

    The function is written for whole arrays, while a device has parts of them. So it is traced on whole shapes, and the
    partitioner carries out its equations on parts. Its arguments and results are split as their layouts say.

    Args:
      function: `(trees by name, extra) -> trees by name`.
      v: the index of the layer's set of variables.
      layer: the layer.
      leaves: the device's parts of the leaves of the trees that it takes.
      records: the records of all trees, also of those that it returns.
      extra: its other arguments, whole on all devices.

    Returns:
      The device's parts of the leaves of what `function` returns.
    """
    axes, lying = records.lying(v)
    shardings_of = lambda names: [sharding for name in sorted(names) for sharding in lying[name]]
    whole = {name: records.layouts[name].tree_shapes(v) for name in leaves}
    with no_mesh():
        jaxpr, new = jax.make_jaxpr(function, return_shape=True)(whole, jax.eval_shape(lambda x: x, extra))
    taken = shardings_of(leaves) + [replicated(axes)] * len(jax.tree.leaves(extra))
    on_parts = jaxpr_per_device(jaxpr, axes, taken, [lambda _, s=s: s for s in shardings_of(new)])
    return replay(on_parts.jaxpr, {name: jax.tree.leaves(tree) for name, tree in new.items()})(leaves, extra)


def _layout_of(tree: PyTree) -> Layout:
    """The layout of a pipeline's parameters, or of an optimiser's state for them."""
    if not isinstance(tree, StageTree):
        raise PerLayerError(
            f"jpipe.per_layer works on the parameters of a jpipe.Pipeline, not on a {type(tree).__name__}; "
            "inside optax.masked and the like, put per_layer outermost"
        )
    return tree.layout


def _state_layout(tx: optax.GradientTransformation, layout: Layout) -> Layout:
    """Where the optimiser's state for each layer lies: with the layer, split as the parameters that it belongs to."""
    states, specs, types = [], [], layout.storage.record_types
    for record_type, treedef in zip(types, layout.treedefs, strict=True):
        params = jax.tree.unflatten(treedef, record_type.leaves)
        states.append(jax.eval_shape(tx.init, params))
        _check_numbers(states[-1])
        specs.append(_state_specs(tx, states[-1], params, jax.tree.unflatten(treedef, record_type.specs)))
    leaves, owners = list(map(jax.tree.leaves, states)), [record_type.devices for record_type in types]
    storage = build_storage(leaves, owners, device_of=range(layout.num_stages), specs=specs)
    return replace(layout, storage=storage, treedefs=tuple(map(jax.tree.structure, states)))


def _state_specs(tx: optax.GradientTransformation, state: Shapes, params: Shapes, specs: PyTree) -> list[PartitionSpec]:
    """The mesh axes of each leaf of an optimiser's state: those of its parameter, if it has its shape.

    Args:
      tx: the optimiser.
      state: its state for a layer, as shapes.
      params: the layer's parameters, as shapes.
      specs: how these are split, a tree like them.
    """
    of_param = lambda leaf, param, spec: spec if leaf.shape == param.shape else PartitionSpec()
    of_other = lambda _: PartitionSpec()
    try:
        specs_of = optax.tree_utils.tree_map_params
        return jax.tree.leaves(specs_of(tx, of_param, state, params, specs, transform_non_params=of_other))
    except Exception:  # optax can't take this state apart
        # Shapes decide, where all parameters of a shape are split alike.
        pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True))
        choices = [{spec for param, spec in pairs if param.shape == leaf.shape} for leaf in jax.tree.leaves(state)]
        return [specs.pop() if len(specs) == 1 else PartitionSpec() for specs in choices]


def _check_numbers(state: Shapes) -> None:
    """Checks that a layer's state can lie in buffers.

    Raises:
      TypeError: it holds random keys.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise PerLayerError(
                f"jpipe.per_layer: the transformation keeps a random key ({leaf.dtype}) in its state at "
                f"{jax.tree_util.keystr(path)}, and every layer would draw the same numbers; leave that part (noise) "
                "outside of per_layer, as in optax.chain(optax.add_noise(...), jpipe.per_layer(...))"
            )
