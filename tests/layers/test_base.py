"""Functions that all layers share."""

from jpipe.layers.base import positional


def test_positional():
    assert positional((1, 2)) == (1, 2)
    assert positional([1, 2]) == ([1, 2],)
    assert positional({"a": 1}) == ({"a": 1},)
