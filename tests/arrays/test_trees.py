"""Errors for pytrees that aren't as they should be name the first leaf."""

import re

import numpy as np
import pytest

from jpipe.arrays.trees import check_same_shapes, check_same_structure

EXPECTED = {"inputs": np.zeros((8, 4), np.float32), "targets": np.zeros(8, np.int32)}


def test_equal_ones_pass():
    check_same_structure("batch", EXPECTED, EXPECTED)
    check_same_shapes("batch", EXPECTED, EXPECTED)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"inputs": 0},
            "it lacks batch['targets']; expected batch['inputs'], batch['targets'] in a dict, got batch['inputs'] in a "
            "dict",
        ),
        (EXPECTED | {"mask": 0}, "it has batch['mask'] besides"),
        ({"inputs": 0, "labels": 0}, "it lacks batch['targets'] and it has batch['labels'] besides; expected"),
        ((0, 0), "it lacks batch['inputs'], batch['targets'] and it has batch[0], batch[1] besides"),
        ([0] * 10, "batch[6], batch[7] and 2 more besides"),
        (0, "got a bare array"),
    ],
)
def test_another_structure(given, message):
    with pytest.raises(ValueError, match="the batch has another structure than at init: .*" + re.escape(message)):
        check_same_structure("batch", given, EXPECTED)


def test_other_containers():
    with pytest.raises(ValueError, match=r"its containers differ; .* in a tuple, got .* in a list"):
        check_same_structure("batch", [1, 2], (1, 2))


def test_another_shape():
    given = EXPECTED | {"targets": np.zeros((8, 1), np.int32)}
    with pytest.raises(ValueError, match=r"batch\['targets'\] has the shape \(8, 1\), not \(8,\) as at init"):
        check_same_shapes("batch", given, EXPECTED)


def test_another_dtype():
    given = EXPECTED | {"targets": np.zeros(8, np.float32)}
    with pytest.raises(ValueError, match=r"batch\['targets'\] has the dtype float32, not int32 as at init; cast it"):
        check_same_shapes("batch", given, EXPECTED)
