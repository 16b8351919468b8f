"""Partitions traced layers over the devices of a stage: the program that one device runs, collectives in plain sight.

A layer is traced once, on whole micro-batches and whole weights. Here its equations are carried out one by one on the
parts that a device has: each has a rule for how its operands have to lie (`jpipe.sharding_rules`), and values are
converted to that. So every collective within a stage is one of jpipe's own, among the devices of that stage alone, and
no compiler adds others: in a loop that other stages don't run, those would wait for ever. And whatever a layer does
across examples stays exact, since only where arrays lie is decided here, never what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import AxisType

from jpipe.sharding_rules import RULES, Step, local_params
from jpipe.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    Placement,
    Shard,
    Sharding,
    convert,
    is_possible,
    local_shape,
    local_struct,
    names_in,
    replicated,
    settled,
)

Axes = tuple[Axis, ...]


class LocalProgram(NamedTuple):
    """What one device runs.

    Attributes:
      program: from and to the device's parts of arrays.
      shardings: how the results lie.
    """

    program: ClosedJaxpr
    shardings: list[Sharding]


def partition_program(
    program: ClosedJaxpr,
    axes: Axes,
    shardings: Sequence[Sharding],
    wanted: Sequence[Callable[[Sharding], Sharding]],
) -> LocalProgram:
    """The program of one device.

    Args:
      program: of whole arrays.
      axes: the mesh axes besides `stage`, as arrays are split over them.
      shardings: how the arguments lie.
      wanted: for each result, how it lies by itself -> how it has to lie.
    """
    if not axes and not _mentions_axes():
        return LocalProgram(program, [()] * len(program.jaxpr.outvars))
    found: list[Sharding] = []

    def run(*arguments: Any) -> list[Any]:
        values = [Value(x, sharding) for x, sharding in zip(arguments, shardings, strict=True)]
        results = Partitioner(axes).run_closed(program, values)
        found[:] = [choose(value.sharding) for choose, value in zip(wanted, results, strict=True)]
        return [value.lying(sharding, axes) for value, sharding in zip(results, found, strict=True)]

    mesh = dict(jax.sharding.get_abstract_mesh().shape)
    sizes = mesh or {name: size for axis in axes for name, size in zip(axis.names, axis.sizes, strict=True)}
    pairs = zip(program.jaxpr.invars, shardings, strict=True)
    local = [local_struct(v.aval, sharding, axes) for v, sharding in pairs]
    with _on_one_device():
        return LocalProgram(jax.make_jaxpr(run, axis_env=list(sizes.items()))(*local), found)


def _mentions_axes() -> bool:
    """Whether programs were traced where mesh axes could be named, though arrays are split over none of them."""
    return any(kind != AxisType.Manual for kind in jax.sharding.get_abstract_mesh().axis_types)


def _on_one_device() -> AbstractContextManager:
    """The context of a program that is manual over all axes of the mesh at hand."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.sharding.use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Manual)))


class Value:
    """An array as one device has it, in every sharding that was asked for."""

    def __init__(self, array: Any, sharding: Sharding):
        self.sharding = sharding
        self.forms = {sharding: array}

    def lying(self, sharding: Sharding, axes: Axes) -> Any:
        """The device's part under another sharding."""
        if sharding not in self.forms:
            self.forms[sharding] = convert(self.forms[self.sharding], axes, self.sharding, sharding)
            if sharding == settled(self.sharding):  # once added up, it needn't be added up again
                self.sharding = sharding
        return self.forms[sharding]


