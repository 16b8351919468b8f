"""Containers: a pytree as JSON and back; what JSON can't hold is refused and named."""

import json
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.checkpoints.containers import containers_from_json, containers_to_json, value_from_json, value_to_json

Point = namedtuple("Point", ["x", "y"])


def there_and_back(tree):
    return containers_from_json(json.loads(json.dumps(containers_to_json(tree, value_to_json))), value_from_json)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        3,
        2**127 + 1,
        "text",
        b"\x00\xff",
        1.5,
        True,
        [],
        (),
        {},
        {"a": (1, [2, None]), "b": {7: "c", 8: {1.5: False}}, "c": {True: ()}},
        {"b": 1, "a": {"1": 2}},
    ],
    ids=repr,
)
def test_plain_values_and_containers_come_back_as_they_were(tree):
    found = there_and_back(tree)
    assert found == tree
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert [type(leaf) for leaf in jax.tree.leaves(found)] == [type(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.float64(np.pi),
        np.array([1 + 2j, np.nan], np.complex64),
        np.zeros((0, 3), bool),
        np.array([1, 2], ">u4"),
        jnp.arange(3),
    ],
    ids=repr,
)
def test_arrays_come_back_to_the_bit(array):
    found = there_and_back([array])[0]
    assert (found.dtype, found.shape) == (np.asarray(array).dtype, np.shape(array))
    assert found.tobytes() == np.asarray(array).tobytes()
    assert found.flags.writeable


def test_other_containers_become_dicts_by_their_fields():
    assert there_and_back(Point(1, [2])) == {"x": 1, "y": [2]}


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"reader": [object()]}, "holds a object at reader/0"),
        (np.array(["text"]), "holds a array of <U4 at its root"),
        ({"key": jax.random.key(0)}, "holds a PRNGKeyArray at key"),
        ({"w": jnp.zeros(2, jnp.bfloat16)}, "holds a array of bfloat16 at w"),
        ({"a": {(1, 2): 3}}, r"a dict at a has the key \(1, 2\)"),
    ],
)
def test_what_json_cannot_hold_is_named(tree, message):
    with pytest.raises(TypeError, match=message):
        there_and_back(tree)


def test_what_earlier_versions_wrote_is_read():
    """Format 1, as of the first release."""
    array = {"leaf": {"array": ["<i2", [2], "AQACAA=="]}}
    encoded = {
        "dict": [["a", {"tuple": [{"leaf": {"value": 1}}, {"none": True}, array]}], ["b", {"leaf": {"bytes": "AP8="}}]]
    }
    found = containers_from_json(encoded, value_from_json)
    assert found["a"][:2] == (1, None)
    np.testing.assert_array_equal(found["a"][2], np.array([1, 2], np.int16))
    assert found["b"] == b"\x00\xff"
