"""Finds the conversions of a plan that are better made by rings, beside products (`jpipe.partitioner.rings`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax import lax

from jpipe.jax.flat_jaxpr import aval_of
from jpipe.jax.inside import carry_out, within
from jpipe.partitioner.conversions import FLOPS, NOTHING, SCATTERED, SENT, Cost, collective_of, cost_of_conversion, hops
from jpipe.partitioner.rings import HIDDEN, Departure, Form, PieceStep, Ring, Rings
from jpipe.partitioner.rules import RULES, part_params
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shape, Shard, Sharding, part_shape
from jpipe.partitioner.way import Conversion, DevicePlan, PlannedEquation, way_by_rule

LEAST_FLOPS, LEAST_IF_SHARED, LEAST_OF_SUMS, LEAST_OF_WEIGHTS = 4500.0, 9000.0, 1000.0, 2000.0
"""The operations of products for each byte that a ring gathers, of one that others read whole, too, of a sum's, and of
weights' that are gathered along a data axis: many bytes, whose pieces nobody joins. In the time of a byte, over the two
links of an axis, a TPU v5p does 2,300. Products of pieces take about a tenth longer, and what is read whole is copied
once more. A scatter by a ring takes no longer than a TPU's own, which pads it."""


def find_rings(plan: DevicePlan) -> Rings:
    """Finds the gathers whose readers are products, and the scattered sums of products, that are worth a ring."""
    return _Finder(plan).found()


