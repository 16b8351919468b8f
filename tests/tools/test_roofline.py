from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jpipe.jax.inside import needed_part
from jpipe.tools.chips import CHIPS, Chip
from jpipe.tools.roofline import roofline

V5E = replace(CHIPS["v5e"], start=0.0)  # of kernels' starts there is a test of its own
CPU = Chip("cpu", 50e9, 2**34, 10e9, 10e9, None)
ENDLESS = replace(V5E, counted=1e30)  # nothing but FLOPs


def of(function, *shapes, dtype=jnp.float32):
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])


def one_pass(size, chip=V5E):
    return 8 * size / chip.pass_bandwidth


def test_a_product_takes_its_flops_and_its_bytes():
    product = of(lambda x, y: x @ y, (1024, 2048), (2048, 512))
    flops, read, written = 2 * 1024 * 2048 * 512, 4 * (1024 * 2048 + 2048 * 512), 4 * 1024 * 512
    found = roofline(product, CPU)
    assert found == pytest.approx(flops / CPU.flops + (read + 3 * written) / CPU.memory_bandwidth)
    stays = roofline(product, V5E)  # on the chip, but for the result's own pass
    assert stays == pytest.approx(flops / V5E.flops + read / V5E.pass_bandwidth + one_pass(1024 * 512))


@pytest.mark.parametrize(("rows", "depth", "columns", "padded"), [(1024, 64, 1024, 2), (64, 1024, 1024, 1)])
def test_what_the_matrix_unit_holds_is_padded(rows, depth, columns, padded):
    product = of(lambda x, y: x @ y, (rows, depth), (depth, columns))
    assert roofline(product, ENDLESS) == pytest.approx(padded * 2 * rows * depth * columns / V5E.flops)


def test_a_reduction_on_a_gpu_reads_its_operand_and_writes_next_to_nothing():
    """It took as long as a copy: predicted steps were a fifth longer than their kernels' bytes and FLOPs take."""
    h100, size = CHIPS["h100"], 2048 * 2048
    found = roofline(of(lambda x: x.sum(axis=1), (2048, 2048)), h100)
    assert found == pytest.approx(4 * size / h100.memory_bandwidth, rel=0.01)


def test_elementwise_operations_are_free_where_products_take_them_in():
    plain, more = (of(f, (512, 512)) for f in (lambda x: x @ x, lambda x: jnp.tanh(x) @ x))
    assert roofline(more, V5E) == pytest.approx(roofline(plain, V5E))
    assert roofline(more, CPU) == pytest.approx(roofline(plain, CPU) + one_pass(512**2, CPU))


def test_a_reduction_is_a_pass_but_of_what_a_product_makes():
    alone, twice, made = (
        of(f, (512, 512)) for f in (jnp.sum, lambda x: (jnp.sum(x), jnp.sum(x * x)), lambda x: jnp.sum(x @ x))
    )
    small = one_pass(2)
    assert roofline(alone, V5E) == pytest.approx(one_pass(512**2), abs=small)
    assert roofline(twice, V5E) == pytest.approx(one_pass(512**2), abs=small)
    flops = 2 * 512**3 / V5E.flops
    assert roofline(made, V5E) == pytest.approx(flops + 2 * 4 * 512**2 / V5E.pass_bandwidth, abs=small)


def test_a_softmax_takes_a_pass_more_if_its_sum_is_kept():
    def attend(x, keep):
        scores = x @ x.T
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        return ((weights / total) @ x, total) if keep else (weights / total) @ x

    kept, free = (roofline(of(lambda x, keep=keep: attend(x, keep), (1024, 128)), V5E) for keep in (True, False))
    assert kept - free == pytest.approx(one_pass(1024**2 + 1024), rel=1e-6)


def test_a_narrow_last_dimension_is_turned_by_a_pass():
    wide, narrow = (of(lambda x, w: jnp.tensordot(x, w, 1), (256, 512), (512, *to)) for to in ((8, 128), (16, 64)))
    turned = 512 * 1024 + 256 * 1024  # the operand and the result
    assert roofline(narrow, V5E) - roofline(wide, V5E) == pytest.approx(one_pass(turned))
    assert roofline(narrow, CPU) == pytest.approx(roofline(wide, CPU))


