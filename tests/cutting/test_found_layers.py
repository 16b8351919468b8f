"""The layers that are found in four models are those that a person would write, however the model is written."""

import jax
import numpy as np
import pytest

import jpipe
import whole_models

CASES = whole_models.cases()


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def found(name):
    case = CASES[name]
    return jpipe.layers_of(case.model, jax.tree.map(lambda a: a[:2], case.batch), inputs=case.inputs)


BLOCKS = [f"{{}}{i}/{part}" for i in range(3) for part in ("attention", "mlp")]


@pytest.mark.parametrize(
    ("style", "below"), [("loop", "h_"), ("remat around", "h_"), ("scan", "blocks/"), ("remat", "blocks/")]
)
def test_a_loop_or_a_scan_over_blocks(style, below):
    layers = found(style)
    assert [layer.name for layer in layers] == ["table", *(name.format(below) for name in BLOCKS), "head"]
    assert [layer.same_as for layer in layers] == [0, 1, 2, 1, 2, 1, 2, 7]
    assert below == "h_" or "blocks/mlp/Dense_0/kernel[1]" in layers[4].parameters


def test_a_tied_table_is_alone_in_its_layers():
    layers = found("tied")
    assert [layer.name for layer in layers][::9] == ["table", "table"]
    assert layers[0].parameters == layers[-1].parameters == ("table/embedding",)


def test_an_encoder_and_a_decoder():
    """In the decoder two values cross: the activation and what the encoder gave."""
    layers = found("translation")
    assert layers[0].parameters == layers[5].parameters == ("table/embedding",)
    crossing = [len(jax.tree.leaves(layer.gives)) for layer in layers]
    assert crossing == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 1, 1, 1]


def test_a_unet():
    """Its skips cross while what lies between them is computed."""
    layers = found("unet")
    assert max(len(jax.tree.leaves(layer.gives)) for layer in layers) == 2
    assert max(layer.flops for layer in layers) < 0.2 * sum(layer.flops for layer in layers)


def test_it_is_a_table():
    printed = str(found("loop"))
    assert printed.startswith("Transformer: 8 layers, 4 functions")
    assert "h_1/attention" in printed and "as 1" in printed


def test_what_is_no_model_is_told():
    with pytest.raises(TypeError, match=r"model is a list; pass one module"):
        jpipe.layers_of([1], np.ones(3))
