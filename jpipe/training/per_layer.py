"""`per_layer`, for transformations that look at one parameter at a time.

Under a layout, leaves of many layers lie together in buffers. Elementwise transformations and global norms don't
notice. Those that look at shapes, paths or norms of single parameters do, so `per_layer` shows them each layer's own
tree, on the device where it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jpipe.jax_tools.tracing import no_mesh, replay
from jpipe.memory.layout import Layout, StageTree, device_index, local, stacked
from jpipe.memory.storage import build_storage
from jpipe.mesh.axes import rest_axes
from jpipe.mesh.programs import on_stages
from jpipe.partitioner.per_device import jaxpr_per_device
from jpipe.partitioner.shardings import of_spec, replicated
from jpipe.training.probing import not_tried


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Shows a transformation each layer's own tree, as `layer_variables` gives it, instead of the stage's buffers.

    For transformations that look at one parameter's shape, path or norm: adafactor, lamb, muon, weight-decay masks,
    `optax.multi_transform`. What they sum over a tree (a clipped norm) they then sum over one layer; keep global norms
    outside: `optax.chain(optax.clip_by_global_norm(1.0), jpipe.per_layer(optax.adamw(1e-3, mask=mask)))`.

    Args:
      tx: any optax transformation.

    Returns:
      A transformation of parameters that a `jpipe.Pipeline` made. Its state lies where the layers do.

    Raises:
      TypeError: if `tx` is no transformation; in `init`, if the parameters are not a pipeline's.
    """
    if not isinstance(tx, optax.GradientTransformation | optax.GradientTransformationExtraArgs):
        raise TypeError(f"jpipe.per_layer: tx is a {type(tx).__name__}; pass one of optax's, such as optax.adamw(1e-3)")
    inner = optax.with_extra_args_support(tx)
    init = lambda params: _init(inner, params)
    update = lambda updates, state, params=None, **extra: _update(inner, updates, state, params, extra)
    return not_tried(optax.GradientTransformationExtraArgs(init, update))


def _init(inner: optax.GradientTransformationExtraArgs, params: Any) -> StageTree:
    """`inner.init` for each layer, on the stage where it lies."""
    layout = _layout_of(params)
    states = _state_layout(inner, layout)
    make = lambda params: {"state": inner.init(params)}

    def body(params: Any) -> Any:
        params, device = local(params), device_index(layout.mesh)
        read = lambda v, instance, _: {"params": layout.storage.read(params, v, instance)}

        def visit(v: int, instance: Any, own: dict[str, Any], buffers: Any) -> Any:
            made = _on_device(make, v, own, {"params": layout, "state": states})
            return states.storage.write(buffers, v, instance, made["state"])

        return stacked(states.storage.for_each_local(read, visit, device, states.zeros()))

    run = on_stages(body, layout.mesh, (dict(layout.specs),), dict(states.specs))
    return StageTree(jax.jit(run)(dict(params)), states)


def _update(
    inner: optax.GradientTransformationExtraArgs, updates: Any, state: Any, params: Any, extra: dict[str, Any]
) -> tuple[StageTree, StageTree]:
    """`inner.update` for each layer, on the stage where it lies."""
    layout, states = _layout_of(updates), _layout_of(state)
    layouts = {"updates": layout, "state": states, "params": layout}
    trees = {"updates": dict(updates), "state": dict(state)} | ({} if params is None else {"params": dict(params)})

    def new(updates: Any, state: Any, params: Any = None, extra: Any = None) -> dict[str, Any]:
        return dict(zip(("updates", "state"), inner.update(updates, state, params, **extra), strict=True))

    def body(trees: dict[str, Any], extra: dict[str, Any]) -> Any:
        trees, device = local(trees), device_index(layout.mesh)

        def read(v: int, instance: Any, carry: dict[str, Any]) -> dict[str, Any]:
            return {name: layouts[name].storage.read(carry[name], v, instance) for name in carry}

        def visit(v: int, instance: Any, own: dict[str, Any], carry: dict[str, Any]) -> dict[str, Any]:
            done = _on_device(new, v, own, layouts, extra=extra)
            write = lambda name, leaves: layouts[name].storage.write(carry[name], v, instance, leaves)
            return carry | {name: write(name, leaves) for name, leaves in done.items()}

        done = layout.storage.for_each_local(read, visit, device, trees)
        return stacked((done["updates"], done["state"]))

    specs = {name: dict(known.specs) for name, known in layouts.items()}
    in_specs = {name: specs[name] for name in trees}, jax.tree.map(lambda _: PartitionSpec(), extra)
    run = on_stages(body, layout.mesh, in_specs, (specs["updates"], specs["state"]))
    changes, new_state = jax.jit(run)(trees, extra)
    return StageTree(changes, layout), StageTree(new_state, states)


