"""Finds the conversions of a plan that are better made by rings, beside products (`jpipe.partitioner.rings`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.partitioner.by_rule import way_by_rule
from jpipe.partitioner.conversions import collective_of, hops
from jpipe.partitioner.prices import FLOPS, NOTHING, Cost, cost_of_conversion, itemsize
from jpipe.partitioner.rings import Arrival, Departure, Form, Operand, Ring, Rings, Step
from jpipe.partitioner.rules import RULES, part_params
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard, Sharding, part_shape
from jpipe.partitioner.way import Conversion, DevicePlan, PlannedEquation
from jpipe.seam.inside import carry_out

PRODUCTS = ("dot_general",)
LEAST_FLOPS, LEAST_IF_SHARED, LEAST_OF_SUMS = 4500.0, 9000.0, 1000.0
"""The operations of products for each byte that a ring gathers, of one that others read whole, too, and of a sum's. In
the time of a byte, over the two links of an axis, a TPU v5p does 2,300. Products of pieces take about a tenth longer,
and what is read whole is copied once more. A scatter by a ring takes no longer than a TPU's own, which pads it."""
MOST_DEVICES = 8
"""Of more devices, pieces are too small."""
HIDDEN = 0.75
"""How much less what goes round a ring costs."""


def find_rings(plan: DevicePlan) -> Rings:
    """Finds the gathers whose readers are products, and the scattered sums of products, that are worth a ring."""
    return _Finder(plan).found()


def hidden(plan: DevicePlan) -> Cost:
    """What a plan sends by rings."""
    cost = NOTHING
    for (value, now), (_, wanted) in (*plan.rings.arrivals, *plan.rings.departures):
        aval = plan.flat.avals[value]
        cost = cost + cost_of_conversion(plan.axes, aval.shape, itemsize(aval.dtype), now, wanted)
    return cost


