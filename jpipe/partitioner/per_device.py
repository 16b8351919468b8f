"""`jaxpr_per_device`: makes the jaxpr that one device runs from one of whole arrays; handlers of loops and branches.

A function is traced once, on whole arrays. Its equations are then carried out one by one on the parts of arrays that a
device has: each has a rule for how its operands have to lie (`jpipe.partitioner.rules`), and values are converted to
that. This decides only where arrays lie, never what is computed: a sum over examples stays exact. The compiler adds no
collectives. All collectives join devices along the given axes alone, so that they may stand in a loop or a branch that
devices along other axes don't run.

Loops, branches, users' sharding constraints and their `shard_map`s have handlers in place of rules. A handler takes the
chooser, an equation of whole arrays and how its operands lie, and returns how it is carried out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jpipe.jax.flat_jaxpr import FlatJaxpr, aval_of, flatten
from jpipe.jax.inside import axes_of, called_by, scan_counts, with_axis_types, with_named_axes
from jpipe.jax.primitives import OVER_DEVICES, ClosedJaxpr, Jaxpr, JaxprEqn, shapes_of
from jpipe.jax.tracing import equations_in, uses
from jpipe.partitioner.axes import split_by
from jpipe.partitioner.choice import Chooser, Handler, Wanted, along_whole_axes, always, cheapest_plan
from jpipe.partitioner.conversions import names_of
from jpipe.partitioner.shardings import REPLICATED, Shard, Sharding, is_possible, named, of_spec, part_structs, summed
from jpipe.partitioner.way import Axes, DevicePlan, Unsplit, Way, way_by_rule

# --- loops and branches -----------------------------------------------------------------------------------------------

Lying = Sequence[Sharding]
"""How several arrays lie."""


def _combined(now: Sharding, other: Sharding, shape: tuple[int, ...], axes: Axes) -> Sharding:
    """Joins two shardings: the first, and the other where that is replicated, if an array of the shape can lie so."""
    both = tuple(b if a == REPLICATED else a for a, b in zip(now, other, strict=True))
    return both if is_possible(shape, both, axes) else now


def _loop_shardings(
    chooser: Chooser, body: FlatJaxpr, consts: Lying, carry: Lying, slices: Lying, fixed: Collection[int]
) -> tuple[list[Sharding], list[Sharding]]:
    """Finds how a loop's carry lies before and after every iteration, and how all results of its body lie.

    They are found by trying: whatever an iteration leaves split, or partial, has to lie so from the start. For the body
    (a, b, c) -> (b, c, c @ w) with w split along its second dimension, and all replicated before the loop:

        a           b           c           an iteration leaves
        replicated  replicated  replicated  replicated  replicated  Shard(1)
        replicated  replicated  Shard(1)    replicated  Shard(1)    Shard(1)
        replicated  Shard(1)    Shard(1)    Shard(1)    Shard(1)    Shard(1)
        Shard(1)    Shard(1)    Shard(1)    Shard(1)    Shard(1)    Shard(1)    as it was: found

    Each part of the carry changes at most once for each axis, from replicated to something else, so that this ends.
    A part that an iteration leaves otherwise in the end (a Shard(0) where it lies as Shard(1)) is converted in each
    iteration. Constants and slices are never partial: a body may use them often.

    Args:
      chooser: of the equation around it.
      body: (constants, carry, slices) -> (carry, ...).
      consts: how the constants lie.
      carry: how the carry lies before the loop.
      slices: how the slices lie.
      fixed: the indices of the parts of the carry that stay as they lie before the loop.
    """
    carry = list(carry)
    shapes = [body.avals[value].shape for value in body.arguments[len(consts) : len(consts) + len(carry)]]
    while True:
        results = chooser.results_at(body, (*consts, *carry, *slices))
        parts = enumerate(zip(carry, results, shapes, strict=False))
        new = [a if i in fixed else _combined(a, b, shape, chooser.axes) for i, (a, b, shape) in parts]
        if new == carry:
            return carry, results
        carry = new


def _scan(chooser: Chooser, equation: JaxprEqn, lying: Lying) -> Way:
    """Carries out a loop over the first dimension, which is gathered; other dimensions stay split.

    Operands: constants, carry, stacked slices `[length, ...]`. Results: carry, stacked results `[length, ...]`.
    """
    params = equation.params
    (num_consts, num_carry), body = scan_counts(equation), chooser.flat(params["jaxpr"])
    first_slice = num_consts + num_carry
    shardings = list(map(summed, lying))
    consts, slices = shardings[:num_consts], list(map(_of_slice, shardings[first_slice:]))
    carry, results = _loop_shardings(chooser, body, consts, shardings[num_consts:first_slice], slices, ())
    of_each = results[num_carry:]
    plan = chooser.make_plan(body, [*consts, *carry, *slices], list(map(always, [*carry, *of_each])))

    def run(*parts: jax.Array) -> list[jax.Array]:
        def iteration(state: list[jax.Array], xs: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            made = plan.run(*parts[:num_consts], *state, *xs)
            return made[:num_carry], made[num_carry:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        state, ys = lax.scan(iteration, list(parts[num_consts:first_slice]), list(parts[first_slice:]), **options)
        return [*state, *ys]

    operands = (*consts, *carry, *map(_of_stacked, slices))
    times = float(params["length"])
    return Way(operands, (*carry, *map(_of_stacked, of_each)), run, times * plan.cost, ((plan, times),))


def _of_slice(stacked: Sharding) -> Sharding:
    """Makes the sharding of slices `[...]` of an array `[length, ...]` whose first dimension is gathered."""
    without_first = lambda s: Shard(s.dim - 1, s.outer) if s.dim else REPLICATED
    return tuple(without_first(s) if isinstance(s, Shard) else s for s in stacked)


def _of_stacked(slices: Sharding) -> Sharding:
    """Makes the sharding of slices stacked along a new first dimension: the reverse of `_of_slice`."""
    return tuple(Shard(s.dim + 1, s.outer) if isinstance(s, Shard) else s for s in slices)


def _while(chooser: Chooser, equation: JaxprEqn, lying: Lying) -> Way:
    """Carries out a loop whose condition looks at replicated values alone.

    Operands: constants of the condition, constants of the body, carry. Results: carry.
    """
    params, whole = equation.params, (REPLICATED,) * len(chooser.axes)
    num_tested, first_carry = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    many = params["cond_jaxpr"].out_avals[0].shape != ()  # several loops at once, as `jax.vmap` makes them
    fixed = [i for i, is_looked_at in enumerate(uses(params["cond_jaxpr"])[num_tested:]) if many or is_looked_at]
    shardings = list(map(summed, lying))
    consts = shardings[num_tested:first_carry]
    carry = [whole if i in fixed else s for i, s in enumerate(shardings[first_carry:])]
    body, cond = chooser.flat(params["body_jaxpr"]), chooser.flat(params["cond_jaxpr"])
    carry, _ = _loop_shardings(chooser, body, consts, carry, [], fixed)
    test = chooser.make_plan(cond, [*[whole] * num_tested, *carry], [always(whole)])
    plan = chooser.make_plan(body, [*consts, *carry], list(map(always, carry)))

    def run(*parts: jax.Array) -> list[jax.Array]:
        tested, constants = parts[:num_tested], parts[num_tested:first_carry]

        def goes_on(state: list[jax.Array]) -> jax.Array:
            return _agreed(test.run(*tested, *state)[0], chooser.axes, [plan])

        def iteration(state: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
            going, old = state
            new = plan.run(*constants, *old)
            if many:  # those that have ended stay as they are
                spread = lambda x: lax.broadcast_in_dim(going, x.shape, range(going.ndim))
                new = [jnp.where(spread(a), a, b) for a, b in zip(new, old, strict=True)]
            return goes_on(new), new

        start = list(parts[first_carry:])
        return lax.while_loop(lambda state: jnp.any(state[0]), iteration, (goes_on(start), start))[1]

    operands = (*[whole] * num_tested, *consts, *carry)
    return Way(operands, tuple(carry), run, test.cost + plan.cost, ((test, 1.0), (plan, 1.0)))


def _cond(chooser: Chooser, equation: JaxprEqn, lying: Lying) -> Way:
    """Branches on a replicated index; a result that they leave lying differently is converted.

    Operands: the index of the branch, the operands of all branches.
    """
    branches, whole = list(map(chooser.flat, equation.params["branches"])), (REPLICATED,) * len(chooser.axes)
    shardings = list(map(summed, lying[1:]))
    results, *others = [chooser.results_at(branch, tuple(shardings)) for branch in branches]
    for of_branch in others:
        pairs = zip(results, of_branch, equation.outvars, strict=True)
        results = [_combined(a, b, aval_of(v).shape, chooser.axes) for a, b, v in pairs]
    plans = [chooser.make_plan(branch, shardings, list(map(always, results))) for branch in branches]

    def run(index: jax.Array, *parts: jax.Array) -> list[jax.Array]:
        if platforms := equation.params.get("branches_platforms"):  # of `jax.lax.platform_dependent`: names, or None
            named_plans = list(zip(platforms, plans, strict=True))
            of_platforms = {name: plan.run for names, plan in named_plans for name in names or ()}
            default = next((plan.run for names, plan in named_plans if names is None), None)
            return lax.platform_dependent(*parts, default=default, **of_platforms)
        return lax.switch(_agreed(index, chooser.axes, plans), [plan.run for plan in plans], *parts)

    cost = max(plan.cost for plan in plans)
    return Way((whole, *shardings), tuple(results), run, cost, tuple((plan, 1.0) for plan in plans))


def _agreed(decision: jax.Array, axes: Axes, plans: Sequence[DevicePlan]) -> jax.Array:
    """Makes a decision, such as whether a loop goes on, the same on all devices along the axes.

    Replicated values should be equal, but those that a callback or an unordered sum made may not be to the last
    bit; then one device would wait in a collective for others that never come.

    Args:
      decision: a replicated bool or integer.
      axes: what arrays are split over.
      plans: of what is decided; if nothing is sent in them, devices need not agree.
    """
    if not any(plan.sends for plan in plans):
        return decision
    return lax.pmax(decision.astype(jnp.int32), names_of(axes)).astype(decision.dtype)


# --- what users say of devices themselves -----------------------------------------------------------------------------


def _constraint(chooser: Chooser, equation: JaxprEqn, lying: Lying) -> Way:
    """Carries out a sharding constraint along all axes but the data axes, along which nothing changes."""
    (now,), axes = lying, chooser.axes
    if (spec := getattr(equation.params["sharding"], "spec", None)) is None:
        return _as_it_is(chooser, equation, lying)
    free, shape = equation.params.get("unconstrained_dims", frozenset()), aval_of(equation.invars[0]).shape
    keeps = [axis.is_data or (isinstance(s, Shard) and s.dim in free) for axis, s in zip(axes, now, strict=True)]
    constrained = [name for axis, keep in zip(axes, keeps, strict=True) if not keep for name in axis.names]
    by_spec = of_spec(split_by(spec, constrained.__contains__), axes)
    wanted = tuple(a if keep else b for a, b, keep in zip(now, by_spec, keeps, strict=True))
    if not is_possible(shape, wanted, axes):  # as far as it can be
        wanted = summed(now)
        for i, keep in enumerate(keeps):
            changed = (*wanted[:i], by_spec[i], *wanted[i + 1 :])
            wanted = changed if not keep and is_possible(shape, changed, axes) else wanted
    return _as_it_is(chooser, equation, [wanted])


def _as_it_is(chooser: Chooser, equation: JaxprEqn, lying: Lying) -> Way:
    """Gives the operands as they lie."""
    return Way(tuple(lying), tuple(lying), lambda *parts: parts)


def _shard_map(chooser: Chooser, equation: JaxprEqn, lying: Lying) -> Way:
    """Carries out `jax.shard_map`, a user's function of single devices, whose operands lie as its specs say.

    Over the axes that it is manual over, its jaxpr runs as it is. Along the others it sees whole arrays, and is carried
    out as the rest is, by a chooser for these axes alone. An operand `[8, 6]` that it takes by `P("expert")`, where
    it isn't manual over `model`:

                          expert      model                     what its jaxpr is of
        lies so           replicated  Shard(1)                  `[8, 6]`
        is wanted so      Shard(0)    Shard(1)                  `[4, 6]`, of which a device has `[4, 3]`
        if it lay so      replicated  Shard(0), as the spec:
        it is wanted so   Shard(0)    replicated                `[4, 6]`

    Without `axis_names` it is manual over all mesh axes, also over some that no array is split over here. Along those
    all devices have the same, so that a sum over them is a product with their number, and nothing is sent.

    Raises:
      ValueError: it names an axis of those where a device would see which of several it is.
    """
    params, axes = equation.params, chooser.axes
    split_over = {name for axis in axes for name in axis.names}
    alike = {name: params["mesh"].shape[name] for name in params["newly_manual_axes"] if name not in split_over}
    inside = [i for i, axis in enumerate(axes) if not _is_manual(axis.names, params["newly_manual_axes"])]
    pick = lambda sharding: tuple(sharding[i] for i in inside)
    operands = [pick(summed(sharding)) for sharding in lying]
    wanted = [_as_specified(spec, axes, inside, at) for spec, at in zip(params["in_specs"], operands, strict=True)]
    inner = Chooser(pick(axes), {**chooser.handlers, **_of_single_devices(alike, split_over)})
    body, arguments = flatten(called_by(equation)), list(map(pick, wanted))
    by_rules = inner.results_at(body, tuple(arguments))
    results = [_as_specified(spec, axes, inside, at) for spec, at in zip(params["out_specs"], by_rules, strict=True)]
    plan = inner.make_plan(body, arguments, [always(pick(sharding)) for sharding in results])
    return Way(tuple(wanted), tuple(results), plan.run, plan.cost, ((plan, 1.0),), sends_too=True)


def _as_specified(spec: PartitionSpec, axes: Axes, inside: Sequence[int], lying: Sharding) -> Sharding:
    """Reads a user's spec; along the axes `inside` the array lies as `lying`, if that splits other dimensions."""
    by_spec = of_spec(spec, axes)
    dims = {s.dim for s in by_spec if isinstance(s, Shard)}
    if any(isinstance(s, Shard) and s.dim in dims for s in lying):
        return by_spec
    others = dict(zip(inside, lying, strict=True))
    return tuple(others.get(i, s) for i, s in enumerate(by_spec))


