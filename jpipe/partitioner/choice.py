"""Chooses how to carry out each equation of a jaxpr, so that a device sends few bytes.

A *sharding* says how an array lies along each mesh axis. A *way* of an equation says how its operands have to lie and
how its results lie then. A *plan* has a way for every equation of a jaxpr, and the conversions of operands in between.
The chooser minimises a plan's cost: the bytes that a device sends, and its operations and written bytes, counted as
the bytes that could be sent meanwhile. If sending alone were counted, it would be cheapest to compute everything on
every device.

A rule (`jpipe.partitioner.rules`) says how an equation is carried out, given how its operands lie. The rules alone make
a plan, from the first equation to the last, but they don't look ahead. So where a rule converts an operand, other
shardings of that operand are tried too, and the rule says what follows from each. Each alternative is followed for some
more equations, and the cheapest is taken (this is known as *rollout* of a policy; D. Bertsekas, Reinforcement Learning
and Optimal Control, 2019, section 2.4). An example is a sum y over p devices, `[n bytes]`, of which a norm and a
residual connection take their parts of the sequence:

    y partial -> replicated     cut to the sequence's parts     2 (p - 1) / p n bytes     what the rule says first
    y partial -> Shard(1)       as it is                          (p - 1) / p n bytes     taken

Alternatives are also tried where nothing is sent yet: for the one operand that stays a sum over devices, and for a
table to which all devices add entries. So a sum is taken once before several readers, and a gradient's before its cast
to a wider type. In the rows of benchmarks/axes.py, at their default sizes, the plans of a row together would send
without this 144 MiB and not 132 (sequence), and 1,248 MiB and not 936 (fsdp-use).

A mesh axis may be split into sub-axes. Sixteen devices along it can split the columns of a projection, but not the
eight heads that a reshape makes of them. But seen as `[8, 2]` the devices are two axes, and each of them splits a
dimension:

    columns [1024]      Shard(0) along 16   =   Shard(0, 1) along 8, Shard(0, 8) along 2
    heads   [8, 128]    none                    Shard(0) along 8,    Shard(1) along 2

So eight heads of keys and values lie as the groups of queries that read them (the word is Shardy's). A plan for
sub-axes begins and ends with arrays that lie along whole ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise

from jpipe.jax.flat_jaxpr import FlatJaxpr, flatten, operand_shape, result_shape
from jpipe.jax.primitives import JaxprEqn
from jpipe.jax.tracing import equations_in
from jpipe.partitioner.conversions import cost_of_conversion
from jpipe.partitioner.rule import dims_of_entries
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, AxisSharding, Shape, Shard, Sharding, is_possible
from jpipe.partitioner.way import Axes, Conversion, DevicePlan, PlannedEquation, Way, way_by_rule


def with_sub_axes(flat: FlatJaxpr, axes: Axes) -> Axes:
    """Splits axes into sub-axes where reshapes would have to gather arrays that these can split."""
    equations = equations_in(e.equation for e in flat.equations)
    shapes = {(operand_shape(e), result_shape(e)) for e in equations if e.primitive.name == "reshape"}
    return tuple(sub_axis for axis in axes for sub_axis in _sub_axes(axis, shapes))


def along_sub_axes(sharding: Sharding, axes: Axes, sub_axes: Axes) -> Sharding:
    """Says along sub-axes the same as a sharding says along the axes."""
    along = {axis.names: s for s, axis in zip(sharding, axes, strict=True)}
    shift = lambda s, outer: Shard(s.dim, s.outer * outer) if isinstance(s, Shard) else s
    return tuple(shift(along[axis.names], axis.outer) for axis in sub_axes)


def along_whole_axes(sharding: Sharding, axes: Axes, sub_axes: Axes) -> Sharding:
    """Makes the sharding along axes to which one along their sub-axes is to be converted.

    What can't be said along the whole axis is partial, if it is along one sub-axis, else replicated.
    """

    def along(axis: Axis) -> AxisSharding:
        pairs = [(s, part) for s, part in zip(sharding, sub_axes, strict=True) if part.names == axis.names]
        lying, parts = zip(*pairs, strict=True)
        if lying == along_sub_axes(lying[:1], (axis,), parts):
            return lying[0]
        return PARTIAL if PARTIAL in lying else REPLICATED

    return tuple(map(along, axes))


def _sub_axes(axis: Axis, reshapes: Iterable[tuple[Shape, Shape]]) -> list[Axis]:
    """Splits an axis into sub-axes, if reshapes ask for it: for 4 and 8 of 16 devices into `[4, 2, 2]`."""
    counts = {count for old, new in reshapes for count in _shared(axis.size, old, new)}
    if axis.is_data or not counts:
        return [axis]
    ends = [1]  # of 4 and 6 of 12 devices, which don't divide one another, the smaller
    for count in [*sorted(counts), axis.size]:
        if count % ends[-1] == 0:
            ends.append(count)
    return [Axis(axis.names, (end // start,), outer=start, inner=axis.size // end) for start, end in pairwise(ends)]


def _shared(size: int, old: Shape, new: Shape) -> set[int]:
    """Finds into how many parts `size` devices can split the first of the dimensions that a reshape makes of one.

    Where they can split the one, but not the first of those: [32] on 16 devices, and [8, 4] on 8 pairs of them.
    """
    starts = dict(zip(accumulate(old, lambda a, b: a * b, initial=1), old, strict=False))
    counts = set()
    for start, dim in zip(accumulate(new, lambda a, b: a * b, initial=1), new, strict=False):
        whole = starts.get(start, 0)
        if whole > dim > 1 and whole % size == 0:
            counts.add(math.gcd(dim, size))
    return counts - {1, size}


HORIZON = 140
"""For how many equations an alternative is followed: about a layer's forward, or half of its backward. Rules do badly,
so that a longer look ahead is misled more. In the rows of benchmarks/axes.py, at three widths, 120 would send up to
1.06 times as much as 140 (fsdp-model), and 165 up to 1.3 times (sequence)."""

Wanted = Callable[[Sharding], Sharding]
"""How a result lies by itself -> how it has to lie."""
Handler = Callable[["Chooser", JaxprEqn, Sequence[Sharding]], Way]
"""(chooser, equation of whole arrays, how its operands lie) -> how it is carried out."""
Forms = dict[int, tuple[Sharding, ...]]
"""The shardings in which a device has each value, by its number. Rules are asked about the first of them."""


def always(sharding: Sharding) -> Wanted:
    """Wants one sharding of a result, however it lies by itself."""
    return lambda _: sharding


def as_it_lies(sharding: Sharding) -> Sharding:
    """Wants a result to lie as it does by itself."""
    return sharding


def cheapest_plan(
    axes: Axes, handlers: Mapping[str, Handler], flat: FlatJaxpr, lie: Sequence[Sharding], wanted: Sequence[Wanted]
) -> DevicePlan:
    """Makes a plan along the axes and one along their sub-axes, and returns the cheaper one.

    With sub-axes 16 devices are seen as `[8, 2]`, which can split eight heads. For arguments see `Chooser` and
    `Chooser.make_plan`; those of the jaxpr `lie` so. The plan speaks of its own axes.
    """
    plans: list[DevicePlan] = []
    for own in dict.fromkeys([axes, with_sub_axes(flat, axes)]):
        lying, wishes = [along_sub_axes(s, axes, own) for s in lie], [_wish_along(own, axes, wish) for wish in wanted]
        plans.append(Chooser(own, handlers).make_plan(flat, lying, wishes))
    return min(plans, key=lambda plan: plan.cost)


def _wish_along(sub_axes: Axes, axes: Axes, wish: Wanted) -> Wanted:
    """Makes the wish along sub-axes that says the same as one along the axes."""
    return lambda s: along_sub_axes(wish(along_whole_axes(s, axes, sub_axes)), axes, sub_axes)


class Chooser:
    """Makes plans for jaxprs.

    Attributes:
      axes: what arrays are split over.
      handlers: name of a primitive -> the handler of its equations (loops, branches, users' constraints); for all
        others there are rules.
      by_rule: an equation, how its operands lie -> its way by its rule.
      flat: a loop's body or a branch -> its flat jaxpr.
      cost_of_conversion: shape, bytes of an element, how an array lies, how it is to lie -> the cost of the conversion.
      way: a flat jaxpr, the number of an equation, how its operands lie -> its way by its handler or rule; the way may
        want operands otherwise.
      results_at: a flat jaxpr, how its arguments lie -> how its results lie by themselves, as the rules say.
        Handlers of loops, branches and users' shardings ask it of their bodies, `results_by_rules` of whole layers.
    """

    def __init__(self, axes: Axes, handlers: Mapping[str, Handler], by_rule: Callable[..., Way] = way_by_rule):
        self.axes, self.handlers = axes, handlers
        self.by_rule = cache(partial(by_rule, axes=axes))
        # Each level of nested loops asks several times for what is in it.
        self.flat = cache(partial(flatten, is_body=True))
        self.cost_of_conversion = cache(partial(cost_of_conversion, axes))
        self.way, self.results_at = cache(self._way), cache(self._results_at)

    def make_plan(self, flat: FlatJaxpr, arguments: Sequence[Sharding], wanted: Sequence[Wanted]) -> DevicePlan:
        """Makes a cheap plan, which is never dearer than the one that the rules alone make.

        Args:
          flat: the jaxpr.
          arguments: how its arguments lie.
          wanted: for each result, from how it lies by itself how it has to lie.
        """
        by_rules, draft = self.by_rules(flat, arguments, wanted), _Draft(self, flat, arguments, wanted)
        if not by_rules.conversions and not any(planned.conversions for planned in by_rules.equations):
            return by_rules  # there is no other way
        return min(draft.plan(draft.cheapest), by_rules, key=lambda plan: plan.cost)

    def by_rules(self, flat: FlatJaxpr, arguments: Sequence[Sharding], wanted: Sequence[Wanted]) -> DevicePlan:
        """Makes the plan of the rules alone, which don't look ahead; its arguments are those of `make_plan`."""
        draft = _Draft(self, flat, arguments, wanted)
        return draft.plan(draft.way)

    def _results_at(self, flat: FlatJaxpr, arguments: tuple[Sharding, ...]) -> list[Sharding]:
        return list(self.by_rules(flat, arguments, [as_it_lies] * len(flat.results)).results)

    def _way(self, flat: FlatJaxpr, at: int, lying: tuple[Sharding, ...]) -> Way:
        equation = flat.equations[at].equation
        if handler := self.handlers.get(equation.primitive.name):
            return handler(self, equation, lying)
        # What no equation reads is a result: if it is a cast to a wider type, it may stay partial and be summed after
        # the cast.
        is_last = not flat.read.intersection(flat.equations[at].makes)
        return self.by_rule(equation, lying, is_last=is_last)


class _Draft:
    """A plan in the making: equations get their ways from the first to the last.

    Attributes:
      forms: the shardings in which a device has the values that the equations so far have made.
    """

    def __init__(self, chooser: Chooser, flat: FlatJaxpr, arguments: Sequence[Sharding], wanted: Sequence[Wanted]):
        self.chooser, self.flat, self.axes = chooser, flat, chooser.axes
        self.arguments, self.wanted = tuple(arguments), wanted
        self.forms: Forms = dict.fromkeys(flat.constants, ((REPLICATED,) * len(self.axes),))
        self.forms |= {value: (sharding,) for value, sharding in zip(flat.arguments, arguments, strict=True)}

    def plan(self, choose: Callable[[int], Way]) -> DevicePlan:
        """Makes the plan in which each equation has the way that `choose` gives for its number, asked in order.

        `choose` may look at `forms`, which has then what the equations before have made.
        """
        equations: list[PlannedEquation] = []
        cost = 0.0
        for at, flat in enumerate(self.flat.equations):
            way = choose(at)
            conversions, cost_of_way = self._take(at, way, self.forms)
            equations.append(PlannedEquation(flat, conversions, way))
            cost += cost_of_way
        results, conversions, last = self._give(self.forms)
        return DevicePlan(self.flat, self.axes, self.arguments, equations, conversions, results, cost + last)

    # --- which way to take: each of these may be the `choose` of `plan` ---

    def way(self, at: int) -> Way:
        """Takes the way of an equation by the rules."""
        return self.chooser.way(self.flat, at, self._lying(at, self.forms))

    def cheapest(self, at: int) -> Way:
        """Finds the way of an equation that is cheapest together with the equations after it."""
        first = self._best_by_rules(at, self.forms)
        if self._is_handled(at):
            return first  # the handler alone knows how
        ways = {(first.operands, first.results): first}
        for lying in self._alternatives(at, first):
            way = self.chooser.way(self.flat, at, lying)
            ways.setdefault((way.operands, way.results), way)
        best, least = first, math.inf
        for way in ways.values() if len(ways) > 1 else ():
            if (cost := self._followed(at, way, least)) < least:
                best, least = way, cost
        return best

    # --- looking ahead ---

    def _alternatives(self, at: int, first: Way) -> Iterator[tuple[Sharding, ...]]:
        """Yields other shardings of the operands, of which one at a time lies otherwise along one axis.

        Along axes along which the first way converts operands, at a price, each operand may be replicated, and those
        that are converted may also be split along a dimension. Where none is converted, so may the one that stays
        partial, or the table that entries are added to, along a dimension that they choose from. (Of two operands
        that stay partial the result takes one transfer where they would take two, so it is left to the reader.)
        """
        flat, lying = self.flat.equations[at], self._lying(at, self.forms)
        shapes = [self.flat.avals[value].shape for value in flat.reads]
        entries = dims_of_entries(flat.equation) if flat.equation.primitive.name == "scatter-add" else []
        sends = self._convert(flat.reads, first.operands, dict(self.forms))[1] > 0
        for i in range(len(self.axes)):
            along = [(now[i], taken[i]) for now, taken in zip(lying, first.operands, strict=True)]
            converted = [k for k, (now, taken) in enumerate(along) if now != taken] if sends else []
            sums = [k for k, pair in enumerate(along) if pair == (PARTIAL, PARTIAL)]
            dims = {k: range(len(shapes[k])) for k in converted or (sums if len(sums) == 1 else [])}
            dims = dims or ({0: entries} if entries else {})
            for k in range(len(lying)) if dims else ():
                for other in (REPLICATED, *map(Shard, dims.get(k, ()))):
                    sharding = (*lying[k][:i], other, *lying[k][i + 1 :])
                    if sharding != lying[k] and is_possible(shapes[k], sharding, self.axes):
                        yield (*lying[:k], sharding, *lying[k + 1 :])

    def _followed(self, at: int, way: Way, least: float) -> float:
        """The cost of a way, of the equations up to the horizon by the rules, and of results made by then.

        It is infinite, and not followed to the end, where it isn't less than `least`.
        """
        forms, end = dict(self.forms), min(at + 1 + HORIZON, len(self.flat.equations))
        cost = self._take(at, way, forms)[1]
        for later in range(at + 1, end):
            if cost >= least:  # costs only grow
                return math.inf
            cost += self._take(later, self._best_by_rules(later, forms), forms)[1]
        return cost + self._give(forms)[2]

    def _best_by_rules(self, at: int, forms: Forms) -> Way:
        """Finds the cheapest way by the rules, where one operand may be taken in any form that a device has.

        A value that was gathered for one reader is there for the next.
        """
        reads, lying = self.flat.equations[at].reads, self._lying(at, forms)
        first = self.chooser.way(self.flat, at, lying)
        others = [(*lying[:k], form, *lying[k + 1 :]) for k, v in enumerate(reads) for form in forms[v][1:]]
        if not others or self._is_handled(at):
            return first
        ways = [first, *(self.chooser.way(self.flat, at, other) for other in others)]
        return min(ways, key=lambda way: self._convert(reads, way.operands, dict(forms))[1] + way.cost)

    def _is_handled(self, at: int) -> bool:
        """Whether the equation is a user's constraint, a loop or a branch, which has a handler of its own."""
        return self.flat.equations[at].equation.primitive.name in self.chooser.handlers

    # --- what a device has, and conversions; all of these add to `forms` what they make ---

    def _lying(self, at: int, forms: Forms) -> tuple[Sharding, ...]:
        """Says how an equation's operands lie; of several forms it takes the first."""
        return tuple(forms[value][0] for value in self.flat.equations[at].reads)

    def _take(self, at: int, way: Way, forms: Forms) -> tuple[list[Conversion], float]:
        """Takes a way: the conversions that it needs, and its cost with them."""
        flat = self.flat.equations[at]
        conversions, cost = self._convert(flat.reads, way.operands, forms)
        forms.update((value, (sharding,)) for value, sharding in zip(flat.makes, way.results, strict=True))
        return conversions, cost + way.cost

    def _give(self, forms: Forms) -> tuple[tuple[Sharding, ...], list[Conversion], float]:
        """Gives the results that are made: how they lie in the end, the conversions to that, and the cost of these."""
        made = [(value, wish) for value, wish in zip(self.flat.results, self.wanted, strict=True) if value in forms]
        results = tuple(wish(forms[value][0]) for value, wish in made)
        return results, *self._convert([value for value, _ in made], results, forms)

    def _convert(self, values: Sequence[int], to: Sequence[Sharding], forms: Forms) -> tuple[list[Conversion], float]:
        """Converts values to shardings, each from the form from which it is cheapest."""
        conversions, cost = [], 0.0
        for value, sharding in zip(values, to, strict=True):
            old, aval = forms[value], self.flat.avals[value]
            if sharding in old:
                continue
            costs = [self.chooser.cost_of_conversion(aval.shape, aval.dtype.itemsize, form, sharding) for form in old]
            conversions.append(Conversion(value, old[costs.index(min(costs))], sharding))
            cost += min(costs)
            # Rules are asked about the first form. A sum goes to the front, so that it isn't taken again; a gathered
            # or cut form goes to the end, so that the value still counts as lying as it was made.
            is_sum = all(a in (b, PARTIAL) and b != PARTIAL for a, b in zip(old[0], sharding, strict=True))
            forms[value] = (sharding, *old) if is_sum else (*old, sharding)
        return conversions, cost
