"""Products beside the transfers that they wait for, piece by piece, on a ring of devices.

A product whose operand has to be gathered along an axis can begin with the part that its device has, while the parts of
its neighbours arrive. A product whose sum is scattered can hand on what it has added up, while it computes more (Wang
et al., 2023, "Overlap communication with dependent computation via decomposition"). So an array is in *pieces* along
the dimension that is gathered or scattered, one for each device of the axis. A device numbers them from itself: piece 0
is its own, piece -1 that of the device on its left. They go round the ring both ways. Of four devices:

    gathered     links       1 and -1 arrive           -2 arrives, from the left
                 products    0                         -1 and 1                     -2

    scattered    products    -2                        -1 and 1                     0
                 links                                 to the left: the sum of -2   that of -2 and -1; to the right: 1

Products depend on the pieces that they read and on no more; what a compiler puts beside a permutation is its own
choice. Which conversions of a plan go by rings, `jpipe.partitioner.find_rings` says; `DevicePlan.run` asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.partitioner.conversions import NOTHING, Cost
from jpipe.partitioner.shardings import Axis, Sharding

Form = tuple[int, Sharding]
"""A value as it lies on devices: its number in the `FlatJaxpr`, and a sharding."""
LEFT, RIGHT = -1, 1
HIDDEN = 0.75
"""The part of what goes by rings beside products that nobody waits for, about as seen in programs for a v5p."""
LEAST_ROWS = 512
"""The length of pieces from which each is multiplied alone. Shorter pieces that arrive together are joined: a product
of r rows reads a weight in less time than it takes if r is above 330 (float32) or 170 (bfloat16) on a v5p."""


@dataclass(frozen=True)
class Ring:
    """The devices of an axis on a ring (`Axis.ring`), in which the next one is on the right."""

    axis: Axis

    @property
    def on_left(self) -> int:
        """The number of pieces that come from the left: of an even number of devices one more than from the right."""
        return self.axis.size // 2

    @property
    def on_right(self) -> int:
        """The number of pieces that come from the right."""
        return (self.axis.size - 1) // 2

    @property
    def outwards(self) -> list[tuple[int, ...]]:
        """The pieces in the order in which they arrive; the pieces of a tuple arrive together."""
        return [(0,), *((-k, k) if k <= self.on_right else (-k,) for k in range(1, self.on_left + 1))]

    def groups(self, size: int) -> list[tuple[int, ...]]:
        """The pieces in the same order; the pieces of a tuple are multiplied together. A piece has that length."""
        return self.outwards if size < LEAST_ROWS else [(k,) for pieces in self.outwards for k in pieces]

    def send(self, x: jax.Array, way: int) -> jax.Array:
        """Sends an array to the neighbour on the `LEFT` or `RIGHT`: the result is what the other neighbour has sent."""
        order = self.axis.ring
        return lax.ppermute(x, self.axis.names, [(i, order[(k + way) % len(order)]) for k, i in enumerate(order)])

    def take(self, whole: jax.Array, dim: int, pieces: Sequence[int]) -> jax.Array:
        """Cuts pieces, one after the other, out of an array that a device has whole."""
        size = whole.shape[dim] // self.axis.size
        return _joined([lax.dynamic_slice_in_dim(whole, self._begin(size, k), size, dim) for k in pieces], dim)

    def put_together(self, results: Iterable[tuple[Sequence[int], jax.Array]], dim: int) -> jax.Array:
        """Makes the whole array from all pieces, which are given as `(pieces, these, one after the other)`."""
        pairs = [(k, one) for ks, joined in results for k, one in zip(ks, _cut(joined, dim, len(ks)), strict=True)]
        shape, size = list(pairs[0][1].shape), pairs[0][1].shape[dim]
        shape[dim] *= self.axis.size
        whole = lax.empty(tuple(shape), pairs[0][1].dtype)
        for k, piece in pairs:
            whole = lax.dynamic_update_slice_in_dim(whole, piece, self._begin(size, k), dim)
        return whole

    def _begin(self, size: int, k: int) -> jax.Array:
        """Where piece k begins in a whole array."""
        order = self.axis.ring
        of_device = [order[(order.index(i) + k) % len(order)] for i in range(len(order))]
        return lax.dynamic_index_in_dim(jnp.asarray(of_device), self.axis.index(), keepdims=False) * size


Send = Callable[[Ring, jax.Array, int], jax.Array]
"""As `Ring.send`."""


class OneByOne:
    """Sends what nothing waits for: on each link an array goes when the one before it has arrived.

    A compiler knows how long a permutation takes, but not that others share the link. Left alone it would begin many of
    them at once.
    """

    def __init__(self):
        self._arrived = dict[tuple[Axis, int], jax.Array]()

    def send(self, ring: Ring, x: jax.Array, way: int) -> jax.Array:
        """As `Ring.send`."""
        before = self._arrived.get((ring.axis, way))
        x = x if before is None else lax.optimization_barrier((x, before))[0]
        self._arrived[ring.axis, way] = arrived = ring.send(x, way)
        return arrived


def _joined(pieces: Sequence[jax.Array], dim: int) -> jax.Array:
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim)


def _cut(joined: jax.Array, dim: int, count: int) -> list[jax.Array]:
    size = joined.shape[dim] // count
    return [lax.slice_in_dim(joined, i * size, (i + 1) * size, axis=dim) for i in range(count)]


class Arriving:
    """An array that arrives in pieces. A piece is sent when it is first asked for.

    Attributes:
      ring: the devices.
      dim: the dimension that is in pieces.
      size: the length of a piece.
    """

    def __init__(self, ring: Ring, dim: int, own: jax.Array):
        self.ring, self.dim, self.size = ring, dim, own.shape[dim]
        self._pieces, self._whole = {0: own}, None

    def piece(self, k: int) -> jax.Array:
        """Piece k. The neighbour on that side has it too: it is the piece before it there."""
        if k not in self._pieces:
            before, way = (k + 1, RIGHT) if k < 0 else (k - 1, LEFT)
            self._pieces[k] = self.ring.send(self.piece(before), way)
        return self._pieces[k]

    @property
    def whole(self) -> jax.Array:
        """All pieces in order."""
        if self._whole is None:
            pieces = [k for together in self.ring.outwards for k in together]
            self._whole = self.ring.put_together([((k,), self.piece(k)) for k in pieces], self.dim)
        return self._whole


def all_of(value: jax.Array | Arriving) -> jax.Array:
    """The array, when all of it is there."""
    return value.whole if isinstance(value, Arriving) else value


Parts = dict[Form, jax.Array | Arriving]
"""A device's part of each form that it has so far."""


