"""Carries out products beside the transfers that they wait for, piece by piece, on a ring of devices.

A product whose operand has to be gathered along an axis can begin with the part that its device has, while the parts of
its neighbours arrive. A product whose sum is scattered can hand on what it has added up, while it computes more. So an
array is in *pieces* along the dimension that is gathered or scattered, one for each device of the axis. They go round
the ring both ways: piece -1 of device i is that of device i - 1, on its left. Of four devices:

    gathered        pieces arrive       -1, 1 ---| -2 -----------|
                    products            0        | -1      1     | -2
    scattered       products            -2       | -1      1     | 0
                    sums leave                   | -2 ---------- | -2 and -1, 1: they end where they belong

Between such conversions are the equations of a *region* of a plan. Those up to the last products are carried out in the
first order, these in the second. What else reads a value of the region gets it whole. `find_regions` looks for regions
in a finished plan (`jpipe.partitioner.choice`), and `Region.run` carries one out in place of its equations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
from jax import lax

from jpipe.partitioner.by_rule import way_by_rule
from jpipe.partitioner.conversions import collective_of, hops
from jpipe.partitioner.prices import FLOPS, NOTHING, Cost, cost_of_conversion, itemsize
from jpipe.partitioner.rules import RULES
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard, Sharding, part_shape
from jpipe.partitioner.way import Conversion, DevicePlan, Form, PlannedEquation, Way

PRODUCTS = ("dot_general",)
MOST_PRODUCTS = 2
"""The products one after the other that a region may have, as a feed-forward has; attention would have more."""
HIDDEN = 0.75
"""How much less what goes round a ring beside products costs."""
Values = dict[Form, jax.Array]
"""Arrays by form."""
LEAST_FLOPS = 3000.0
"""The operations that a region has for each byte that a device sends round the ring: fewer take less time than that."""


@dataclass(frozen=True, eq=False)
class Step:
    """An equation of a region.

    Attributes:
      planned: the equation in the plan.
      way: how it is carried out on one piece: the way in the plan, with the pieces as one more axis.
    """

    planned: PlannedEquation
    way: Way

    @property
    def reads(self) -> list[tuple[Form, int | None]]:
        """For each operand its form, and the dimension in pieces; None if it is read whole."""
        forms = zip(self.planned.flat.reads, self.planned.way.operands, strict=True)
        return [(form, _dim(along[-1])) for form, along in zip(forms, self.way.operands, strict=True)]

    @property
    def makes(self) -> list[tuple[Form, int | None]]:
        """For each result its form, and the dimension in pieces; None if it is a sum over all pieces."""
        forms = zip(self.planned.flat.makes, self.planned.way.results, strict=True)
        return [(form, _dim(along[-1])) for form, along in zip(forms, self.way.results, strict=True)]


def _dim(along: object) -> int | None:
    return along.dim if isinstance(along, Shard) else None


@dataclass(frozen=True, eq=False)
class Region:
    """Equations of a plan that are carried out piece by piece.

    Attributes:
      axis: the axis along which pieces go round.
      steps: the equations, in order.
      sums: those that add up over all pieces, as gradients of weights do: done at the end, of whole arrays, whose
        pieces are in the order of the ring, which doesn't matter to a sum.
      arrives: forms that are gathered -> the form of a device's own part.
      leaves: forms whose sums are scattered -> the form of a device's own part of the sum.
      whole: forms that are read outside.
    """

    axis: Axis
    steps: tuple[Step, ...]
    sums: tuple[Step, ...]
    arrives: dict[Form, Form]
    leaves: dict[Form, Form]
    whole: frozenset[Form]

    @property
    def equations(self) -> list[PlannedEquation]:
        """The equations in the plan."""
        return [step.planned for step in (*self.steps, *self.sums)]

    @cached_property
    def dims(self) -> dict[Form, int]:
        """The dimension of each form in pieces."""
        pairs = [pair for step in self.steps for pair in (*step.reads, *step.makes)]
        made = {form for step in self.steps for form, _ in step.makes}
        return {form: dim for form, dim in pairs if dim is not None and (form in made or form in self.arrives)}

    @property
    def takes(self) -> list[Form]:
        """The forms that have to be made before."""
        reads = [form for step in (*self.steps, *self.sums) for form, _ in step.reads if form not in self.dims]
        return list(dict.fromkeys([*self.arrives.values(), *reads]))

    @property
    def gives(self) -> list[Form]:
        """The forms that are made for others."""
        return [*self.leaves.values(), *self.whole, *(form for step in self.sums for form, _ in step.makes)]

    @cached_property
    def last(self) -> list[Step]:
        """The steps from the last products on, by which sums leave."""
        needed, found = {*self.leaves}, list[Step]()
        for step in reversed(self.steps):
            if any(form in needed for form, _ in step.makes):
                found.append(step)
                if step.planned.flat.equation.primitive.name not in PRODUCTS:
                    needed |= {form for form, dim in step.reads if dim is not None}
        return found[::-1]

    def run(self, at_hand: Mapping[Form, jax.Array]) -> Values:
        """Carries the region out: a device's parts of `takes` -> its parts of `gives`.

        Nobody can ask for what arrives before the products beside it are done, to which it is tied: else compilers wait
        for it earlier.
        """
        ring, of_sums = Ring(self.axis), {form for step in self.sums for form, dim in step.reads if dim is not None}
        # With sums over all pieces the last products aren't held back: what leaves has these beside it.
        held = [] if self.sums else self.last
        first = [step for step in self.steps if step not in held]
        ends = {*self.leaves} if self.sums else {form for step in held for form, dim in step.reads if dim is not None}
        pieces: dict[int, Values] = {0: {form: at_hand[part] for form, part in self.arrives.items()}}
        whole: Values = {}
        in_ring: Values = {}
        for here, after in itertools.pairwise([*ring.outwards, ()]):
            coming = {k: {f: ring.arriving(k, pieces[ring.before(k)][f]) for f in self.arrives} for k in after}
            for k in here:
                self._carry_out(first, ring, k, pieces[k], at_hand)
                for joined, forms, in_true_order in ((whole, self.whole, True), (in_ring, of_sums, False)):
                    for form in forms.intersection(pieces[k]):
                        joined[form] = ring.joined(joined.get(form), pieces[k][form], self.dims[form], k, in_true_order)
            kept = [{form: pieces[k][form] for form in ends if form in pieces[k]} for k in here]
            coming, kept, *rest = lax.optimization_barrier((coming, kept, *([whole] if not ends else [])))
            whole = rest[0] if rest else whole
            pieces |= {**dict(zip(here, kept, strict=True)), **coming}
        sums = _Sums(self, ring, in_ring, at_hand)
        sent = self._sent(ring, pieces, held, at_hand, sums, whole)
        return whole | sent | sums.rest()

    def _sent(
        self,
        ring: Ring,
        pieces: dict[int, Values],
        held: Sequence[Step],
        at_hand: Mapping[Form, jax.Array],
        sums: _Sums,
        whole: Values,
    ) -> Values:
        """Sends sums on their way, to which each device adds its own: a device's own parts of them."""
        if not self.leaves:
            return {}
        going: dict[int, Values] = {}
        for here in reversed(ring.outwards):
            gone = {way: {form: ring.shifted(x, way) for form, x in of_way.items()} for way, of_way in going.items()}
            for k in here:
                self._carry_out(held, ring, k, pieces[k], at_hand)
                for form in {form for step in held for form, _ in step.makes} & self.whole:
                    whole[form] = ring.joined(whole.get(form), pieces[k][form], self.dims[form], k, True)
            if held:
                kept = [{form: pieces[k][form] for form in self.leaves} for k in here]
                gone, kept = lax.optimization_barrier((gone, kept))
            else:
                kept = [pieces[k] for k in here]
                gone = sums.beside(gone)
            for k, own in zip(here, kept, strict=True):
                # What is for a device on the left goes to the left; the end of both ways is this device's own sum.
                sent = [gone.get(way, {}) for way in (ring.ways if k == 0 else (-1 if k < 0 else 1,))]
                total = own
                for before in sent:
                    total = {form: before[form] + x if form in before else x for form, x in total.items()}
                going[0 if k == 0 else -1 if k < 0 else 1] = total
        return {then: going[0][form] for form, then in self.leaves.items()}

    def _carry_out(
        self, steps: Sequence[Step], ring: Ring, k: int, values: Values, at_hand: Mapping[Form, jax.Array]
    ) -> None:
        """Carries out steps for piece k, whose values they add to."""

        def read(form: Form, dim: int | None) -> jax.Array:
            if form in values:
                return values[form]
            return at_hand[form] if dim is None else ring.taken(at_hand[form], dim, k)

        for step in steps:
            results = step.way.run(*(read(*pair) for pair in step.reads))
            values |= zip([form for form, _ in step.makes], results, strict=True)


