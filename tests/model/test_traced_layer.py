"""One layer's forward and backward: the gradients of `jax.vjp`, from no more than what is stored."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import jpipe
from cases import assert_close
from jpipe.jax.tracing import equations_in
from jpipe.layers.adapt import as_layers
from jpipe.memory.batches import default_inputs
from jpipe.model.layer_function import LayerArguments, LayerFunction
from jpipe.model.loss import trace_loss
from jpipe.model.random_keys import key_shape
from jpipe.model.remat import MODES, as_remat
from jpipe.model.trace import trace_model
from jpipe.model.traced_layer import partition_layer, trace_layer
from jpipe.partitioner.splits import Splits

REMATS = [*MODES, jax.checkpoint_policies.dots_saveable]
BATCH = {"inputs": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}


def loss_fn(outputs, batch):
    return jnp.sum(outputs**2) + jnp.sum(batch["inputs"]), jnp.float32(3)


def cast(params, x):
    """A layer whose kernel is cast: the cast kernel follows from the parameters alone."""
    return jnp.sin(x @ params.astype(jnp.float32))


MIDDLE = {
    "dense": nn.Dense(4),
    "dropout": nn.Dropout(0.5, deterministic=False),
    "cast": jpipe.Layer(lambda key, x: jnp.ones((4, 4), jnp.bfloat16), cast),
    "function": jnp.tanh,
    "gelu": nn.gelu,
}


def functions_of(layer, remat):
    layers = as_layers([lambda x: x, layer, lambda y: y * 2])
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), BATCH)
    model = trace_model(layers, default_inputs, shapes)
    traced = trace_loss(loss_fn, model.groups[-1].gives, shapes)
    loss = lambda g: traced if g == model.last else None
    make = lambda group, loss: LayerFunction(group, key_shape(), as_remat(remat), shapes, loss)
    return [make(group, loss(g)) for g, group in enumerate(model.groups)]


def layer_of(function):
    """Its forward and backward on one device."""
    return partition_layer(trace_layer(function))


@pytest.mark.parametrize(("mesh", "dimensions"), [(("stage",), 1), ((), 2)])
def test_on_cpus_gradients_of_weights_are_summed_over_one_dimension(mesh, dimensions):
    """Which `jpipe.jax.rewrites` is for; of devices that aren't known, as JAX has them."""
    devices = Mesh(np.array(jax.devices()[:1]), mesh) if mesh else AbstractMesh((), ())
    layers, shapes = as_layers([nn.Dense(4), nn.Dense(5), nn.Dense(3)]), jax.ShapeDtypeStruct((2, 6, 4), jnp.float32)
    group = trace_model(layers, lambda batch: batch, shapes).groups[1]
    layer = trace_layer(LayerFunction(group, key_shape(), as_remat("none"), shapes))
    (*_, product) = products_in(partition_layer(layer, Splits(devices, ())).backward_program.jaxpr)
    assert len(product[0]) == dimensions


def products_in(jaxpr):
    """The dimensions that products of weights are summed over, those inside of calls too."""
    products = [e for e in equations_in(jaxpr.eqns) if e.primitive.name == "dot_general"]
    summed = [product.params["dimension_numbers"][0] for product in products]
    return [dimensions for dimensions in summed if dimensions[0][0] == 0]


def test_rows_are_added_to_by_comparison_in_a_backward_in_two_parts_too():
    """A regression: once it was in parts, the zero was no literal any more, and the scatter stayed."""
    array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    shapes = {"inputs": array(2, 3, 4), "labels": array(2, 3, dtype=jnp.int32)}
    taken = lambda y, batch: jnp.take_along_axis(jax.nn.log_softmax(y), batch["labels"][..., None], -1).sum()
    model = trace_model(as_layers([lambda x: x, nn.Dense(5)]), default_inputs, shapes)
    loss = trace_loss(taken, model.groups[-1].gives, shapes)
    layer = partition_layer(trace_layer(LayerFunction(model.groups[-1], key_shape(), as_remat("none"), shapes, loss)))
    assert "scatter-add" in str(layer.backward_jaxpr)
    split = layer.in_two_parts.split
    assert "scatter-add" not in str(split.inputs) + str(split.weights)


@pytest.mark.parametrize("remat", REMATS, ids=[*MODES, "dots_saveable"])
@pytest.mark.parametrize("name", MIDDLE)
def test_backward_equals_vjp(name, remat):
    function = functions_of(MIDDLE[name], remat)[1]
    layer = layer_of(function)
    rng = np.random.default_rng(0)
    leaves = jax.tree.leaves(function.group.variables)
    params = [jnp.asarray(rng.standard_normal(a.shape).astype(a.dtype)) for a in leaves]
    key = jax.random.key(0)
    arguments, x = LayerArguments(params, [], [], key, None), [jnp.asarray(BATCH["inputs"])]
    dy = [jnp.asarray(BATCH["inputs"] + 1)]

    @jax.jit
    def both(arguments, x, dy):
        results, residuals = layer.forward(arguments, x)
        assert [(a.shape, a.dtype) for a in residuals] == [(a.shape, a.dtype) for a in layer.residuals]
        return results.outputs, layer.backward(arguments, residuals, dy)

    run = lambda p, x: function.forward(LayerArguments(p, [], [], key, None), x).outputs
    expected, vjp = jax.vjp(run, params, x)
    outputs, gradients = both(arguments, x, dy)
    assert_close(outputs, expected, "outputs")
    for found, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(vjp(dy)), strict=True):
        assert found.dtype == want.dtype
        assert_close(found.astype(jnp.float32), want.astype(jnp.float32), "gradient")


def test_what_is_stored():
    sizes = lambda name, remat: [a.shape for a in stored(name, remat)]
    assert sizes("dense", "layer") == [(2, 4)], "its input"
    assert sizes("dense", "none") == [(2, 4)], "its input; the kernel is at hand"
    assert set(sizes("function", "none")) == {(2, 4)}
    assert (4, 4) not in sizes("cast", "none"), "the cast kernel is made again"
    assert sizes("cast", "layer") == [(2, 4)]


def test_what_elementwise_operations_give_is_made_again():
    assert [(a.shape, a.dtype) for a in stored("gelu", "none")] == [((2, 4), np.float32)]
    assert len(stored("gelu", jax.checkpoint_policies.everything_saveable)) > 3
    kept = {(a.shape, a.dtype.name) for a in stored("dropout", "none")}
    assert kept == {((2, 4), "bool")}, "a mask takes a byte, its random bits four, and time"


def stored(name, remat):
    return layer_of(functions_of(MIDDLE[name], remat)[1]).residuals


def test_what_is_made_again_needs_parameters_alone():
    """A regression: an operation that takes the input, of which it uses the shape alone."""

    @jax.jit
    def like(x, w):
        return jnp.zeros_like(x) + w

    layer = jpipe.Layer(lambda key, x: jnp.ones((), x.dtype), lambda w, x: x * jnp.sin(like(x, w)))
    function = functions_of(layer, "none")[1]
    found = trace_layer(function)
    assert len(found.remake.jaxpr.invars) == 1
    run = lambda w, x: function.forward(LayerArguments([w], [], [], jax.random.key(0), None), [x]).outputs[0]
    w, x, dy = jnp.float32(2), jnp.asarray(BATCH["inputs"]), jnp.asarray(BATCH["inputs"] + 1)
    local, arguments = layer_of(function), LayerArguments([w], [], [], jax.random.key(0), None)
    gradients = local.backward(arguments, local.forward(arguments, [x])[1], [dy])
    assert_close(tuple(jax.tree.leaves(gradients)), jax.vjp(run, w, x)[1](dy))
