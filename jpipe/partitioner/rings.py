"""Carries out products beside the transfers that they wait for, piece by piece, on a ring of devices.

A product whose operand has to be gathered along an axis can begin with the part that its device has, while the part of
a neighbour arrives. A product whose sum is scattered can hand on a part of the sum while it computes the next. So an
array is in *pieces* along the dimension that is gathered or scattered, one for each device of the axis, in the order in
which they go round the ring. They go both ways, a half each. Of four devices, device i works on

    k           0           1           2           3
    first half  i           i - 1       i - 2       i - 3       comes from the left
    last half   i           i + 1       i + 2       i + 3       from the right

    arrives     k = 1 ----| k = 2 ----| k = 3 ----|
    products    k = 0       k = 1       k = 2       k = 3
    sums leave                          k = 1 ----| k = 1, 2 -| k = 1, 2, 3, to which k = 0 is added

The equations between such conversions are a *region* of a plan, which a device carries out for one piece after the
other. What else reads a value of the region gets it whole. `find_regions` looks for them in a finished plan
(`jpipe.partitioner.choice`), and `Region.run` carries one out in place of its equations (`DevicePlan.run`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.partitioner.by_rule import way_by_rule
from jpipe.partitioner.conversions import collective_of, hops
from jpipe.partitioner.prices import FLOPS
from jpipe.partitioner.rules import RULES
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard, Sharding
from jpipe.partitioner.way import Conversion, DevicePlan, Form, PlannedEquation, Way

PRODUCTS = ("dot_general",)
MOST_PRODUCTS = 2
"""The products one after the other that a region may have, as a feed-forward has; attention would have more."""
LEAST_FLOPS = 2.0**24
"""Regions with fewer operations a piece aren't worth the starts of their transfers."""


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
      arrives: forms that are gathered -> the form of a device's own part.
      leaves: forms whose sums are scattered -> the form of a device's own part of the sum.
      whole: forms that are read outside.
    """

    axis: Axis
    steps: tuple[Step, ...]
    arrives: dict[Form, Form]
    leaves: dict[Form, Form]
    whole: frozenset[Form]

    @property
    def equations(self) -> list[PlannedEquation]:
        """The equations in the plan."""
        return [step.planned for step in self.steps]

    @property
    def dims(self) -> dict[Form, int]:
        """The dimension of each form in pieces."""
        pairs = [pair for step in self.steps for pair in (*step.reads, *step.makes)]
        made = {form for step in self.steps for form, _ in step.makes}
        return {form: dim for form, dim in pairs if dim is not None and (form in made or form in self.arrives)}

    @property
    def takes(self) -> list[Form]:
        """The forms that have to be made before."""
        made = {form for step in self.steps for form, _ in step.makes} | {*self.arrives}
        reads = [form for step in self.steps for form, _ in step.reads if form not in made]
        return list(dict.fromkeys([*self.arrives.values(), *reads]))

    @property
    def gives(self) -> list[Form]:
        """The forms that are made for others."""
        return [*self.leaves.values(), *self.whole]

    def run(self, at_hand: Mapping[Form, jax.Array]) -> dict[Form, jax.Array]:
        """Carries the region out: a device's parts of `takes` -> its parts of `gives`."""
        ring, dims, count = Ring(self.axis), self.dims, self.axis.size
        # What is only handed on begins with the piece that has the longest way.
        order = [*range(count)] if self.arrives else [*range(1, count), 0]
        here = {form: at_hand[own] for form, own in self.arrives.items()}
        going: dict[Form, jax.Array] = {}
        own: dict[Form, jax.Array] = {}
        made: dict[Form, jax.Array] = {}
        for k in order:
            coming = {form: ring.shifted(x, dims[form]) for form, x in here.items() if k != order[-1]}
            gone = {form: ring.shifted(x, dims[form]) for form, x in going.items()}
            values = self._piece(ring, k, here, at_hand)
            new = {form: values[form] for form in (*self.leaves, *self.whole)}
            # Nobody can ask for what arrives before the products beside it are done: so compilers wait for it there.
            coming, gone, new = lax.optimization_barrier((coming, gone, new))
            for form in self.leaves:
                if k == 0:
                    own[form] = new[form]
                else:
                    going[form] = gone[form] + new[form] if form in gone else new[form]
            for form in self.whole:
                made[form] = self._joined(ring, made.get(form), new[form], dims.get(form), k)
            if k == 0 == order[-1]:
                going = gone
            here = coming
        if self.arrives:
            going = {form: ring.shifted(x, dims[form]) for form, x in going.items()}
        return made | {then: going[form] + own[form] for form, then in self.leaves.items()}

    def _piece(
        self, ring: Ring, k: int, here: Mapping[Form, jax.Array], at_hand: Mapping[Form, jax.Array]
    ) -> dict[Form, jax.Array]:
        """Computes all equations for piece k."""
        values = dict(here)

        def read(form: Form, dim: int | None) -> jax.Array:
            if form in values:
                return values[form]
            return at_hand[form] if dim is None else ring.taken(at_hand[form], dim, k)

        for step in self.steps:
            results = step.way.run(*(read(*pair) for pair in step.reads))
            values |= zip([form for form, _ in step.makes], results, strict=True)
        return values

    def _joined(self, ring: Ring, sofar: jax.Array | None, piece: jax.Array, dim: int | None, k: int) -> jax.Array:
        """What the pieces so far give together: their sum, or the array with one more of them."""
        if dim is None:
            return piece if sofar is None else sofar + piece
        if sofar is None:
            shape = list(piece.shape)
            shape[dim] *= self.axis.size
            sofar = lax.empty(tuple(shape), piece.dtype)
        return ring.put(sofar, piece, dim, k)


