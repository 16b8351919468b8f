"""`Offload`: what lies in the memory of the hosts (`offload=`), and how arrays go there and back.

A chip's host has several times the memory of its chips, behind a link that is a hundred times slower than the chip's
own memory. So what waits long, or is needed once a step, may lie there, if it moves while the chip computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jpipe.arrays.indexing import Index, put_slice
from jpipe.arrays.loops import each
from jpipe.mesh.on_stages import on_stages
from jpipe.mesh.splits import Splits
from jpipe.terminal.notices import warn_once
from jpipe.types import PyTree
from jpipe.users_numbers import as_number

HOST = "pinned_host"
"""The memory of hosts that chips read and write, as JAX calls it in shardings (`memory_kind`)."""


@dataclass(frozen=True)
class Offload:
    """The shares of what lies on the hosts: 0 for nothing, 1 for all.

    Attributes:
      residuals: of the bytes of what forwards keep for backwards.
      boundaries: of the layers' inputs among them, which are all that remat "layer" keeps.
      optimizer: of the optimiser's state; 0 or 1.
    """

    residuals: float = 0
    boundaries: float = 0
    optimizer: float = 0

    def __bool__(self) -> bool:
        return any((self.residuals, self.boundaries, self.optimizer))


NOTHING = Offload()
WORDS = tuple(field.name for field in fields(Offload))


def as_offload(offload: str | Sequence[str] | Mapping[str, float]) -> Offload:
    """Makes an `Offload` of what a user passed: a word, several, or a share by word.

    Raises:
      ValueError: an unknown word, or a share that is none.
      TypeError: anything else.
    """
    if isinstance(offload, str):
        offload = (offload,)
    if not isinstance(offload, Mapping):
        if not isinstance(offload, (Sequence, set, frozenset)):
            raise TypeError(f"offload={offload!r} is neither a word nor several; use some of {list(WORDS)}")
        offload = dict.fromkeys(offload, 1)
    for word, share in offload.items():
        if word not in WORDS:
            raise ValueError(f"offload={word!r} is unknown; use some of {list(WORDS)}")
        remedy = "use 0 or 1: all of it, or nothing" if word == "optimizer" else "use a share from 0 to 1"
        number = as_number(f"offload[{word!r}]", share, remedy)
        if number > 1 or (word == "optimizer" and number not in (0, 1)):
            raise ValueError(f"offload[{word!r}]={share!r}; {remedy}")
    return Offload(**{word: float(share) for word, share in offload.items()})


TILE = (32, 1024)
"""Multiples of the tiles in which accelerators keep an array's last two dimensions, whatever its dtype."""
SLICE_BYTES = 2**23
"""The most bytes of an array that go to the host or come from there at once; a few such slices are on the device."""


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
        wanted = next((dim for dim in range(last) if row(dim) <= SLICE_BYTES), last)
        dim = max(dim for dim in range(wanted + 1) if fits(dim))
        unit = TILE[dim - last + 1] if dim >= last - 1 else 1
        view, at = (shape, dim) if before(dim) == 1 else ((before(dim + 1), *shape[dim + 1 :]), 0)
        run = max(SLICE_BYTES // row(dim) // unit, 1) * unit
        return cls(view, at, min(view[at], run))

    @property
    def parts(self) -> list[tuple[int, tuple[int, ...], Callable[[Index], tuple[Index, ...]]]]:
        """For slices of one shape each: (how many there are, the shape, the index at which the i-th begins)."""
        before, size, after = self.view[: self.dim], self.view[self.dim], self.view[self.dim + 1 :]
        count, rest = divmod(size, self.run)
        at = lambda i, start=0: (*(0 for _ in before), start + i * self.run)
        parts = [(count, (*before, self.run, *after), at)]
        return [*parts, (1, (*before, rest, *after), partial(at, start=size - rest))] if rest else parts


def moves(splits: Splits) -> bool:
    """Whether the devices have a memory besides their host's. CPUs haven't: there all stays where it is."""
    if splits.on_cpu:
        warn_once("offload= moves nothing on CPUs, which have no memory besides their host's; steps are the same")
    return not splits.on_cpu


def is_apart(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the hosts' memory is another than that of the devices, as it isn't on CPUs."""
    return not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "cpu"


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


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same sharding in the memory of the hosts; as it is on CPUs, which have no other.

    The shape of a device that isn't there, as its compiler is given it, may not say that it has such a memory.
    """
    if not is_apart(sharding.mesh):
        return sharding
    there = sharding.with_memory_kind(HOST)
    is_known = there.memory_kind == HOST
    return there if is_known else NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def to_host(tree: PyTree) -> PyTree:
    """Arrays, traced, in the memory of the host."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
    """Arrays, traced, in the memory of the device."""
    return jax.device_put(tree, jax.memory.Space.Device)
