"""What tests of layers share."""

import jax
import pytest


@pytest.fixture(scope="session")
def key() -> jax.Array:
    return jax.random.key(0)
