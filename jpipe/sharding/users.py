"""What users' layers say of devices themselves: sharding constraints, and programs of single devices (`shard_map`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jpipe.sharding.partitioner import Axes, Partitioner, Special, Value
from jpipe.sharding.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    Placement,
    Shard,
    Sharding,
    is_possible,
    names_in,
    replicated,
    settled,
)


def _constraint(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """`jax.lax.with_sharding_constraint`, as far as it doesn't concern the axes of examples, which stay as they are."""
    (value,), sharding = operands, equation.params["sharding"]
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return operands
    free = equation.params.get("unconstrained_dims", frozenset())
    wanted = list(value.sharding)
    for i, axis in enumerate(parts.axes):
        now = value.sharding[i]
        if axis.of_examples or (isinstance(now, Shard) and now.dim in free):
            continue
        dims = [dim for dim, entry in enumerate(spec) if axis.names[0] in names_in(entry)]
        wanted[i] = Shard(dims[0]) if dims else REPLICATED
        if not is_possible(equation.invars[0].aval.shape, tuple(wanted), parts.axes):
            wanted[i] = REPLICATED if now == PARTIAL else now
    array = value.lying(tuple(wanted), parts.axes)
    return [Value(array, tuple(wanted))]


def _shard_map(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """A user's own program of single devices: its operands lie as it says, and it runs as it is."""
    p, axes = equation.params, parts.axes
    manual = [_is_manual(axis, p["newly_manual_axes"]) for axis in axes]
    inside = [i for i, own in enumerate(manual) if not own]  # axes that the program leaves to jpipe
    wanted = []
    for v, spec, value in zip(equation.invars, p["in_specs"], operands, strict=True):
        said, now = _of_users_spec(spec, axes), settled(value.sharding)
        sharding = tuple(a if own else b for a, b, own in zip(said, now, manual, strict=True))
        alone = tuple(a if own else REPLICATED for a, own in zip(said, manual, strict=True))
        possible = _apart([sharding[i] for i in inside], said) and is_possible(v.aval.shape, sharding, axes)
        wanted.append(sharding if possible else alone)
    inner = Partitioner(tuple(axes[i] for i in inside), {**parts.special, **_OF_DEVICES})
    pick = lambda sharding: tuple(sharding[i] for i in inside)
    results = inner.run_closed(p["jaxpr"], inner.values(parts.arrays(operands, wanted), list(map(pick, wanted))))
    found = []
    for value, spec in zip(results, p["out_specs"], strict=True):
        said = list(_of_users_spec(spec, axes))
        lying = value.sharding if _apart(value.sharding, said) else replicated(inner.axes)
        array = value.lying(lying, inner.axes)
        for i, placement in zip(inside, lying, strict=True):
            said[i] = placement
        found.append(Value(array, tuple(said)))
    return found


def _is_manual(axis: Axis, names: Any) -> bool:
    """Whether a user's program is manual over an axis."""
    own = set(axis.names) & set(names)
    if own and own != set(axis.names):
        raise ValueError(
            f"jax.shard_map in a layer is manual over {sorted(own)}, a part of the mesh axes {axis.names} that "
            "examples are split over jointly; make it manual over all of them"
        )
    return bool(own)


def _apart(placements: Sequence[Placement], said: Sequence[Placement]) -> bool:
    """Whether the axes left to jpipe split other dimensions than those that the user's program splits."""
    dims = {p.dim for p in said if isinstance(p, Shard)}
    return not any(isinstance(p, Shard) and p.dim in dims for p in placements)


def _of_users_spec(spec: Any, axes: Axes) -> Sharding:
    """The sharding that a user's PartitionSpec means.

    Raises:
      ValueError: it names a part of axes that examples are split over jointly, or in another order.
    """
    found: list[Placement] = [REPLICATED] * len(axes)
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


def _hand_through(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    return operands


def _psum(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """A user's own sum over devices, whatever it says of varying types."""
    p, shardings = equation.params, [value.sharding for value in operands]
    add = lambda x: lax.psum(x, p["axes"], axis_index_groups=p.get("axis_index_groups"))
    return parts.values([add(x) for x in parts.arrays(operands, shardings)], shardings)


def _ppermute(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """A user's own permutation, by a gather: as a permutation it would be one collective of all stages."""
    axes, shardings = equation.params["axis_name"], [value.sharding for value in operands]
    sources = {target: source for source, target in equation.params["perm"]}
    table = jnp.asarray([sources.get(i, -1) for i in range(lax.axis_size(axes))])
    source = table[lax.axis_index(axes)]

    def permuted(x: Any) -> Any:
        found = lax.dynamic_index_in_dim(lax.all_gather(x, axes), jnp.maximum(source, 0), keepdims=False)
        return jnp.where(source >= 0, found, jnp.zeros_like(found))

    return parts.values(list(map(permuted, parts.arrays(operands, shardings))), shardings)


_OF_DEVICES: dict[str, Special] = {
    **dict.fromkeys(("pvary", "pbroadcast"), _hand_through),
    **dict.fromkeys(("psum", "psum_invariant"), _psum),
    "ppermute": _ppermute,
}
"""What in a user's program of single devices would reach other stages, or talks of varying types."""

SAID: dict[str, Special] = {
    "sharding_constraint": _constraint,
    "reshard": _hand_through,  # of explicit axes, which there are none of where layers are traced
    "shard_map": _shard_map,
}
"""Equations by which users say how arrays lie."""
