"""Rows of `benchmarks/axes.py` in jpipe and in plain JAX, in float64 on simulated devices: for a worker of `timed`."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from timed import alive

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import axes
from axes_models import ROWS, SMALL
from axes_programs import (
    BLOCKS,
    MICROBATCHES,
    STAGES,
    Case,
    make_pipeline,
    plain_batch,
    plain_shapes,
    plain_step,
    random_batch,
    random_weights,
)

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
IN_FLOAT32 = {"qwen3": {"rtol": 1e-4, "atol": 1e-7}}
"""google-tunix's block computes partly in float32."""


def case_of(name: str) -> Case:
    """A row at small sizes, all in float64."""
    (row,) = [axes.fitted(row, small=True) for row in ROWS if row.name == name]
    return Case.of(row, dataclasses.replace(SMALL, dtype="float64", param_dtype="float64"), jax.devices())


def plain(case: Case, weights: dict[str, Any], batch: Any) -> tuple[Any, dict[str, Any]]:
    """(loss, gradients `[blocks, ...]`) in plain JAX, on the devices of one stage."""
    with jax.set_mesh(case.plain_mesh):
        shapes = plain_shapes(case, STAGES * BLOCKS)
        placed = {name: jax.device_put(weight, shapes[name].sharding) for name, weight in weights.items()}
        cut = lambda a: a.reshape(MICROBATCHES, -1, *a.shape[1:])
        parts = jax.tree.map(lambda a, like: jax.device_put(cut(a), like.sharding), batch, plain_batch(case))
        return jax.device_get(plain_step(case)(placed, parts))


def jpipes(case: Case, weights: dict[str, Any], batch: Any) -> tuple[Any, dict[str, Any]]:
    """The same by jpipe."""
    pipe, count = make_pipeline(case), STAGES * BLOCKS
    trees = jax.device_get(pipe.layer_variables(pipe.init(jax.random.key(0), batch)))
    known = (0, len(trees) - 1) if case.row.tied else range(1, 1 + count)
    for i in known:
        own = weights if case.row.tied else {name: weight[i - 1] for name, weight in weights.items()}
        trees[i] = jax.tree.map_with_path(lambda path, _, own=own: own[_name(path, own)], trees[i])
    alive("value_and_grad")
    (loss, _), gradients = pipe.value_and_grad(pipe.from_layer_variables(trees, batch), batch)
    found = jax.device_get(pipe.layer_variables({"params": gradients}))
    by_block = [{_name(p, weights): a for p, a in jax.tree_util.tree_leaves_with_path(found[i])} for i in known]
    if case.row.tied:
        return loss, by_block[0]
    return loss, {name: np.stack([tree[name] for tree in by_block]) for name in weights}


def _name(path: Any, names: Any) -> str:
    """Which weight's leaf a path leads to."""
    (name,) = [str(getattr(key, "key", key)) for key in path if str(getattr(key, "key", key)) in names]
    return name


def check(name: str) -> int:
    """Compares loss and every gradient of a row; the number of comparisons."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), nnx.use_eager_sharding(False):
        case = case_of(name)
        weights, batch, tolerance = random_weights(case), random_batch(case), IN_FLOAT32.get(name, TOLERANCE)
        alive("plain JAX")
        with case.row.within(case.plain_mesh):
            loss, gradients = plain(case, weights, batch)
        alive("jpipe")
        with case.row.within(case.mesh):
            found, ours = jpipes(case, weights, batch)
        np.testing.assert_allclose(found, loss, **tolerance)
        for key, expected in gradients.items():
            assert expected.dtype == jnp.float64
            assert np.abs(expected).max() > 0, f"the gradient of {key} is zero"
            np.testing.assert_allclose(ours[key], expected, **tolerance, err_msg=key)
    return 1 + len(gradients)


def compiled(name: str) -> dict[str, Any]:
    """What a row sends at small sizes, as `--json` has it."""
    (row,) = [axes.fitted(row, small=True) for row in ROWS if row.name == name]
    alive("compile")
    plain, ours = axes.compare(Case.of(row, SMALL, jax.devices()))
    return {"plain": plain.as_json(), "jpipe": ours.as_json()}
