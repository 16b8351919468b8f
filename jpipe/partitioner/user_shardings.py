"""What users' layers say of devices themselves: sharding constraints, and functions of single devices (`shard_map`).

A handler takes the partitioner, an equation of whole arrays and its operands, and returns the results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jpipe.partitioner.equations import Axes, Handler, Partitioner, Value
from jpipe.partitioner.rule_result import aval_of
from jpipe.partitioner.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    AxisSharding,
    Shard,
    Sharding,
    is_possible,
    names_in,
    replicated,
    settled,
)
from jpipe.seam.jaxpr_types import JaxprEqn


def _constraint(partitioner: Partitioner, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """`jax.lax.with_sharding_constraint`, as far as it doesn't concern the data axes: along these nothing changes."""
    (value,), axes = operands, partitioner.axes
    spec = getattr(equation.params["sharding"], "spec", None)
    if spec is None:
        return operands
    free, shape = equation.params.get("unconstrained_dims", frozenset()), aval_of(equation.invars[0]).shape
    wanted = list(value.sharding)
    for i, axis in enumerate(axes):
        now = value.sharding[i]
        if axis.of_examples or (isinstance(now, Shard) and now.dim in free):
            continue
        dims = [dim for dim, entry in enumerate(spec) if axis.names[0] in names_in(entry)]
        wanted[i] = Shard(dims[0]) if dims else REPLICATED
        if not is_possible(shape, tuple(wanted), axes):
            wanted[i] = REPLICATED if now == PARTIAL else now
    return [Value(value.part(tuple(wanted), axes), tuple(wanted))]


def _shard_map(partitioner: Partitioner, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """`jax.shard_map`: a user's function of single devices, whose operands lie as its specs say.

    Over the axes that it is manual over, its jaxpr runs as it is. Along the others it sees whole arrays, and is
    partitioned as the rest of the layer is, by a partitioner of these axes alone.
    """
    p, axes = equation.params, partitioner.axes
    manual = [_is_manual(axis, p["newly_manual_axes"]) for axis in axes]
    inside = [i for i, is_manual in enumerate(manual) if not is_manual]  # the axes that it isn't manual over
    pick = lambda sharding: tuple(sharding[i] for i in inside)
    wanted = []
    for v, spec, value in zip(equation.invars, p["in_specs"], operands, strict=True):
        by_spec = _of_users_spec(spec, axes)
        both = _merged(by_spec, pick(settled(value.sharding)), inside)
        possible = _split_other_dims(pick(both), by_spec) and is_possible(aval_of(v).shape, both, axes)
        wanted.append(both if possible else _merged(by_spec, [REPLICATED] * len(inside), inside))
    inner = Partitioner(tuple(axes[i] for i in inside), {**partitioner.handlers, **_OF_SINGLE_DEVICES})
    arguments = inner.values(partitioner.parts_of(operands, wanted), list(map(pick, wanted)))
    found = []
    for value, spec in zip(inner.run(p["jaxpr"], arguments), p["out_specs"], strict=True):
        by_spec = _of_users_spec(spec, axes)
        along = value.sharding if _split_other_dims(value.sharding, by_spec) else replicated(inner.axes)
        found.append(Value(value.part(along, inner.axes), _merged(by_spec, along, inside)))
    return found


def _merged(sharding: Sharding, others: Iterable[AxisSharding], at: Sequence[int]) -> Sharding:
    """A sharding with the entries of the axes `at` replaced by `others`."""
    replaced = dict(zip(at, others, strict=True))
    return tuple(replaced.get(i, along) for i, along in enumerate(sharding))


def _is_manual(axis: Axis, names: Collection[str]) -> bool:
    """Whether a user's function is manual over an axis, if it is manual over the mesh axes `names`.

    Raises:
      ValueError: it is manual over a part of axes that examples are split over jointly.
    """
    own = set(axis.names) & set(names)
    if own and own != set(axis.names):
        raise ValueError(
            f"jax.shard_map in a layer is manual over {sorted(own)}, a part of the mesh axes {axis.names} that "
            "examples are split over jointly; make it manual over all of them"
        )
    return bool(own)


def _split_other_dims(shardings: Sequence[AxisSharding], by_spec: Sharding) -> bool:
    """Whether the dimensions that are split along some axes are others than those that a user's spec splits."""
    dims = {s.dim for s in by_spec if isinstance(s, Shard)}
    return not any(isinstance(s, Shard) and s.dim in dims for s in shardings)


def _of_users_spec(spec: PartitionSpec, axes: Axes) -> Sharding:
    """The sharding that a PartitionSpec in a user's `shard_map` means, with data axes too.

    Raises:
      ValueError: it names a part of axes that examples are split over jointly, or in another order.
    """
    found: list[AxisSharding] = [REPLICATED] * len(axes)
    for dim, entry in enumerate(spec):
        names, outer = list(names_in(entry)), 1
        while names:
            i = next((i for i, axis in enumerate(axes) if names[0] in axis.names), None)
            if i is None:  # an axis of one device
                names.pop(0)
                continue
            if tuple(names[: len(axes[i].names)]) != axes[i].names:
                raise ValueError(
                    f"the spec {spec} of jax.shard_map in a layer names {names[0]!r}, but examples are split over the "
                    f"mesh axes {axes[i].names} jointly; name all of them, in this order"
                )
            found[i] = Shard(dim, outer)
            outer *= axes[i].size
            del names[: len(axes[i].names)]
    return tuple(found)


def _identity(partitioner: Partitioner, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    return operands


def _psum(partitioner: Partitioner, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """A user's own sum over devices, whatever it says of varying types."""
    p, shardings = equation.params, [value.sharding for value in operands]
    add = lambda x: lax.psum(x, p["axes"], axis_index_groups=p.get("axis_index_groups"))
    return partitioner.values([add(x) for x in partitioner.parts_of(operands, shardings)], shardings)


def _ppermute(partitioner: Partitioner, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """A user's own permutation, by a gather: as a permutation it would be one collective of all stages."""
    axes, shardings = equation.params["axis_name"], [value.sharding for value in operands]
    sources = {target: source for source, target in equation.params["perm"]}
    table = jnp.asarray([sources.get(i, -1) for i in range(lax.axis_size(axes))])
    source = table[lax.axis_index(axes)]

    def permute(x: jax.Array) -> jax.Array:
        found = lax.dynamic_index_in_dim(lax.all_gather(x, axes), jnp.maximum(source, 0), keepdims=False)
        return jnp.where(source >= 0, found, jnp.zeros_like(found))

    return partitioner.values(list(map(permute, partitioner.parts_of(operands, shardings))), shardings)


_OF_SINGLE_DEVICES: dict[str, Handler] = {
    **dict.fromkeys(("pvary", "pbroadcast"), _identity),
    **dict.fromkeys(("psum", "psum_invariant"), _psum),
    "ppermute": _ppermute,
}
"""Within `shard_map`: the handlers of what would reach other stages, or talks of varying types."""

USER_SHARDINGS: dict[str, Handler] = {
    "sharding_constraint": _constraint,
    "reshard": _identity,  # of explicit axes, which there are none of where layers are traced
    "shard_map": _shard_map,
}
"""The handlers of equations by which users say how arrays lie, by the name of the primitive."""
