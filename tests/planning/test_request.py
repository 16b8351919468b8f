"""What a user asks for, and what is none of the options."""

import pytest

from jpipe.planning.request import Options


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cast": "never"}, ValueError, r"cast='never' is unknown; use one of \['step', 'use'\]"),
        ({"unroll": 2}, TypeError, "unroll=2 is not a bool; True compiles a stage's layers one by one"),
    ],
)
def test_a_wrong_option_is_an_error(options, error, message):
    with pytest.raises(error, match=message):
        Options(**options)
    assert Options() == Options("step", False)
