"""Outputs of micro-batches are joined along their batch axis, wherever that is; what has none is refused."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from cases import assert_close
from jpipe.memory.outputs import join_microbatches, output_axes
from jpipe.partitioner.shardings import REPLICATED, Shard


def shapes(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


class Doubled(NamedTuple):
    """The last layer for twice as many examples, as far as it is looked at."""

    gives: Any
    gives_at: list


def doubled(large, dim=None):
    return Doubled(shapes(x=large), [(REPLICATED if dim is None else Shard(dim, 1),)])


@pytest.mark.parametrize(
    ("small", "large", "axis"),
    [
        ((4, 5), (8, 5), 0),
        ((5, 4), (5, 8), 1),
        ((4, 4, 3), (4, 8, 3), 1),
        ((1, 7), (1, 7), 0),  # a row for each micro-batch
        ((0, 4), (0, 8), 1),
    ],
)
def test_the_axis_that_grows_with_the_batch(small, large, axis):
    assert output_axes(shapes(x=small), doubled(large), 4) == (axis,)


def test_examples_and_their_places_in_one_axis():
    """`[b * T]` is joined, `[T * b]` isn't: shapes don't tell, but where half of the examples lies does."""
    assert output_axes(shapes(x=(20, 3)), doubled((40, 3), dim=0), 4) == (0,)
    with pytest.raises(ValueError, match=r"examples are mixed with something else in axis 0.* an axis of its own"):
        output_axes(shapes(x=(20, 3)), doubled((40, 3)), 4)


@pytest.mark.parametrize(
    ("small", "large", "message"),
    [
        ((), (), r"outputs\['x'\] has the shape \(\) for micro-batches of 4 examples, in which no axis is the batch"),
        ((7,), (7,), "no axis is the batch.* return means as the loss's metrics"),
        ((4, 4), (8, 8), r"the axes \[0, 1\] may each be the batch"),
        ((5, 3), (9, 3), "no axis is the batch"),
        ((4, 5), (8, 9), "no axis is the batch"),
        ((1, 5), (1, 9), "no axis is the batch"),
    ],
)
def test_what_can_not_be_joined(small, large, message):
    with pytest.raises(ValueError, match=message):
        output_axes(shapes(x=small), doubled(large), 4)


def test_of_a_model_of_one_batch_size():
    """Its only axis of length b was taken for the batch; now its operations have to tell."""
    assert output_axes(shapes(x=(4, 4), y=(4,)), None, 4, [Shard(1), Shard(0)]) == (1, 0)
    with pytest.raises(ValueError, match=r"no axis is the batch"):
        output_axes(shapes(x=(4, 4)), None, 4, [REPLICATED])
    with pytest.raises(ValueError, match=r"can't be traced for 8 examples.*let it take batches of any size"):
        output_axes(shapes(x=(3, 4)), None, 4)


def test_they_are_joined_in_order():
    x = np.arange(24).reshape(2, 6, 2)
    parts = jnp.stack(jnp.split(jnp.asarray(x), 3, axis=1))
    np.testing.assert_array_equal(join_microbatches(parts, 1), x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(x.shape[-1])(nn.tanh(x))


def turned(x):
    """Time first."""
    return jnp.swapaxes(x, 0, 1)


def several(x):
    """Time first; a number an example; examples and places in one dimension; a number a micro-batch."""
    return {"x": x, "one": x.sum((0, 2)), "flat": x.reshape(-1, x.shape[-1]), "mean": x.mean()[None]}


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
def test_apply_equals_the_plain_model(axes):
    """An output `[S, B, d]` came back as `[M*S, b, d]`."""
    mesh = jpipe.make_mesh(stage=2, **axes, devices=jax.devices()[: 4 if axes else 2])
    layers = [turned, Block(), Block(), lambda x: {k: v for k, v in several(x).items() if k != "flat"}]
    pipe = jpipe.Pipeline(layers, None, num_stages=2, num_microbatches=2, mesh=mesh, balance="even")
    x = np.random.default_rng(0).standard_normal((8, 3, 4)).astype(np.float32)
    variables = pipe.init(jax.random.key(0), x)
    found, plain = pipe.apply(variables, x), x
    for layer, tree in zip(layers, pipe.layer_variables(variables), strict=True):
        plain = layer.apply(tree, plain) if isinstance(layer, nn.Module) else layer(plain)
    assert found["mean"].shape == (2,)
    plain["mean"] = np.stack([np.mean(plain["x"][:, :4]), np.mean(plain["x"][:, 4:])])
    assert_close(found, plain, "outputs")


@pytest.mark.parametrize(
    ("last", "joins"),
    [
        (lambda x: x.reshape(-1, 4), True),
        (lambda x: jnp.repeat(x[:, 0], 2, axis=0), True),
        (lambda x: x.swapaxes(0, 1).reshape(-1, 4), False),
        (lambda x: jnp.concatenate([x, x + 1], 0), False),
    ],
)
def test_one_that_mixes_examples_and_something_else(last, joins):
    """Rows came back in another order than the model's, without a word, where places came before examples."""
    pipe = jpipe.Pipeline([Block(), Block(), last], None, num_stages=2, num_microbatches=2, balance="even")
    x = np.random.default_rng(0).standard_normal((4, 3, 4)).astype(np.float32)
    variables = pipe.init(jax.random.key(0), x)
    if not joins:
        with pytest.raises(ValueError, match="examples are mixed with something else"):
            pipe.apply(variables, x)
        return
    plain = x
    for tree in pipe.layer_variables(variables)[:2]:
        plain = Block().apply(tree, plain)
    assert_close(pipe.apply(variables, x), last(plain), "outputs")


@pytest.mark.parametrize("count", [1, 2])
def test_it_refuses_before_anything_is_compiled(count):
    """A scalar came back as `[M]`, also for one micro-batch."""
    pipe = jpipe.Pipeline([Block(), lambda x: (x, x.sum())], None, num_stages=2, num_microbatches=count, balance="even")
    x = np.ones((4, 4), np.float32)
    variables = pipe.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"outputs\[1\] has the shape \(\)"):
        pipe.apply(variables, x)


def test_a_model_that_is_written_for_one_batch_size():
    layers = [Block(), lambda x: x.reshape(2, 3, 4).swapaxes(0, 1)]
    pipe = jpipe.Pipeline(layers, None, num_stages=2, num_microbatches=2, balance="even")
    x = np.random.default_rng(0).standard_normal((4, 3, 4)).astype(np.float32)
    variables = pipe.init(jax.random.key(0), x)
    (tree, _) = pipe.layer_variables(variables)
    assert_close(pipe.apply(variables, x), np.swapaxes(Block().apply(tree, x), 0, 1), "outputs")
