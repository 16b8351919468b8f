"""What the seam to Flax relies on, in this version of Flax, and what happens without it."""

import flax
import jax
import numpy as np
import pytest
from flax import nnx

from jpipe.seam.flax_inside import collection_of, unsharded_creation
from jpipe.terminal.progress import warn_once


class Seen(nnx.Variable):
    """A variable type of a user's."""


@pytest.mark.parametrize(
    ("kind", "name"), [(nnx.Param, "params"), (nnx.BatchStat, "batch_stats"), (nnx.Cache, "cache"), (Seen, "Seen")]
)
def test_collections_are_called_as_in_linen(kind, name):
    found = collection_of(kind)
    assert found == name, f"Flax {flax.__version__} calls {kind.__name__} {found!r}: checkpoints hold it as {name!r}"


def test_variables_are_made_off_the_mesh():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    make = nnx.with_partitioning(nnx.initializers.ones_init(), ("elsewhere",))  # an axis that the mesh hasn't
    with jax.set_mesh(mesh), unsharded_creation():
        made = nnx.Param(make(jax.random.key(0), (4,)))
    np.testing.assert_array_equal(made.get_value(), np.ones(4))


def test_without_the_switch(monkeypatch):
    monkeypatch.delattr(nnx, "use_eager_sharding")
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"no nnx\.use_eager_sharding"), unsharded_creation():
        pass
    with unsharded_creation():  # a second warning would be an error
        pass
