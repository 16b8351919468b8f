"""Chooses how to carry out each equation of a jaxpr: the way for which devices send the fewest bytes.

A rule (`jpipe.partitioner.rules`) says how an equation is carried out, given how its operands lie. The rules alone,
from the first equation to the last, make a plan, but one that doesn't look ahead. So where an equation would convert an
operand, other shardings of that operand are tried too, and the rule says what follows from each. Each alternative is
followed for some more equations, and the cheapest is taken (this is known as *rollout* of a policy; D. Bertsekas,
Reinforcement Learning and Optimal Control, 2019, section 2.4). An example is a sum y over devices, of which a norm and
a residual connection take their parts of the sequence:

    y partial -> replicated     cut to the sequence's parts     2 (p - 1) / p n bytes     what the rule says first
    y partial -> Shard(1)       as it is                          (p - 1) / p n bytes     taken

Two changes to a plan are tried at last. Where one reader takes a sum, and another goes on with the partial values and
has to sum them later: one sum before both. And where entries are added to a whole constant, such as the zeros of a
table's gradient: a split constant. Costs are in bytes that a device sends. Computing and writing count too, as the
bytes that could be sent meanwhile; otherwise it would be cheapest to compute everything on every device. Rollouts see
neither to the end nor what is chosen on the way. So two plans are made, by other prices and other ways to look ahead,
and the cheaper one is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np

from jpipe.jaxprs.flat_jaxpr import FlatEquation, FlatJaxpr, aval_of, flatten
from jpipe.partitioner.conversions import bytes_sent, collective_of, hops
from jpipe.partitioner.rule import RuleResult
from jpipe.partitioner.rules import RULES, part_params
from jpipe.partitioner.shardings import (
    PARTIAL,
    REPLICATED,
    AxisSharding,
    Shape,
    Shard,
    Sharding,
    is_possible,
    part_shape,
    replicated,
)
from jpipe.partitioner.sub_axes import apart, taken_apart, together
from jpipe.partitioner.way import NOTHING, Axes, Conversion, Cost, DevicePlan, PlannedEquation, Way, added_to_whole
from jpipe.seam.inside import carry_out
from jpipe.seam.jaxpr_types import JaxprEqn

SENT, SCATTERED, FLOPS, WRITTEN = np.eye(4)
"""The quantities counted: bytes sent, bytes of reduce-scatters, operations of products, bytes written; of a device."""
PRICES = SENT + 1.2 * SCATTERED + FLOPS / 1000 + WRITTEN / 128
"""The worth of each in bytes sent; the cheapest plan is taken. In the time of a byte 765 operations are done on a TPU
v5p (459 TFLOP/s, 600 GB/s), 985 on a v5e, 1,100 on an H100 (NVLink, 900 GB/s), and 4.6 bytes written on a v5p
(2,765 GB/s), but few of them: operations are joined. A TPU's compiler scatters 2,048 rows as 2,240, and 144 more."""
TRIED = (PRICES, 200), (SENT + SCATTERED + FLOPS / 1000 + WRITTEN / 8, 50)
"""The prices by which plans are made, and for how many equations an alternative is followed. The second prices prefer a
split sum, because a later reader can use it split. Where rules do badly, a shorter look ahead is misled less."""

Wanted = Callable[[Sharding], Sharding]
"""How a result lies by itself -> how it has to lie."""
Handler = Callable[["Chooser", JaxprEqn, Sequence[Sharding]], Way]
"""(chooser, equation of whole arrays, how its operands lie) -> how it is carried out."""
Forms = dict[int, tuple[Sharding, ...]]
"""The shardings in which a device has each value, by its number; the rules go by the first."""


def always(sharding: Sharding) -> Wanted:
    """However a result lies by itself, it has to lie like this."""
    return lambda _: sharding


def price(prices: Cost, cost: Cost) -> float:
    """The worth of a cost; the same to the last bit on all hosts, or they would choose other plans."""
    a, b, c, d = (prices * cost).tolist()
    return a + b + c + d


