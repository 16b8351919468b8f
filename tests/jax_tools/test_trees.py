"""Errors for pytrees that aren't as they should be name the first leaf."""

import numpy as np
import pytest

from jpipe.jax_tools.trees import check_same_shapes, check_same_structure

EXPECTED = {"inputs": np.zeros((8, 4), np.float32), "targets": np.zeros(8, np.int32)}


def test_equal_ones_pass():
    check_same_structure("batch", EXPECTED, EXPECTED)
    check_same_shapes("batch", EXPECTED, EXPECTED)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": 0}, r"it lacks batch\['targets'\]; expected \[\['inputs'\], \['targets'\]\], got \[\['inputs'\]\]"),
        (EXPECTED | {"mask": 0}, r"it has batch\['mask'\] besides"),
        (0, r"it lacks batch\['inputs'\].*got \[a bare array\]"),
    ],
)
def test_another_structure(given, message):
    with pytest.raises(ValueError, match=f"the batch has another structure than at init: {message}"):
        check_same_structure("batch", given, EXPECTED)


def test_other_containers():
    with pytest.raises(ValueError, match="its containers differ"):
        check_same_structure("batch", [1, 2], (1, 2))


def test_another_shape():
    given = EXPECTED | {"targets": np.zeros((8, 1), np.int32)}
    with pytest.raises(ValueError, match=r"batch\['targets'\] has the shape \(8, 1\), not \(8,\) as at init"):
        check_same_shapes("batch", given, EXPECTED)


def test_another_dtype():
    given = EXPECTED | {"targets": np.zeros(8, np.float32)}
    with pytest.raises(ValueError, match=r"batch\['targets'\] has the dtype float32, not int32 as at init; cast it"):
        check_same_shapes("batch", given, EXPECTED)
