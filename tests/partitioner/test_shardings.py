"""How arrays lie on devices, and conversions, against arrays that are cut in NumPy by the definition of a shard."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.partitioner.shardings import (
    PARTIAL,
    REPLICATED,
    Axis,
    Shard,
    convert,
    gather_axes,
    in_runs,
    is_possible,
    local_shape,
    of_spec,
    scatter_axes,
    settled,
    to_spec,
)

AXES = (Axis(("data",), (2,)), Axis(("model",), (2,)))
SIZES = {"data": 2, "model": 2}
DEVICES = list(itertools.product(range(2), range(2)))
"""The devices, by their indices along the axes."""
X = np.arange(8 * 4).reshape(8, 4)


def cut(x, sharding, device):
    """The part of an array that a device has, taken element by element; all of it along axes that don't cut it."""
    for dim, n in enumerate(x.shape):
        own = range(n)
        for along, axis, index in zip(sharding, AXES, device, strict=True):
            if isinstance(along, Shard) and along.dim == dim:
                block = n // (along.outer * axis.size)
                own = [e for e in own if e // block % axis.size == index]
        x = x.swapaxes(0, dim)[list(own)].swapaxes(0, dim)
    return x


def parts_of(x, sharding):
    """The parts of all devices `[2, 2, ...]`; where the sharding is partial, the last device has what is missing."""
    parts = np.stack([cut(x, sharding, device) for device in DEVICES]).reshape(
        2, 2, *local_shape(x.shape, sharding, AXES)
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


SHARDS = [Shard(0), Shard(1), Shard(0, 2), Shard(1, 2), Shard(0, 4)]
SHARDINGS = [s for s in itertools.product([REPLICATED, PARTIAL, *SHARDS], repeat=2) if is_possible(X.shape, s, AXES)]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_local_shape(sharding):
    assert {cut(X, sharding, device).shape for device in DEVICES} == {local_shape(X.shape, sharding, AXES)}


def test_what_is_not_possible():
    assert not is_possible((8, 4), (Shard(0), Shard(0)), AXES)  # the blocks don't lie within one another
    assert is_possible((8, 4), (Shard(0), Shard(0, 2)), AXES)
    assert is_possible((8, 4), (Shard(0, 2), Shard(0)), AXES)
    assert not is_possible((7, 4), (Shard(0), REPLICATED), AXES)
    assert not is_possible((6, 4), (Shard(0, 2), REPLICATED), AXES)


SOME = [
    *itertools.product([REPLICATED, PARTIAL, Shard(0), Shard(1)], repeat=2),
    (Shard(0), Shard(0, 2)),
    (Shard(0, 2), Shard(0)),
    (Shard(0, 2), Shard(0, 4)),
    (Shard(1, 2), PARTIAL),
    (REPLICATED, Shard(0, 4)),
]
SOME = [s for s in SOME if s in SHARDINGS]


@pytest.mark.parametrize("now", SOME)
def test_convert(make_mesh, now):
    """To every other sharding, in one program."""
    everywhere = PartitionSpec("data", "model")

    def run(parts):  # [1, 1, ...]
        return [convert(parts[0, 0], AXES, now, wanted)[None, None] for wanted in SOME]

    mesh = make_mesh((2, 2), ("data", "model"))
    converted = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
    for wanted, parts in zip(SOME, converted(parts_of(X, now)), strict=True):
        expected = np.stack([cut(X, wanted, device) for device in DEVICES])
        found = whole_of(np.asarray(parts), wanted)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected, f"{now} -> {wanted}")


SPECS = [
    ("data",),
    (None, "model"),
    ("model", "data"),
    (("data", "model"),),
    (("model", "data"),),
    (None, ("model", "data")),
]


@pytest.mark.parametrize("spec", SPECS)
def test_specs_mean_what_they_mean_to_jax(make_mesh, spec):
    """The parts of `of_spec` are those of JAX, and `to_spec` gives the spec back."""
    spec, mesh = PartitionSpec(*spec), make_mesh((2, 2), ("data", "model"))
    sharding = of_spec(spec, AXES, SIZES)
    indices = NamedSharding(mesh, spec).devices_indices_map(X.shape)
    for device in DEVICES:
        np.testing.assert_array_equal(cut(X, sharding, device), X[indices[mesh.devices[device]]])
    assert tuple(to_spec(sharding, AXES, 2)) == (*spec, None)[:2]


def test_of_spec_takes_data_axes_for_gathered():
    axes = (Axis(("data",), (2,), of_examples=True), Axis(("model",), (2,)))
    assert of_spec(PartitionSpec("data", "model"), axes, SIZES) == (REPLICATED, Shard(1))


def test_settled_and_in_runs():
    assert settled((PARTIAL, Shard(0, 2))) == (REPLICATED, Shard(0, 2))
    assert in_runs((PARTIAL, Shard(0, 2))) == (PARTIAL, REPLICATED)
    assert in_runs((REPLICATED, Shard(1))) == (REPLICATED, Shard(1))


@pytest.mark.parametrize("spec", SPECS)
def test_gather_axes_and_scatter_axes(make_mesh, spec):
    """Gathered over `data`, parts lie as the spec says of `model`; scattered, each device has its sum over `data`."""
    spec, is_data = PartitionSpec(*spec), lambda name: name == "data"
    gathered_at = (REPLICATED, of_spec(spec, AXES, SIZES)[1])
    everywhere = PartitionSpec("data", "model")

    def run(part):
        gathered = gather_axes(part, spec, is_data)
        return gathered[None, None], scatter_axes(gathered, spec, is_data)

    mesh = make_mesh((2, 2), ("data", "model"))
    gathered, scattered = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=(everywhere, spec), check_vma=False)
    )(X)
    for device in DEVICES:
        np.testing.assert_array_equal(gathered[device], cut(X, gathered_at, device))
    is_split = any("data" in (entry or ()) for entry in spec)
    np.testing.assert_array_equal(scattered, X * (2 if is_split else 1))