def cheapest_plan(
    axes: Axes,
    handlers: Mapping[str, Handler],
    flat: FlatJaxpr,
    arguments: Sequence[Sharding],
    wanted: Sequence[Wanted],
) -> DevicePlan:
    """The cheapest of the plans that are made by all of `TRIED`, and for axes `taken_apart` too.

    Arguments are those of `Chooser` and `Chooser.plan`. The plan speaks of its own axes.
    """

    def along(parts: Axes) -> list[DevicePlan]:
        """The plans along the axes, or along parts of them."""
        along_parts = lambda at: apart(at, axes, parts)
        ends = [lambda at, choose=choose: along_parts(choose(together(at, axes, parts))) for choose in wanted]
        return [Chooser(parts, handlers, *how).plan(flat, list(map(along_parts, arguments)), ends) for how in TRIED]

    plans = [plan for parts in dict.fromkeys([axes, taken_apart(flat, axes)]) for plan in along(parts)]
    return min(plans, key=lambda plan: price(PRICES, plan.cost))


def as_it_lies(sharding: Sharding) -> Sharding:
    """A result may lie as it does by itself."""
    return sharding


class Chooser:
    """Makes plans for jaxprs.

    Attributes:
      axes: what arrays are split over.
      handlers: name of a primitive -> what plans its equations; for all others there are rules.
      prices: what things cost, as `PRICES`.
      horizon: for how many equations an alternative is followed.
      flat: a loop's body or a branch -> it without calls.
      way: a flat jaxpr, the number of an equation, how its operands lie -> how the rules carry it out, or its handler;
        operands may be wanted otherwise.
      results_at: a flat jaxpr, how its arguments lie -> how its results lie by themselves, as the rules say.
    """

    def __init__(self, axes: Axes, handlers: Mapping[str, Handler], prices: Cost = PRICES, horizon: int = 200):
        self.axes, self.handlers, self.prices, self.horizon = axes, handlers, prices, horizon
        # Each level of nested loops asks several times for what is in it.
        self.flat = cache(partial(flatten, is_body=True))
        self.way, self.results_at = cache(self._way), cache(self._results_at)

    def plan(self, flat: FlatJaxpr, arguments: Sequence[Sharding], wanted: Sequence[Wanted]) -> DevicePlan:
        """A plan by which few bytes are sent.

        Args:
          flat: the jaxpr.
          arguments: how its arguments lie.
          wanted: for each result, from how it lies by itself how it has to lie.
        """
        settled: dict[int, Sharding] = {}
        choosing = _Choosing(self, flat, arguments, settled)
        ahead = choosing.plan(wanted, lambda at: choosing.cheapest(at, wanted))
        best = min(ahead, self.by_rules(flat, arguments, wanted), key=lambda plan: price(self.prices, plan.cost))
        for find in (_summed_wide, _summed_twice, added_to_whole):
            for sums in find(best):
                choosing = _Choosing(self, flat, arguments, settled | sums)
                other = choosing.plan(wanted, partial(choosing.as_before_or_cheapest, best, sums, wanted))
                if price(self.prices, other.cost) < price(self.prices, best.cost):
                    best, settled = other, settled | sums
        return best

    def by_rules(self, flat: FlatJaxpr, arguments: Sequence[Sharding], wanted: Sequence[Wanted]) -> DevicePlan:
        """The plan that follows from the rules alone, which don't look ahead; arguments as those of `plan`."""
        choosing = _Choosing(self, flat, arguments, {})
        return choosing.plan(wanted, choosing.way)

    def _results_at(self, flat: FlatJaxpr, arguments: tuple[Sharding, ...]) -> list[Sharding]:
        return list(self.by_rules(flat, arguments, [as_it_lies] * len(flat.results)).results)

    def _way(self, flat: FlatJaxpr, at: int, lying: tuple[Sharding, ...]) -> Way:
        equation = flat.equations[at].equation
        handler = self.handlers.get(equation.primitive.name)
        if handler:
            return handler(self, equation, lying)
        return self.by_rule(equation, lying, is_last=not flat.read.intersection(flat.equations[at].makes))

    def by_rule(self, equation: JaxprEqn, lying: Sequence[Sharding], *, is_last: bool = False) -> Way:
        """The way of an equation by its operation's rule, where its operands lie so.

        Args:
          equation: of whole arrays.
          lying: how its operands lie.
          is_last: whether no other equation reads what it makes: then `Axis.sums_late`, along all axes.
        """
        along_axes = self._apply_rule(equation, lying, is_last)
        operands = tuple(tuple(along.operands[i] for along in along_axes) for i in range(len(lying)))
        results = tuple(tuple(along.results[i] for along in along_axes) for i in range(len(equation.outvars)))
        pairs = zip(equation.outvars, results, strict=True)
        shapes = [part_shape(aval_of(v).shape, sharding, self.axes) for v, sharding in pairs]

        def run(*parts: jax.Array) -> list[jax.Array]:
            operation = partial(_run_on_parts, equation, shapes)
            for along in along_axes:
                operation = along.wrap(operation) if along.wrap else operation
            made = operation(*parts)
            assert [x.shape for x in made] == shapes, equation
            return made

        given = [part_shape(aval_of(v).shape, s, self.axes) for v, s in zip(equation.invars, operands, strict=True)]
        sends = any(along.wrap for along in along_axes)
        return Way(operands, results, run, _cost_of_work(equation, given, shapes), sends=sends)

    def _apply_rule(self, equation: JaxprEqn, lying: Sequence[Sharding], is_last: bool) -> list[RuleResult]:
        """How an equation is carried out along each axis; where there is no way, operands are whole."""
        rule = RULES.get(equation.primitive.name)
        whole = RuleResult([REPLICATED] * len(lying), [REPLICATED] * len(equation.outvars))
        along_axes: list[RuleResult] = []
        for i, axis in enumerate(self.axes):
            axis = replace(axis, sums_late=True) if is_last else axis
            along = rule(equation, [sharding[i] for sharding in lying], axis) if rule else None
            if along is None or not self._is_possible(equation, [*along_axes, along]):
                along = whole
            along_axes.append(along)
        return along_axes

    def _is_possible(self, equation: JaxprEqn, along_axes: list[RuleResult]) -> bool:
        """Whether operands and results can lie so along the first axes."""
        axes, variables = self.axes[: len(along_axes)], (*equation.invars, *equation.outvars)
        shardings = zip(*[(*along.operands, *along.results) for along in along_axes], strict=True)
        return all(is_possible(aval_of(v).shape, s, axes) for v, s in zip(variables, shardings, strict=True))