class _Sums:
    """The sums over all pieces, which are done one by one, some of them beside transfers.

    Args:
      region: the region.
      ring: its ring.
      in_ring: what they read in pieces, joined in the order of the ring.
      at_hand: what they read whole.
    """

    def __init__(self, region: Region, ring: Ring, in_ring: Values, at_hand: Mapping[Form, jax.Array]):
        self._todo = list(region.sums)
        self._values = {
            **{form: at_hand[form] for step in region.sums for form, d in step.reads if d is None},
            **in_ring,
        }
        self._made: Values = {}

    def beside(self, moving: dict[int, Values]) -> dict[int, Values]:
        """Does one of them beside what is moving, which nobody can ask for before: the next one waits for it."""
        if self._todo and moving:
            step = self._todo.pop(0)
            results = step.planned.way.run(*(self._values[form] for form, _ in step.reads))
            self._made |= zip([form for form, _ in step.makes], results, strict=True)
            if self._todo:
                moving, self._values = lax.optimization_barrier((moving, self._values))
        return moving

    def rest(self) -> Values:
        """All of them."""
        for step in self._todo:
            results = step.planned.way.run(*(self._values[form] for form, _ in step.reads))
            self._made |= zip([form for form, _ in step.makes], results, strict=True)
        return self._made


