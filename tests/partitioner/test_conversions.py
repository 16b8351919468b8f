"""Conversions from every sharding to every other, against arrays that are cut in NumPy."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jpipe.partitioner.conversions import bytes_sent, convert, hops, sent_in
from jpipe.partitioner.shardings import PARTIAL, REPLICATED, Axis, Shard, is_possible, part_shape, replicated
from parts import AXES, DEVICES, X, cut


def parts_of(x, sharding):
    """The parts of all devices `[2, 2, ...]`; where the sharding is partial, the last device has what is missing."""
    parts = np.stack([cut(x, sharding, device) for device in DEVICES]).reshape(
        2, 2, *part_shape(x.shape, sharding, AXES)
    )
    for i in range(2):
        if sharding[i] == PARTIAL:
            first = np.random.default_rng(i).integers(0, 99, parts.shape).take([0], i)
            parts = np.concatenate([first, parts.take([1], i) - first], i)
    return parts


def whole_of(parts, sharding):
    """Parts of all devices with partial sums added up, each on all devices that it is a sum over."""
    for i in range(2):
        if sharding[i] == PARTIAL:
            parts = np.broadcast_to(parts.sum(i, keepdims=True), parts.shape)
    return parts


SOME = [
    *itertools.product([REPLICATED, PARTIAL, Shard(0), Shard(1)], repeat=2),
    (Shard(0), Shard(0, 2)),
    (Shard(0, 2), Shard(0)),
    (Shard(0, 2), Shard(0, 4)),
    (Shard(1, 2), PARTIAL),
    (REPLICATED, Shard(0, 4)),
]
SOME = [s for s in SOME if is_possible(X.shape, s, AXES)]


TWO_AXES = AXES, (2, 2), ("data", "model")
PARTS_OF_ONE = (Axis(("model",), (2,), inner=2), Axis(("model",), (2,), outer=2)), (4,), ("model",)


@pytest.mark.parametrize(("axes", "shape", "names"), [TWO_AXES, PARTS_OF_ONE], ids=["axes", "parts of one axis"])
@pytest.mark.parametrize("now", SOME)
def test_convert(make_mesh, now, axes, shape, names):
    """To every other sharding, in one program."""
    everywhere = PartitionSpec(names)

    def run(parts):  # [1, ...]
        return [convert(parts[0], axes, now, wanted)[None] for wanted in SOME]

    mesh, given = make_mesh(shape, names), parts_of(X, now)
    converted = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
    for wanted, parts in zip(SOME, converted(given.reshape(4, *given.shape[2:])), strict=True):
        parts = np.asarray(parts).reshape(2, 2, *parts.shape[1:])
        expected = np.stack([cut(X, wanted, device) for device in DEVICES])
        found = whole_of(parts, wanted)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected, f"{now} -> {wanted}")


THREE_AXES = tuple(Axis((name,), (2,)) for name in ("a", "b", "c"))
AXES_AND_PARTS = Axis(("a",), (2,)), Axis(("b",), (2,), inner=2), Axis(("b",), (2,), outer=2)


@pytest.mark.parametrize(("axes", "shape"), [(THREE_AXES, (2, 2, 2)), (AXES_AND_PARTS, (2, 4))], ids=["axes", "parts"])
def test_chance_conversions_among_three(make_mesh, axes, shape):
    """From whole arrays to a sharding, to another one and back; and what is sent is what was counted."""
    whole, x = replicated(axes), np.arange(16.0 * 8).reshape(16, 8)
    mesh = make_mesh(shape, ("a", "b", "c")[: len(shape)])
    rng = np.random.default_rng(0)
    one = lambda: [REPLICATED, PARTIAL, Shard(int(rng.integers(2)), int(2 ** rng.integers(3)))][rng.integers(3)]
    drawn = [tuple(one() for _ in axes) for _ in range(300)]
    pairs = list(itertools.pairwise(s for s in drawn if is_possible(x.shape, s, axes)))[:60]
    pairs.append(((PARTIAL, Shard(1), PARTIAL), (REPLICATED, Shard(0), Shard(1))))  # one by way of whole arrays
    everywhere = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    on_all = lambda function: jax.jit(jax.shard_map(function, mesh=mesh, **everywhere))

    def there_and_back(x):
        return [convert(convert(convert(x, axes, whole, a), axes, a, b), axes, b, whole) for a, b in pairs]

    for pair, found in zip(pairs, on_all(there_and_back)(x), strict=True):
        np.testing.assert_allclose(found, x, rtol=1e-6, err_msg=str(pair))
    for a, b in pairs:
        part = jax.ShapeDtypeStruct(part_shape(x.shape, a, axes), np.float32)
        traced = jax.make_jaxpr(on_all(lambda x, a=a, b=b: convert(x, axes, a, b)))(part)
        counted = sum(bytes_sent(axes, x.shape, 4, hop) for hop in hops(axes, a, b))
        assert sum(sent.bytes for sent in sent_in(traced.jaxpr, dict(mesh.shape))) == counted, (a, b)


SIZES = {"stage": 2, "model": 4, "data": 1}


def traced(function, *arguments):
    return jax.make_jaxpr(function, axis_env=list(SIZES.items()))(*arguments).jaxpr


def test_each_with_its_axes_and_bytes():
    def function(x):  # [4, 8] float32: 128 bytes
        y = lax.psum(x, ("stage", "model")) + lax.psum(x, "data")  # of one device: nothing is sent
        y = lax.all_gather(y, "model", axis=0, tiled=True)
        y = lax.psum_scatter(y, "model", scatter_dimension=0, tiled=True)
        y = lax.all_to_all(y, "model", 0, 1, tiled=True)
        return lax.ppermute(lax.pmax(y.reshape(4, 8), "model"), "stage", [(0, 1)])

    found = sent_in(traced(function, np.ones((4, 8), np.float32)), SIZES)
    assert [(one.collective, one.axes, one.shape, one.bytes) for one in found] == [
        ("all_reduce", ("stage", "model"), (4, 8), 2 * 7 / 8 * 128),
        ("all_gather", ("model",), (4, 8), 3 * 128),
        ("reduce_scatter", ("model",), (16, 8), 3 / 4 * 512),
        ("all_to_all", ("model",), (4, 8), 3 / 4 * 128),
        ("all_reduce", ("model",), (4, 8), 2 * 3 / 4 * 128),
        ("permute", ("stage",), (4, 8), 128),
    ]
    assert {one.dtype for one in found} == {"float32"}


def test_in_loops_and_scopes_with_the_line_that_made_it():
    def body(x, _):
        with jax.named_scope("inside"):
            return jax.jit(lambda x: lax.psum(x, "model"))(x), None  # this line

    def function(x):
        with jax.named_scope("outside"):
            return lax.scan(body, x, length=5)[0]

    (one,) = sent_in(traced(function, jnp.ones(3)), SIZES)
    assert one.loops == (5,)
    assert [name for name in one.scope if name in ("inside", "outside")] == ["outside", "inside"]
    file, line = one.line.split(":")
    assert file == "test_conversions.py"
    assert "# this line" in Path(__file__).read_text().splitlines()[int(line) - 1]