class Partitioner:
    """Carries out equations of whole arrays on the parts that a device has."""

    def __init__(self, axes: Axes, special: Mapping[str, Special] | None = None):
        self.axes = axes
        self.special = _SPECIAL if special is None else special

    def run(self, jaxpr: Jaxpr, constants: Sequence[Value], arguments: Sequence[Value]) -> list[Value]:
        """The results of a program."""
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
        read = lambda v: self._literal(v) if isinstance(v, Literal) else known[v]
        for equation in jaxpr.eqns:
            results = self.carry_out(equation, list(map(read, equation.invars)))
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def run_closed(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[Value]) -> list[Value]:
        """The results of a program that an equation holds."""
        jaxpr, constants = (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
        return self.run(jaxpr, [self.whole(_constant(c)) for c in constants], arguments)

    def carry_out(self, equation: Any, operands: list[Value]) -> list[Value]:
        """The results of one equation."""
        special = self.special.get(equation.primitive.name)
        if special:
            scope = str(equation.source_info.name_stack)
            with jax.named_scope(scope) if scope else nullcontext():
                return special(self, equation, operands)
        steps = self._steps(equation, operands)
        wanted = [tuple(step.wanted[i] for step in steps) for i in range(len(operands))]
        given = [tuple(step.given[i] for step in steps) for i in range(len(equation.outvars))]
        shapes = [local_shape(v.aval.shape, g, self.axes) for v, g in zip(equation.outvars, given, strict=True)]
        run = partial(_run, equation, shapes)
        for step, axis in zip(steps, self.axes, strict=True):
            run = step.around(run, axis) if step.around else run
        results = run(*self.arrays(operands, wanted))
        found = [(x.shape, x.dtype) for x in results]
        assert found == [(s, v.aval.dtype) for s, v in zip(shapes, equation.outvars, strict=True)], equation
        return self.values(results, given)

    def _literal(self, literal: Any) -> Value:
        return self.whole(np.asarray(literal.val, literal.aval.dtype))

    def whole(self, array: Any) -> Value:
        """An array that all devices have."""
        return Value(array, replicated(self.axes))

    def values(self, arrays: Sequence[Any], shardings: Sequence[Sharding]) -> list[Value]:
        """A device's parts as values."""
        return [Value(x, sharding) for x, sharding in zip(arrays, shardings, strict=True)]

    def arrays(self, values: Sequence[Value], shardings: Sequence[Sharding]) -> list[Any]:
        """A device's parts of values."""
        return [value.lying(sharding, self.axes) for value, sharding in zip(values, shardings, strict=True)]

    def agreed(self, decision: Any, shardings: Sequence[Sharding]) -> Any:
        """What decides whether devices run a program, if that works on values which lie in parts.

        Replicated values should be equal, but those that a callback or an unordered sum made may not be to the last
        bit; then one device would wait in a collective for others that never come.
        """
        whole = replicated(self.axes)
        if all(sharding == whole for sharding in shardings):
            return decision
        names = tuple(name for axis in self.axes for name in axis.names)
        return lax.pmax(decision.astype(jnp.int32), names).astype(decision.dtype)

    def shardings_of(self, program: Any, avals: Sequence[Any], shardings: Sequence[Sharding]) -> list[Sharding]:
        """How the results of a program lie by themselves; nothing is computed."""
        found: list[Sharding] = []

        def trace(*arrays: Any) -> list[Any]:
            results = self.run_closed(program, self.values(arrays, shardings))
            found[:] = [value.sharding for value in results]
            return [value.forms[value.sharding] for value in results]

        jax.eval_shape(trace, *[local_struct(a, s, self.axes) for a, s in zip(avals, shardings, strict=True)])
        return found

    def _steps(self, equation: Any, operands: list[Value]) -> list[Step]:
        """How an equation is carried out along each axis."""
        rule, steps = RULES.get(equation.primitive.name), []
        for i, axis in enumerate(self.axes):
            placements = [value.sharding[i] for value in operands]
            step = rule(equation, placements, axis) if rule else None
            whole = Step([REPLICATED] * len(operands), [REPLICATED] * len(equation.outvars))
            if step is None or not self._is_possible(equation, [*steps, step]):
                step = whole
            steps.append(step)
        return steps

    def _is_possible(self, equation: Any, steps: list[Step]) -> bool:
        """Whether operands and results can lie as the steps along the first axes want them."""
        axes, variables = self.axes[: len(steps)], (*equation.invars, *equation.outvars)
        shardings = zip(*[(*step.wanted, *step.given) for step in steps], strict=True)
        return all(is_possible(v.aval.shape, s, axes) for v, s in zip(variables, shardings, strict=True))


def _constant(array: Any) -> Any:
    """A constant without the mesh that it was made under, whose axes were of other types."""
    plain = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return np.asarray(array) if plain and not jnp.issubdtype(array.dtype, jax.dtypes.extended) else array


def _run(equation: Any, shapes: list[tuple[int, ...]], *operands: Any) -> list[Any]:
    """An equation, carried out on a device's own operands."""
    params = local_params(equation, operands, shapes)
    names = _names(len(operands))  # what they are called doesn't matter, nor of which shape they once were
    single = equation.replace(invars=names, params=params, ctx=_context(equation.ctx, jax.sharding.get_abstract_mesh()))
    jaxpr = _NOTHING.jaxpr.replace(invars=names, outvars=equation.outvars, eqns=[single], effects=equation.effects)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*operands)