@dataclass(frozen=True)
class Ring:
    """The devices of an axis on a ring. To the right is 1, to the left -1."""

    axis: Axis

    @property
    def ways(self) -> tuple[int, ...]:
        """The ways round."""
        return (1, -1)

    def farthest(self, way: int) -> int:
        """How many devices a piece passes that goes one way: together they reach all others."""
        return self.axis.size // 2 if way == 1 else (self.axis.size - 1) // 2

    @property
    def outwards(self) -> list[tuple[int, ...]]:
        """The pieces of all devices as seen from one, in the order in which they arrive: those on its left first."""
        far = range(1, self.farthest(1) + 1)
        return [(0,), *((-j, j) if j <= self.farthest(-1) else (-j,) for j in far)]

    def before(self, k: int) -> int:
        """The piece that is nearer."""
        return k + 1 if k < 0 else k - 1

    def arriving(self, k: int, nearer: jax.Array) -> jax.Array:
        """Piece k, of which the neighbour on its side has a nearer one."""
        return self.shifted(nearer, 1 if k < 0 else -1)

    def shifted(self, x: jax.Array, way: int) -> jax.Array:
        """The neighbour's array."""
        size = self.axis.size
        return lax.ppermute(x, self.axis.names, [(i, (i + way) % size) for i in range(size)])

    def taken(self, whole: jax.Array, dim: int, k: int) -> jax.Array:
        """Piece k of an array that a device has whole."""
        size = whole.shape[dim] // self.axis.size
        return lax.dynamic_slice_in_dim(whole, self._begin(size, k), size, dim)

    def joined(self, sofar: jax.Array | None, piece: jax.Array, dim: int, k: int, in_true_order: bool) -> jax.Array:
        """The whole array so far, with piece k; in the order of the ring it lies where no device need be asked for."""
        size = piece.shape[dim]
        if sofar is None:
            shape = (*piece.shape[:dim], size * self.axis.size, *piece.shape[dim + 1 :])
            sofar = lax.empty(shape, piece.dtype)
        at = self._begin(size, k) if in_true_order else (k % self.axis.size) * size
        return lax.dynamic_update_slice_in_dim(sofar, piece, at, dim)

    def _begin(self, size: int, k: int) -> jax.Array:
        """Where piece k begins in a whole array."""
        return (self.axis.index() + k) % self.axis.size * size


# --- finding regions ---


