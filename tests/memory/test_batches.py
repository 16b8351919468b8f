"""Batches, the shapes of their micro-batches, and whose outputs are joined along their batch axis, wherever that is."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from cases import assert_close, run_layers
from jpipe.memory.batches import (
    batch_size,
    check_no_example,
    cut_batch,
    cut_for_evaluation,
    cut_for_training,
    data_shard,
    default_inputs,
    is_bare,
    joining,
    lying_by_shapes,
    place_rows,
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


SEEN = cut_batch(batch(8), 2).shapes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cut_for_training(batch(30), 4, 1),
            "batch size 30 is not divisible by num_microbatches=4; use 1, 2, 3, 5, 6, 10, 15 or 30",
        ),
        (lambda: cut_for_training(batch(1), 2, 1), "batch size 1 is not divisible by num_microbatches=2; use 1$"),
        (
            lambda: cut_for_training(batch(8), 4, 4),
            r"batch size 8 isn't divisible by num_microbatches=4 \* 4 devices; use a multiple of 16",
        ),
        (lambda: batch_size({"a": np.ones(3), "b": np.ones(4)}), r"batch\['a'\] has 3, batch\['b'\] has 4"),
        (lambda: batch_size(batch(0)), "batch size 0"),
        (
            lambda: check_no_example({"inputs": np.ones(4, np.float32), "ids": np.ones(8, np.int64)}, SEEN),
            r"batch\['inputs'\] has the shape \(4,\), that of one example",
        ),
    ],
)
def test_batches_that_can_not_be_cut(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    check_no_example(batch(3), SEEN)
    check_no_example(np.ones(4), SEEN)


@pytest.mark.parametrize(
    ("size", "shards", "count"), [(16, 1, 4), (6, 1, 3), (5, 1, 1), (16, 4, 4), (8, 4, 2), (12, 4, 3), (6, 4, 3)]
)
def test_evaluation_cuts_any_size(size, shards, count):
    """Into four, or the next fewer; so that data axes can split them, where there is a way."""
    assert cut_for_evaluation(batch(size), 4, shards).count == count


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
    return joining(shapes(x=small), lying, 4)


ALONE = "no axis is the batch alone"


@pytest.mark.parametrize(
    ("small", "large", "dim", "expected"),
    [
        ((4, 5), (8, 5), None, 0),
        ((5, 4), (5, 8), None, 1),
        ((1, 7), (1, 7), None, 0),  # a row for each micro-batch
        # `[b * T]` is joined, `[T * b]` isn't: shapes don't tell, but where half of the examples lies does.
        ((20, 3), (40, 3), 0, 0),
        ((20, 3), (40, 3), None, rf"{ALONE}.* an axis of its own"),
        ((), (), None, rf"outputs\['x'\] has the shape \(\) for micro-batches of 4 examples, in which {ALONE}"),
        ((7,), (7,), None, f"{ALONE}.* return means as the loss's metrics"),
        ((4, 4), (8, 8), None, r"of which \[0, 1\] grow with the batch"),
        ((5, 3), (9, 3), None, r"of which \[0\] grow with the batch"),
    ],
)
def test_the_axis_that_grows_with_the_batch(small, large, dim, expected):
    """The axis along which micro-batches are joined, or why there is none."""
    if isinstance(expected, int):
        assert [at.dim for at in axes_by_shapes(small, large, dim)] == [expected]
        return
    with pytest.raises(ValueError, match=expected):
        axes_by_shapes(small, large, dim)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(x.shape[-1])(nn.tanh(x))


def turned(x):
    """Time first."""
    return jnp.swapaxes(x, 0, 1)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def applied(layers, x, count=2, **options):
    """(outputs, the layers' own variables) of a pipeline without a loss."""
    pipe = jpipe.Pipeline(layers, None, num_stages=2, num_microbatches=count, balance="even", **options)
    variables = pipe.init(jax.random.key(0), x)
    return pipe.apply(variables, x), pipe.layer_variables(variables)


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
def test_apply_equals_the_plain_model(axes):
    """An output `[S, B, d]` came back as `[M*S, b, d]`; a number an example, and a number a micro-batch."""
    mesh = jpipe.make_mesh(stage=2, **axes, devices=jax.devices()[: 4 if axes else 2])
    last = lambda x: {"x": x, "one": x.sum((0, 2)), "mean": x.mean()[None]}
    layers, x = [turned, Block(), Block(), last], normal(8, 3, 4)
    found, trees = applied(layers, x, mesh=mesh)
    plain = run_layers(layers, trees, x)
    assert found["mean"].shape == (2,)
    plain["mean"] = np.stack([np.mean(plain["x"][:, :4]), np.mean(plain["x"][:, 4:])])
    assert_close(found, plain, "outputs")


@pytest.mark.parametrize(
    ("last", "of_all"),
    [
        (lambda x: x.reshape(-1, 4), lambda x: x.reshape(-1, 4)),
        (lambda x: jnp.repeat(x[:, 0], 2, axis=0), lambda x: jnp.repeat(x[:, 0], 2, axis=0)),
        (lambda x: x.reshape(2, 3, 4).swapaxes(0, 1), turned),  # written for one batch size
    ],
)
def test_outputs_are_joined_in_the_order_of_examples(last, of_all):
    """Rows came back in another order than the model's, without a word, where places came before examples."""
    x = normal(4, 3, 4)
    found, (tree, _) = applied([Block(), last], x)
    assert_close(found, of_all(Block().apply(tree, x)), "outputs")


@pytest.mark.parametrize(
    ("last", "shape", "count", "message"),
    [
        (lambda x: turned(x).reshape(-1, 4), (4, 3, 4), 2, ALONE),
        (lambda x: jnp.sort(x, 0)[:3], (8, 4), 1, r"outputs has the shape \(3, 4\)"),
        (lambda x: jnp.sort(x, 0)[:3], (8, 4), 2, r"outputs has the shape \(3, 4\)"),
    ],
)
def test_outputs_that_can_not_be_joined_are_refused(last, shape, count, message):
    with pytest.raises(ValueError, match=message):
        applied([Block(), last], normal(*shape), count)


@pytest.mark.parametrize("count", [1, 2])
def test_sums_and_means_are_those_of_the_whole_batch(count):
    """Also of what has no number for each example but a vector; what couples examples is the micro-batches' mean."""
    last = lambda x: {
        "sum": x.sum(),
        "mean": x.mean(),
        "each": x.sum(0),
        "size": jnp.float32(x.shape[-1]),
        "two": x.mean() ** 2,
    }
    x = normal(4, 4)
    found, (tree, _) = applied([Block(), last], x, count)
    plain = last(y := Block().apply(tree, x))
    plain["two"] = np.mean([rows.mean() ** 2 for rows in np.split(y, count)])
    assert_close(found, plain, "outputs")
