"""Which leaves have gradients, and in which dtype values are summed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.arrays.dtypes import accumulator_dtype, is_float

SUMMED_IN = [
    (jnp.bfloat16, np.float32),
    (np.float16, np.float32),
    (jnp.float8_e4m3fn, np.float32),
    (np.float32, np.float32),
    (np.float64, np.float64),
    (np.complex64, np.complex64),
    (np.int8, np.int8),
    (np.uint32, np.uint32),
    (np.bool_, np.bool_),
]


@pytest.mark.parametrize(("dtype", "summed_in"), SUMMED_IN, ids=lambda dtype: np.dtype(dtype).name)
def test_sums_of_narrow_numbers_are_wide(dtype, summed_in):
    assert accumulator_dtype(np.dtype(dtype)) == np.dtype(summed_in)


@pytest.mark.parametrize("dtype", [dtype for dtype, _ in SUMMED_IN], ids=lambda dtype: np.dtype(dtype).name)
def test_leaves_with_gradients(dtype):
    """Those that `jax.grad` takes, if it is told that a function is holomorphic."""
    leaf = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(dtype))  # without x64 there is no float64 to trace
    differentiable = np.dtype(dtype).kind not in "iub"
    assert is_float(leaf) == is_float(np.zeros((), dtype)) == differentiable
    holomorphic = np.dtype(dtype).kind == "c"
    if differentiable:
        jax.eval_shape(jax.grad(lambda x: x, holomorphic=holomorphic), leaf)
    else:
        with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
            jax.eval_shape(jax.grad(lambda x: x), leaf)


def test_random_keys_have_no_gradients():
    assert not is_float(jax.random.key(0))
