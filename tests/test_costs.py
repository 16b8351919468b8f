"""Costs of layers, by which stages are balanced."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe

BATCH = np.ones((8, 16), np.float32)


def costs(layers, balance, k=2, m=2):
    pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y), num_stages=k, num_microbatches=m, balance=balance)
    jax.eval_shape(pipe.init, jax.random.key(0), BATCH)
    return pipe.partition


def test_flops_count_the_matrix_products():
    wide = [nn.Dense(16, use_bias=False), nn.Dense(64, use_bias=False), nn.Dense(16, use_bias=False), nn.relu]
    found = costs(wide, "flops").layer_costs
    products = [2 * 4 * 16 * 16, 2 * 4 * 16 * 64, 2 * 4 * 64 * 16]
    for cost, product in zip(found, products, strict=False):
        assert product <= cost < 1.1 * product
    assert found[3] < 0.1 * products[0]


def test_layers_of_one_kind_have_one_cost():
    found = costs([nn.Dense(16) for _ in range(5)], "flops").layer_costs
    assert found[1] == found[2] == found[3]


def test_size_is_bytes_of_variables_and_outputs():
    found = costs([nn.Dense(8), nn.Dense(4, use_bias=False)], "size").layer_costs
    assert found == ((16 * 8 + 8 + 4 * 8) * 4, (8 * 4 + 4 * 4) * 4)


def test_even():
    assert costs([nn.Dense(8), nn.Dense(8), nn.relu, nn.relu], "even").layer_costs == (1, 1, 1, 1)


def test_time_is_measured_once_a_kind():
    found = costs([nn.relu, nn.Dense(16), nn.Dense(16), nn.tanh], "time").layer_costs
    assert min(found) > 0
    assert found[1] == found[2]


@pytest.mark.parametrize(
    ("balance", "counts"),
    [([1, 3], (1, 3)), ([3.0, 1.0, 1.0, 1.0], (1, 3)), ("even", (2, 2)), (np.asarray([3, 1]), (3, 1))],
)
def test_ones_own_balance(balance, counts):
    assert costs([nn.Dense(16) for _ in range(4)], balance).counts == counts


def test_a_heavy_head_gets_a_stage_of_its_own():
    layers = [nn.Dense(16), nn.Dense(16), nn.Dense(16), nn.Dense(512)]
    assert costs(layers, "flops").cuts == (3,)
