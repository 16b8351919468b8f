"""What users' functions say of devices themselves: sharding constraints, and functions of single devices (`shard_map`).

A handler takes the planner, an equation of whole arrays and how its operands lie, and returns how it is carried out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jpipe.partitioner.choice import Handler, Planner
from jpipe.partitioner.control_flow import always
from jpipe.partitioner.flat_jaxpr import flatten
from jpipe.partitioner.rule import aval_of
from jpipe.partitioner.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    AxisSharding,
    Shard,
    Sharding,
    is_possible,
    names_in,
    of_spec,
    settled,
)
from jpipe.partitioner.way import Way
from jpipe.seam.jaxpr_types import ClosedJaxpr, JaxprEqn


def _constraint(planner: Planner, equation: JaxprEqn, lying: Sequence[Sharding]) -> Way:
    """`jax.lax.with_sharding_constraint`, as far as it doesn't concern the data axes: along these nothing changes."""
    (now,), axes = lying, planner.axes
    spec = getattr(equation.params["sharding"], "spec", None)
    if spec is None:
        return _as_it_is(planner, equation, lying)
    free, shape = equation.params.get("unconstrained_dims", frozenset()), aval_of(equation.invars[0]).shape
    wanted = list(now)
    for i, axis in enumerate(axes):
        along = now[i]
        if axis.is_data or (isinstance(along, Shard) and along.dim in free):
            continue
        dims = [dim for dim, entry in enumerate(spec) if axis.names[0] in names_in(entry)]
        wanted[i] = Shard(dims[0]) if dims else REPLICATED
        if not is_possible(shape, tuple(wanted), axes):
            wanted[i] = REPLICATED if along == PARTIAL else along
    return _as_it_is(planner, equation, [tuple(wanted)])


def _as_it_is(planner: Planner, equation: JaxprEqn, lying: Sequence[Sharding]) -> Way:
    """Each result is an operand, and lies as it."""
    return Way(tuple(lying), tuple(lying), lambda *parts: parts)


def _shard_map(planner: Planner, equation: JaxprEqn, lying: Sequence[Sharding]) -> Way:
    """`jax.shard_map`: a user's function of single devices, whose operands lie as its specs say.

    Over the axes that it is manual over, its jaxpr runs as it is. Along the others it sees whole arrays, and is carried
    out as the rest is, by a planner for these axes alone. An operand `[8, 6]` that it takes by `P("expert")`, where
    it isn't manual over `model`:

                          expert      model                     what its jaxpr is of
        lies so           replicated  Shard(1)                  `[8, 6]`
        is wanted so      Shard(0)    Shard(1)                  `[4, 6]`, of which a device has `[4, 3]`
        if it lay so      replicated  Shard(0), as the spec:
        it is wanted so   Shard(0)    replicated                `[4, 6]`
    """
    p, axes = equation.params, planner.axes
    inside = [i for i, axis in enumerate(axes) if not _is_manual(axis, p["newly_manual_axes"])]
    pick = lambda sharding: tuple(sharding[i] for i in inside)
    wanted = []
    for v, spec, now in zip(equation.invars, p["in_specs"], lying, strict=True):
        both = _as_specified(spec, axes, dict(zip(inside, pick(settled(now)), strict=True)))
        wanted.append(both if is_possible(aval_of(v).shape, both, axes) else of_spec(spec, axes))
    inner = Planner(pick(axes), {**planner.handlers, **_OF_SINGLE_DEVICES})
    body, arguments = flatten(ClosedJaxpr(p["jaxpr"], ())), list(map(pick, wanted))
    found = [
        _as_specified(spec, axes, dict(zip(inside, sharding, strict=True)))
        for sharding, spec in zip(inner.results_at(body, arguments), p["out_specs"], strict=True)
    ]
    plan = inner.plan(body, arguments, [always(pick(sharding)) for sharding in found])
    return Way(tuple(wanted), tuple(found), plan.run, plan.cost, ((plan, 1.0),))


def _as_specified(spec: PartitionSpec, axes: Sequence[Axis], others: Mapping[int, AxisSharding]) -> Sharding:
    """The sharding that a user's spec means, along the axes of `others` as these if they split other dimensions."""
    by_spec = of_spec(spec, axes)
    dims = {s.dim for s in by_spec if isinstance(s, Shard)}
    if any(isinstance(s, Shard) and s.dim in dims for s in others.values()):
        return by_spec
    return tuple(others.get(i, s) for i, s in enumerate(by_spec))


def _is_manual(axis: Axis, names: Collection[str]) -> bool:
    """Whether a user's function is manual over an axis, if it is manual over the mesh axes `names`.

    Raises:
      ValueError: it is manual over a part of mesh axes that arrays are split over jointly.
    """
    own = set(axis.names) & set(names)
    if own and own != set(axis.names):
        raise ValueError(
            f"jax.shard_map is manual over {sorted(own)}, a part of the mesh axes {axis.names} that arrays are split "
            "over jointly; make it manual over all of them"
        )
    return bool(own)


def _psum(planner: Planner, equation: JaxprEqn, lying: Sequence[Sharding]) -> Way:
    """A user's own sum over devices, whatever it says of varying types."""
    p = equation.params
    add = lambda x: lax.psum(x, p["axes"], axis_index_groups=p.get("axis_index_groups"))
    return Way(tuple(lying), tuple(lying), lambda *parts: list(map(add, parts)))


def _ppermute(planner: Planner, equation: JaxprEqn, lying: Sequence[Sharding]) -> Way:
    """A user's own permutation, by a gather: as a permutation it would be one collective of all devices of the mesh."""
    axes = equation.params["axis_name"]
    sources = {target: source for source, target in equation.params["perm"]}

    def permute(x: jax.Array) -> jax.Array:
        table = jnp.asarray([sources.get(i, -1) for i in range(lax.axis_size(axes))])
        source = table[lax.axis_index(axes)]
        found = lax.dynamic_index_in_dim(lax.all_gather(x, axes), jnp.maximum(source, 0), keepdims=False)
        return jnp.where(source >= 0, found, jnp.zeros_like(found))

    return Way(tuple(lying), tuple(lying), lambda *parts: list(map(permute, parts)))


_OF_SINGLE_DEVICES: dict[str, Handler] = {
    **dict.fromkeys(("pvary", "pbroadcast"), _as_it_is),
    **dict.fromkeys(("psum", "psum_invariant"), _psum),
    "ppermute": _ppermute,
}
"""Within `shard_map`: the handlers of what would reach devices along other axes, or talks of varying types."""

USER_SHARDINGS: dict[str, Handler] = {
    "sharding_constraint": _constraint,
    "reshard": _as_it_is,  # of explicit axes, which there are none of where functions are traced
    "shard_map": _shard_map,
}
"""The handlers of equations by which users say how arrays lie, by the name of the primitive."""
