"""A list of layers and one module that runs them, with a mark behind each, are the same model by both doors."""

import re
from collections import Counter

import jax
import pytest

import jpipe
from cases import call_layer, model

SIZES = {"num_stages": 2, "num_microbatches": 4}
COUNTED = ("dot_general", "while", "collective_permute", "all_reduce", "tanh", "gather", "scatter")


def name(i: int) -> str:
    return f"layer_{i:02d}"


def as_module(truth) -> jpipe.Layer:
    """One module of all layers of a model."""

    def init(key, x):
        trees = {}
        for i, tree in enumerate(truth.trees):
            leaves, structure = jax.tree.flatten(tree)
            keys = jax.random.split(jax.random.fold_in(key, i), len(leaves) or 1)
            made = [jax.random.normal(*each) for each in zip(keys, [x.shape for x in leaves], strict=False)]
            trees[name(i)] = jax.tree.unflatten(
                structure, [m.astype(x.dtype) for m, x in zip(made, leaves, strict=True)]
            )
        return trees

    def apply(params, x):
        for i, layer in enumerate(truth.sequence):
            x = call_layer(layer, params[name(i)], x)
            x = jpipe.cut(x) if i + 1 < len(truth.sequence) else x
        return x

    return jpipe.Layer(init, apply, name="chain")


@pytest.mark.parametrize(
    "kind", ["linen", "nn.Sequential", *(pytest.param(k, marks=pytest.mark.slow) for k in ("alternating", "plain"))]
)
def test_both_doors_lead_to_one_program(kind):
    """The same groups, cuts and operations, but for random keys, which follow from a layer's index or don't."""
    with jax.enable_x64(True):
        truth, found = model(kind), []
        for layers in (truth.layers, as_module(truth)):
            pipe = jpipe.Pipeline(layers, truth.loss_fn, **SIZES)
            shapes = jax.eval_shape(pipe.init, jax.random.key(0), truth.batch)
            text = jax.jit(pipe.value_and_grad).lower(shapes, truth.batch).as_text()
            counts = Counter(re.findall(r"stablehlo\.(\w+)", text))
            found.append((pipe.plan.model.group_of, pipe.partition.counts, {op: counts[op] for op in COUNTED}))
        assert found[0] == found[1]
        assert found[0][2]["dot_general"] > 0
