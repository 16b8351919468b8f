"""Which conversions of a plan go by rings."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from blocks import SHAPES, SPECS, WIDTH, attention, feed_forward, gradients
from jpipe.partitioner import find_rings, per_device

KINDS = ("all_gather", "reduce_scatter", "collective_permute", "all_reduce")
OVER = P(None, "model")


def lowered(function, out_specs=OVER, ring=(0, 1, 2, 3), *, tokens=16, times=1, dtype=jnp.float32, **options):
    """The text of a program of four devices, whose weights are some times as long and wide."""
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=jax.devices()[:4])
    specs = {"in_specs": (OVER, SPECS), "out_specs": out_specs}
    run = per_device(function, mesh, **specs, rings={"model": ring} if ring else {})
    shapes = {name: (times * a, times * b) for name, (a, b) in SHAPES.items()}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((1, tokens, times * WIDTH), dtype)
    return jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs)).lower(x, weights).as_text(**options)


def count(text):
    return [text.count(f'"stablehlo.{kind}"') for kind in KINDS]


@pytest.fixture
def however_small(monkeypatch):
    for least in ("LEAST_FLOPS", "LEAST_IF_SHARED", "LEAST_OF_SUMS", "LEAST_OF_WEIGHTS"):
        monkeypatch.setattr(find_rings, least, 0.0)


def test_gathers_and_scatters_go_round_the_ring(however_small):
    """Of four devices a gather is three permutations, and so is a scattered sum."""
    assert count(lowered(feed_forward, ring=())) == [1, 1, 0, 0]
    assert count(lowered(feed_forward)) == [0, 0, 6, 0]


def test_gradients_too(however_small):
    """Rather than that a sum is added up whole, it is scattered, and gathered beside products."""
    out = OVER, SPECS
    assert count(lowered(gradients(feed_forward), out, ring=())) == [1, 1, 0, 1]
    assert count(lowered(gradients(feed_forward), out)) == [0, 0, 12, 0]


def test_neighbours_are_those_on_the_ring(however_small):
    text = lowered(feed_forward, ring=(0, 1, 3, 2))
    pairs = {re.sub(r"\s", "", found) for found in re.findall(r"source_target_pairs = dense<(.*?)>", text)}
    assert pairs == {"[[0,1],[1,3],[3,2],[2,0]]", "[[0,2],[1,0],[3,1],[2,3]]"}


def narrow(function):
    """The function in bfloat16."""
    return lambda x, w: function(x, jax.tree.map(lambda a: a.astype(jnp.bfloat16), w))


def test_only_where_products_hide_it():
    """A feed-forward of width 16 does too little beside what it sends, one of width 4096 enough.

    What attention gathers stays a gather there; its sum goes by a ring, which takes no longer than to scatter it.
    """
    large = {"tokens": 2048, "times": 256, "dtype": jnp.bfloat16}
    assert count(lowered(feed_forward)) == [1, 1, 0, 0]
    assert count(lowered(narrow(feed_forward), **large)) == [0, 0, 6, 0]
    assert count(lowered(narrow(attention), **large)) == [1, 0, 3, 0]


def test_a_weight_is_read_as_it_was_before_its_cast(however_small):
    """A cast that all pieces' products read is carried out apart by TPUs' compilers.

    JAX lowers a product of bfloat16 and float32 for CPUs to one of float32.
    """

    def products(ring):
        text = lowered(narrow(feed_forward), ring=ring, dtype=jnp.bfloat16)
        operands = re.findall(r"stablehlo.dot_general.*: \((.*)\) ->", text)
        return [re.findall("x(bf16|f32)>", pair) for pair in operands]

    assert products(()) == [["bf16", "bf16"]] * 3
    assert products((0, 1, 2, 3)) == [["f32", "f32"]] * 9  # three pieces, of which one is of two


def test_scopes_stay(however_small):
    """A product whose sum departs is carried out where the sum is read, but it stays in its own scope."""

    def named(x, w):
        with jax.named_scope("first"):
            y = jax.jit(feed_forward)(x, w)
        with jax.named_scope("second"):
            return jax.jit(jnp.tanh)(y)

    for ring in ((), (0, 1, 2, 3)):
        names = re.findall(r'loc\("([^"]*dot_general)"', lowered(named, ring=ring, debug_info=True))
        assert len(set(names)) == 1 and "first/" in names[0] and "second" not in names[0]