def find_regions(plan: DevicePlan) -> tuple[Region, ...]:
    """Looks for regions of a plan, from its first equation to its last; an equation is in one at most."""
    found, claimed = list[Region](), set[int]()
    index = {id(planned): at for at, planned in enumerate(plan.equations)}

    def take(region: Region | None) -> None:
        """Takes a region, if it can be carried out at once."""
        if region is not None and not _waits_for_itself(plan, found, region):
            found.append(region)
            claimed.update(index[id(planned)] for planned in region.equations)

    for at, planned in enumerate(plan.equations):
        for conversion in planned.conversions:
            i = _along(plan, conversion, "all_gather")
            if i is not None and at not in claimed:
                take(_Growth(plan, i, claimed).grown(at, (conversion.value, conversion.wanted)))
    for conversion in [*(c for planned in plan.equations for c in planned.conversions), *plan.conversions]:
        i, before = _along(plan, conversion, "reduce_scatter"), (conversion.value, conversion.now)
        if i is not None and not any(before in region.leaves for region in found):
            for region in _Growth(plan, i, claimed).shrunk(conversion):
                if not _waits_for_itself(plan, found, region):
                    take(region)
                    break
    return tuple(found)


def _waits_for_itself(plan: DevicePlan, others: Sequence[Region], region: Region) -> bool:
    """Whether what a region takes follows from what it makes, if other regions are carried out at once, too."""
    index = {id(planned): at for at, planned in enumerate(plan.equations)}
    own = {index[id(planned)] for planned in region.equations}
    todo, needed = [value for value, _ in region.takes], set[int]()
    while todo:
        new = {*plan.flat.needed_for(todo)} - needed
        needed |= new
        regions = [other for other in others if any(index[id(planned)] in new for planned in other.equations)]
        todo = [value for other in regions for value, _ in other.takes]
    return bool(own & needed)


def hidden(plan: DevicePlan) -> Cost:
    """What a plan sends within its regions."""
    cost = NOTHING
    for region in plan.regions:
        assert isinstance(region, Region)
        for (value, now), (_, wanted) in [
            *((own, form) for form, own in region.arrives.items()),
            *region.leaves.items(),
        ]:
            aval = plan.flat.avals[value]
            cost = cost + cost_of_conversion(plan.axes, aval.shape, itemsize(aval.dtype), now, wanted)
    return cost


def _along(plan: DevicePlan, conversion: Conversion, kind: str) -> int | None:
    """The axis along which a conversion is one collective of a kind, of one run of elements, and may go by a ring."""
    path = hops(plan.axes, conversion.now, conversion.wanted)
    if len(path) != 1 or len(path[0].over) != 1 or collective_of(plan.axes, path[0]) != kind:
        return None
    (i,), axis = path[0].over, plan.axes[path[0].over[0]]
    shard = (conversion.now if kind == "all_gather" else conversion.wanted)[i]
    others = [s for j, s in enumerate(conversion.now) if j != i]
    alone = isinstance(shard, Shard) and not any(isinstance(s, Shard) and s.dim == shard.dim for s in others)
    return i if alone and axis.by_ring and not axis.is_part else None