def _is_manual(axis_names: tuple[str, ...], names: Collection[str]) -> bool:
    """Whether a user's function is manual over an axis, if it is manual over the mesh axes `names`.

    Raises:
      ValueError: it is manual over a part of mesh axes that arrays are split over jointly.
    """
    manual = set(axis_names) & set(names)
    if manual and manual != set(axis_names):
        raise ValueError(f"jax.shard_map is manual over {sorted(manual)}, a part of the axes {axis_names}; name all")
    return bool(manual)


def _of_single_devices(alike: Mapping[str, int], split_over: Collection[str]) -> dict[str, Handler]:
    """Makes the handlers of collectives within `shard_map`: they reach only devices along axes that split arrays.

    Args:
      alike: the other mesh axes that the function is manual over, along which all devices have the same, and how many
        devices they have.
      split_over: the mesh axes that arrays are split over.
    """

    def run_on_each(lying: Lying, one: Callable[[jax.Array], jax.Array]) -> Way:
        return Way(tuple(lying), tuple(lying), lambda *parts: list(map(one, parts)))

    def reach(equation: JaxprEqn, *, tells_apart: bool) -> tuple[tuple[str, ...], int]:
        """Returns the axes of a collective along which devices differ, and the number of devices along all others.

        Raises:
          ValueError: the function isn't manual over one, as over stages: its other devices run other layers. Or the
            collective tells devices apart, or gives something of each, along axes where all are alike.
        """
        names = axes_of(equation)
        if outside := [n for n in names if isinstance(n, str) and n not in alike and n not in split_over]:
            fault = f"jax.shard_map holds a collective over {outside}, along which devices do other work"
            raise ValueError(f"{fault} and would never come to it; name axes of {sorted(split_over)} there")
        other = [name for name in names if alike.get(name, 1) > 1]
        if other and tells_apart:
            name = equation.primitive.name
            fault = f"jax.shard_map holds {name} over the axes {tuple(names)}, but along {other} all devices"
            remedy = "name the axes that it is about: jax.shard_map(..., axis_names={...})"
            raise ValueError(f"{fault} have the same; {remedy}")
        return tuple(name for name in names if name not in alike), math.prod(alike[name] for name in other)

    def reduce(chooser: Chooser, equation: JaxprEqn, lying: Lying) -> Way:
        """Carries out a user's own sum over devices, whatever it says of varying types, or a maximum or minimum."""
        groups = equation.params.get("axis_index_groups")
        over, count = reach(equation, tells_apart=bool(groups))
        combine = {"pmax": lax.pmax, "pmin": lax.pmin}.get(equation.primitive.name, lax.psum)

        def on_device(x: jax.Array) -> jax.Array:
            total = combine(x, over, axis_index_groups=groups) if over else x
            return total * jnp.asarray(count, x.dtype) if combine is lax.psum and count > 1 else total

        if any(isinstance(name, int) for name in over):  # dimensions that the result lacks, of `jax.vmap`
            lying = [(REPLICATED,) * len(chooser.axes)] * len(lying)
        return run_on_each(lying if combine is lax.psum else list(map(summed, lying)), on_device)

    def check(chooser: Chooser, equation: JaxprEqn, lying: Lying) -> Way:
        """Carries out operations that tell devices apart, or give something of each."""
        reach(equation, tells_apart=True)
        if equation.primitive.name == "ppermute":
            return run_on_each(lying, partial(_permuted, equation))
        return way_by_rule(equation, lying, chooser.axes)

    return {
        **dict.fromkeys(("pvary", "pbroadcast"), _as_it_is),
        **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), reduce),
        **dict.fromkeys(OVER_DEVICES, check),
    }


