"""Finds the conversions of a plan that are better made by rings, beside products (`jpipe.partitioner.rings`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax import lax

from jpipe.jaxprs.flat_jaxpr import aval_of
from jpipe.partitioner.by_rule import way_by_rule
from jpipe.partitioner.conversions import collective_of, hops
from jpipe.partitioner.prices import FLOPS, NOTHING, SCATTERED, SENT, Cost, cost_of_conversion, itemsize
from jpipe.partitioner.rings import HIDDEN, Arrival, Departure, Form, PieceStep, Ring, Rings
from jpipe.partitioner.rules import RULES, part_params
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard, Sharding, part_shape
from jpipe.partitioner.way import Conversion, DevicePlan, PlannedEquation
from jpipe.seam.inside import carry_out

LEAST_FLOPS, LEAST_IF_SHARED, LEAST_OF_SUMS = 4500.0, 9000.0, 1000.0
"""The operations of products for each byte that a ring gathers, of one that others read whole, too, and of a sum's. In
the time of a byte, over the two links of an axis, a TPU v5p does 2,300. Products of pieces take about a tenth longer,
and what is read whole is copied once more. A scatter by a ring takes no longer than a TPU's own, which pads it."""


def find_rings(plan: DevicePlan) -> Rings:
    """Finds the gathers whose readers are products, and the scattered sums of products, that are worth a ring."""
    return _Finder(plan).found()


def hidden(plan: DevicePlan) -> Cost:
    """Counts what a plan sends by rings and nobody waits for."""
    cost = NOTHING
    for (value, now), (_, wanted) in (*plan.rings.arrivals, *plan.rings.departures):
        aval = plan.flat.avals[value]
        cost = cost + cost_of_conversion(plan.axes, aval.shape, itemsize(aval.dtype), now, wanted)
    return HIDDEN * cost


