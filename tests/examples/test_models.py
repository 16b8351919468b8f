"""The models in `examples/models`: parameter counts against the paper's and the reference implementations'.

They are counted by shapes only, and equal layers are traced once: depth costs nothing.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from models import amoebanet, dit, resnet, transformer_l, translation, unet

import jpipe
from jpipe.layers.adapt import as_layers
from jpipe.model.groups import Model
from jpipe.model.trace import trace_model


def traced(layers: list, batch: dict) -> Model:
    return trace_model(as_layers(layers), lambda batch: batch["inputs"], batch)


def num_parameters(model: Model) -> int:
    size = lambda group: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(group.variables.get("params", {})))
    return sum(size(model.groups[known.group]) * len(known.users) for known in model.variable_sets)


def shape_given(model: Model) -> tuple[int, ...]:
    return model.groups[-1].gives.shape


def images(size: int, channels: int = 3) -> dict:
    inputs = jax.ShapeDtypeStruct((2, size, size, channels), jnp.float32)
    return {"inputs": inputs, "targets": jax.ShapeDtypeStruct((2,), jnp.int32)}


def pixels(size: int, channels: int = 3) -> dict:
    return {**images(size, channels), "targets": jax.ShapeDtypeStruct((2, size, size), jnp.int32)}


def sentences(num_inputs: int, num_targets: int) -> dict:
    tokens = lambda length: jax.ShapeDtypeStruct((2, length), jnp.int32)
    return {"inputs": tokens(num_inputs), "targets": tokens(num_targets)}


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "printed"), [(3, "282.2M"), (13, "785.8M"), (103, "5.3B"), (415, "21.0B"), (1663, "83.9B")]
)
def test_transformer_l_has_the_parameters_of_table_1(num_layers, printed):
    model = traced(transformer_l.transformer_l(num_layers), sentences(16, 16))
    count = num_parameters(model)
    assert count == 2 * 32000 * 2048 + 32000 + num_layers * 50_358_272
    unit = {"M": 1e6, "B": 1e9}[printed[-1]]
    assert f"{count / unit:.1f}{printed[-1]}" == printed
    assert len(model.groups) == 3
    assert shape_given(model) == (2, 16, 32000)


@pytest.mark.parametrize(
    ("size", "billions"),
    [
        ((6, 8192, 16), "0.41"),
        ((24, 8192, 16), "1.24"),
        ((12, 16384, 32), "1.24"),
        ((32, 16384, 32), "3.08"),
        ((64, 16384, 32), "6.04"),
    ],
)
def test_translation_models_have_the_parameters_of_the_paper(size, billions):
    model = traced(translation.translation(*size), sentences(16, 12))
    assert f"{num_parameters(model) / 1e9:.2f}" == billions
    assert len(model.groups) == 6  # source, encoder, norm, start of the decoder, decoder, head
    assert shape_given(model) == (2, 12, 64000)


@pytest.mark.parametrize(
    ("size", "millions"),
    [((12, 384, 6), 33), ((12, 768, 12), 130), ((24, 1024, 16), 458), ((28, 1152, 16), 675)],
    ids=["S", "B", "L", "XL"],
)
def test_dit_has_the_parameters_of_table_1(size, millions):
    """Of arXiv 2212.09748: patches of 2x2, and twice as many outputs as the latents' four channels."""
    shape = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    model = traced(dit.dit(*size, outputs=8), {"inputs": (shape(2, 32, 32, 4), shape(2), shape(2, dtype=jnp.int32))})
    assert round(num_parameters(model) / 1e6) == millions
    assert len(model.groups) == 3
    assert shape_given(model) == (2, 32, 32, 8)


