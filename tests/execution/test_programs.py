"""The programs, as the pipeline jits them; what they compute is held by tests/end_to_end/test_transparency.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from device_programs import programs_for
from jpipe.execution.programs import narrow_dtypes

X = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)


class Block(nn.Module):
    """A product in bfloat16 whose kernel is cast, and a scale that is used as it is."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.normal(1.0), (16,))
        return nn.Dense(16, use_bias=False, dtype=jnp.bfloat16)(x).astype(jnp.float32) * scale


class Regularized(Block):
    """As a block, but the kernel itself counts too."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(1.0), (16, 16))
        return (x.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)).astype(jnp.float32) + jnp.tanh(kernel).sum()


def pipeline(layers, **options):
    options = {"num_stages": 2, "num_microbatches": 4, "balance": "even", **options}
    return jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), **options)


def narrow_of(pipe):
    return narrow_dtypes(pipe.planner.training_step(pipe.planner.for_training(X)))


@pytest.mark.parametrize(
    ("block", "devices", "expected"),
    [(Block, "gpu", {"float32_16x16": np.dtype(jnp.bfloat16)}), (Block, "tpu", {}), (Regularized, "gpu", {})],
)
def test_what_is_only_cast_is_copied_on_gpus(block, devices, expected):
    with programs_for(devices):
        assert narrow_of(pipeline([block() for _ in range(4)])) == expected


class Table(nn.Module):
    """A table that is cast to look up, and used again as a head."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("table", nn.initializers.normal(1.0), (16, 16)).astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize(
    ("remat", "kind"), [("none", "own"), ("layer", "spread"), pytest.param("full", "tied", marks=pytest.mark.slow)]
)
def test_layers_compute_the_same_to_the_bit(remat, kind):
    results = []
    for devices in ("tpu", "gpu"):
        table = jpipe.Shared(Table())
        blocks = [Block() for _ in range(4)]
        layers = [table, *blocks[:2], table] if kind == "tied" else blocks
        with programs_for(devices):
            pipe = pipeline(layers, remat=remat, ends="spread" if kind == "spread" else "own")
            variables = pipe.init(jax.random.key(0), X)
            results.append((pipe.value_and_grad(variables, X), pipe.apply(variables, X)))
            assert bool(narrow_of(pipe)) == (devices == "gpu")
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_gradients_of_shared_parameters_are_summed_in_their_own_dtype():
    """They were summed in that of the copy."""

    class Narrow(nn.Module):
        @nn.compact
        def __call__(self, x):
            table = self.param("table", nn.initializers.normal(1.0), (16, 16), jnp.float64)
            return (x.astype(jnp.float32) @ table.astype(jnp.float32)).astype(jnp.float64)

    with jax.enable_x64(True):
        table, batch, found = jpipe.Shared(Narrow()), X.astype(np.float64), []
        for devices in ("tpu", "gpu"):
            with programs_for(devices):
                pipe = pipeline([table, jnp.tanh, jnp.tanh, table], num_microbatches=8)
                variables = pipe.init(jax.random.key(0), batch)
                found.append(pipe.value_and_grad(variables, batch))
                assert bool(narrow_of(pipe)) == (devices == "gpu")
        jax.tree.map(np.testing.assert_array_equal, *found)