def _run_on_parts(equation: JaxprEqn, shapes: list[Shape], *operands: jax.Array) -> list[jax.Array]:
    """Carries out an equation on a device's parts of its operands; `shapes` are those of its parts of the results."""
    return carry_out(equation, operands, part_params(equation, [np.shape(x) for x in operands], shapes))


def _cost_of_work(equation: JaxprEqn, operands: Sequence[Shape], results: Sequence[Shape]) -> Cost:
    """The cost of what a device computes and writes."""
    pairs = zip(equation.outvars, results, strict=True)
    written = sum(math.prod(shape) * _itemsize(aval_of(v).dtype) for v, shape in pairs)
    flops = 0.0
    if equation.primitive.name == "dot_general":
        (contracting, _), _ = equation.params["dimension_numbers"]
        flops = 2.0 * math.prod(results[0]) * math.prod(operands[0][dim] for dim in contracting)
    elif equation.primitive.name == "conv_general_dilated":
        given = equation.params["dimension_numbers"].rhs_spec[0]
        flops = 2.0 * math.prod(results[0]) * math.prod(operands[1]) / max(operands[1][given], 1)
    return flops * FLOPS + written * WRITTEN


def _itemsize(dtype: np.dtype) -> int:
    return getattr(dtype, "itemsize", 8)  # a random key has two words


def _summed_twice(plan: DevicePlan) -> list[dict[int, Sharding]]:
    """The partial values that one equation takes as a sum and another one as they are; and how the sum lies then."""
    sums = {c.value: c.wanted for e in plan.equations for c in e.conversions if PARTIAL in c.now}
    taken = [pair for e in plan.equations for pair in zip(e.flat.reads, e.way.operands, strict=True)]
    passed_on = {value for value, sharding in taken if PARTIAL in sharding}
    return [{value: sharding} for value, sharding in sums.items() if value in passed_on and PARTIAL not in sharding]


def _summed_wide(plan: DevicePlan) -> list[dict[int, Sharding]]:
    """The partial values that are cast to a wider type and summed as the jaxpr's results; and how the sums lie then.

    Such values are gradients of parameters that a layer casts to another dtype to compute; all of them at once.
    """
    is_sum = lambda c: any(a == PARTIAL and b != PARTIAL for a, b in zip(c.now, c.wanted, strict=True))
    sums = {c.value: c.wanted for c in plan.conversions if is_sum(c)}
    casts = [e.flat for e in plan.equations if e.flat.equation.primitive.name == "convert_element_type"]
    size = lambda value: _itemsize(plan.flat.avals[value].dtype)
    narrow = [(cast.reads[0], cast.makes[0]) for cast in casts if size(cast.reads[0]) < size(cast.makes[0])]
    found = {value: sums[wide] for value, wide in narrow if wide in sums}
    return [found] if found else []


class _Choosing:
    """A plan in the making.

    Attributes:
      settled: values that are summed or split before any equation reads them, and how they lie then.
      forms: how the values lie that the equations so far have made.
    """

    def __init__(
        self, chooser: Chooser, flat: FlatJaxpr, arguments: Sequence[Sharding], settled: Mapping[int, Sharding]
    ):
        self.chooser, self.flat, self.axes, self.settled = chooser, flat, chooser.axes, settled
        self.arguments = tuple(arguments)
        self.forms: Forms = dict.fromkeys(flat.constants, (replicated(self.axes),))
        self.forms |= {value: (sharding,) for value, sharding in zip(flat.arguments, arguments, strict=True)}
        self._sent: dict[tuple[Shape, int, Sharding, Sharding], Cost] = {}

    def plan(self, wanted: Sequence[Wanted], choose: Callable[[int], Way]) -> DevicePlan:
        """The plan that has the chosen way of each equation, in order; `wanted` says how the results have to lie."""
        equations: list[PlannedEquation] = []
        cost = NOTHING
        for at, flat in enumerate(self.flat.equations):
            first, before = self._settle(at, self.forms)
            way = choose(at)
            conversions, more = self._take(at, way, self.forms)
            equations.append(PlannedEquation(flat, (*first, *conversions), way))
            cost = cost + before + more
        results = [choose(self.forms[value][0]) for choose, value in zip(wanted, self.flat.results, strict=True)]
        conversions, more = self._convert(self.flat.results, results, self.forms)
        fields = {"conversions": tuple(conversions), "results": tuple(results), "cost": cost + more}
        return DevicePlan(self.flat, self.axes, self.arguments, tuple(equations), **fields)

    def way(self, at: int) -> Way:
        """The way that the rules say for an equation."""
        return self.chooser.way(self.flat, at, tuple(self.forms[value][0] for value in self.flat.equations[at].reads))

    def _at_hand(self, at: int, forms: Forms) -> Way:
        """The way that the rules say for an equation; operands at hand in several forms are taken in the best.

        A value that was gathered for one reader is there for the next.
        """
        reads, by_rule = self.flat.equations[at].reads, partial(self.chooser.way, self.flat, at)
        lying = tuple(forms[value][0] for value in reads)
        first = by_rule(lying)
        others = [(*lying[:k], form, *lying[k + 1 :]) for k, v in enumerate(reads) for form in forms[v][1:]]
        if not others or self._is_handled(at):
            return first
        taken = lambda way: self._convert(reads, way.operands, dict(forms))[1] + way.cost
        ways = [first, *map(by_rule, others)]
        return min(ways, key=lambda way: price(self.chooser.prices, taken(way)))

    def _is_handled(self, at: int) -> bool:
        """Whether the equation is a user's constraint, a loop or a branch, which has a handler of its own."""
        return self.flat.equations[at].equation.primitive.name in self.chooser.handlers

    def _settle(self, at: int, forms: Forms) -> tuple[list[Conversion], Cost]:
        """The conversions of an equation's operands that lie otherwise before anything reads them, and their cost."""
        values = [value for value in self.flat.equations[at].reads if value in self.settled]
        return self._convert(values, [self.settled[value] for value in values], forms)

    def _take(self, at: int, way: Way, forms: Forms) -> tuple[list[Conversion], Cost]:
        """The conversions that a way needs, and its cost with them; `forms` has then what was made."""
        flat = self.flat.equations[at]
        conversions, cost = self._convert(flat.reads, way.operands, forms)
        forms.update((value, (sharding,)) for value, sharding in zip(flat.makes, way.results, strict=True))
        return conversions, cost + way.cost

    def _convert(
        self, values: Sequence[int], wanted: Sequence[Sharding], forms: Forms
    ) -> tuple[list[Conversion], Cost]:
        """The conversions to have values as they are wanted, each from where it is cheapest."""
        conversions, cost, prices = [], NOTHING, self.chooser.prices
        for value, sharding in zip(values, wanted, strict=True):
            old = forms[value]
            if sharding in old:
                continue
            now = min(old, key=lambda form: price(prices, self._cost_of(Conversion(value, form, sharding))))
            conversions.append(Conversion(value, now, sharding))
            cost = cost + self._cost_of(conversions[-1])
            # Once a sum was taken, it needn't be taken again: the rules go by what it has become.
            is_settled = all(a in (b, PARTIAL) and b != PARTIAL for a, b in zip(old[0], sharding, strict=True))
            forms[value] = (sharding, *old) if is_settled else (*old, sharding)
        return conversions, cost

    def _cost_of(self, conversion: Conversion) -> Cost:
        """The cost of what a device sends in a conversion."""
        value, now, wanted = conversion
        aval = self.flat.avals[value]
        key = aval.shape, _itemsize(aval.dtype), now, wanted
        if key not in self._sent:
            kind = lambda hop: SCATTERED if collective_of(self.axes, hop) == "reduce_scatter" else SENT
            sent = [kind(hop) * bytes_sent(self.axes, *key[:2], hop) for hop in hops(self.axes, now, wanted)]
            self._sent[key] = sum(sent, start=NOTHING)
        return self._sent[key]

    def cheapest(self, at: int, wanted: Sequence[Wanted]) -> Way:
        """The way of an equation that is cheapest together with the equations after it."""
        first, flat = self._at_hand(at, self.forms), self.flat.equations[at]
        if self._is_handled(at) or not self._convert(flat.reads, first.operands, dict(self.forms))[1].any():
            return first
        ways = {(first.operands, first.results): first}
        for lying in self._hypotheses(flat, first):
            way = self.chooser.way(self.flat, at, lying)
            ways.setdefault((way.operands, way.results), way)
        followed = lambda way: price(self.chooser.prices, self._followed(at, way, wanted))
        return min(ways.values(), key=followed) if len(ways) > 1 else first

    def as_before_or_cheapest(
        self, plan: DevicePlan, values: Collection[int], wanted: Sequence[Wanted], at: int
    ) -> Way:
        """The cheapest way of an equation that follows one that reads any of the values; of others that of a plan."""
        near = self.flat.equations[max(0, at + 1 - self.chooser.horizon) : at + 1]
        is_near = any(value in values for equation in near for value in equation.reads)
        return self.cheapest(at, wanted) if is_near else plan.equations[at].way

    def _hypotheses(self, flat: FlatEquation, first: Way) -> Iterator[tuple[Sharding, ...]]:
        """How operands might lie: otherwise along one axis, where the rules convert one of them."""
        lying = tuple(self.forms[value][0] for value in flat.reads)
        for i, axis in enumerate(self.axes):
            changed = [k for k, (a, b) in enumerate(zip(lying, first.operands, strict=True)) if a[i] != b[i]]
            for k in range(len(lying)) if changed else ():
                shape = self.flat.avals[flat.reads[k]].shape
                others: list[AxisSharding] = [REPLICATED]
                if k in changed:
                    others += [Shard(dim) for dim, size in enumerate(shape) if size % axis.size == 0]
                for other in others:
                    own = (*lying[k][:i], other, *lying[k][i + 1 :])
                    if own != lying[k] and is_possible(shape, own, self.axes):
                        yield (*lying[:k], own, *lying[k + 1 :])

    def _followed(self, at: int, way: Way, wanted: Sequence[Wanted]) -> Cost:
        """The cost of a way, and of the equations after it up to the horizon, by the rules and with what is at hand."""
        forms, end = dict(self.forms), min(at + 1 + self.chooser.horizon, len(self.flat.equations))
        cost = self._take(at, way, forms)[1]
        for later in range(at + 1, end):
            before = self._settle(later, forms)[1]
            cost = cost + before + self._take(later, self._at_hand(later, forms), forms)[1]
        made = [(value, choose) for value, choose in zip(self.flat.results, wanted, strict=True) if value in forms]
        results = [choose(forms[value][0]) for value, choose in made]
        return cost + self._convert([value for value, _ in made], results, forms)[1]
