"""Counts what a device sends, computes and writes, and says how much of each is worth a byte sent.

A cost is an array `[4]` of four quantities (bytes sent, bytes of reduce-scatters, operations, bytes written), so that
the costs of equations can be added. Prices weigh the quantities: `price(prices, cost)` is the number that is minimised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jpipe.jaxprs.flat_jaxpr import aval_of
from jpipe.partitioner.conversions import bytes_sent, collective_of, hops
from jpipe.partitioner.shardings import PARTIAL, Axis, Shape, Shard, Sharding, part_shape
from jpipe.seam.primitives import JaxprEqn

Cost = np.ndarray
"""`[4]`, how much of each quantity one device needs; also the prices of the four."""
NOTHING: Cost = np.zeros(4)
SENT, SCATTERED, FLOPS, WRITTEN = np.eye(4)
"""One unit of each quantity: a byte sent, a byte of a reduce-scatter, an operation of a product, a byte written."""
PRICES = SENT + 1.2 * SCATTERED + FLOPS / 1000 + WRITTEN / 128
"""The worth of each quantity in bytes sent. In the time of a byte 765 operations are done on a TPU v5p (459 TFLOP/s,
600 GB/s), 985 on a v5e, 1,100 on an H100 (NVLink, 900 GB/s), and 4.6 bytes written on a v5p (2,765 GB/s), but few of
them: operations are joined. A TPU's compiler scatters 2,048 rows as 2,240, and 144 more."""
AMONG_ZEROS = 16 * WRITTEN
"""The cost of a byte of a shard that is written among zeros, to be added to a partial sum: no other operation does that
on its way. 16 MiB take 105,000 cycles on a v5p."""
HIDDEN = 0.75
"""The part of what goes by rings beside products that nobody waits for, about as seen in programs for a v5p."""
SPLIT_SUMS = SENT + SCATTERED + FLOPS / 1000 + WRITTEN / 8
"""Prices that prefer a split sum to a whole one, because a later reader can use it split."""


def price(prices: Cost, cost: Cost) -> float:
    """Weighs a cost in bytes sent, to the same last bit on all hosts: else they would choose other plans."""
    a, b, c, d = (prices * cost).tolist()
    return a + b + c + d


def cost_of_work(equation: JaxprEqn, operands: Sequence[Shape], results: Sequence[Shape]) -> Cost:
    """Counts the cost of an equation on a device, of computing and of writing, by the shapes of its parts."""
    pairs = zip(equation.outvars, results, strict=True)
    written = sum(math.prod(shape) * itemsize(aval_of(v).dtype) for v, shape in pairs)
    flops = 0.0
    if equation.primitive.name == "dot_general":
        (contracting, _), _ = equation.params["dimension_numbers"]
        flops = 2.0 * math.prod(results[0]) * math.prod(operands[0][dim] for dim in contracting)
    elif equation.primitive.name == "conv_general_dilated":
        output_features = equation.params["dimension_numbers"].rhs_spec[0]
        flops = 2.0 * math.prod(results[0]) * math.prod(operands[1]) / max(operands[1][output_features], 1)
    return flops * FLOPS + written * WRITTEN


def cost_of_conversion(axes: Sequence[Axis], shape: Shape, size: int, now: Sharding, wanted: Sharding) -> Cost:
    """Counts the cost of sending, for a whole array of elements of `size` bytes that comes to lie otherwise."""
    cost = NOTHING
    for hop in hops(axes, now, wanted):
        if hop.wanted == PARTIAL and isinstance(hop.now[hop.over[0]], Shard):
            cost = cost + AMONG_ZEROS * math.prod(part_shape(shape, hop.then, axes)) * size
        quantity = SCATTERED if collective_of(axes, hop) == "reduce_scatter" else SENT
        cost = cost + quantity * bytes_sent(axes, shape, size, hop)
    return cost


def itemsize(dtype: np.dtype) -> int:
    """Counts the bytes of an element."""
    return getattr(dtype, "itemsize", 8)  # a random key has two words
