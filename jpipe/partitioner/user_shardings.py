"""What users' functions say of devices themselves: sharding constraints, and functions of single devices (`shard_map`).

A handler takes the interpreter, an equation of whole arrays and its operands, and returns the results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jpipe.partitioner.parts_interpreter import DeviceValue, Handler, PartsInterpreter
from jpipe.partitioner.rule import aval_of
from jpipe.partitioner.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    Shard,
    Sharding,
    is_possible,
    names_in,
    of_spec,
    settled,
)
from jpipe.seam.inside import called_by
from jpipe.seam.jaxpr_types import JaxprEqn


def _constraint(interpreter: PartsInterpreter, equation: JaxprEqn, operands: list[DeviceValue]) -> list[DeviceValue]:
    """`jax.lax.with_sharding_constraint`, as far as it doesn't concern the data axes: along these nothing changes."""
    (value,), axes = operands, interpreter.axes
    spec = getattr(equation.params["sharding"], "spec", None)
    if spec is None:
        return operands
    free, shape = equation.params.get("unconstrained_dims", frozenset()), aval_of(equation.invars[0]).shape
    wanted = list(value.sharding)
    for i, axis in enumerate(axes):
        now = value.sharding[i]
        if axis.is_data or (isinstance(now, Shard) and now.dim in free):
            continue
        dims = [dim for dim, entry in enumerate(spec) if axis.names[0] in names_in(entry)]
        wanted[i] = Shard(dims[0]) if dims else REPLICATED
        if not is_possible(shape, tuple(wanted), axes):
            wanted[i] = REPLICATED if now == PARTIAL else now
    return [DeviceValue(value.part(tuple(wanted), axes), tuple(wanted))]


def _shard_map(interpreter: PartsInterpreter, equation: JaxprEqn, operands: list[DeviceValue]) -> list[DeviceValue]:
    """`jax.shard_map`: a user's function of single devices, whose operands lie as its specs say.

    Over the axes that it is manual over, its jaxpr runs as it is. Along the others it sees whole arrays, and is carried
    out as the rest is, by an interpreter of these axes alone. An operand `[8, 6]` that it takes by `P("expert")`, where
    it isn't manual over `model`:

                          expert      model                     what its jaxpr is of
        lies so           replicated  Shard(1)                  `[8, 6]`
        is wanted so      Shard(0)    Shard(1)                  `[4, 6]`, of which a device has `[4, 3]`
        if it lay so      replicated  Shard(0), as the spec:
        it is wanted so   Shard(0)    replicated                `[4, 6]`
    """
    p, axes = equation.params, interpreter.axes
    inside = [i for i, axis in enumerate(axes) if not _is_manual(axis, p["newly_manual_axes"])]
    pick = lambda sharding: tuple(sharding[i] for i in inside)
    given = [pick(settled(value.sharding)) for value in operands]
    wanted = [_as_specified(spec, axes, inside, at) for spec, at in zip(p["in_specs"], given, strict=True)]
    inner = PartsInterpreter(pick(axes), {**interpreter.handlers, **_OF_SINGLE_DEVICES})
    arguments = inner.values(interpreter.parts_of(operands, wanted), list(map(pick, wanted)))
    results = inner.run(called_by(equation), arguments)
    gives = [value.sharding for value in results]
    found = [_as_specified(spec, axes, inside, at) for spec, at in zip(p["out_specs"], gives, strict=True)]
    return interpreter.values(inner.parts_of(results, list(map(pick, found))), found)


def _as_specified(spec: PartitionSpec, axes: Sequence[Axis], inside: Sequence[int], lying: Sharding) -> Sharding:
    """The sharding that a user's spec means, along the axes `inside` as `lying` if that splits other dimensions."""
    by_spec = of_spec(spec, axes)
    dims = {s.dim for s in by_spec if isinstance(s, Shard)}
    if any(isinstance(s, Shard) and s.dim in dims for s in lying):
        return by_spec
    others = dict(zip(inside, lying, strict=True))
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


def _psum(interpreter: PartsInterpreter, equation: JaxprEqn, operands: list[DeviceValue]) -> list[DeviceValue]:
    """A user's own sum over devices, whatever it says of varying types."""
    p, shardings = equation.params, [value.sharding for value in operands]
    add = lambda x: lax.psum(x, p["axes"], axis_index_groups=p.get("axis_index_groups"))
    return interpreter.values([add(x) for x in interpreter.parts_of(operands, shardings)], shardings)


def _ppermute(interpreter: PartsInterpreter, equation: JaxprEqn, operands: list[DeviceValue]) -> list[DeviceValue]:
    """A user's own permutation, by a gather: as a permutation it would be one collective of all devices of the mesh."""
    axes, shardings = equation.params["axis_name"], [value.sharding for value in operands]
    sources = {target: source for source, target in equation.params["perm"]}
    table = jnp.asarray([sources.get(i, -1) for i in range(lax.axis_size(axes))])
    source = table[lax.axis_index(axes)]

    def permute(x: jax.Array) -> jax.Array:
        found = lax.dynamic_index_in_dim(lax.all_gather(x, axes), jnp.maximum(source, 0), keepdims=False)
        return jnp.where(source >= 0, found, jnp.zeros_like(found))

    return interpreter.values(list(map(permute, interpreter.parts_of(operands, shardings))), shardings)


_identity: Handler = lambda interpreter, equation, operands: operands
_OF_SINGLE_DEVICES: dict[str, Handler] = {
    **dict.fromkeys(("pvary", "pbroadcast"), _identity),
    **dict.fromkeys(("psum", "psum_invariant"), _psum),
    "ppermute": _ppermute,
}
"""Within `shard_map`: the handlers of what would reach devices along other axes, or talks of varying types."""

USER_SHARDINGS: dict[str, Handler] = {
    "sharding_constraint": _constraint,
    "reshard": _identity,  # of explicit axes, which there are none of where functions are traced
    "shard_map": _shard_map,
}
"""The handlers of equations by which users say how arrays lie, by the name of the primitive."""
