"""Batches, the shapes of their micro-batches, and whose outputs are joined along their batch axis, wherever that is."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from cases import assert_close
from jpipe.checks import check_placed
from jpipe.memory.batches import (
    batch_size,
    check_no_example,
    cut_batch,
    cut_for_evaluation,
    cut_for_training,
    data_shard,
    default_inputs,
    is_bare,
    join_microbatches,
    lying_by_shapes,
    output_axes,
    place_rows,
    split_microbatches,
)
from jpipe.partitioner.shardings import REPLICATED, Shard


@pytest.mark.parametrize(
    ("shape", "axes"), [((4,), ("stage",)), ((2, 4), ("stage", "data")), ((2, 4), ("stage", "dp"))]
)
def test_one_process_feeds_all_rows(make_mesh, shape, axes):
    mesh = make_mesh(shape, axes)
    assert data_shard(mesh, axes[1:]) == (0, 1)
    batch = {"x": np.arange(16).reshape(8, 2)}
    placed = place_rows(batch, mesh, axes[1:])["x"]
    np.testing.assert_array_equal(placed, batch["x"])
    assert {shard.data.shape for shard in placed.addressable_shards} == {(8 // (mesh.size // mesh.shape["stage"]), 2)}
    check_placed(batch)


def test_rows_that_can_not_be_placed(make_mesh):
    mesh = make_mesh((2, 4), ("stage", "data"))
    with pytest.raises(ValueError, match=r"6 rows of 1 parts don't fit 4 devices; place a multiple of 4 rows"):
        place_rows(np.ones((6, 2)), mesh, ("data",))
    with pytest.raises(ValueError, match="batch is being traced; place takes the rows of this process"):
        jax.jit(lambda x: place_rows(x, mesh, ("data",)))(np.ones((8, 2)))


# --- rows on the mesh -------------------------------------------------------------------------------------------------


def test_what_the_inputs_are():
    x, t = np.ones(2), np.zeros(2)
    for whole in ({"inputs": x, "targets": t}, (x, t), [x, t], x):
        assert default_inputs(whole) is x
    with pytest.raises(ValueError, match=r"the keys \['x'\] and no 'inputs'"):
        default_inputs({"x": x})
    with pytest.raises(ValueError, match="an empty tuple"):
        default_inputs(())


def test_bare_inputs_are_told_from_batches():
    seen = cut_batch(batch(8), 2).shapes
    bare = lambda given: is_bare(given, seen, seen["inputs"], default_inputs, None)
    assert bare(batch(8)["inputs"])
    assert not bare(batch(8))
    assert not bare({"inputs": batch(8)["inputs"]}), "without what only the loss needs"
    with pytest.raises(
        ValueError,
        match=r"batch\['x'\] in a dict: neither a training batch, batch\[.* nor the bare inputs, a bare array",
    ):
        bare({"x": np.ones(8)})


def test_where_the_structure_does_not_tell_shapes_do_or_the_caller():
    """One array, which `inputs` cuts: it was cut twice where bare inputs were meant."""
    tokens = lambda length: np.zeros((8, length), np.int32)
    seen, read = cut_batch(tokens(9), 2).shapes, lambda batch: batch[:, :-1]
    bare = lambda given, said=None: is_bare(given, seen, cut_batch(tokens(8), 2).shapes, read, said)
    assert (bare(tokens(9)), bare(tokens(8))) == (False, True)
    assert (bare(tokens(5), True), bare(tokens(5), False), bare(tokens(9), True)) == (True, False, True)
    with pytest.raises(ValueError, match=r"int32\[8,5\] may be a batch, .* say which: .* bare=False\), or"):
        bare(tokens(5))
    with pytest.raises(ValueError, match=r"bare=True, but the batch is batch\['x'\] in a dict"):
        bare({"x": tokens(8)}, True)
    assert not is_bare(tokens(5), seen, seen, default_inputs, None), "where inputs are the whole batch, all is the same"
    doubled = lambda batch: 2 * batch
    with pytest.raises(ValueError, match="say which"):
        is_bare(tokens(9), seen, seen, doubled, None)


# --- bare inputs ------------------------------------------------------------------------------------------------------


def batch(size, width=4):
    return {"inputs": np.ones((size, width), np.float32), "ids": np.ones(size, np.int64)}


def test_a_micro_batch_is_known_by_its_shapes():
    """So that it can be looked up."""
    found = cut_for_training(batch(8), 4, 1)
    assert jax.tree.map(lambda a: (a.shape, a.dtype.name), found.shapes) == {
        "inputs": ((2, 4), "float32"),
        "ids": ((2,), "int32"),
    }
    assert found.count == 4 and not found.bare
    assert found == cut_for_training(jax.eval_shape(lambda: batch(8)), 4, 1) == cut_batch(batch(8), 4)
    assert hash(found) == hash(cut_batch(batch(8), 4))
    others = [
        cut_batch(batch(8), 2),
        cut_batch(batch(8, 5), 4),
        cut_batch(batch(8)["inputs"], 4),
        cut_batch(batch(8), 4, bare=True),
    ]
    assert len({found, *others}) == 5


@pytest.mark.parametrize(
    ("size", "m", "shards", "message"),
    [
        (30, 4, 1, "batch size 30 is not divisible by num_microbatches=4; use 1, 2, 3, 5, 6, 10, 15 or 30"),
        (1, 2, 1, "batch size 1 is not divisible by num_microbatches=2; use 1$"),
        (8, 4, 4, r"batch size 8 isn't divisible by num_microbatches=4 \* 4 devices; use a multiple of 16"),
    ],
)
def test_sizes_that_training_can_not_cut(size, m, shards, message):
    with pytest.raises(ValueError, match=message):
        cut_for_training(batch(size), m, shards)


@pytest.mark.parametrize(
    ("size", "shards", "count"), [(16, 1, 4), (6, 1, 3), (5, 1, 1), (16, 4, 4), (8, 4, 2), (12, 4, 3), (6, 4, 3)]
)
def test_evaluation_cuts_any_size(size, shards, count):
    """Into four, or the next fewer; so that data axes can split them, where there is a way."""
    assert cut_for_evaluation(batch(size), 4, shards).count == count


def test_batch_size():
    assert batch_size(batch(3)) == 3
    with pytest.raises(ValueError, match=r"differ in batch size: batch\['a'\] has 3, batch\['b'\] has 4"):
        batch_size({"a": np.ones(3), "b": np.ones(4)})
    with pytest.raises(ValueError, match="batch size 0"):
        batch_size(batch(0))


def test_a_micro_batch_of_twice_as_many():
    found = cut_batch(batch(8), 2)
    assert (found.size, found.doubled.size) == (4, 8)
    assert found.doubled.leaves == cut_batch(batch(8), 1).leaves


def test_a_single_example():
    seen = cut_batch(batch(8), 2).shapes
    check_no_example(batch(3), seen)
    check_no_example(np.ones(4), seen)
    with pytest.raises(ValueError, match=r"batch\['inputs'\] has the shape \(4,\), that of one example"):
        check_no_example({"inputs": np.ones(4, np.float32), "ids": np.ones(8, np.int64)}, seen)


def test_micro_batches_are_runs_of_examples():
    x = np.arange(12).reshape(6, 2)
    parts = split_microbatches({"x": x}, 3)["x"]
    np.testing.assert_array_equal(parts, [x[:2], x[2:4], x[4:]])


# --- outputs ----------------------------------------------------------------------------------------------------------


def shapes(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


class Doubled(NamedTuple):
    """The last layer for twice as many examples, as far as it is looked at."""

    gives: Any
    gives_at: list


def doubled(large, dim=None):
    return Doubled(shapes(x=large), [(REPLICATED if dim is None else Shard(dim, 1),)])


def axes_by_shapes(small, large, dim=None):
    """The batch axes of an output whose layers couple examples, which shapes have to confirm."""
    lying = lying_by_shapes(shapes(x=small), doubled(large, dim), [REPLICATED], 4)
    return output_axes(shapes(x=small), lying, 4)


@pytest.mark.parametrize(
    ("small", "large", "axis"),
    [
        ((4, 5), (8, 5), 0),
        ((5, 4), (5, 8), 1),
        ((4, 4, 3), (4, 8, 3), 1),
        ((1, 7), (1, 7), 0),  # a row for each micro-batch
    ],
)
def test_the_axis_that_grows_with_the_batch(small, large, axis):
    assert axes_by_shapes(small, large) == (axis,)


def test_examples_and_their_places_in_one_axis():
    """`[b * T]` is joined, `[T * b]` isn't: shapes don't tell, but where half of the examples lies does."""
    assert axes_by_shapes((20, 3), (40, 3), dim=0) == (0,)
    with pytest.raises(ValueError, match=r"no axis is the batch alone.* an axis of its own"):
        axes_by_shapes((20, 3), (40, 3))
    with pytest.raises(ValueError, match=r"no axis is the batch alone.* an axis of its own"):
        output_axes(shapes(x=(20, 3)), [Shard(0, 5)], 4)


@pytest.mark.parametrize(
    ("small", "large", "message"),
    [
        (
            (),
            (),
            r"outputs\['x'\] has the shape \(\) for micro-batches of 4 examples, in which no axis is the batch alone",
        ),
        ((7,), (7,), "no axis is the batch alone.* return means as the loss's metrics"),
        ((4, 4), (8, 8), r"of which \[0, 1\] grow with the batch"),
        ((5, 3), (9, 3), r"of which \[0\] grow with the batch"),
        ((4, 5), (8, 9), r"of which \[0, 1\] grow with the batch"),
        ((1, 5), (1, 9), r"of which \[1\] grow with the batch"),
    ],
)
def test_what_can_not_be_joined(small, large, message):
    with pytest.raises(ValueError, match=message):
        axes_by_shapes(small, large)


def test_of_a_model_of_one_batch_size():
    """Its only axis of length b was taken for the batch; now its operations have to tell."""
    assert output_axes(shapes(x=(4, 4), y=(4,)), [Shard(1), Shard(0)], 4) == (1, 0)
    with pytest.raises(ValueError, match=r"no axis is the batch"):
        output_axes(shapes(x=(4, 4)), [REPLICATED], 4)


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
        with pytest.raises(ValueError, match="no axis is the batch alone"):
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
