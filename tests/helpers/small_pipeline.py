"""Four small layers in two stages, for tests of what is said before anything is compiled."""

import flax.linen as nn
import jax.numpy as jnp

import jpipe


def loss_fn(outputs, batch):
    return jnp.mean(jnp.square(outputs - batch["targets"]))


def dense(width=4):
    return nn.Dense(width)


def make(layers=None, loss=loss_fn, **options):
    options = {"num_stages": 2, "num_microbatches": 2, "balance": "even"} | options
    return jpipe.Pipeline(layers if layers is not None else [dense() for _ in range(4)], loss, **options)
