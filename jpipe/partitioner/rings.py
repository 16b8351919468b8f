"""Products beside the transfers that they wait for, piece by piece, on a ring of devices.

A product whose operand has to be gathered along an axis can begin with the part that its device has, while the parts of
its neighbours arrive. A product whose sum is scattered can hand on what it has added up, while it computes more (Wang
et al., 2023, "Overlap communication with dependent computation via decomposition"). So an array is in *pieces* along
the dimension that is gathered or scattered, one for each device of the axis. They go round the ring both ways: piece -1
of device i is that of device i - 1, on its left. Of four devices:

    arriving        pieces that travel      -1, 1 ---| -2 -----------|
                    products                0        | -1      1     | -2
    leaving         products                -2       | -1      1     | 0
                    sums that travel                 | -2 ---------- | -2 and -1, 1: they end where they belong

Nothing here makes a device wait: products depend on the pieces that they read and no more, and what a compiler puts
beside a permutation is its own choice. Which conversions of a plan go by rings, `jpipe.partitioner.find_rings` says;
`DevicePlan.run` (`jpipe.partitioner.way`) asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.partitioner.shardings import Axis, Sharding

Form = tuple[int, Sharding]
"""A value as it lies on devices: its number in the `FlatJaxpr`, and a sharding."""
HIDDEN = 0.75
"""The part of what goes by rings that nobody waits for, about as seen in programs compiled for a v5p."""
LEAST_ROWS = 512
"""The length of pieces in elements from which each is multiplied alone. Shorter pieces that arrive together are joined:
a product of r rows reads a weight in less time than it takes if r is above 330 (float32) or 170 (bfloat16) on a v5p."""


@dataclass(frozen=True)
class Ring:
    """The devices of an axis on a ring. To the right is 1, to the left -1."""

    axis: Axis

    def farthest(self, way: int) -> int:
        """How many devices a piece passes that goes one way: together they reach all others."""
        return self.axis.size // 2 if way == 1 else (self.axis.size - 1) // 2

    @property
    def outwards(self) -> list[tuple[int, ...]]:
        """The pieces of all devices as seen from one, in the order in which they arrive: those on its left first."""
        far = range(1, self.farthest(1) + 1)
        return [(0,), *((-j, j) if j <= self.farthest(-1) else (-j,) for j in far)]

    def groups(self, size: int) -> list[tuple[int, ...]]:
        """The same, of which those of a tuple are multiplied together; `size` is a piece's length."""
        if size < LEAST_ROWS:
            return self.outwards
        return [(k,) for pieces in self.outwards for k in pieces]

    def shifted(self, x: jax.Array, way: int) -> jax.Array:
        """The array of the neighbour from which that way leads here."""
        order = self.axis.ring
        return lax.ppermute(x, self.axis.names, [(i, order[(k + way) % len(order)]) for k, i in enumerate(order)])

    def taken(self, whole: jax.Array, dim: int, pieces: Sequence[int]) -> jax.Array:
        """Pieces of an array that a device has whole, one after the other."""
        size = whole.shape[dim] // self.axis.size
        return _joined([lax.dynamic_slice_in_dim(whole, self._begin(size, k), size, dim) for k in pieces], dim)

    def whole(self, results: Iterable[tuple[Sequence[int], jax.Array]], dim: int) -> jax.Array:
        """The whole array of all pieces, which are given as `(pieces, an array of them, one after the other)`."""
        pairs = [(k, one) for ks, joined in results for k, one in zip(ks, _apart(joined, dim, len(ks)), strict=True)]
        size, shape = pairs[0][1].shape[dim], list(pairs[0][1].shape)
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


def _joined(pieces: Sequence[jax.Array], dim: int) -> jax.Array:
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim)


def _apart(joined: jax.Array, dim: int, count: int) -> list[jax.Array]:
    size = joined.shape[dim] // count
    return [lax.slice_in_dim(joined, i * size, (i + 1) * size, axis=dim) for i in range(count)]


