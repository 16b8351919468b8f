"""What tests of layers share."""

import jax
import pytest


@pytest.fixture(scope="session")
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield
