"""Errors for pytrees that aren't as they should be name the first leaf."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.jax.trees import accumulator_dtype, check_same_shapes, check_same_structure, is_float

SUMMED_IN = [
    (jnp.bfloat16, np.float32),
    (np.float16, np.float32),
    (jnp.float8_e4m3fn, np.float32),
    (np.float32, np.float32),
    (np.float64, np.float64),
    (np.complex64, np.complex64),
    (np.int8, np.int8),
    (np.bool_, np.bool_),
]


@pytest.mark.parametrize(("dtype", "summed_in"), SUMMED_IN, ids=lambda dtype: np.dtype(dtype).name)
def test_sums_of_narrow_numbers_are_wide(dtype, summed_in):
    assert accumulator_dtype(np.dtype(dtype)) == np.dtype(summed_in)


def test_leaves_with_gradients():
    """Those that `jax.grad` takes, if it is told that a function is holomorphic."""
    for dtype, _ in SUMMED_IN:
        assert is_float(np.zeros((), dtype)) == (np.dtype(dtype).kind not in "iub")
    assert not is_float(jax.random.key(0))


# --- dtypes -----------------------------------------------------------------------------------------------------------


EXPECTED = {"inputs": np.zeros((8, 4), np.float32), "targets": np.zeros(8, np.int32)}


def test_equal_ones_pass():
    check_same_structure("batch", EXPECTED, EXPECTED)
    check_same_shapes("batch", EXPECTED, EXPECTED)


@pytest.mark.parametrize(
    ("given", "expected", "message"),
    [
        ({"inputs": 0}, EXPECTED, "it lacks batch['targets']"),
        ({"inputs": 0, "labels": 0}, EXPECTED, "it lacks batch['targets'] and it has batch['labels'] besides"),
        ({**EXPECTED, "a": {"b": 0, "c": 0}}, EXPECTED, "it has batch['a']['b'] and 1 more besides"),
        ([0] * 10, EXPECTED, "it is batch[0] and 9 more in a list, not batch['inputs'] and 1 more in a dict"),
        (0, EXPECTED, "it is a bare array, not batch['inputs'] and 1 more in a dict"),
        ({"a": 0}, {}, "it has batch['a'] besides"),
        ([1, 2], (1, 2), "it is batch[0] and 1 more in a list, not batch[0] and 1 more in a tuple"),
    ],
)
def test_another_structure(given, expected, message):
    with pytest.raises(ValueError, match=re.escape(f"the batch has another structure than at init: {message}") + "$"):
        check_same_structure("batch", given, expected)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.zeros((8, 1), np.int32), "batch['targets'] has the shape (8, 1), not (8,) as at init"),
        (np.zeros(8, np.float32), "batch['targets'] has the dtype float32, not int32 as at init; cast it"),
    ],
)
def test_another_shape_or_dtype(targets, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_same_shapes("batch", EXPECTED | {"targets": targets}, EXPECTED)


def test_floats_may_all_have_another_dtype_alike():
    """Those of one dtype; what was given so far counts."""
    tree = lambda *dtypes: [jnp.zeros(2, dtype) for dtype in dtypes]
    expected, casts = tree("float32", "bfloat16", "float32", "int32"), {}
    check_same_shapes("x", tree("float16", "float32", "float16", "int32"), expected, casts)
    assert casts == {jnp.dtype("float32"): jnp.dtype("float16"), jnp.dtype("bfloat16"): jnp.dtype("float32")}
    with pytest.raises(ValueError, match="the dtype float32, not float16 as those before it; cast all alike"):
        check_same_shapes("x", expected, expected, casts)
    with pytest.raises(ValueError, match=r"x\[3\] has the dtype float32, not int32 as at init; cast it back"):
        check_same_shapes("x", tree("float32", "bfloat16", "float32", "float32"), expected, {})
    with pytest.raises(ValueError, match=r"x\[2\] has the dtype float16, not float32 as at init; cast it back"):
        check_same_shapes("x", tree("float32", "bfloat16", "float16", "int32"), expected, {})