def _permuted(equation: JaxprEqn, x: jax.Array) -> jax.Array:
    """Permutes by gathers: as a permutation it would be one collective of all devices of the mesh."""
    axes, sources = equation.params["axis_name"], {target: source for source, target in equation.params["perm"]}
    size, device = lax.axis_size(axes), lax.axis_index(axes)
    stays = jnp.asarray([sources.get(i) == i for i in range(size)])
    result = jnp.where(stays[device], x, jnp.zeros_like(x))
    for groups in _gathered_among([pair for pair in equation.params["perm"] if pair[0] != pair[1]], size):
        places = [(i, group.index(s) if (s := sources.get(i)) in group else -1) for group in groups for i in group]
        place = jnp.asarray([place for _, place in sorted(places)])[device]
        of_group = lax.all_gather(x, axes, axis_index_groups=groups)
        of_source = lax.dynamic_index_in_dim(of_group, jnp.maximum(place, 0), keepdims=False)
        result = jnp.where(place >= 0, of_source, result)
    return result


def _gathered_among(permutation: Sequence[tuple[int, int]], size: int) -> list[list[list[int]]]:
    """Groups devices, in one set of groups after the other, so that each is with its source in one of them.

    In pairs, if that is less: of a ring 0 -> 1 -> 2 -> 3 -> 0 first (0, 1), (2, 3), then (1, 2), (3, 0). That sends an
    array twice, among all devices it would be sent three times. An odd number of devices can't be paired, as groups
    have to be equally large.

    Args:
      permutation: (source, target) pairs, of different devices.
      size: the number of devices.
    """
    if permutation and size % 2:
        return [[list(range(size))]]
    targets, sent = dict(permutation), []
    have_source = {target for _, target in permutation}
    for source in sorted(range(size), key=lambda i: i in have_source):  # along chains, from their ends, and rings
        while source in targets:
            sent.append((source, targets[source]))
            source = targets.pop(source)
    rounds: list[list[list[int]]] = []
    while sent:
        pairs, alone = [], dict.fromkeys(range(size))
        for source, target in sent:
            if {source, target} <= alone.keys():
                pairs.append([source, target])
                del alone[source], alone[target]
        rest = list(alone)
        rounds.append([*pairs, *map(list, zip(rest[::2], rest[1::2], strict=True))])
        sent = [pair for pair in sent if not any({*pair} <= {*group} for group in rounds[-1])]
    return rounds if len(rounds) < size - 1 else [[list(range(size))]]


