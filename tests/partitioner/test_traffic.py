"""Collectives read from a program of single devices, counted by hand."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.partitioner.conversions import ring_bytes
from jpipe.partitioner.traffic import sent_in

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
    assert file == "test_traffic.py"
    assert "# this line" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_on_a_ring_of_one_nothing_is_sent():
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert ring_bytes(kind, 100.0, 1) == 0