@pytest.mark.slow
def test_amoebanet_b_has_the_parameters_of_the_paper():
    model = traced(amoebanet.amoebanet(18, 512, variant="B"), images(224))
    assert num_parameters(model) == 557_277_864
    assert shape_given(model) == (2, 1000)


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ((18, 208), 81.1),
        pytest.param((18, 416), 317.5, marks=pytest.mark.slow),
        pytest.param((18, 544), 540.2, marks=pytest.mark.slow),
        pytest.param((36, 544), 1053, marks=pytest.mark.slow),
        pytest.param((72, 512), 1843, marks=pytest.mark.slow),
    ],
)
def test_amoebanet_d_has_the_parameters_of_table_1(size, millions):
    model = traced(amoebanet.amoebanet(*size), images(224))
    assert num_parameters(model) / 1e6 == pytest.approx(millions, abs=0.05 if millions < 1000 else 0.5)
    # In each stack two cells differ from the others, as the two tensors that they take do.
    assert len(model.groups) == 1 + 2 + (3 + 1 + 3 + 1 + 3) + 1


@pytest.mark.slow
def test_amoebanet_gives_what_it_computes_in():
    """An average pool that leaves out the padding gives float32, whatever it takes; all cells gave that then."""
    with jax.numpy_dtype_promotion("standard"):
        model = traced(amoebanet.amoebanet(3, 16, dtype="bfloat16"), images(224))
    assert {leaf.dtype.name for leaves in model.boundaries for leaf in leaves} == {"bfloat16"}


@pytest.mark.parametrize(
    ("make", "batch", "count", "groups", "shape"),
    [
        pytest.param(resnet.resnet50, images(224), 25_557_032, 10, (2, 1000), marks=pytest.mark.slow),
        (resnet.resnet101, images(224), 44_549_160, 10, (2, 1000)),
        # 0.27M (table 6 of arXiv 1512.03385), and shortcuts, which those haven't.
        (
            lambda: resnet.small_resnet(10, (3, 3, 3), 16),
            images(32),
            269_722 + 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64,
            0,
            (2, 10),
        ),
        # As the original, and as its usual PyTorch version with BatchNorm.
        (lambda: unet.unet(2, norm=False), pixels(64, channels=1), 31_030_658, 0, (2, 64, 64, 2)),
        (lambda: unet.unet(2), pixels(64), 31_037_698, 0, (2, 64, 64, 2)),
    ],
    ids=["ResNet-50", "ResNet-101", "ResNet-20", "U-Net", "U-Net with BatchNorm"],
)
def test_models_of_images_have_the_usual_parameters(make, batch, count, groups, shape):
    model = traced(make(), batch)
    assert (num_parameters(model), shape_given(model)) == (count, shape)
    assert groups in (0, len(model.groups))


# --- in a pipeline ----------------------------------------------------------------------------------------------------

SMALL = {
    "transformer_l": (transformer_l, lambda: transformer_l.transformer_l(3, 16, 32, 2, 50), sentences(8, 8)),
    "translation": (translation, lambda: translation.translation(2, 32, 1, 16, 50), sentences(8, 6)),
    "amoebanet": (amoebanet, lambda: amoebanet.amoebanet(3, 8, 10, stem="small"), images(8, 1)),
    "resnet": (resnet, lambda: resnet.small_resnet(10, dropout=0.1), images(8, 1)),
    "unet": (unet, lambda: unet.unet(3, 2, 4), pixels(16)),
}


@pytest.mark.filterwarnings("ignore:layer .* alone takes:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("amoebanet", "resnet") else n for n in SMALL]
)
def test_models_train_in_stages(name):
    """A training step in four stages, traced: gradients and statistics for all variables."""
    family, make, batch = SMALL[name]
    pipe = jpipe.Pipeline(make(), family.loss_fn, num_stages=4, num_microbatches=2)
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(pipe.init, key, batch)
    (loss, updates), grads = jax.eval_shape(pipe.value_and_grad, variables, batch, key)
    assert loss.shape == ()
    assert jax.tree.map(jnp.shape, {"params": grads, **updates}) == jax.tree.map(jnp.shape, variables)