@dataclass(frozen=True)
class Ring:
    """The devices of an axis on a ring. A piece has two halves, which go opposite ways."""

    axis: Axis

    def shifted(self, piece: jax.Array, dim: int) -> jax.Array:
        """The halves of the neighbours: the first from the left, the last from the right."""
        first, last = jnp.split(piece, 2, dim)
        right, left = (self._permuted(half, way) for half, way in ((first, 1), (last, -1)))
        return lax.concatenate([right, left], dim)

    def _permuted(self, x: jax.Array, way: int) -> jax.Array:
        size = self.axis.size
        return lax.ppermute(x, self.axis.names, [(i, (i + way) % size) for i in range(size)])

    def taken(self, whole: jax.Array, dim: int, k: int) -> jax.Array:
        """Piece k of an array that a device has whole."""
        half = whole.shape[dim] // (2 * self.axis.size)
        return lax.concatenate([lax.dynamic_slice_in_dim(whole, at, half, dim) for at in self._begins(half, k)], dim)

    def put(self, whole: jax.Array, piece: jax.Array, dim: int, k: int) -> jax.Array:
        """The array with piece k in its place."""
        half = piece.shape[dim] // 2
        for at, part in zip(self._begins(half, k), jnp.split(piece, 2, dim), strict=True):
            whole = lax.dynamic_update_slice_in_dim(whole, part, at, dim)
        return whole

    def _begins(self, half: int, k: int) -> tuple[jax.Array, jax.Array]:
        """Where the halves of piece k begin in a whole array."""
        index, size = self.axis.index(), self.axis.size
        return (index - k) % size * 2 * half, (index + k) % size * 2 * half + half


# --- finding regions ---


def find_regions(plan: DevicePlan) -> tuple[Region, ...]:
    """Looks for regions of a plan, from its first equation to its last; an equation is in one at most."""
    found, claimed = list[Region](), set[int]()
    for at, planned in enumerate(plan.equations):
        for conversion in planned.conversions:
            i = _along(plan, conversion, "all_gather")
            if i is not None and at not in claimed:
                region = _Growth(plan, i, claimed).grown(at)
                if region is not None:
                    found.append(region)
                    claimed |= {at for at, planned in enumerate(plan.equations) if planned in region.equations}
    return tuple(found)