HANDLERS: dict[str, Handler] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "sharding_constraint": _constraint,
    "reshard": _as_it_is,  # of explicit axes, which there are none of where functions are traced
    "shard_map": _shard_map,
}
"""The handlers of equations that hold jaxprs, or by which users say how arrays lie, by the name of the primitive."""


# --- the entry --------------------------------------------------------------------------------------------------------


class PerDeviceJaxpr(NamedTuple):
    """The jaxpr that one device runs.

    Attributes:
      jaxpr: from the device's parts of the arguments to its parts of the results.
      shardings: for each result how it lies.
      unsplit: the equations that every device carries out whole though an operand was split.
    """

    jaxpr: ClosedJaxpr
    shardings: list[Sharding]
    unsplit: list[Unsplit]


def jaxpr_per_device(
    jaxpr: ClosedJaxpr, axes: Axes, shardings: Sequence[Sharding], wanted: Sequence[Wanted]
) -> PerDeviceJaxpr:
    """Makes the jaxpr that one device runs from a jaxpr of whole arrays.

    Args:
      jaxpr: of whole arrays.
      axes: the mesh axes that arrays may be split over.
      shardings: for each argument how it lies.
      wanted: for each result a function: how it lies by itself -> how it has to lie.
    """
    here = jax.sharding.get_abstract_mesh()
    # Where mesh axes could be named in tracing, a jaxpr may say so though arrays are split over none.
    if not axes and all(axis_type == AxisType.Manual for axis_type in here.axis_types):
        return PerDeviceJaxpr(jaxpr, [()] * len(jaxpr.jaxpr.outvars), [])
    plan = cheapest_plan(axes, HANDLERS, flatten(jaxpr), shardings, wanted)
    sizes = dict(here.shape) or {n: size for axis in axes for n, size in zip(axis.names, axis.sizes, strict=True)}
    parts = part_structs(shapes_of(jaxpr.jaxpr.invars), shardings, axes)
    with jax.sharding.use_abstract_mesh(with_axis_types(here, dict.fromkeys(here.axis_names, AxisType.Manual))):
        results = [along_whole_axes(sharding, axes, plan.axes) for sharding in plan.results]
        return PerDeviceJaxpr(with_named_axes(plan.run, sizes)(*parts)[0], results, plan.unsplit)


def results_by_rules(jaxpr: ClosedJaxpr, axes: Axes, shardings: Sequence[Sharding]) -> list[Sharding]:
    """Says how the results of a jaxpr of whole arrays lie by themselves, where its arguments lie so; traces nothing."""
    return Chooser(axes, HANDLERS).results_at(flatten(jaxpr), tuple(shardings))


def named_axes(jaxpr: ClosedJaxpr | Jaxpr) -> frozenset[str]:
    """Collects the mesh axes that constraints and the specs of `shard_map`s name, in the jaxprs inside of it too."""
    names: set[str] = set()
    for equation in equations_in(jaxpr.eqns):
        params, name = equation.params, equation.primitive.name
        specs = (*params["in_specs"], *params["out_specs"]) if name == "shard_map" else ()
        if name == "sharding_constraint":
            specs = (getattr(params["sharding"], "spec", None) or PartitionSpec(),)
        names.update(named(specs))
    return frozenset(names)
