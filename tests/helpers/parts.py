"""Arrays cut in NumPy, by the definition of a shard, over two axes of two devices."""

import itertools

import numpy as np

from jpipe.partitioner.shardings import Axis, Shard

AXES = (Axis(("data",), (2,)), Axis(("model",), (2,)))
DEVICES = list(itertools.product(range(2), range(2)))
"""The devices, by their indices along the axes."""
X = np.arange(8 * 4).reshape(8, 4)
SPECS = [("data",), (None, "model"), ("model", "data"), (("data", "model"),), (("model", "data"),)]
SPECS += [(None, ("model", "data"))]
"""What `jax.sharding.PartitionSpec` takes for `X`."""


def cut(x, sharding, device):
    """The part of an array that a device has, taken element by element; all of it along axes that don't cut it."""
    for dim, n in enumerate(x.shape):
        own = range(n)
        for along, axis, index in zip(sharding, AXES, device, strict=True):
            if isinstance(along, Shard) and along.dim == dim:
                block = n // (along.outer * axis.size)
                own = [e for e in own if e // block % axis.size == index]
        x = x.swapaxes(0, dim)[list(own)].swapaxes(0, dim)
    return x
