"""Takes the numbers in which a group's layers differ out of their trace, and hands them in as data.

A layer's numbers (a rate of stochastic depth, a residual scale) are literals of its trace. Where layers differ in
nothing else, the literals are taken out of the trace of the first of them, and the group's function reads them as
arguments: so all of them are one program. Only literals outside of loops, branches, custom derivatives and
`jax.checkpoint` are taken out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.jax.flat_jaxpr import without_calls
from jpipe.jax.in_place import Index, take_row
from jpipe.jax.primitives import PLAIN_CALLS, ClosedJaxpr
from jpipe.types import Leaf


@dataclass(frozen=True, eq=False)
class Constants:
    """The scalars in which the functions of a group's layers differ.

    Attributes:
      scalars: all scalars of the trace of the layer that stands for the group, in the order of `scalars_of`.
      places: the indices of the scalars that differ.
      values: by a layer's index in the model, its scalars in these places.
    """

    scalars: Sequence[np.ndarray] = ()
    places: tuple[int, ...] = ()
    values: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the numbers that differ, all of them scalars."""
        return [jax.ShapeDtypeStruct((), self.scalars[place].dtype) for place in self.places]

    def of(self, layer: Index) -> list[Leaf]:
        """Returns the scalars that a layer, given by its index in the model, has in the places."""
        if not self.places:
            return []
        if isinstance(layer, int):
            return [jnp.asarray(value) for value in self.values[layer]]
        missing = [np.zeros((), shape.dtype) for shape in self.shapes]
        rows = [self.values.get(i, missing) for i in range(max(self.values, default=0) + 1)]
        return [take_row(jnp.asarray(np.stack(column)), layer) for column in zip(*rows, strict=True)]

    def put_into(self, closed: ClosedJaxpr, new: Sequence[Leaf]) -> ClosedJaxpr:
        """Puts other scalars into the places of a trace of the layer that stands for the group.

        Raises:
          ValueError: it isn't the trace that layers were compared by.
        """
        flat = without_plain_calls(closed)
        at = scalar_places(flat)
        if list(map(bits, scalars_of(flat))) != list(map(bits, self.scalars)):
            fault = "layers that differ in numbers alone are one function, but under other keys the layer computes with"
            raise ValueError(f"{fault} other numbers; use keys of JAX's default implementation, without impl=")
        by_index = dict(zip((at[place] for place in self.places), new, strict=True))
        return ClosedJaxpr(flat.jaxpr, [by_index.get(i, constant) for i, constant in enumerate(flat.consts)])


def differing(scalars: Mapping[int, Sequence[np.ndarray]], first: int, known: Constants = Constants()) -> Constants:
    """Compares the scalars of layers, and returns the constants of their group.

    Args:
      scalars: of each layer's trace, by its index in the model; of equal number and types.
      first: the index of the layer that stands for the group.
      known: the constants of those of the layers that were compared before.
    """
    of_first, places = list(map(bits, scalars[first])), set(known.places)
    new = {i: numbers for i, numbers in scalars.items() if i not in known.values}
    for numbers in new.values():
        pairs = zip(of_first, map(bits, numbers), strict=True)
        places.update(place for place, (a, b) in enumerate(pairs) if a != b)
    chosen = tuple(sorted(places))
    kept, to_read = (known.values, new) if chosen == known.places else ({}, scalars)
    values = {i: [numbers[place] for place in chosen] for i, numbers in to_read.items()}
    return Constants(scalars[first], chosen, {**kept, **values})


def without_plain_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Makes constants of a trace's literals, in plain calls too (`jit`); the functions below take such a trace."""
    return without_calls(closed, PLAIN_CALLS)


def scalars_of(flat: ClosedJaxpr) -> list[np.ndarray]:
    """Lists the scalars of a trace that can be taken out: floating-point numbers and integers."""
    return [np.asarray(flat.consts[i]) for i in scalar_places(flat)]


def scalar_places(flat: ClosedJaxpr) -> list[int]:
    """Lists the indices of scalars among the constants of a jaxpr."""
    is_number = lambda dtype: jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return [i for i, constant in enumerate(flat.consts) if np.ndim(constant) == 0 and is_number(constant.dtype)]


def bits(constant: Leaf | object) -> object:
    """Returns the type and the bits of a constant."""
    kind = ""
    if isinstance(constant, jax.Array) and jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        kind, constant = str(constant.dtype), jax.random.key_data(constant)
    array = np.asarray(constant)
    return kind, str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()