def _on_device(
    function: Callable[..., dict[str, Any]], v: int, own: dict[str, Any], layouts: dict[str, Layout], **extra: Any
) -> dict[str, Any]:
    """What a device does of `function` for one layer.

    Args:
      function: from the layer's whole trees, by keyword, to others by name.
      v: the index of the layer's set of variables.
      own: the device's parts of the leaves of these trees.
      layouts: the layout of each tree, of those returned too.
      extra: what all devices have.

    Returns:
      The device's parts of the leaves of what `function` returns.
    """
    mesh = next(iter(layouts.values())).mesh
    axes = rest_axes(mesh)
    at = lambda name: [of_spec(spec, axes) for spec in layouts[name].storage.record_types[v].specs]
    whole = {n: jax.tree.unflatten(layouts[n].treedefs[v], layouts[n].storage.record_types[v].leaves) for n in own}
    names = sorted(own)
    with no_mesh():
        jaxpr, found = jax.make_jaxpr(lambda trees, extra: function(**trees, **extra), return_shape=True)(
            whole, jax.eval_shape(lambda x: x, extra)
        )
    given = [s for name in names for s in at(name)] + [replicated(axes)] * len(jax.tree.leaves(extra))
    wanted = [s for name in sorted(found) for s in at(name)]
    done = jaxpr_per_device(jaxpr, axes, given, [lambda _, s=s: s for s in wanted])
    return replay(done.jaxpr, {name: jax.tree.leaves(tree) for name, tree in found.items()})(own, extra)


def _layout_of(tree: Any) -> Layout:
    if not isinstance(tree, StageTree):
        raise TypeError(
            f"jpipe.per_layer works on the parameters of a jpipe.Pipeline, not on a {type(tree).__name__}; "
            "inside optax.masked and the like, put per_layer outermost"
        )
    return tree.layout


def _state_layout(tx: optax.GradientTransformation, layout: Layout) -> Layout:
    """Where the optimiser's state for each layer lies: with the layer, split as the parameters that it belongs to."""
    trees, specs = [], []
    record_types = layout.storage.record_types
    for known, treedef in zip(record_types, layout.treedefs, strict=True):
        params = jax.tree.unflatten(treedef, list(known.leaves))
        trees.append(jax.eval_shape(tx.init, params))
        _check_numbers(trees[-1])
        specs.append(_state_specs(tx, trees[-1], params, list(zip(known.leaves, known.specs, strict=True))))
    storage = build_storage(
        [jax.tree.leaves(tree) for tree in trees],
        [known.devices for known in record_types],
        device_of=range(layout.num_stages),
        specs=specs,
    )
    return Layout(storage, tuple(map(jax.tree.structure, trees)), layout.users, layout.mesh)


@dataclass(frozen=True)
class _Split:
    """How a parameter, or a leaf of an optimiser's state, is split."""

    shape: tuple[int, ...]
    spec: PartitionSpec


def _state_specs(
    tx: optax.GradientTransformation, state: Any, params: Any, leaves: list[tuple[Any, PartitionSpec]]
) -> list[PartitionSpec]:
    """The mesh axes of each leaf of an optimiser's state: those of its parameter, if it has its shape."""
    splits = [_Split(leaf.shape, spec) for leaf, spec in leaves]
    own = lambda leaf, split: _Split(leaf.shape, split.spec if leaf.shape == split.shape else PartitionSpec())
    other = lambda leaf: _Split(leaf.shape, PartitionSpec())
    try:
        found = optax.tree_utils.tree_map_params(
            tx, own, state, jax.tree.unflatten(jax.tree.structure(params), splits), transform_non_params=other
        )
    except Exception:  # a state that optax can't take apart: by shape, where that leaves no doubt
        by_shape = {shape: {s.spec for s in splits if s.shape == shape} for shape in {s.shape for s in splits}}
        only = lambda leaf: next(iter(found)) if len(found := by_shape.get(leaf.shape, ())) == 1 else PartitionSpec()
        return [only(leaf) for leaf in jax.tree.leaves(state)]
    return [split.spec for split in jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, _Split))]


def _check_numbers(state: Any) -> None:
    """Checks that a layer's state can lie in buffers.

    Raises:
      TypeError: it holds random keys.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"jpipe.per_layer: the transformation keeps a random key ({leaf.dtype}) in its state at "
                f"{jax.tree_util.keystr(path)}, and every layer would draw the same numbers; leave that part (noise) "
                "outside of per_layer, as in optax.chain(optax.add_noise(...), jpipe.per_layer(...))"
            )