class _Finder:
    """Looks through a plan."""

    def __init__(self, plan: DevicePlan):
        self.plan = plan
        self._maker = {form: at for at, planned in enumerate(plan.equations) for form in _made(planned)}
        conversions = [*(c for planned in plan.equations for c in planned.conversions), *plan.conversions]
        self._conversions = {_forms(c): c for c in conversions}
        read = [form for planned in plan.equations for form in _read(planned)]
        results = zip(plan.flat.results, plan.results, strict=True)
        self._readers = Counter([*read, *results, *(before for before, _ in self._conversions)])
        """How often each form is read, or converted."""

    def found(self) -> Rings:
        """What is worth it; an equation is a step of one conversion at most."""
        arrivals: dict[tuple[Form, Form], Arrival] = {}
        departures: dict[tuple[Form, Form], Departure] = {}
        readers, later = dict[int, Step](), set[int]()
        for forms, conversion in self._conversions.items():
            for arrival, steps in self._arrivals(conversion):
                if not readers.keys() & steps.keys():
                    arrivals[forms] = arrival
                    readers |= steps
        for forms, conversion in self._conversions.items():
            for departure, steps in self._departures(conversion):
                if not (later | readers.keys()).intersection(steps):
                    departures[forms] = departure
                    later |= {*steps}
                    break
        return Rings(arrivals, readers, departures, frozenset(later))

    def _along(self, conversion: Conversion, kind: str) -> int | None:
        """The axis along which a conversion is one collective of a kind, of one run of elements, and may be a ring."""
        plan = self.plan
        path = hops(plan.axes, conversion.now, conversion.wanted)
        if len(path) != 1 or len(path[0].over) != 1 or collective_of(plan.axes, path[0]) != kind:
            return None
        (i,), axis = path[0].over, plan.axes[path[0].over[0]]
        shard = (conversion.now if kind == "all_gather" else conversion.wanted)[i]
        others = [s for j, s in enumerate(conversion.now) if j != i]
        alone = isinstance(shard, Shard) and not any(isinstance(s, Shard) and s.dim == shard.dim for s in others)
        return i if alone and axis.ring and not axis.is_part else None

    def _arrivals(self, conversion: Conversion) -> Iterator[tuple[Arrival, dict[int, Step]]]:
        """The gather by a ring, and the steps that read it, by the index of their equations, if it is worth it."""
        i = self._along(conversion, "all_gather")
        shard = None if i is None else conversion.now[i]
        if i is None or not isinstance(shard, Shard):
            return
        gathered = _forms(conversion)[1]
        readers, work = dict[int, Step](), 0.0
        for at, planned in enumerate(self.plan.equations):
            if _read(planned).count(gathered) == 1 and planned.flat.equation.primitive.name in PRODUCTS:
                step = self._step(planned, i, {gathered: shard.dim})
                if step is not None:
                    readers[at] = step
                    work += float(planned.way.cost @ FLOPS)
        least = LEAST_FLOPS if self._readers[gathered] == len(readers) else LEAST_IF_SHARED
        if self._is_worth(conversion, work, least):
            yield Arrival(Ring(self.plan.axes[i]), shard.dim), readers

    def _departures(self, conversion: Conversion) -> Iterator[tuple[Departure, dict[int, Step]]]:
        """The scatter by a ring, and its steps by the index of their equations, where it is worth it."""
        i = self._along(conversion, "reduce_scatter")
        shard = None if i is None else conversion.wanted[i]
        if i is None or not isinstance(shard, Shard):
            return
        for steps in self._back_to_products(_forms(conversion)[0], shard.dim, i):
            equations = [self.plan.equations[at] for at in steps]
            work = sum(float(planned.way.cost @ FLOPS) for planned in equations)
            if self._is_worth(conversion, work, LEAST_OF_SUMS):
                ring, in_order = Ring(self.plan.axes[i]), dict(sorted(steps.items()))
                size = self.plan.flat.avals[conversion.value].shape[shard.dim] // ring.axis.size
                yield Departure(ring, size, tuple(in_order.values())), in_order

    def _back_to_products(self, form: Form, dim: int, i: int) -> Iterator[dict[int, Step]]:
        """The steps from products to a form in pieces; nothing else reads what they make."""
        at = self._maker.get(form)
        if at is None or self._readers[form] != 1:
            return
        planned = self.plan.equations[at]
        reads = _read(planned)
        if planned.flat.equation.primitive.name in PRODUCTS:
            for before in dict.fromkeys(reads):
                for of_operand in range(len(before[1]) and len(self.plan.flat.avals[before[0]].shape)):
                    step = self._step(planned, i, {before: of_operand})
                    if step is not None and step.makes == (form, dim):
                        yield {at: step}
            return
        partial = [before for before in dict.fromkeys(reads) if before[1][i] == PARTIAL]
        step = self._step(planned, i, dict.fromkeys(partial, dim))
        if step is None or step.makes != (form, dim):
            return
        before: list[dict[int, Step]] = []
        for one in partial:
            found = next(self._back_to_products(one, dim, i), None)
            if found is None:
                return
            before.append(found)
        if partial:
            yield {k: step for steps in before for k, step in steps.items()} | {at: step}

    def _step(self, planned: PlannedEquation, i: int, dims: dict[Form, int]) -> Step | None:
        """The equation on pieces of some operands; None if it can't be done so, or its result isn't in pieces."""
        equation, way, reads = planned.flat.equation, planned.way, _read(planned)
        if equation.primitive.name not in RULES or way.sends or way.plans or len(way.results) != 1:
            return None
        axes = (*self.plan.axes, Axis(("pieces",), (self.plan.axes[i].size,)))
        lying = [(*form[1], Shard(dims[form]) if form in dims else REPLICATED) for form in reads]
        found = way_by_rule(equation, lying, axes)
        (makes,) = found.results
        same = all(a[:-1] == b for a, b in zip(found.operands, way.operands, strict=True))
        same &= makes[:-1] == way.results[0] and all(a == b for a, b in zip(found.operands, lying, strict=True))
        one_run = all(_is_one_run_alone(s) for s in (*found.operands, makes))
        along = makes[-1]
        if found.sends or not (same and one_run and isinstance(along, Shard)):
            return None

        forms = [form if form in dims else self._before_cast(form) for form in reads]
        shape = part_shape(self.plan.flat.avals[planned.flat.makes[0]].shape, makes, axes)

        def run(operands: Sequence[jax.Array], count: int) -> jax.Array:
            made = tuple(size * count if dim == along.dim else size for dim, size in enumerate(shape))
            params = part_params(equation, [np.shape(x) for x in operands], [made])
            if forms == reads:
                return carry_out(equation, operands, params)[0]
            params |= {"precision": lax.Precision.DEFAULT, "preferred_element_type": np.dtype(np.float32)}
            return lax.convert_element_type(carry_out(equation, operands, params)[0], equation.outvars[0].aval.dtype)

        operands = tuple(Operand(form, dims.get(before)) for form, before in zip(forms, reads, strict=True))
        return Step(operands, Operand(_made(planned)[0], along.dim), run)

    def _before_cast(self, form: Form) -> Form:
        """What was cast from float32 to bfloat16, as a weight is; the form itself, if nothing was.

        A TPU's product of float32 and bfloat16 multiplies bfloat16 (`Precision.DEFAULT`). Without a cast its compiler
        can't carry out the cast apart from the products of all pieces, which takes longer than to read float32.
        """
        planned = self.plan.equations[self._maker[form]] if form in self._maker else None
        if planned is None or planned.flat.equation.primitive.name != "convert_element_type":
            return form
        (before,) = _read(planned)
        dtypes = [self.plan.flat.avals[value].dtype for value, _ in (before, form)]
        return before if dtypes == [jnp.float32, jnp.bfloat16] and before[1] == form[1] else form

    def _is_worth(self, conversion: Conversion, work: float, least: float) -> bool:
        """Whether so many operations hide what is sent."""
        aval = self.plan.flat.avals[conversion.value]
        sent = cost_of_conversion(self.plan.axes, aval.shape, itemsize(aval.dtype), *conversion[1:])
        return work > 0 and work >= least * float(sent[:2].sum())


def _is_one_run_alone(sharding: Sharding) -> bool:
    """Whether pieces are of one run of elements, and no axis splits the same dimension."""
    along = sharding[-1]
    if not isinstance(along, Shard):
        return True
    return along.outer == 1 and not any(isinstance(s, Shard) and s.dim == along.dim for s in sharding[:-1])


def _forms(conversion: Conversion) -> tuple[Form, Form]:
    """The forms before and after it."""
    return (conversion.value, conversion.now), (conversion.value, conversion.wanted)


def _read(planned: PlannedEquation) -> list[Form]:
    """The forms that an equation reads."""
    return list(zip(planned.flat.reads, planned.way.operands, strict=True))


def _made(planned: PlannedEquation) -> list[Form]:
    """The forms that an equation makes."""
    return list(zip(planned.flat.makes, planned.way.results, strict=True))
