"""Warnings point at the line of the user's that called the package."""

import warnings

import pytest

from jpipe.terminal.notices import warn_user

CALLS = "def inner():\n    warn_user('mine')\n\ndef outer():\n    inner()\n"


@pytest.mark.parametrize("name", ["jpipe.deep", "jax._src.api"])
def test_a_warning_points_past_the_package_and_jax(name):
    module = {"__name__": name, "warn_user": warn_user}
    exec(CALLS, module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module["outer"]()
    assert [(w.filename, str(w.message), w.category) for w in caught] == [(__file__, "mine", UserWarning)]
