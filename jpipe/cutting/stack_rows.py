"""Computes a row of a stacked array without the rest: what `jax.vmap` made for all blocks at once, for one of them.

So a stage that has some of the blocks makes the weights of these alone. From the end of a trace backwards an index is
put into the operands of each operation that treats the rows alike; elsewhere the array is made, and sliced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jpipe.jax.flat_jaxpr import FlatEquation, FlatJaxpr, jaxpr_of
from jpipe.jax.primitives import ELEMENTWISE
from jpipe.types import Leaf

ROWWISE = ELEMENTWISE | {"bitcast_convert_type"}
"""Operations that treat all elements alike; a bit cast to a type of another width makes more dimensions or fewer."""
KEYWISE = frozenset({"random_bits", "random_clone", "random_fold_in", "random_split", "random_unwrap", "random_wrap"})
"""Operations on each of some random keys: on all at once, others than threefry's may draw from the first alone."""
THREEFRY = jax.eval_shape(partial(jax.random.key, impl="threefry2x32"), 0).dtype


@dataclass
class StackRows:
    """Computes values of a trace for some arguments, and rows of them.

    Attributes:
      flat: the trace.
      values: what is computed so far, by number and indices of a row.
    """

    flat: FlatJaxpr
    values: dict[tuple[int, tuple[int, ...]], Leaf] = field(default_factory=dict)

    def value(self, number: int, indices: tuple[int, ...] = ()) -> Leaf:
        """A value, or its row at some indices along the first dimensions."""
        number, indices = self.flat.element(number, indices)
        if (number, indices) not in self.values:
            self.values[number, indices] = self._made(number, indices)
        return self.values[number, indices]

    def _made(self, number: int, indices: tuple[int, ...]) -> Leaf:
        if number in self.flat.constants and not indices:
            return self.flat.constants[number]
        i = self.flat.made_by.get(number)
        one = None if i is None else self.flat.equations[i]
        if not indices:
            assert one is not None
            reads = list(dict.fromkeys(one.reads))
            run = jaxpr_as_fun(jaxpr_of(self.flat, [one], reads, one.makes, []))
            made = run(*map(self.value, reads))
            self.values |= {(n, ()): leaf for n, leaf in zip(one.makes, made, strict=True)}
            return self.values[number, ()]
        *before, index = indices
        if not before and one is not None and (row := self._row(one, index)) is not None:
            return row
        array = self.value(number, tuple(before))
        return lax.squeeze(lax.dynamic_slice_in_dim(array, np.int32(index), 1), [0])

    def _row(self, one: FlatEquation, index: int) -> Leaf | None:
        """The row of what an equation makes, from rows of what it reads; None if that isn't known to be the same."""
        bind, params = one.equation.primitive.bind, one.equation.params
        name, shape = one.equation.primitive.name, self.flat.avals[one.makes[0]].shape
        operands = [self.flat.avals[n].shape for n in one.reads]
        row = lambda n, at: self.value(n, () if at is None else (at,))
        dtypes = [self.flat.avals[n].dtype for n in (*one.reads, *one.makes)]
        is_threefry = all(d == THREEFRY for d in dtypes if jnp.issubdtype(d, jax.dtypes.prng_key))
        if name in KEYWISE and is_threefry and all(s and s[0] == shape[0] for s in operands):
            return bind(*(row(n, index) for n in one.reads), **params)
        if name in ROWWISE and all(not s or len(s) == len(shape) for s in operands):
            at = [None if not s else (index if s[0] == shape[0] else 0) for s in operands]
            return bind(*map(row, one.reads, at), **params)
        if name in _MOVED and (found := _MOVED[name](params, operands[0], shape)) is not None:
            from_row, changed = found
            return bind(row(one.reads[0], index if from_row else None), **{**params, **changed})
        return None


Shape = tuple[int, ...]
Moved = Callable[[Mapping, Shape, Shape], tuple[bool, dict] | None]
"""(parameters, the operand's shape, the result's) -> (whether a row is made of the operand's row, other parameters)."""


def _broadcast(params: Mapping, operand: Shape, shape: Shape) -> tuple[bool, dict] | None:
    dimensions = params["broadcast_dimensions"]
    if 0 in dimensions and operand[0] != shape[0]:
        return None
    from_row = 0 in dimensions
    return from_row, {"shape": shape[1:], "broadcast_dimensions": tuple(d - 1 for d in dimensions[from_row:])}


def _reshape(params: Mapping, operand: Shape, shape: Shape) -> tuple[bool, dict] | None:
    same = operand[:1] == shape[:1] and params["dimensions"] is None
    return (True, {"new_sizes": shape[1:]}) if same else None


def _transpose(params: Mapping, operand: Shape, shape: Shape) -> tuple[bool, dict] | None:
    first, *others = params["permutation"]
    return (True, {"permutation": tuple(d - 1 for d in others)}) if first == 0 else None


_MOVED: dict[str, Moved] = {"broadcast_in_dim": _broadcast, "reshape": _reshape, "transpose": _transpose}


def rows_of(flat: FlatJaxpr, wanted: Sequence[tuple[int, tuple[int, ...]]]) -> Callable[..., list[Leaf]]:
    """A function from the arguments of a trace to rows of its values, each given by its number and indices."""

    def run(*arguments: jax.Array) -> list[Leaf]:
        rows = StackRows(flat, {(n, ()): leaf for n, leaf in zip(flat.arguments, arguments, strict=True)})
        return [rows.value(number, indices) for number, indices in wanted]

    return run