@cache
def _context(context: Any, mesh: Any) -> Any:
    """The context of an equation (compute type and the like), but with another mesh."""
    with context.manager, jax.sharding.use_abstract_mesh(mesh):
        return jax.make_jaxpr(lambda x: x + 1)(0.0).jaxpr.eqns[0].ctx


_NOTHING = jax.make_jaxpr(lambda: ())()
_POOL: list[Any] = []


def _names(count: int) -> list[Any]:
    while len(_POOL) < count:
        _POOL.extend(jax.make_jaxpr(lambda *x: x)(*[0.0] * 32).jaxpr.invars)
    return _POOL[:count]


# --- programs inside of equations ---


def _call(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """A program that is only called: as if it stood in the caller's place."""
    params = equation.params
    return parts.run_closed(params.get("jaxpr", params.get("call_jaxpr")), operands)


def _meet(now: Sharding, new: Sharding) -> Sharding:
    """How a value that a loop carries has to lie from the start, if a trip leaves it lying so."""
    return tuple(b if a == REPLICATED else a for a, b in zip(now, new, strict=True))


def _body(parts: Partitioner, program: Any, shardings: Sequence[Sharding], given: Sequence[Sharding]) -> Callable:
    """A program as a function of a device's parts; its results lie as `given`."""
    return lambda *arrays: parts.arrays(parts.run_closed(program, parts.values(arrays, shardings)), given)


def _loop_shardings(
    parts: Partitioner, program: Any, before: list[Sharding], carry: list[Sharding], after: list[Sharding], fixed: Any
) -> tuple[list[Sharding], list[Sharding]]:
    """How the carried values of a loop lie in every trip, and how all results of its body lie by themselves.

    Args:
      parts: the partitioner.
      program: the body, of (constants, carried values, slices).
      before: how its constants lie.
      carry: how the carried values lie at first.
      after: how the slices lie.
      fixed: the indices of carried values that have to be replicated.
    """
    avals = [v.aval for v in (program.jaxpr if isinstance(program, ClosedJaxpr) else program).invars]
    while True:
        results = parts.shardings_of(program, avals, [*before, *carry, *after])
        new = [
            now
            if i in fixed or not is_possible(avals[len(before) + i].shape, _meet(now, r), parts.axes)
            else _meet(now, r)
            for i, (now, r) in enumerate(zip(carry, results, strict=False))
        ]
        if new == carry:
            return carry, results
        carry = new


def _scan(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """A loop over the first dimension, which is gathered; other dimensions stay split."""
    p = equation.params
    num_consts, num_carry, body = p["num_consts"], p["num_carry"], p["jaxpr"]
    shardings = [settled(value.sharding) for value in operands]
    consts, carry = shardings[:num_consts], shardings[num_consts : num_consts + num_carry]
    stacked = [_moved(s, 0) for s in shardings[num_consts + num_carry :]]
    slices = [_moved(s, -1) for s in stacked]
    carry, results = _loop_shardings(parts, body, consts, carry, slices, ())
    out = results[num_carry:]
    arrays = parts.arrays(operands, [*consts, *carry, *stacked])
    run = _body(parts, body, [*consts, *carry, *slices], [*carry, *out])

    def trip(state: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        found = run(*arrays[:num_consts], *state, *xs)
        return found[:num_carry], found[num_carry:]

    state, ys = lax.scan(
        trip,
        arrays[num_consts : num_consts + num_carry],
        arrays[num_consts + num_carry :],
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    return parts.values([*state, *ys], [*carry, *[_moved(s, 1) for s in out]])


def _moved(sharding: Sharding, by: int) -> Sharding:
    """The sharding of an array with one more dimension in front (by=1), one less (-1), or that one gathered (0)."""
    keep = lambda p: Shard(p.dim + by, p.outer) if p.dim or by > 0 else REPLICATED
    return tuple(keep(p) if isinstance(p, Shard) else p for p in sharding)


def _while(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """A loop whose condition looks at replicated values alone."""
    p = equation.params
    num_cond, num_body = p["cond_nconsts"], p["body_nconsts"]
    whole = replicated(parts.axes)
    condition = p["cond_jaxpr"].jaxpr
    each = condition.outvars[0].aval.shape != ()  # of several loops at once, as `jax.vmap` makes them
    count = len(operands) - num_cond - num_body
    fixed = set(range(count)) if each else _looked_at(condition, num_cond)
    shardings = [settled(value.sharding) for value in operands]
    consts = shardings[num_cond : num_cond + num_body]
    carry = [whole if i in fixed else s for i, s in enumerate(shardings[num_cond + num_body :])]
    carry, _ = _loop_shardings(parts, p["body_jaxpr"], consts, carry, [], fixed)
    arrays = parts.arrays(operands, [*[whole] * num_cond, *consts, *carry])
    test = _body(parts, p["cond_jaxpr"], [*[whole] * num_cond, *carry], [whole])
    body = _body(parts, p["body_jaxpr"], [*consts, *carry], carry)
    goes_on = lambda state: parts.agreed(test(*arrays[:num_cond], *state)[0], [*consts, *carry])

    def trip(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        going, old = state
        new = body(*arrays[num_cond : num_cond + num_body], *old)
        if each:  # those that have ended stay as they are
            spread = lambda x: lax.broadcast_in_dim(going, x.shape, range(going.ndim))
            new = [jnp.where(spread(a), a, b) for a, b in zip(new, old, strict=True)]
        return goes_on(new), new

    start = arrays[num_cond + num_body :]
    state = lax.while_loop(lambda state: jnp.any(state[0]), trip, (goes_on(start), start))[1]
    return parts.values(state, carry)


def _looked_at(condition: Jaxpr, num_consts: int) -> set[int]:
    """The carried values that the condition of a loop looks at."""
    used = [v for e in condition.eqns for v in e.invars] + list(condition.outvars)
    known = {v for v in used if not isinstance(v, Literal)}
    return {i for i, v in enumerate(condition.invars[num_consts:]) if v in known}


def _cond(parts: Partitioner, equation: Any, operands: list[Value]) -> list[Value]:
    """Branches on a replicated index; where they leave a result lying differently, it is brought together."""
    branches = equation.params["branches"]
    index, *rest = operands
    shardings = [settled(value.sharding) for value in rest]
    avals = [v.aval for v in equation.invars[1:]]
    found = [parts.shardings_of(branch, avals, shardings) for branch in branches]
    given = []
    for v, (first, *others) in zip(equation.outvars, zip(*found, strict=True), strict=True):
        for other in others:
            first = _meet(first, other)
        given.append(first if is_possible(v.aval.shape, first, parts.axes) else replicated(parts.axes))
    runs = [_body(parts, branch, shardings, given) for branch in branches]
    (which,) = parts.arrays([index], [replicated(parts.axes)])
    which = parts.agreed(which, [*shardings, *given])
    return parts.values(lax.switch(which, runs, *parts.arrays(rest, shardings)), given)


# --- what users say of shardings themselves ---


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
    inner = Partitioner(tuple(axes[i] for i in inside), _SPECIAL | _OF_DEVICES)
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


Special = Callable[["Partitioner", Any, list[Value]], list[Value]]
_OF_DEVICES: dict[str, Special] = {
    **dict.fromkeys(("pvary", "pbroadcast"), _hand_through),
    **dict.fromkeys(("psum", "psum_invariant"), _psum),
    "ppermute": _ppermute,
}
"""What in a user's program of single devices would reach other stages, or talks of varying types."""

_SPECIAL: dict[str, Special] = {
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"), _call
    ),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "sharding_constraint": _constraint,
    "reshard": _hand_through,  # of explicit axes, which there are none of where layers are traced
    "shard_map": _shard_map,
}
