"""The contents of a checkpoint: names by layer, whatever the layout; the first difference in words; pytrees as JSON."""

import copy
import json
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe.checkpoints.contents import Contents, first_difference, from_json, to_json

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def contents_of(k=2, tx=None, layers=None):
    """Of a state of which there are only shapes: two equal layers, a function, and the first one's weights again."""
    first = jpipe.Shared(nn.Dense(8))
    own = layers or [first, nn.Dense(8, use_bias=False), lambda x: x, first]
    pipe = jpipe.Pipeline(own, lambda y, _: jnp.mean(y), num_stages=k, num_microbatches=2, balance="even")
    state = pipe.abstract_state(X, tx or optax.adam(1e-3))
    return Contents(pipe.plan.model, state)


@pytest.fixture(scope="module")
def found():
    return contents_of()


def test_names_and_shapes(found):
    named = {"/".join(path): shape.shape for path, shape in found.shapes().items()}
    shapes = {"0000_Dense": {"kernel": (8, 8), "bias": (8,)}, "0001_Dense": {"kernel": (8, 8)}}
    expected = {
        f"{tree}": shape
        for layer, leaves in shapes.items()
        for name, shape in leaves.items()
        for tree in (
            f"layers/{layer}/params/{name}",
            f"optimizer/0/mu/{layer}/{name}",
            f"optimizer/0/nu/{layer}/{name}",
        )
    }
    assert named == expected | {"optimizer/0/count": ()}


def test_records_are_in_the_order_of_layers_and_know_who_shares_them(found):
    users = [record.users for record in found.each_record if record.shapes]
    assert users == [(0, 3), (1,)]
    assert [list(record.shapes) for record in found.each_record if record.shapes] == [
        ["layers/params", "optimizer/0/mu", "optimizer/0/nu"]
    ] * 2
    assert found.num_bytes == 3 * 4 * (64 + 8 + 64)


def test_the_layout_does_not_matter(found):
    assert contents_of(k=4).description() == found.description()
    assert first_difference(found.description(), contents_of(k=1).description()) is None


def test_a_layers_item_is_told_with_the_names_of_its_arrays(found):
    layers = found.description()["layers"]
    assert [layer["stored"] for layer in layers] == ["0000_Dense", "0001_Dense", None, "0000_Dense"]
    path = ["layers", "0001_Dense", "params", "kernel"]
    assert layers[1]["item"] == {"dict": [["params", {"dict": [["kernel", {"leaf": path}]]}]]}
    assert layers[0]["item"] == layers[3]["item"]


def test_random_keys_are_told_apart_from_arrays():
    found = contents_of(tx=optax.add_noise(0.1, 0.5, jax.random.key(3)))
    assert sorted(found.random_keys) == [("key",), ("optimizer", "rng_key")]
    assert ("optimizer", "rng_key") not in found.without_layer


def test_the_first_difference_in_words(found):
    own = found.description()

    def change(what):
        saved = copy.deepcopy(own)
        what(saved)
        return first_difference(saved, own)

    assert change(lambda saved: saved["layers"][1].update(name="0001_Conv")) == (
        "layer 1 is 0001_Conv in the checkpoint and 0001_Dense in the pipeline"
    )
    assert change(lambda saved: saved["layers"][3].update(stored="0001_Dense")) == (
        "layer 0003_Dense has the variables of 0001_Dense in the checkpoint"
    )
    assert change(lambda saved: saved["layers"].pop()) == (
        "layer 3 is missing in the checkpoint and 0003_Dense in the pipeline"
    )
    assert change(lambda saved: saved["arrays"].pop()) == (
        "optimizer/0/nu/0001_Dense/kernel is missing in the checkpoint and float32[8, 8] in the pipeline"
    )


def test_a_state_that_only_looks_like_the_parameters_is_refused(found):
    mu = found.state.opt_state[0].mu
    wrong = type(mu)({name: jax.ShapeDtypeStruct((2, 3), leaf.dtype) for name, leaf in mu.items()}, mu.layout)
    for opt_state in ([wrong], [next(iter(mu.values()))]):
        with pytest.raises(TypeError, match=r"optimizer/0 follows the pipeline's buffers, .*per_layer"):
            Contents(found.model, found.state.replace(opt_state=opt_state))
    with pytest.raises(TypeError, match=r"optimizer/0 is a int, not an array"):
        Contents(found.model, found.state.replace(opt_state=[3]))


# --- pytrees as JSON --------------------------------------------------------------------------------------------------


Point = namedtuple("Point", ["x", "y"])


def there_and_back(tree):
    return from_json(json.loads(json.dumps(to_json(tree))))


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
    found = from_json(encoded)
    assert found["a"][:2] == (1, None)
    np.testing.assert_array_equal(found["a"][2], np.array([1, 2], np.int16))
    assert found["b"] == b"\x00\xff"