def test_loops_take_their_trips_and_branches_the_longest():
    once = lambda x: x @ x
    single = roofline(of(once, (64, 64)), V5E)
    looped = of(lambda x: jax.lax.scan(lambda x, _: (once(x), None), x, length=5)[0], (64, 64))
    either = of(lambda x: jax.lax.cond(x[0, 0] > 0, once, lambda x: x, x), (64, 64))
    result = one_pass(64**2)
    assert roofline(looped, V5E) == pytest.approx(5 * single + result)
    assert roofline(either, V5E) == pytest.approx(single + result)


def test_what_is_not_wanted_takes_nothing():
    both = of(lambda x: (x @ x, x.sum()), (512, 512))
    assert roofline(needed_part(both, [False, True])[0], V5E) == pytest.approx(roofline(of(jnp.sum, (512, 512)), V5E))


def test_operations_on_whole_arrays_read_and_write_them():
    """They took nothing: the backward of a max-pool, Fourier transforms, the largest of a row."""
    size = 64 * 64 * 8
    pool = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    pooled = of(jax.grad(lambda x: pool(x).sum()), (1, 64, 64, 8))
    assert roofline(pooled, V5E) > one_pass(size) + one_pass(size)  # the gradient is a result
    assert roofline(of(lambda x: jnp.fft.ifft(jnp.fft.fft(x)), (64, 512), dtype=jnp.complex64), V5E) > 2 * one_pass(
        size
    )
    assert roofline(of(lambda x: jax.lax.top_k(x, 4)[1], (64, 512)), V5E) > one_pass(size)


def test_each_product_and_each_reduction_has_to_start():
    started = replace(V5E, start=1.0)
    for count, function in (
        (1, lambda x: x @ x),
        (2, lambda x: x @ x @ x),
        (1, jnp.sum),
        (2, lambda x: jnp.exp(x - jnp.max(x)) @ x),
    ):
        traced = of(function, (8, 8))
        assert roofline(traced, started) - roofline(traced, V5E) == pytest.approx(count)


CHANNELS = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "window_strides": (1, 1), "padding": "SAME"}


@pytest.mark.parametrize("batch, channels", [(8, (128, 256)), (2, (32, 8)), (12, (200, 96))])
def test_images_are_padded_to_lanes_and_sublanes(batch, channels):
    """FLOPs and bytes of forward, and of the backward by its three products, as if all channels were there."""
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, **CHANNELS)
    shapes = (batch, 14, 14, channels[0]), (1, 1, *channels)
    padded = lambda n, tile: -(-n // tile) * tile
    examples, read, given = padded(batch, 8), padded(channels[0], 128), padded(channels[1], 128)
    flops = 2 * examples * 14 * 14 * read * given / V5E.flops
    image = lambda size: 4 * examples * 14 * 14 * size
    weights = 4 * channels[0] * channels[1]
    once = (image(read) + image(given) + weights) / V5E.memory_bandwidth
    traced = of(lambda x, w: jnp.sum(convolve(x, w)), *shapes)
    assert roofline(traced, V5E) == pytest.approx(flops + once, abs=one_pass(2))

    backward = of(lambda x, w, g: jax.vjp(convolve, x, w)[1](g), *shapes, (batch, 14, 14, channels[1]))
    results = one_pass(examples * 14 * 14 * read + channels[0] * channels[1])
    assert roofline(backward, V5E) == pytest.approx(2 * (flops + once) + results)


def test_groups_of_channels_are_counted_as_they_are():
    convolve = lambda x, w: jnp.sum(jax.lax.conv_general_dilated(x, w, **CHANNELS, feature_group_count=64))
    found = roofline(of(convolve, (8, 14, 14, 64), (1, 1, 1, 64)), replace(V5E, memory_bandwidth=1e30, counted=1e30))
    assert found == pytest.approx(2 * 8 * 14 * 14 * 64 / V5E.flops)
