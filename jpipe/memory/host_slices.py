"""`Cuts`: how an array that lies on the hosts is cut into slices. A device holds a few of them, never all of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpipe.arrays.host import HOST, to_host
from jpipe.arrays.indexing import Index, put_slice
from jpipe.arrays.loops import each
from jpipe.memory.memory_order import Order
from jpipe.mesh.axes import on_stages

TILE = (32, 1024)
"""Multiples of the tiles in which accelerators keep an array's last two dimensions, whatever its dtype."""
LANES = 128
"""The entries of the innermost dimension of a TPU's tiles."""
SLICE_BYTES = 2**23
"""The most bytes of an array that go to the host or come from there at once; a few such slices are on the device. Eight
times as many where the last dimension isn't a multiple of `LANES`: the compiler then has a dimension innermost that a
smaller slice would cut, and aborts on slices that aren't one piece of memory."""


@dataclass(frozen=True)
class Cuts:
    """How an array is cut into slices that go to the host and come from there.

    A TPU's compiler moves slices of one dimension alone, so dimensions before it are merged with it:

        [1, 4, 96, 50], cut to [50] each 256:       [384, 50], rows 0..255 | 256..383

    Attributes:
      view: the array's shape, with dimensions merged.
      dim: the dimension of it that is cut.
      run: how many of its entries are a slice.
    """

    view: tuple[int, ...]
    dim: int
    run: int

    @classmethod
    def of(cls, shape: tuple[int, ...], itemsize: int) -> Cuts:
        """The cuts of an array of a shape whose elements have so many bytes."""
        last = len(shape) - 1
        row = lambda dim: itemsize * math.prod(shape[dim + 1 :])
        before = lambda dim: math.prod(shape[:dim])
        # Accelerators keep the last two dimensions in tiles: merging is no copy where these stay whole.
        fits = lambda dim: before(dim) == 1 or dim < last - 1 or (dim == last - 1 and shape[dim] % TILE[0] == 0)
        most = SLICE_BYTES * (8 if shape[last:] and shape[last] % LANES else 1)
        wanted = next((dim for dim in range(last) if row(dim) <= most), last)
        dim = max(dim for dim in range(wanted + 1) if fits(dim))
        unit = TILE[dim - last + 1] if dim >= last - 1 else 1
        view, at = (shape, dim) if before(dim) == 1 else ((before(dim + 1), *shape[dim + 1 :]), 0)
        run = max(most // row(dim) // unit, 1) * unit
        return cls(view, at, min(view[at], run))

    @property
    def order(self) -> Order | None:
        """The order of a slice's dimensions in memory, in which it is one piece; None leaves it to the compiler.

        Where the last dimension would be padded to `LANES`, the compiler has another one innermost, and is left to.
        """
        return tuple(range(len(self.view))) if self.view[-1] % LANES == 0 else None

    @property
    def parts(self) -> list[tuple[int, tuple[int, ...], Callable[[Index], tuple[Index, ...]]]]:
        """For slices of one shape each: (how many there are, the shape, the index at which the i-th begins)."""
        before, size, after = self.view[: self.dim], self.view[self.dim], self.view[self.dim + 1 :]
        count, rest = divmod(size, self.run)
        at = lambda i, start=0: (*(0 for _ in before), start + i * self.run)
        parts = [(count, (*before, self.run, *after), at)]
        return [*parts, (1, (*before, rest, *after), partial(at, start=size - rest))] if rest else parts


def zeros_on_host(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Zeros in the memory of the host, of which only slices are made on the device."""
    cuts = Cuts.of(shape, dtype.itemsize)
    array = to_host(jax.lax.empty(cuts.view, dtype))
    for count, part, at in cuts.parts:
        write = lambda i, zeros, array, at=at: put_slice(array, zeros, at(i))
        array = each(0, count, jnp.zeros(part, dtype), write, array)
    return array.reshape(shape)


def zeros_like(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of the shape and the sharding of an array; those on the hosts are never whole on the devices."""
    if array.sharding.memory_kind != HOST:
        return jnp.zeros(array.shape, array.dtype, device=array.sharding)
    part = array.sharding.shard_shape(array.shape)
    mesh = cast(Mesh, array.sharding.mesh)
    make = on_stages(lambda: zeros_on_host(part, array.dtype), mesh, (), array.sharding.spec)
    return jax.jit(make, out_shardings=array.sharding)()
