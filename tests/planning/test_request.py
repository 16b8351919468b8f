"""What a user asks for, and what is none of the options."""

import pytest

import jpipe
from cases import ahead
from jpipe.planning.request import Options


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cast": "never"}, ValueError, r"cast='never' is unknown; use one of \['step', 'use'\]"),
        ({"ends": "half"}, ValueError, r"ends='half' is unknown; use one of \['own', 'spread', 'shared'\]"),
        ({"unroll": 2}, TypeError, "unroll=2 is not a bool; True compiles a stage's layers one by one"),
    ],
)
def test_a_wrong_option_is_an_error(options, error, message):
    with pytest.raises(error, match=message):
        Options(**options)
    assert Options() == Options("step", False)


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_where_residuals_are_kept_none_are_computed_ahead(remat):
    layer = jpipe.Layer(lambda key, x: {}, lambda w, x: x)
    with pytest.raises(
        ValueError, match="schedule='ahead' has actions R, and this remat leaves nothing to compute ahea"
    ):
        jpipe.Pipeline([layer] * 4, lambda y, _: y, num_stages=2, num_microbatches=4, schedule=ahead(2, 4), remat=remat)