class _Finder:
    """Looks through a plan."""

    def __init__(self, plan: DevicePlan):
        self.plan = plan
        self._maker = {form: at for at, planned in enumerate(plan.equations) for form in _made(planned)}
        self._conversions = [*(c for planned in plan.equations for c in planned.conversions), *plan.conversions]
        read = [form for planned in plan.equations for form in _read(planned)]
        results = zip(plan.flat.results, plan.results, strict=True)
        self._readers = Counter([*read, *results, *(_forms(c)[0] for c in self._conversions)])
        """How often each form is read, or converted."""

    def found(self) -> Rings:
        """Finds what is worth it; an equation is a step of one conversion at most."""
        arrivals, readers = dict[tuple[Form, Form], Arrival](), dict[int, PieceStep]()
        departures, later = dict[tuple[Form, Form], Departure](), set[int]()
        for conversion, (i, dim) in self._along("all_gather"):
            steps = self._that_gather(conversion, i, dim)
            if steps and not readers.keys() & steps.keys():
                arrivals[_forms(conversion)] = Arrival(Ring(self.plan.axes[i]), dim)
                readers |= steps
        for conversion, (i, dim) in self._along("reduce_scatter"):
            size = self.plan.flat.avals[conversion.value].shape[dim] // self.plan.axes[i].size
            for steps in self._that_scatter(conversion, i, dim):
                if not (later | readers.keys()).intersection(steps):
                    departures[_forms(conversion)] = Departure(Ring(self.plan.axes[i]), size, tuple(steps.values()))
                    later |= {*steps}
                    break
        return Rings(arrivals, readers, departures, frozenset(later))

    def _along(self, kind: str) -> Iterator[tuple[Conversion, tuple[int, int]]]:
        """The conversions that are one collective of a kind, which may go by a ring, each with (axis, dimension)."""
        axes = self.plan.axes
        for conversion in self._conversions:
            path = hops(axes, conversion.now, conversion.wanted)
            if len(path) != 1 or len(path[0].over) != 1 or collective_of(axes, path[0]) != kind:
                continue
            (i,) = path[0].over
            shard = (conversion.now if kind == "all_gather" else conversion.wanted)[i]
            others = [s for j, s in enumerate(conversion.now) if j != i]
            is_split_twice = any(
                isinstance(a, Shard) and isinstance(shard, Shard) and a.dim == shard.dim for a in others
            )
            if axes[i].ring and not axes[i].is_part and isinstance(shard, Shard) and not is_split_twice:
                yield conversion, (i, shard.dim)

    def _that_gather(self, conversion: Conversion, i: int, dim: int) -> dict[int, PieceStep]:
        """The products that read what a ring gathers, by the index of their equations; none if it isn't worth it."""
        gathered, found = _forms(conversion)[1], dict[int, PieceStep]()
        for at, planned in enumerate(self.plan.equations):
            if _is_product(planned) and _read(planned).count(gathered) == 1:
                step = self._step(planned, i, {gathered: dim})
                found |= {} if step is None else {at: step}
        least = LEAST_FLOPS if self._readers[gathered] == len(found) else LEAST_IF_SHARED
        return found if self._is_worth(conversion, found, least) else {}

    def _that_scatter(self, conversion: Conversion, i: int, dim: int) -> Iterator[dict[int, PieceStep]]:
        """The steps of a sum that a ring scatters, by the index of their equations, in order, if it is worth it."""
        for steps in self._back_to_products(_forms(conversion)[0], dim, i):
            if self._is_worth(conversion, steps, LEAST_OF_SUMS):
                yield dict(sorted(steps.items()))

    def _back_to_products(self, form: Form, dim: int, i: int) -> Iterator[dict[int, PieceStep]]:
        """The steps from products to a form in pieces, whose results nothing else reads.

        What is added to them is there whole.
        """
        at = self._maker.get(form)
        if at is None or self._readers[form] != 1:
            return
        planned = self.plan.equations[at]
        forms = dict.fromkeys(_read(planned))
        if _is_product(planned):
            dims = [{one: k} for one in forms for k in range(len(self.plan.flat.avals[one[0]].shape))]
            steps = [self._step(planned, i, of_one) for of_one in dims]
            yield from ({at: step} for step in steps if step is not None and step.dim == dim)
            return
        partial = [one for one in forms if one[1][i] == PARTIAL]
        step = self._step(planned, i, dict.fromkeys(partial, dim))
        before = [next(self._back_to_products(one, dim, i), {}) for one in partial]
        if step is not None and step.dim == dim and any(before):
            yield {k: one for steps in before for k, one in steps.items()} | {at: step}

    def _step(self, planned: PlannedEquation, i: int, dims: dict[Form, int]) -> PieceStep | None:
        """The equation on pieces of some operands; None if it can't be done so, or its result isn't in pieces."""
        equation, way, reads = planned.flat.equation, planned.way, _read(planned)
        if equation.primitive.name not in RULES or way.sends or way.plans or len(way.results) != 1:
            return None
        axes = (*self.plan.axes, Axis(("pieces",), (self.plan.axes[i].size,)))
        lying = tuple((*form[1], Shard(dims[form]) if form in dims else REPLICATED) for form in reads)
        found = way_by_rule(equation, lying, axes)
        (makes,), along = found.results, found.results[0][-1]
        is_way = found.operands == lying and makes[:-1] == way.results[0] and not found.sends
        if not is_way or not isinstance(along, Shard) or not all(map(_is_one_run_alone, (*lying, makes))):
            return None
        forms = [form if form in dims or not _is_product(planned) else self._before_cast(form) for form in reads]
        shape = part_shape(self.plan.flat.avals[planned.flat.makes[0]].shape, makes, axes)

        def run(operands: Sequence[jax.Array], count: int) -> jax.Array:
            made = tuple(size * count if dim == along.dim else size for dim, size in enumerate(shape))
            params = part_params(equation, [np.shape(x) for x in operands], [made])
            if forms == reads:
                return carry_out(equation, operands, params)[0]
            params |= {"precision": lax.Precision.DEFAULT, "preferred_element_type": np.dtype(np.float32)}
            return carry_out(equation, operands, params)[0].astype(aval_of(equation.outvars[0]).dtype)

        operands = tuple((form, dims.get(before)) for form, before in zip(forms, reads, strict=True))
        return PieceStep(operands, _made(planned)[0], along.dim, run)

    def _before_cast(self, form: Form) -> Form:
        """Finds what was cast from float32 to bfloat16, as a weight is; the form itself, if nothing was.

        A TPU's product of float32 and bfloat16 multiplies bfloat16 (`Precision.DEFAULT`). A cast that the products of
        all pieces read its compiler carries out apart, which takes longer than the transfer.
        """
        planned = self.plan.equations[self._maker[form]] if form in self._maker else None
        if planned is None or planned.flat.equation.primitive.name != "convert_element_type":
            return form
        (before,) = _read(planned)
        casts = [self.plan.flat.avals[value].dtype.name for value, _ in (before, form)] == ["float32", "bfloat16"]
        return before if casts and before[1] == form[1] else form

    def _is_worth(self, conversion: Conversion, steps: Mapping[int, PieceStep], least: float) -> bool:
        """Whether so many operations a byte that is sent are done meanwhile."""
        aval = self.plan.flat.avals[conversion.value]
        sent = cost_of_conversion(self.plan.axes, aval.shape, itemsize(aval.dtype), conversion.now, conversion.wanted)
        work = sum(float(self.plan.equations[at].way.cost @ FLOPS) for at in steps)
        return work > 0 and work >= least * float((SENT + SCATTERED) @ sent)


def _is_product(planned: PlannedEquation) -> bool:
    return planned.flat.equation.primitive.name == "dot_general"


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