def _along(plan: DevicePlan, conversion: Conversion, kind: str) -> int | None:
    """The axis along which a conversion is one collective of a kind, of one run of elements, and may go by a ring."""
    path = hops(plan.axes, conversion.now, conversion.wanted)
    if len(path) != 1 or len(path[0].over) != 1 or collective_of(plan.axes, path[0]) != kind:
        return None
    (i,), axis = path[0].over, plan.axes[path[0].over[0]]
    shard = (conversion.now if kind == "all_gather" else conversion.wanted)[i]
    others = [s for j, s in enumerate(conversion.now) if j != i]
    alone = isinstance(shard, Shard) and not any(isinstance(s, Shard) and s.dim == shard.dim for s in others)
    is_even = alone and plan.flat.avals[conversion.value].shape[shard.dim] % (2 * axis.size) == 0
    return i if is_even and axis.by_ring and not axis.is_part else None


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

    def grown(self, start: int) -> Region | None:
        """The region that begins with a gather for an equation; None if it isn't worth it."""
        for at in range(start, len(self.plan.equations)):
            planned = self.plan.equations[at]
            for conversion in planned.conversions:
                self._convert(conversion)
            step = None if at in self.claimed else self._step(planned)
            if step is not None:
                self.steps[at] = step
                self.dims |= {form: dim for form, dim in step.makes if dim is not None}
                depth = self._depth(planned)
                self.depth |= dict.fromkeys(_made(planned), depth)
            elif any(form in self.dims or form in self.late for form in _read(planned)):
                self.late |= {*_made(planned)}
        for conversion in self.plan.conversions:
            self._convert(conversion)
        return self._pruned()

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
        # Gradients of weights are sums over pieces: they are one product of whole arrays, which adds them up in place.
        done = all(isinstance(s[-1], Shard) for s in found.results) and self._depth(planned) <= MOST_PRODUCTS
        halves = all(self._has_halves(v, s) for v, s in self._shards(planned, found))
        return Step(planned, found) if same and stays and is_one_run and done and halves and not found.sends else None

    def _depth(self, planned: PlannedEquation) -> int:
        """The products that an equation's results have gone through."""
        before = max(self.depth.get(form, 0) for form in _read(planned))
        return before + (planned.flat.equation.primitive.name in PRODUCTS)

    def _shards(self, planned: PlannedEquation, way: Way) -> Iterator[tuple[int, Sharding]]:
        yield from zip(planned.flat.reads, way.operands, strict=True)
        yield from zip(planned.flat.makes, way.results, strict=True)

    def _has_halves(self, value: int, sharding: Sharding) -> bool:
        """Whether pieces have two halves, and no other axis splits their dimension."""
        along = sharding[-1]
        if not isinstance(along, Shard):
            return along != PARTIAL or True
        others = [s for s in sharding[:-1] if isinstance(s, Shard) and s.dim == along.dim]
        return not others and self.plan.flat.avals[value].shape[along.dim] % (2 * self.plan.axes[self.i].size) == 0

    def _pruned(self) -> Region | None:
        """The region without what follows its last products, if enough is left."""
        needed, kept = set(self.leaves), dict[int, Step]()
        for at, step in reversed(self.steps.items()):
            is_first = step.planned.flat.equation.primitive.name in PRODUCTS and self._depth(step.planned) == 1
            if is_first or any(form in needed for form, _ in step.makes):
                kept[at] = step
                needed |= {form for form, _ in step.reads}
        steps = dict(reversed(kept.items()))
        arrives = {form: own for form, own in self.arrives.items() if form in needed}
        made = {form for step in steps.values() for form, _ in step.makes}
        leaves = {form: then for form, then in self.leaves.items() if form in made}
        products = sum(float(step.way.cost @ FLOPS) for step in steps.values())
        if not arrives or products < LEAST_FLOPS:
            return None
        whole = self._read_outside(steps, leaves) & {*made, *arrives}
        return Region(self.plan.axes[self.i], tuple(steps.values()), arrives, leaves, frozenset(whole))

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