@dataclass(eq=False)
class _Growth:
    """A region in the making: from a gather on, all equations that can be done piece by piece.

    Attributes:
      plan: the plan.
      i: the index of the axis.
      claimed: equations of other regions.
      dims: forms in pieces -> their dimension.
      late: forms that are there only after the region.
      steps: by index of the equation.
      arrives, leaves: as of `Region`.
      depth: for each form in pieces, the products that it has gone through.
    """

    plan: DevicePlan
    i: int
    claimed: set[int]
    dims: dict[Form, int] = field(default_factory=dict)
    late: set[Form] = field(default_factory=set)
    steps: dict[int, Step] = field(default_factory=dict)
    arrives: dict[Form, Form] = field(default_factory=dict)
    leaves: dict[Form, Form] = field(default_factory=dict)
    depth: dict[Form, int] = field(default_factory=dict)

    def shrunk(self, conversion: Conversion) -> Iterator[Region]:
        """Regions of a product whose sum is scattered, and of what is done with it."""
        before, wanted = (conversion.value, conversion.now), conversion.wanted[self.i]
        assert isinstance(wanted, Shard)
        for steps in self._back_to_products(before, wanted.dim):
            self.leaves = {before: (conversion.value, conversion.wanted)}
            self.dims = {form: dim for step in steps.values() for form, dim in step.makes if dim is not None}
            region = self._whole_region(dict(sorted(steps.items())), {})
            if region is not None:
                yield region

    def _back_to_products(self, form: Form, dim: int) -> Iterator[dict[int, Step]]:
        """The steps from a product to a form in pieces, for each product that there is."""
        at = self.maker.get(form)
        if at is None or at in self.claimed:
            return
        planned = self.plan.equations[at]
        for before in _read(planned):
            for of_operand in range(len(self.plan.flat.avals[before[0]].shape)):
                self.dims = {before: of_operand}
                step = self._step(planned)
                if step is None or step.makes[0] != (form, dim):
                    continue
                if planned.flat.equation.primitive.name in PRODUCTS:
                    yield {at: step}
                else:
                    for steps in self._back_to_products(before, of_operand):
                        yield {**steps, at: step}

    @cached_property
    def maker(self) -> dict[Form, int]:
        """The equation that makes each form."""
        return {form: at for at, planned in enumerate(self.plan.equations) for form in _made(planned)}

    def grown(self, start: int, seed: Form) -> Region | None:
        """The region that begins with a gather for an equation; None if it isn't worth it."""
        for at in range(start, len(self.plan.equations)):
            planned = self.plan.equations[at]
            for conversion in planned.conversions:
                self._convert(conversion)
            step = None if at in self.claimed else self._step(planned)
            if step is not None:
                self.steps[at] = step
                self.dims |= {form: dim for form, dim in step.makes if dim is not None}
                self.late |= {form for form, dim in step.makes if dim is None}
                depth = self._depth(planned)
                self.depth |= dict.fromkeys(_made(planned), depth)
            elif any(form in self.dims or form in self.late for form in _read(planned)):
                self.late |= {*_made(planned)}
        for conversion in self.plan.conversions:
            self._convert(conversion)
        return self._pruned(seed)

    def _convert(self, conversion: Conversion) -> None:
        """Notes a conversion: one by which pieces arrive or leave, or one that is done after the region."""
        before, after = (conversion.value, conversion.now), (conversion.value, conversion.wanted)
        if before in self.dims:
            into = conversion.wanted[self.i]
            if _along(self.plan, conversion, "reduce_scatter") == self.i and into == Shard(self.dims[before]):
                self.leaves[before] = after
            self.late.add(after)
        elif before in self.late:
            self.late.add(after)
        elif _along(self.plan, conversion, "all_gather") == self.i:
            shard = conversion.now[self.i]
            assert isinstance(shard, Shard)
            self.arrives[after], self.dims[after] = before, shard.dim

    def _step(self, planned: PlannedEquation) -> Step | None:
        """The equation on one piece; None if it can't be done so, or has nothing to do with the region."""
        equation, way, reads = planned.flat.equation, planned.way, _read(planned)
        if not any(form in self.dims for form in reads) or any(form in self.late for form in reads):
            return None
        if equation.primitive.name not in RULES or way.sends or way.plans:
            return None
        pieces = Axis(("pieces",), (self.plan.axes[self.i].size,))
        lying = [(*form[1], Shard(self.dims[form]) if form in self.dims else REPLICATED) for form in reads]
        axes = (*self.plan.axes, pieces)
        found = way_by_rule(equation, lying, axes)
        same = all(a[:-1] == b for a, b in zip(found.operands, way.operands, strict=True))
        same &= all(a[:-1] == b for a, b in zip(found.results, way.results, strict=True))
        stays = all(
            a[-1] == b[-1] for form, a, b in zip(reads, found.operands, lying, strict=True) if form in self.dims
        )
        is_one_run = all(not isinstance(s[-1], Shard) or s[-1].outer == 1 for s in (*found.operands, *found.results))
        done = all(isinstance(s[-1], Shard) for s in found.results) and self._depth(planned) <= MOST_PRODUCTS
        if equation.primitive.name in PRODUCTS and all(s[-1] == PARTIAL for s in found.results):  # a weight's gradient
            done = all(form in self.dims for form in reads)
        alone = all(self._is_alone(s) for _, s in self._shards(planned, found))
        return Step(planned, found) if same and stays and is_one_run and done and alone and not found.sends else None

    def _depth(self, planned: PlannedEquation) -> int:
        """The products that an equation's results have gone through."""
        before = max(self.depth.get(form, 0) for form in _read(planned))
        return before + (planned.flat.equation.primitive.name in PRODUCTS)

    def _shards(self, planned: PlannedEquation, way: Way) -> Iterator[tuple[int, Sharding]]:
        yield from zip(planned.flat.reads, way.operands, strict=True)
        yield from zip(planned.flat.makes, way.results, strict=True)

    def _is_alone(self, sharding: Sharding) -> bool:
        """Whether no other axis splits the dimension in pieces."""
        along = sharding[-1]
        return not any(isinstance(s, Shard) and isinstance(along, Shard) and s.dim == along.dim for s in sharding[:-1])

    def _pruned(self, seed: Form) -> Region | None:
        """The region of a gather, without what follows its last products, if enough is left."""
        sums = {at: step for at, step in self.steps.items() if step.makes[0][1] is None}
        needed, kept = {*self.leaves, *(form for step in sums.values() for form, _ in step.reads)}, dict[int, Step]()
        for at, step in reversed(self.steps.items()):
            is_first = step.planned.flat.equation.primitive.name in PRODUCTS and self._depth(step.planned) == 1
            if at not in sums and (is_first or any(form in needed for form, _ in step.makes)):
                kept[at] = step
                needed |= {form for form, _ in step.reads}
        steps = self._connected(dict(reversed(kept.items())), seed)
        needed = {form for step in steps.values() for form, _ in step.reads}
        arrives = {form: own for form, own in self.arrives.items() if form in needed}
        made = {form for step in steps.values() for form, _ in step.makes} | {*arrives}
        self.arrives, self.leaves = arrives, {form: then for form, then in self.leaves.items() if form in made}
        sums = {at: step for at, step in sums.items() if all(form in made for form, _ in step.reads)}
        return self._whole_region(steps, sums) if arrives else None

    def _whole_region(self, steps: Mapping[int, Step], sums: Mapping[int, Step]) -> Region | None:
        """The region of these steps, if they are worth it."""
        work = sum(float(step.way.cost @ FLOPS) for step in steps.values())
        if work < LEAST_FLOPS * sum(map(self._bytes_of_piece, (*self.arrives.values(), *self.leaves.values()))):
            return None
        made = {form for step in steps.values() for form, _ in step.makes} | {*self.arrives}
        whole = self._read_outside({**steps, **sums}, self.leaves) & made
        lists = tuple(steps.values()), tuple(sums.values())
        return Region(self.plan.axes[self.i], *lists, self.arrives, self.leaves, frozenset(whole))

    def _bytes_of_piece(self, form: Form) -> int:
        """The bytes of a device's own part."""
        aval = self.plan.flat.avals[form[0]]
        return math.prod(part_shape(aval.shape, form[1], self.plan.axes)) * itemsize(aval.dtype)

    def _connected(self, steps: Mapping[int, Step], seed: Form) -> dict[int, Step]:
        """The steps that have to do with the pieces of a gather: others begin regions of their own."""
        forms, found, before = {seed}, dict[int, Step](), -1
        while len(found) > before:
            before = len(found)
            for at, step in steps.items():
                own = {form for form, dim in (*step.reads, *step.makes) if dim is not None and form in self.dims}
                if own & forms:
                    found[at] = step
                    forms |= own
        return dict(sorted(found.items()))

    def _read_outside(self, steps: Mapping[int, Step], leaves: Mapping[Form, Form]) -> set[Form]:
        """The forms that others than the region's equations read, or convert."""
        others = [planned for at, planned in enumerate(self.plan.equations) if at not in steps]
        conversions = [c for planned in self.plan.equations for c in planned.conversions] + [*self.plan.conversions]
        goes = lambda c: leaves.get((c.value, c.now)) == (c.value, c.wanted)
        converted = {(c.value, c.now) for c in conversions if not goes(c)}
        results = zip(self.plan.flat.results, self.plan.results, strict=True)
        return {form for planned in others for form in _read(planned)} | converted | {*results}


def _read(planned: PlannedEquation) -> Sequence[Form]:
    """The forms that an equation reads."""
    return list(zip(planned.flat.reads, planned.way.operands, strict=True))


def _made(planned: PlannedEquation) -> Sequence[Form]:
    """The forms that an equation makes."""
    return list(zip(planned.flat.makes, planned.way.results, strict=True))