@dataclass(frozen=True, eq=False)
class Arriving:
    """An array that arrives in pieces; each is sent when it is first read.

    Attributes:
      ring: the devices.
      own: the piece that the device has.
      dim: the dimension that is in pieces.
    """

    ring: Ring
    own: jax.Array
    dim: int
    _pieces: dict[int, jax.Array] = field(default_factory=dict)

    def piece(self, k: int) -> jax.Array:
        """Piece k, of which the neighbour on its side has a nearer one."""
        if k == 0:
            return self.own
        if k not in self._pieces:
            self._pieces[k] = self.ring.shifted(self.piece(k + 1 if k < 0 else k - 1), 1 if k < 0 else -1)
        return self._pieces[k]

    @cached_property
    def whole(self) -> jax.Array:
        """All pieces in order."""
        pieces = [k for ks in self.ring.outwards for k in ks]
        return self.ring.whole([((k,), self.piece(k)) for k in pieces], self.dim)


def all_of(value: jax.Array | Arriving) -> jax.Array:
    """The array, when all of it is there."""
    return value.whole if isinstance(value, Arriving) else value


@dataclass(frozen=True, eq=False)
class PieceStep:
    """An equation that is carried out on pieces.

    Attributes:
      reads: each operand, and its dimension in pieces; None if it is read whole.
      makes: its one result.
      dim: the result's dimension in pieces.
      run: a device's operands, of some pieces, and their number -> the result of these pieces.
    """

    reads: tuple[tuple[Form, int | None], ...]
    makes: Form
    dim: int
    run: Callable[[Sequence[jax.Array], int], jax.Array]

    def as_pieces_arrive(self, at_hand: Mapping[Form, jax.Array | Arriving]) -> jax.Array:
        """The whole result of the step on all pieces of an operand that arrives."""
        (arriving,) = [at_hand[form] for form, dim in self.reads if dim is not None]
        assert isinstance(arriving, Arriving)

        def result(pieces: Sequence[int]) -> jax.Array:
            arrived = _joined([arriving.piece(k) for k in pieces], arriving.dim)
            operands = [all_of(at_hand[form]) if dim is None else arrived for form, dim in self.reads]
            return self.run(operands, len(pieces))

        groups = arriving.ring.groups(arriving.own.shape[arriving.dim])
        return arriving.ring.whole([(pieces, result(pieces)) for pieces in groups], self.dim)


@dataclass(frozen=True, eq=False)
class Arrival:
    """A gather that goes by a ring.

    Attributes:
      ring: the devices.
      dim: the dimension that is gathered.
    """

    ring: Ring
    dim: int

    def start(self, own: jax.Array) -> Arriving:
        """The array whose own piece a device has."""
        return Arriving(self.ring, own, self.dim)


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

    def run(self, at_hand: Mapping[Form, jax.Array | Arriving]) -> jax.Array:
        """A device's own part of the sum."""
        sums = {k: x for pieces in reversed(self.ring.groups(self.size)) for k, x in self._of(pieces, at_hand).items()}
        total = sums[0]
        for way in (-1, 1):
            going = None
            for k in range(self.ring.farthest(-way), 0, -1):  # it was numbered as what comes from there
                going = sums[way * k] if going is None else going + sums[way * k]
                going = self.ring.shifted(going, way)
            total = total if going is None else total + going
        return total

    def _of(self, pieces: Sequence[int], at_hand: Mapping[Form, jax.Array | Arriving]) -> dict[int, jax.Array]:
        """The device's sums of some pieces."""
        made: dict[Form, jax.Array] = {}

        def read(form: Form, dim: int | None) -> jax.Array:
            if form in made:
                return made[form]
            value = all_of(at_hand[form])
            return value if dim is None else self.ring.taken(value, dim, pieces)

        for step in self.steps:
            made[step.makes] = step.run([read(*operand) for operand in step.reads], len(pieces))
        last = self.steps[-1]
        return dict(zip(pieces, _apart(made[last.makes], last.dim, len(pieces)), strict=True))


@dataclass(frozen=True, eq=False)
class Rings:
    """The conversions of a plan that go by rings.

    Attributes:
      arrivals: the form of a device's part, and the gathered form -> the gather.
      readers: the index of an equation -> the step on pieces of what arrives; all others read it whole.
      departures: the form of a sum, and that of a device's part of it -> the scatter.
      later: the indices of the equations that are steps of departures.
    """

    arrivals: Mapping[tuple[Form, Form], Arrival] = field(default_factory=dict)
    readers: Mapping[int, PieceStep] = field(default_factory=dict)
    departures: Mapping[tuple[Form, Form], Departure] = field(default_factory=dict)
    later: frozenset[int] = frozenset()