class _Finder:
    """Looks through a plan.

    Attributes:
      plan: the plan.
      maker: the index of the equation that makes a form.
      readers: the indices of the equations that read a form; one behind all of them for conversions and results.
    """

    def __init__(self, plan: DevicePlan):
        self.plan = plan
        self.maker = {form: at for at, planned in enumerate(plan.equations) for form in _made(planned)}
        self.conversions = [*(c for planned in plan.equations for c in planned.conversions), *plan.conversions]
        self.readers = defaultdict[Form, list[int]](list)
        for at, planned in enumerate(plan.equations):
            for form in _read(planned):
                self.readers[form].append(at)
        for form in (*map(_before, self.conversions), *zip(plan.flat.results, plan.results, strict=True)):
            self.readers[form].append(len(plan.equations))

    def found(self) -> Rings:
        """Finds what is worth it; an equation is a step of one conversion at most."""
        arrivals, readers = dict[tuple[Form, Form], tuple[Ring, int]](), dict[int, PieceStep]()
        departures, later = dict[tuple[Form, Form], Departure](), set[int]()
        hidden = NOTHING
        for conversion, i, dim in self._along("all_gather"):
            steps = self._that_gather(conversion, i, dim)
            if steps and not readers.keys() & steps.keys():
                arrivals[_before(conversion), _after(conversion)] = Ring(self.plan.axes[i]), dim
                readers |= steps
                hidden = hidden + self._hidden(conversion, steps)
        for conversion, i, dim in self._along("reduce_scatter"):
            size = self.plan.flat.avals[conversion.value].shape[dim] // self.plan.axes[i].size
            for steps in self._back_to_products(_before(conversion), dim, i):
                is_free = not (later | readers.keys()).intersection(steps)
                if is_free and self._is_worth(conversion, steps, LEAST_OF_SUMS):
                    departure = Departure(Ring(self.plan.axes[i]), size, tuple(steps[at] for at in sorted(steps)))
                    departures[_before(conversion), _after(conversion)] = departure
                    later |= {*steps}
                    hidden = hidden + self._hidden(conversion, steps)
                    break
        return Rings(arrivals, readers, departures, frozenset(later), hidden)

    def _along(self, kind: str) -> Iterator[tuple[Conversion, int, int]]:
        """The conversions that are one collective of a kind along a ring, each with the axis and the dimension."""
        axes = self.plan.axes
        for conversion in self.conversions:
            path = hops(axes, conversion.now, conversion.wanted)
            if len(path) == 1 and len(path[0].over) == 1 and collective_of(axes, path[0]) == kind:
                (i,), split = path[0].over, conversion.now if kind == "all_gather" else conversion.wanted
                shard = split[i]
                is_whole = kind != "all_gather" or conversion.wanted[i] == REPLICATED
                if axes[i].ring and isinstance(shard, Shard) and _is_one_run(split, i) and is_whole:
                    yield conversion, i, shard.dim

    def _that_gather(self, conversion: Conversion, i: int, dim: int) -> dict[int, PieceStep]:
        """The products that read what a ring gathers, by the index of their equations; none if it isn't worth it."""
        readers, found = self.readers[_after(conversion)], dict[int, PieceStep]()
        for at in readers:
            if at < len(self.plan.equations) and _is_product(self.plan.equations[at]) and readers.count(at) == 1:
                step = self._step(self.plan.equations[at], i, {_after(conversion): dim})
                found |= {} if step is None else {at: step}
        least = LEAST_OF_WEIGHTS if self.plan.axes[i].is_data else LEAST_FLOPS
        least = least if len(readers) == len(found) else LEAST_IF_SHARED
        return found if self._is_worth(conversion, found, least) else {}

    def _back_to_products(self, form: Form, dim: int, i: int) -> Iterator[dict[int, PieceStep]]:
        """The steps from products to a form in pieces, whose results nothing else reads.

        What is added to them is there whole.
        """
        at = self.maker.get(form)
        if at is None or len(self.readers[form]) != 1:
            return
        planned = self.plan.equations[at]
        forms = dict.fromkeys(_read(planned))
        if _is_product(planned):
            dims = [{one: k} for one in forms for k in range(len(self.plan.flat.avals[one[0]].shape))]
            steps = [self._step(planned, i, of_one) for of_one in dims]
            yield from ({at: step} for step in steps if step is not None and step.dim == dim)
            return
        partial = [one for one in forms if one[1][i] == PARTIAL]
        whole = [len(self.plan.flat.avals[value].shape) for value, _ in partial]
        for k in sorted(range(min(whole, default=0)), key=lambda k: k != dim):  # a transpose has it elsewhere
            step = self._step(planned, i, dict.fromkeys(partial, k))
            before = [next(self._back_to_products(one, k, i), {}) for one in partial]
            if step is not None and step.dim == dim and any(before):
                yield {k: one for steps in before for k, one in steps.items()} | {at: step}
                return

    def _step(self, planned: PlannedEquation, i: int, dims: Mapping[Form, int]) -> PieceStep | None:
        """The equation on pieces of some operands; None if it can't be done so, or its result isn't in pieces."""
        equation, way, reads = planned.flat.equation, planned.way, _read(planned)
        if equation.primitive.name not in RULES or way.sends or way.plans or len(way.results) != 1:
            return None
        axes = (*self.plan.axes, Axis(("pieces",), (self.plan.axes[i].size,)))
        lying = tuple((*form[1], Shard(dims[form]) if form in dims else REPLICATED) for form in reads)
        found = way_by_rule(equation, lying, axes)
        (makes,), along = found.results, found.results[0][-1]
        is_way = found.operands == lying and makes[:-1] == way.results[0] and not found.sends
        if not is_way or not isinstance(along, Shard) or not all(_is_one_run(s, -1) for s in (*lying, makes)):
            return None
        taken = [form if form in dims else self._before_cast(planned, form) for form in reads]
        piece = part_shape(self.plan.flat.avals[planned.flat.makes[0]].shape, makes, axes)
        run = _run_of_pieces(planned, piece, along.dim, before_casts=taken != reads)
        operands = tuple((form, dims.get(read)) for form, read in zip(taken, reads, strict=True))
        joins = way.results[0][i] != REPLICATED  # else what all devices have would differ in its last bits
        return PieceStep(operands, _made(planned)[0], along.dim, run, joins)

    def _before_cast(self, planned: PlannedEquation, form: Form) -> Form:
        """Finds the float32 weight that was cast to the bfloat16 operand of a product; else the operand itself.

        A TPU's product of float32 and bfloat16 multiplies bfloat16 (`Precision.DEFAULT`). A cast that the products of
        all pieces read its compiler carries out apart, which takes longer than the transfer.
        """
        cast = self.plan.equations[self.maker[form]] if form in self.maker and _is_product(planned) else None
        if cast is None or cast.flat.equation.primitive.name != "convert_element_type":
            return form
        (wide,) = _read(cast)
        dtypes = [self.plan.flat.avals[value].dtype.name for value, _ in (wide, form)]
        is_weight = wide[0] in self.plan.flat.arguments and dtypes == ["float32", "bfloat16"]
        return wide if is_weight and wide[1] == form[1] else form

    def _hidden(self, conversion: Conversion, steps: Mapping[int, PieceStep]) -> Cost:
        """The cost of what is sent by a ring and nobody waits for: none, if too little is done meanwhile."""
        return HIDDEN * self._sent(conversion) if self._is_worth(conversion, steps, LEAST_FLOPS) else NOTHING

    def _sent(self, conversion: Conversion) -> Cost:
        aval = self.plan.flat.avals[conversion.value]
        return cost_of_conversion(self.plan.axes, aval.shape, aval.dtype.itemsize, conversion.now, conversion.wanted)

    def _is_worth(self, conversion: Conversion, steps: Mapping[int, PieceStep], least: float) -> bool:
        """Whether so many operations a byte that is sent are done meanwhile."""
        work = sum(float(self.plan.equations[at].way.cost @ FLOPS) for at in steps)
        return work > 0 and work >= least * float((SENT + SCATTERED) @ self._sent(conversion))


