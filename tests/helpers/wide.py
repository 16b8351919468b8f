"""A pipeline of layers of some work, unevenly cut, for what measures."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe.tools.measure import StageTimes

WIDTH = 128
ROWS = 32


class Wide(nn.Module):
    """A layer of some work: width to the same by way of eight times as much."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(8 * WIDTH)(x)))


def loss_fn(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def make(num_stages=2, num_microbatches=4, **options):
    """Seven layers, all but the first two of some work, unevenly cut where there are two stages; and a batch."""
    layers = [nn.relu, nn.Dense(WIDTH), *[Wide() for _ in range(4)], nn.Dense(1)]
    options = {"balance": [2, 5] if num_stages == 2 else "even"} | options
    pipe = jpipe.Pipeline(layers, loss_fn, num_stages=num_stages, num_microbatches=num_microbatches, **options)
    keys = jax.random.split(jax.random.key(1))
    batch = {"inputs": jax.random.normal(keys[0], (ROWS, WIDTH)), "targets": jax.random.normal(keys[1], (ROWS, 1))}
    return pipe, pipe.create_state(jax.random.key(0), batch, optax.sgd(0.1, momentum=0.9)), batch


def stage_times(*parts):
    """Times of stages, of forward, backward and recomputation; a backward is whole."""
    return StageTimes(*map(np.asarray, parts), weight=np.zeros(len(parts[0])))
