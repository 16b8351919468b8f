"""Programs that leave the process that made them: `jax.export`, serialised executables, JAX's persistent cache."""

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export
from jax.experimental import serialize_executable

import jpipe
from cases import assert_close, linen
from jpipe.processes.progress import warn_once


@pytest.fixture(autouse=True)
def in_float64():
    """Optax itself mixes dtypes."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


TX = optax.adam(1e-2)


@functools.cache
def plain():
    """(the model, its losses before each of some steps, its layers' trees after them), by plain Flax and optax."""
    truth = linen(jnp.float64, num_blocks=1)

    @jax.jit
    def step(trees, opt_state):
        loss, grads = jax.value_and_grad(truth.loss_of)(trees, truth.batch)
        updates, opt_state = TX.update(grads, opt_state, trees)
        return optax.apply_updates(trees, updates), opt_state, loss

    trees, opt_state, losses = truth.trees, TX.init(truth.trees), []
    for _ in range(2):
        trees, opt_state, loss = step(trees, opt_state)
        losses.append(loss)
    return truth, losses, trees


def make(mesh=None, **options):
    """A pipeline of the model, and its variables."""
    truth, sizes = plain()[0], {"num_stages": 2, "num_microbatches": 2}
    pipe = jpipe.Pipeline(truth.layers, truth.loss_fn, **sizes, mesh=mesh, balance="even", **options)
    return pipe, pipe.from_layer_variables(truth.trees, truth.batch)


def started(mesh, **options):
    """A pipeline, the structure of a state, its `train_step` as a function of leaves, and the leaves."""
    pipe, variables = make(mesh, **options)
    state = pipe.create_state(jax.random.key(0), plain()[0].batch, TX, variables)
    return pipe, jax.tree.structure(state), *of_leaves(pipe.train_step, state)


def of_leaves(function, tree):
    """(a function of a pytree and a batch as one of lists of leaves, which any process can call; the leaves)."""
    leaves, structure = jax.tree.flatten(tree)

    def run(leaves, batch):
        return jax.tree.leaves(function(jax.tree.unflatten(structure, leaves), batch))

    return run, leaves


def read_back(function, *arguments, **options):
    """What another process would call."""
    return export.deserialize(export.export(jax.jit(function), **options)(*arguments).serialize())


def check_steps(pipe, structure, run, leaves):
    """Steps of a program that was read back are plain Flax's."""
    truth, losses, trees = plain()
    for expected in losses:
        *leaves, _, _, loss = run(leaves, truth.batch)  # metrics by name: finite, grad_norm, loss
        assert_close(loss, expected, "loss")
    assert_close(pipe.layer_variables(jax.tree.unflatten(structure, leaves).variables), trees, "variables")


@pytest.mark.parametrize(("shape", "explicit"), [((2, 2), False), ((2, 1), True)], ids=["auto", "explicit"])
def test_apply_that_was_exported_gives_the_models_outputs(make_mesh, shape, explicit):
    truth, mesh = plain()[0], make_mesh(shape, ("stage", "data"), explicit=explicit)
    pipe, variables = make(mesh)
    run, leaves = of_leaves(pipe.apply, variables)
    found = read_back(run, leaves, truth.batch["inputs"])
    assert (found.platforms, found.nr_devices) == (("cpu",), mesh.size)
    assert_close(found.call(leaves, truth.batch["inputs"]), [truth.truth[1]], "outputs")


def test_a_step_that_was_exported_trains_as_the_model_does(make_mesh):
    pipe, structure, run, leaves = started(make_mesh((2, 2), ("stage", "data")), remat="none")
    check_steps(pipe, structure, jax.jit(read_back(run, leaves, plain()[0].batch).call), leaves)


def test_a_compiled_step_that_was_serialised_trains_as_the_model_does(make_mesh):
    mesh = make_mesh((2,))
    pipe, structure, run, leaves = started(mesh)
    compiled = jax.jit(run).lower(leaves, plain()[0].batch).compile()
    stored, devices = serialize_executable.serialize(compiled), list(mesh.devices.flat)
    loaded = serialize_executable.deserialize_and_load(*stored, execution_devices=devices)
    check_steps(pipe, structure, loaded, leaves)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_programs_are_exported_for_accelerators_that_are_not_there(platform):
    """Which a CPU can only lower. Every operation is one of which `jax.export` promises that it stays."""
    (pipe, variables), batch = make(remat="none"), plain()[0].batch
    for function, tree in ((pipe.apply, variables), (pipe.train_step, pipe.abstract_state(batch, TX))):
        run, leaves = of_leaves(function, tree)
        with warnings_of(platform):
            found = read_back(run, leaves, batch, platforms=[platform])
        assert found.platforms == (platform,)
        assert "LayoutConstraint" not in found.mlir_module()
    assert "LayoutConstraint" in jax.jit(run).lower(leaves, batch).as_text(), "it is left out of exported programs only"


def warnings_of(platform):
    """The context that expects what is said of programs for TPUs; of others nothing is."""
    warn_once.cache_clear()
    if platform == "tpu":
        return pytest.warns(
            UserWarning, match=r"on TPUs pipe\.apply takes as long as it did, but a training step may take half"
        )
    return contextlib.nullcontext()


STEP = """
import collections, json, sys
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np, optax
import jpipe

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
layers = [nn.Dense(4), *[nn.Dense(4)] * 2, lambda x: jnp.tanh(x), nn.Dense(3)]
pipe = jpipe.Pipeline(layers, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2)
batch = np.ones((4, 4), np.float32)
state = pipe.create_state(jax.random.key(0), batch, optax.adam(1e-2))
before = dict(counts)
state, metrics = pipe.train_step(state, batch)
print(json.dumps([before, counts, float(metrics["loss"])]))
"""


def test_a_second_process_finds_all_programs_in_jaxs_persistent_cache(tmp_path):
    """They follow from the code alone: not from hashes, addresses or an order that differs from process to process."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }

    def counted(seed):
        command = [sys.executable, "-c", STEP]
        environment = os.environ | settings | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        return json.loads(done.stdout)

    (before, first, loss), (_, second, again) = counted("1"), counted("2")
    assert first["cache_misses"] > before["cache_misses"] > 0, "the step and what goes before it are compiled"
    assert second.get("cache_misses", 0) == 0
    assert second["cache_hits"] == first["cache_misses"] + first.get("cache_hits", 0)  # some are alike
    assert loss == again
