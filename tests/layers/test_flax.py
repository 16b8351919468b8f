"""What Linen and NNX modules have in common as layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jpipe
from cases import NnxDrops
from jpipe.layers.adapt import as_layers
from jpipe.layers.base import Context, LayerError
from jpipe.layers.flax import logical_rules

X = np.ones((2, 4), np.float32)


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5, deterministic=False), lambda rngs: NnxDrops(rngs=rngs)], ids=["linen", "nnx"]
)
def test_a_layer_that_needs_a_key_says_so(key, layer):
    (layer,) = as_layers([layer])
    with pytest.raises(LayerError, match="draws random numbers in evaluation mode"):
        layer.apply({}, (X,), Context(None, True))
    layer.apply({}, (X,), Context(key, True))


def test_partition_specs_by_logical_rules(key):
    """Of linen, names without a rule split nothing; of nnx, they stand for themselves, as in Flax."""

    def specs(layer):
        (layer,) = as_layers([layer])
        variables = jax.eval_shape(lambda k: layer.init((X,), Context(k, False)), key)
        return layer.partition_specs(variables)["params"]

    ones, names = nn.initializers.ones, ("embed", "mlp")
    linen = nn.Dense(4, use_bias=False, kernel_init=nn.with_logical_partitioning(ones, names))
    own = nn.with_logical_partitioning(ones, names, rules=(("embed", "fsdp"),))
    plain = nn.Dense(4, use_bias=False, kernel_init=nn.with_partitioning(ones, names))

    def nnx_linear(rngs, **metadata):
        return nnx.Linear(4, 4, use_bias=False, kernel_init=nnx.with_partitioning(ones, names, **metadata), rngs=rngs)

    local = lambda rngs: nnx_linear(rngs, sharding_rules=(("embed", "fsdp"),))
    bare = [linen, nn.Dense(4, use_bias=False, kernel_init=own), plain, lambda rngs: nnx_linear(rngs), local]
    assert [tuple(*specs(layer)) for layer in bare] == [(None, None), ("fsdp", None), names, names, ("fsdp", "mlp")]
    with_bias = nn.Dense(4, kernel_init=nn.with_partitioning(ones, names))
    assert specs(with_bias) == [PartitionSpec(), PartitionSpec(*names)]
    with nn.logical_axis_rules((("mlp", ("tp", "sp")), ("batch", "data"))):
        later, fewer = logical_rules({"tp", "sp"}), logical_rules({"tp"})
        both = ("tp", "sp")
        expected = [(None, both), ("fsdp", None), names, ("embed", both), ("fsdp", both)]
        assert [tuple(*specs(layer)) for layer in bare] == expected
    for rules, expected in ((later, (None, ("tp", "sp"))), (fewer, (None, ("tp",)))):
        with rules():
            assert specs(linen) == [PartitionSpec(*expected)]
    assert tuple(*specs(linen)) == (None, None)
    with nn.logical_axis_rules((("embed", "tp"),)), pytest.raises(ValueError, match="Inconsistent"):
        specs(local)


class Sows(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "x", x)
        self.sow("losses", "load", jnp.mean(x))
        return nn.Dense(3)(x)


class SowsNnx(nnx.Module):
    def __init__(self, kind, rngs):
        self.kind, self.dense = kind, nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        self.sow(self.kind, "load", jnp.mean(x))
        return self.dense(x)


class Losses(nnx.Variable):
    """Losses of layers, which nothing would add up."""


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning", r"ignore:self.sow\(.intermediates")
@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (Sows(), r"\(Sows\) changes the structure of its collection 'losses' in training"),
        (lambda rngs: SowsNnx(Losses, rngs), r"\(SowsNnx\) makes the collection 'Losses' in training"),
        (lambda rngs: SowsNnx(nnx.Intermediate, rngs), None),
    ],
    ids=["linen", "nnx", "intermediates"],
)
def test_sown_losses_are_refused_with_a_remedy_and_intermediates_are_nobodys(layer, what):
    """As in Flax, where training asks for no intermediates."""
    pipe = jpipe.Pipeline([layer], lambda y, b: jnp.mean(y), num_stages=1, num_microbatches=1)
    init = lambda: pipe.init(jax.random.key(0), jnp.ones((2, 3)))
    if what is None:
        assert set(init()) == {"params"}
        return
    with pytest.raises(ValueError, match=f"{what}, as self.sow does. To have its values"):
        init()