def _run_of_pieces(
    planned: PlannedEquation, piece: Shape, dim: int, *, before_casts: bool
) -> Callable[[Sequence[jax.Array], int], jax.Array]:
    """Makes `PieceStep.run`.

    Args:
      planned: the equation.
      piece: the shape of the result of one piece.
      dim: its dimension in pieces.
      before_casts: it is a product, and some operands come as they were before their cast to bfloat16.
    """
    flat = planned.flat
    equation, result = within(flat.equation, flat.callers), aval_of(flat.equation.outvars[0])

    def run(operands: Sequence[jax.Array], count: int) -> jax.Array:
        made = (*piece[:dim], piece[dim] * count, *piece[dim + 1 :])
        params = part_params(equation, [np.shape(x) for x in operands], [made])
        if before_casts:
            params |= {"precision": lax.Precision.DEFAULT, "preferred_element_type": np.dtype(np.float32)}
        return carry_out(equation, operands, params)[0].astype(result.dtype)

    return run


def _is_product(planned: PlannedEquation) -> bool:
    return planned.flat.equation.primitive.name == "dot_general"


def _is_one_run(sharding: Sharding, i: int) -> bool:
    """Whether an axis's parts are of one run of elements, and no other axis splits the same dimension."""
    shard, others = sharding[i], [s for j, s in enumerate(sharding) if j != i % len(sharding)]
    if not isinstance(shard, Shard):
        return True
    return shard.outer == 1 and not any(isinstance(s, Shard) and s.dim == shard.dim for s in others)


def _before(conversion: Conversion) -> Form:
    return conversion.value, conversion.now


def _after(conversion: Conversion) -> Form:
    return conversion.value, conversion.wanted


def _read(planned: PlannedEquation) -> list[Form]:
    """The forms that an equation reads."""
    return list(zip(planned.flat.reads, planned.way.operands, strict=True))


def _made(planned: PlannedEquation) -> list[Form]:
    """The forms that an equation makes."""
    return list(zip(planned.flat.makes, planned.way.results, strict=True))
