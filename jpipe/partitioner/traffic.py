"""Lists what devices send each other in a program: its collectives, read from its jaxpr."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jax.extend.core import jaxprs_in_params

from jpipe.partitioner.conversions import ring_bytes
from jpipe.partitioner.shardings import Shape
from jpipe.seam.inside import axes_of, line_of, scopes_of
from jpipe.seam.primitives import COLLECTIVES, Jaxpr, shapes_of


class Sent(NamedTuple):
    """A collective of a program.

    Attributes:
      collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute".
      axes: the mesh axes along which it joins devices.
      devices: how many it joins: all along these axes, or a part of them.
      shape: the shape of the part that a device puts in.
      dtype: the dtype of that part.
      bytes: the bytes that a device sends, each time.
      loops: the lengths of the loops around it, outermost first, as far as they are known.
      scope: the names of the scopes and loops around it, outermost first.
      line: the user's line that made it, as "model.py:12"; empty if none did.
    """

    collective: str
    axes: tuple[str, ...]
    devices: int
    shape: Shape
    dtype: str
    bytes: float
    loops: tuple[int, ...]
    scope: tuple[str, ...]
    line: str


def sent_in(jaxpr: Jaxpr, sizes: Mapping[str, int]) -> list[Sent]:
    """Lists the collectives of a jaxpr, and of those within it, in order.

    Args:
      jaxpr: a program that all devices run.
      sizes: mesh axis -> how many devices it has.
    """
    return list(_sent(jaxpr, sizes, (), ()))


def _sent(jaxpr: Jaxpr, sizes: Mapping[str, int], scope: tuple[str, ...], loops: tuple[int, ...]) -> Iterator[Sent]:
    for equation in jaxpr.eqns:
        name, here = equation.primitive.name, (*scope, *scopes_of(equation))
        inner = (*loops, equation.params["length"]) if name == "scan" else loops
        for within in jaxprs_in_params(equation.params):
            yield from _sent(within, sizes, here, inner)
        named = axes_of(equation) if name in COLLECTIVES else ()
        axes = tuple(axis for axis in named if sizes.get(axis, 1) > 1)
        for leaf in shapes_of(equation.invars) if axes else ():
            groups = equation.params.get("axis_index_groups")
            count = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
            kind = COLLECTIVES[name]
            size = ring_bytes(kind, leaf.size * leaf.dtype.itemsize, count)
            yield Sent(kind, axes, count, leaf.shape, leaf.dtype.name, size, loops, here, line_of(equation))
