"""Where examples lie in a model's outputs, as its operations say, and which layers couple them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jpipe.layers.adapt import as_layers
from jpipe.model.examples_in_layers import follow_examples
from jpipe.model.trace import trace_model
from jpipe.partitioner.shardings import REPLICATED, Shard

X = jax.ShapeDtypeStruct((4, 6), jnp.float32)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return nn.BatchNorm(use_running_average=not train)(x)


def followed(*layers, batch=X):
    model = trace_model(as_layers([*layers]), lambda batch: batch, batch)
    return follow_examples(model), model


def test_examples_are_followed_through_all_layers():
    found, _ = followed(nn.Dense(8), lambda x: x.T, lambda x: (x, x.reshape(-1), jnp.zeros(3)))
    assert found.outputs == [Shard(1), Shard(0, 8), REPLICATED]
    assert found.is_certain and not found.couplings


def test_batchnorm_couples_by_its_statistics():
    found, model = followed(nn.Dense(8), Normed(), nn.Dense(3))
    assert found.outputs == [Shard(0)] and found.is_certain
    assert found.in_words(model) == [
        "layer 1 (Normed) looks at several examples of a micro-batch: BatchNorm's statistics"
    ]
    assert found.in_words(model, statistics=False) == []


def test_other_couplings_are_named_with_their_line():
    found, model = followed(nn.Dense(8), lambda x: x - x.max(0), nn.Dense(3))
    (line,) = found.in_words(model, statistics=False)
    assert "reduce_max at test_examples_in_layers.py:" in line and not found.is_certain


def test_unknown_operations_are_not_named_but_make_the_rest_uncertain():
    called = lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    with_rule = jax.custom_jvp(called)
    with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), tangents[0]))
    found, model = followed(nn.Dense(8), with_rule, nn.Dense(3))
    assert found.in_words(model) == [] and not found.is_certain
