"""FLOPs counted on jaxprs, against the compiler's own count."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.extend.core import Primitive
from jax.sharding import AxisType
from models import amoebanet, resnet, transformer_l, translation, unet

import jpipe
from jpipe.jax.flops import count_flops
from jpipe.layers.adapt import as_layers
from jpipe.model.layer_function import LayerFunction
from jpipe.model.loss import trace_loss
from jpipe.model.random_keys import key_shape
from jpipe.model.remat import MODES
from jpipe.model.trace import trace_model
from jpipe.model.traced_layer import TracedLayer, partition_layer, trace_layer
from jpipe.partitioner.users_mesh import as_mesh
from jpipe.planning.costs import layer_costs


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def counted(function, *arguments) -> float:
    return count_flops(jax.make_jaxpr(function)(*arguments))


def compilers(function, *arguments) -> float:
    """The compiler's count, of what is given to it."""
    found = jax.jit(function).lower(*arguments).cost_analysis() or {}
    return found.get("flops", 0.0)


# --- layers of the examples -------------------------------------------------------------------------------------------


def tokens(*sizes):
    return {"inputs": shape(*sizes, dtype=jnp.int32), "targets": shape(*sizes, dtype=jnp.int32)}


IMAGES = {"inputs": shape(2, 16, 16, 3), "targets": shape(2, dtype=jnp.int32)}
PIXELS = {"inputs": shape(2, 16, 16, 3), "targets": shape(2, 16, 16, dtype=jnp.int32)}
EXAMPLES = {  # as wide as such models are: then products and convolutions decide
    "transformer_l": (transformer_l.loss_fn, lambda: transformer_l.transformer_l(2), tokens(2, 64)),
    "translation": (translation.loss_fn, lambda: translation.translation(1, 2048, 1, 1024, 5000), tokens(2, 32)),
    "amoebanet": (amoebanet.loss_fn, lambda: amoebanet.amoebanet(3, 1024, 1000, stem="small", dropout=0.0), IMAGES),
    "resnet": (amoebanet.loss_fn, lambda: resnet.small_resnet(10), IMAGES),
    "unet": (unet.loss_fn, lambda: unet.unet(3, 2, 512), PIXELS),
}


def compilers_layer(layer: TracedLayer) -> float:
    """What a layer takes forward and backward, and forward once more if its stage keeps inputs only: as they run."""
    function, arguments, local = layer.function, layer.function.arguments, partition_layer(layer)
    activation, residuals = jax.tree.leaves(function.group.takes), local.residuals
    outputs = function.differentiated(local.forward.results.outputs)
    again = compilers(function.forward, arguments, activation) if function.remat.keep_inputs else 0.0
    backward = compilers(local.backward, arguments, residuals, outputs)
    return again + compilers(local.forward, arguments, activation) + backward


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "amoebanet")) for n in EXAMPLES])
def test_layers_of_the_examples_take_what_the_compiler_counts(name):
    """Each layer, forward and backward, to 1 %, or a thousandth of the largest: embeddings have no product."""
    loss_fn, make, batch = EXAMPLES[name]
    model = trace_model(as_layers(make()), lambda b: b["inputs"], batch)
    layers = []
    for g, group in enumerate(model.groups):
        loss = trace_loss(loss_fn, group.gives, batch) if g == model.last else None
        layers.append(trace_layer(LayerFunction(group, key_shape(), MODES["none"], batch, loss)))
    found = layer_costs(model, layers, "flops", as_mesh(None, 2))
    firsts, expected = [group.indices[0] for group in model.groups], list(map(compilers_layer, layers))
    np.testing.assert_allclose([found[i].total for i in firsts], expected, rtol=0.01, atol=1e-3 * max(expected))


# --- operations -------------------------------------------------------------------------------------------------------

X = shape(8, 16)