@dataclass(frozen=True, eq=False)
class PieceStep:
    """An equation that is carried out on pieces.

    Attributes:
      reads: each operand, and its dimension in pieces; None if it is read whole.
      makes: its one result.
      dim: the result's dimension in pieces.
      run: a device's operands, of some pieces, and their number -> the result of these pieces.
      joins: whether short pieces that arrive together are multiplied together.
    """

    reads: tuple[tuple[Form, int | None], ...]
    makes: Form
    dim: int
    run: Callable[[Sequence[jax.Array], int], jax.Array]
    joins: bool

    def as_pieces_arrive(self, parts_of: Parts) -> jax.Array:
        """The whole result of the step on all pieces of an operand that arrives."""
        (arriving,) = [parts_of[form] for form, dim in self.reads if dim is not None]
        assert isinstance(arriving, Arriving)

        def result(pieces: Sequence[int]) -> jax.Array:
            arrived = _joined([arriving.piece(k) for k in pieces], arriving.dim)
            operands = [all_of(parts_of[form]) if dim is None else arrived for form, dim in self.reads]
            return self.run(operands, len(pieces))

        groups = arriving.ring.groups(arriving.size if self.joins else LEAST_ROWS)
        return arriving.ring.put_together([(pieces, result(pieces)) for pieces in groups], self.dim)


@dataclass(frozen=True, eq=False)
class Departure:
    """A scattered sum that goes by a ring.

    Attributes:
      ring: the devices.
      size: the length of a piece.
      steps: what makes the sum, from products on, in order; nothing else reads what they make.
    """

    ring: Ring
    size: int
    steps: tuple[PieceStep, ...]

    def run(self, parts_of: Parts, send: Send) -> jax.Array:
        """A device's own part of the sum.

        Piece k is for the device that is k to the right. Of four devices piece -2 goes to the left first; there the
        device adds its piece -1, which is for the same device, and sends the sum on; that device adds its own piece 0,
        and what comes from the device on its left, whose piece 1 is for it.
        """
        sums = {k: x for pieces in reversed(self.ring.groups(self.size)) for k, x in self._of(pieces, parts_of).items()}
        total = sums[0]
        for way, farthest in ((LEFT, self.ring.on_left), (RIGHT, self.ring.on_right)):
            going: jax.Array | None = None
            for k in range(farthest, 0, -1):
                going = send(self.ring, sums[way * k] if going is None else going + sums[way * k], way)
            total = total if going is None else total + going
        return total

    def _of(self, pieces: Sequence[int], parts_of: Parts) -> dict[int, jax.Array]:
        """The device's sums of some pieces."""
        made: dict[Form, jax.Array] = {}

        def read(form: Form, dim: int | None) -> jax.Array:
            if form in made:
                return made[form]
            value = all_of(parts_of[form])
            return value if dim is None else self.ring.take(value, dim, pieces)

        for step in self.steps:
            made[step.makes] = step.run([read(*operand) for operand in step.reads], len(pieces))
        last = self.steps[-1]
        return dict(zip(pieces, _cut(made[last.makes], last.dim, len(pieces)), strict=True))


@dataclass(frozen=True, eq=False)
class Rings:
    """The conversions of a plan that go by rings.

    Attributes:
      arrivals: the form of a device's part, and the gathered form -> (the devices, the dimension that is gathered).
      readers: the index of an equation -> the step on pieces of what arrives; all others read it whole.
      departures: the form of a sum, and that of a device's part of it -> the scatter.
      later: the indices of the equations that are steps of departures.
      hidden: the cost of what nobody waits for.
    """

    arrivals: Mapping[tuple[Form, Form], tuple[Ring, int]] = field(default_factory=dict)
    readers: Mapping[int, PieceStep] = field(default_factory=dict)
    departures: Mapping[tuple[Form, Form], Departure] = field(default_factory=dict)
    later: frozenset[int] = frozenset()
    hidden: Cost = field(default_factory=NOTHING.copy)

    def depart(
        self, conversions: Iterable[tuple[int, Sharding, Sharding]], parts_of: Parts, send_of: Callable[[int], Send]
    ) -> None:
        """Carries out the departures among conversions. Their steps know their scopes, so no other is to be around.

        Args:
          conversions: of values, by number, from one sharding to another.
          parts_of: where the departures' results are added.
          send_of: how a value is sent.
        """
        for value, now, wanted in conversions:
            if departure := self.departures.get(((value, now), (value, wanted))):
                parts_of[value, wanted] = departure.run(parts_of, send_of(value))
