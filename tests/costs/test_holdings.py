"""What stages have and devices hold: as many bytes as the arrays of `init` have on each device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe.costs.holdings import Amount, holdings

TOKENS = np.ones((8, 5), np.int32)


class Block(nn.Module):
    """Kernels split over `fsdp` and `tp`, and running averages."""

    @nn.compact
    def __call__(self, x):
        split = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", "tp"))
        x = nn.Dense(16, kernel_init=split)(x)
        return nn.BatchNorm(use_running_average=False)(x)


def make(**options) -> jpipe.Pipeline:
    table = jpipe.Shared(nn.Embed(32, 16))
    layers = [table, Block(), Block(), nn.Dense(16), Block(), table.using("attend")]
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), num_microbatches=2, **options)


def sizes(trees) -> tuple[int, int]:
    leaves = jax.tree.leaves(trees)
    return sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"stage": 2}, {"balance": [1, 5]}),
        ({"stage": 2}, {"balance": [1, 2, 1, 2], "num_chunks": 2, "schedule": "interleaved"}),
        ({"stage": 2, "fsdp": 2, "tp": 2}, {"balance": [4, 2], "unroll": True}),
        ({"stage": 2, "data": 2, "tp": 2}, {"balance": [3, 3], "shard_over": ["data"]}),
    ],
)
def test_own_and_held_are_what_arrays_have(make_mesh, axes, options):
    pipe = make(num_stages=2, mesh=make_mesh(tuple(axes.values()), tuple(axes)), **options)
    variables = pipe.init(jax.random.key(0), TOKENS)
    found = holdings(pipe.plan)
    assert set(found.own) == set(found.room) == set(found.device) == {"params", "batch_stats"}
    for name, tree in variables.items():
        for device in pipe.mesh.devices.flat:
            parts = [s.data for a in tree.values() for s in a.addressable_shards if s.device == device]
            assert found.device[name] == sizes(parts), f"{name} on {device}"
        assert found.room[name] == sizes([a[0] for a in tree.values()])
    # The layers' own trees, the table once though layers 0 and 5 use it.
    trees = pipe.layer_variables(variables)
    for s, (start, stop) in enumerate(pipe.partition.bounds):
        for name in variables:
            own = [tree[name] for tree in trees[start : min(stop, 5)] if name in tree]
            assert found.own[name][s] == sizes(own), f"{name} of virtual stage {s}"
    assert found.shared == ((0, 5),)


def test_devices_hold_the_most_of_each_type_of_leaf():
    """By hand: five kernels `[4, 4]` and their biases on stage 0, a large head on stage 1, which share no type."""
    layers = [*[nn.Dense(4, use_bias=False) for _ in range(5)], nn.Dense(100, use_bias=False)]
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=2, num_microbatches=1, balance=[5, 1])
    jax.eval_shape(pipe.init, jax.random.key(0), np.ones((2, 4), np.float32))
    found = holdings(pipe.plan)
    assert found.own["params"] == (Amount(80, 320), Amount(400, 1600))
    assert found.device["params"] == found.room["params"] == Amount(480, 1920)
    assert found.shared == ()
