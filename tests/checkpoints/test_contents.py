"""The contents of a checkpoint: names by layer, whatever the layout; the first difference in words; pytrees as JSON."""

import json
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe.checkpoints.contents import Contents, from_json, to_json

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def contents_of(k=2):
    """Of a state of which there are only shapes: two equal layers, a function, and the first one's weights again."""
    first = jpipe.Shared(nn.Dense(8))
    own = [first, nn.Dense(8, use_bias=False), lambda x: x, first]
    pipe = jpipe.Pipeline(own, lambda y, _: jnp.mean(y), num_stages=k, num_microbatches=2, balance="even")
    state = pipe.abstract_state(X, optax.adam(1e-3))
    return Contents(pipe.plan.model, state)


def test_names_and_shapes_are_those_of_layers_whatever_the_layout():
    found = contents_of()
    weights = {"0000_Dense/{}kernel": (8, 8), "0000_Dense/{}bias": (8,), "0001_Dense/{}kernel": (8, 8)}
    expected = {"optimizer/0/count": ()}
    for name, shape in weights.items():
        expected |= {f"layers/{name.format('params/')}": shape}
        expected |= {f"optimizer/0/{moment}/{name.format('')}": shape for moment in ("mu", "nu")}
    assert {"/".join(path): shape.shape for path, shape in found.shapes().items()} == expected
    assert found.num_bytes == 3 * 4 * (64 + 8 + 64)
    assert found.description() == contents_of(k=4).description() == contents_of(k=1).description()


# --- pytrees as JSON --------------------------------------------------------------------------------------------------


Point = namedtuple("Point", ["x", "y"])


def there_and_back(tree):
    return from_json(json.loads(json.dumps(to_json(tree))))


@pytest.mark.parametrize(
    "tree",
    [
        *[None, 3, 2**127 + 1, "text", b"\x00\xff", 1.5, True, [], (), {}, {"b": 1, "a": {"1": 2}}],
        {"a": (1, [2, None]), "b": {7: "c", 8: {1.5: False}}, "c": {True: ()}},
    ],
    ids=repr,
)
def test_plain_values_and_containers_come_back_as_they_were(tree):
    found = there_and_back(tree)
    assert found == tree
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert [type(leaf) for leaf in jax.tree.leaves(found)] == [type(leaf) for leaf in jax.tree.leaves(tree)]
    assert there_and_back(Point(1, [tree])) == {"x": 1, "y": [tree]}, "other containers become dicts by their fields"


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
    found = from_json(encoded)
    assert found["a"][:2] == (1, None)
    np.testing.assert_array_equal(found["a"][2], np.array([1, 2], np.int16))
    assert found["b"] == b"\x00\xff"