CONV = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
IMAGE, KERNEL = shape(2, 9, 7, 4), shape(3, 2, 4, 6)
OPERATIONS = {
    "product": (lambda x, y: x @ y, (X, shape(16, 5))),
    "convolution": (lambda x, w: CONV(x, w, (1, 1), "SAME"), (IMAGE, KERNEL)),
    "strided": (lambda x, w: CONV(x, w, (2, 3), "VALID"), (IMAGE, KERNEL)),
    "dilated input": (lambda x, w: CONV(x, w, (1, 1), ((2, 1), (0, 3)), lhs_dilation=(2, 2)), (IMAGE, KERNEL)),
    "groups": (lambda x, w: CONV(x, w, (1, 1), "SAME", feature_group_count=2), (IMAGE, shape(3, 2, 2, 6))),
    "gradient of a convolution": (
        jax.grad(lambda x, w: CONV(x, w, (2, 2), "SAME", feature_group_count=2).sum(), (0, 1)),
        (IMAGE, shape(3, 2, 2, 6)),
    ),
    "fft": (lambda x: jnp.fft.fft(x), (shape(8, 16, dtype=jnp.complex64),)),
    "larger branch": (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: jnp.ones((8, 8)), x), (X,)),
    "no dead code": (lambda x: (x @ x.T, x.T @ x)[1], (X,)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_products_take_what_the_compiler_counts(name):
    """To 1 %: the compiler also counts a few operations on single numbers."""
    function, arguments = OPERATIONS[name]
    found = counted(function, *arguments)
    np.testing.assert_allclose(found, compilers(function, *arguments), rtol=0.01)


INDICES = shape(9, 3, dtype=jnp.int32)
BY_HAND = {
    "sum": (lambda x: x.sum(0), (X,), 8 * 16),
    "pool": (lambda x: jax.lax.reduce_window(x, -np.inf, jax.lax.max, (2, 4), (2, 4), "VALID"), (X,), 8 * 16),
    "pool's gradient": (jax.grad(lambda x: nn.max_pool(x, (2, 3), (2, 1)).sum()), (IMAGE,), 2 * 4 * 5 * 4 * 2 * 3),
    "embedding's gradient": (lambda x, i: x.at[i].add(1.0, mode="drop"), (X, INDICES), 9 * 3 * 16),
    "no work": (lambda x: jnp.concatenate([x.T, x.reshape(16, 8)])[3:], (X,), 0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_anything_else_takes_about_one_an_element(name):
    """And index arithmetic, a few operations for each index."""
    function, arguments, expected = BY_HAND[name]
    found = counted(function, *arguments)
    assert expected <= found <= expected + 5 * INDICES.size


def test_work_of_all_shards():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("model")
    found = counted(jax.shard_map(jnp.negative, mesh=mesh, in_specs=spec, out_specs=spec), X)
    assert found == 8 * 16


# --- loops ------------------------------------------------------------------------------------------------------------


def unrolled(x, steps=7):
    for _ in range(steps):
        x = jnp.sin(x @ jnp.ones((16, 16), jnp.float32))
    return x.sum()


def scanned(x, steps=7):
    return jax.lax.scan(lambda x, _: (jnp.sin(x @ jnp.ones((16, 16), jnp.float32)), None), x, length=steps)[0].sum()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.grad, lambda f: jax.grad(jax.checkpoint(f))])
def test_a_scan_takes_its_body_as_often_as_it_runs(wrap):
    """The compiler's own count has it once, so that a layer with an RNN was taken for nearly free."""
    found, expected = counted(wrap(scanned), X), compilers(wrap(unrolled), X)
    np.testing.assert_allclose(found, expected, rtol=0.05)  # the compiler counts sines apart
    assert compilers(scanned, X) < 0.2 * found


def test_of_a_loop_of_unknown_length_one_trip_is_counted():
    halve = lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x / 2, x)
    assert counted(halve, X) == 128 + 1 + 128  # a sum, a comparison, a division


# --- kernels ----------------------------------------------------------------------------------------------------------


def attend(x):
    """`[B, T, 128]`, attention with a kernel for TPUs."""
    heads = x[:, None]
    return flash_attention(heads, heads, heads)[:, 0]


@pytest.mark.filterwarnings("ignore:layer 1 .* alone takes:UserWarning")
def test_a_kernel_for_tpus_is_planned_on_a_cpu():
    """Layers were lowered for the backend at hand: "Only interpret mode is supported on CPU backend"."""
    batch = np.ones((2, 128, 128), np.float32)
    options = {"num_stages": 2, "num_microbatches": 2, "balance": "flops", "remat": "none"}
    pipe = jpipe.Pipeline([nn.Dense(128), attend, nn.Dense(128)], lambda y, _: jnp.mean(y), **options)
    jax.eval_shape(pipe.init, jax.random.key(0), batch)
    found = pipe.partition.layer_costs  # its backward has no estimate
    product = 2 * 128 * 128 * 128
    assert found[1] == pytest.approx(9 * product, rel=0.1)  # 2 forward, 7 in its backward, where two are made again


def test_the_estimate_of_a_kernel():
    estimate = pl.CostEstimate(flops=1234, transcendentals=56, bytes_accessed=0)

    def double(x, cost=None):
        def kernel(x, y):
            y[...] = 2 * x[...]

        spec = pl.BlockSpec((4, 16), lambda i: (i, 0))
        call = pl.pallas_call(kernel, grid=(2,), in_specs=[spec], out_specs=spec, out_shape=X, cost_estimate=cost)
        return call(x)

    assert counted(functools.partial(double, cost=estimate), X) == 1234
    assert counted(double, X) == 8 * 16


# --- what isn't known -------------------------------------------------------------------------------------------------


def test_an_unknown_operation_takes_one_an_element():
    unknown = Primitive("of_tomorrow")
    unknown.def_abstract_eval(lambda x: x)
    assert counted(lambda x: unknown.bind(x @ x.T), X) == 2 * 8 * 8 * 16 + 8 * 8
