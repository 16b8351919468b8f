"""Random keys: different ones for different layers, micro-batches and ends; types; raw keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.model.random_keys import as_key, init_key, layer_key

KEY = jax.random.key(7)
IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]


def bits(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_keys_are_made_by_folding_in():
    """Written out, so that numbers don't change from one version to the next unnoticed; each is used once."""
    keys = [layer_key(KEY, i, m) for i in range(5) for m in range(5)] + [init_key(KEY, i) for i in range(5)]
    assert len(set(map(bits, keys))) == 30
    fold = jax.random.fold_in
    assert bits(layer_key(KEY, 3, 2)) == bits(fold(fold(fold(KEY, 0x57E9), 3), 2))
    assert bits(init_key(KEY, 3)) == bits(fold(fold(KEY, 0x1217), 3))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_typed_and_raw_keys(impl):
    key = jax.random.key(3, impl=impl)
    assert as_key(key) is key
    with jax.default_prng_impl(impl):
        for raw in (jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))):
            assert as_key(raw).dtype == key.dtype
            assert bits(as_key(raw)) == bits(key)


@pytest.mark.parametrize(
    "bad", [0, None, "key", np.zeros(2, np.int32), np.zeros((2, 2), np.uint32), jax.random.split(KEY), jnp.zeros(2)]
)
def test_what_is_no_key(bad):
    with pytest.raises(TypeError, match=r"which is no random key; use jax.random.key\(0\)"):
        as_key(bad)
    of_another = jax.random.key_data(jax.random.key(0, impl="rbg"))
    with pytest.raises(TypeError, match=r"key is a raw key of shape \(4,\), but .*'threefry2x32' have \(2,\); pass"):
        as_key(of_another)
