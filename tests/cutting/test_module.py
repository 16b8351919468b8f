"""The traces of a module: in both modes, with all outputs or those that are read."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jpipe.cutting.module import make_whole
from jpipe.layers.adapt import as_whole


class Pair(nn.Module):
    """Gives what it computed on its way, too."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        y = nn.Dense(4)(x)
        z = nn.Dense(3)(y)
        return z, {"hidden": y, "wide": nn.Dense(64)(y)}


def test_what_nobody_reads_is_not_computed():
    batch = jax.ShapeDtypeStruct((2, 5), jnp.float32)
    whole = make_whole(as_whole(Pair()), lambda batch: batch, batch)
    assert whole.paths[:2] == [("Dense_0", "bias"), ("Dense_0", "kernel")]
    modes = whole.trace(lambda batch: batch, batch)
    assert [leaf.shape for leaf in jax.tree.leaves(modes.outputs)] == [(2, 3), (2, 4), (2, 64)]
    for read, products in (((True, True, True), 3), ((True, False, False), 2)):
        for traced in (modes.reading(read).training, modes.reading(read).evaluation):
            assert sum(traced.places.works) == products
            assert len(traced.straight.outputs) == sum(read)
