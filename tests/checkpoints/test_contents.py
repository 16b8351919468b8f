"""The contents of a checkpoint: names by layer, whatever the pipeline's layout; the first difference in words."""

import copy

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe.checkpoints.contents import Contents, first_difference

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
