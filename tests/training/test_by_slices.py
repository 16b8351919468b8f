"""An optimiser's state on the hosts: steps are the same to the bit, and compiled programs move slices alone.

CPUs have no second memory: there the loops are the same, and nothing moves. Programs for TPUs and GPUs are compiled.
"""

import itertools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jpipe
from cases import assert_close, assert_equal
from gpu_program import needs_gpu_compiler
from jpipe.jax.in_place import HOST
from jpipe.memory import layout
from jpipe.tools.chips import ABSENT, parse_topology
from tpu_program import needs_tpu_compiler

pytestmark = pytest.mark.filterwarnings("ignore:offload= moves nothing")
BATCH = {
    "inputs": np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32),
    "targets": np.random.default_rng(1).standard_normal((8, 5)).astype(np.float32),
}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Buffers of several slices, and of one that is smaller than the others; optax itself mixes dtypes."""
    monkeypatch.setattr(layout, "SLICE_BYTES", 600)
    with jax.numpy_dtype_promotion("standard"):
        yield


def pipe_of(on_hosts, k=2, layers=(), **options):
    layers = layers or [*(nn.Dense(8) for _ in range(6)), nn.Dense(5)]
    loss = lambda y, batch: jnp.mean((y.astype(jnp.float32) - batch["targets"]) ** 2)
    where = "optimizer" if on_hosts else ()
    return jpipe.Pipeline(layers, loss, num_stages=k, num_microbatches=2, offload=where, **options)


def trained(tx, on_hosts, steps=3, **options):
    pipe = pipe_of(on_hosts, **options)
    state = pipe.create_state(jax.random.key(0), BATCH, tx)
    for _ in range(steps):
        state, metrics = pipe.train_step(state, BATCH)
    arrays = [a for a in jax.tree.leaves(state.opt_state) if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key)]
    return pipe.layer_variables(state.variables), arrays, metrics


OPTIMIZERS = {
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.0, 1e-2, 3), momentum=0.9),
    "finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "adafactor": lambda: jpipe.per_layer(optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    "layers in several steps": lambda: optax.MultiSteps(jpipe.per_layer(optax.lamb(1e-2)), 2).gradient_transformation(),
    "finite layers beside moments": lambda: optax.apply_if_finite(
        optax.chain(optax.scale_by_adam(), jpipe.per_layer(optax.lamb(1e-2))), 3
    ),
}


SLOW = ("hyperparameters", "finite", "adafactor", "finite layers beside moments")


@pytest.mark.parametrize("name", [n if n not in SLOW else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS])
def test_steps_are_the_same_to_the_bit(name):
    tx = OPTIMIZERS[name]()
    assert_equal(trained(tx, True), trained(tx, False))


def test_sums_of_what_follows_from_the_state():
    """They are added up slice by slice, in another order; products of arrays with each other are of whole ones."""
    tx = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.1), optax.scale(-1e-2))
    assert_close(trained(tx, True, steps=4), trained(tx, False, steps=4))


def split(size, *axes):
    return nn.Dense(size, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), axes))


WIDE = [*(nn.Dense(40) for _ in range(5)), nn.Dense(5)]
MESHES = {
    "data": ("data", {"layers": WIDE}),
    "sharded": ("data", {"layers": WIDE, "shard_over": "data"}),
    "spread": ("data", {"layers": WIDE, "shard_over": "data", "ends": "spread"}),
    "tensor": ("model", {"layers": [nn.Dense(8), split(16, None, "model"), split(8, "model", None), nn.Dense(5)]}),
}
ON_MESHES = {
    "lion": optax.chain(optax.clip_by_global_norm(0.1), optax.lion(1e-2)),
    "adam": optax.adam(1e-2),
    "lamb": jpipe.per_layer(optax.lamb(1e-2)),
}
BY_DEFAULT = [("spread", "lamb", True), ("tensor", "adam", False)]
OTHERS = [("spread", "lion", True), *itertools.product(MESHES, ("lion", "lamb"), [False])]
REST = [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]


@pytest.mark.parametrize(("name", "tx", "explicit"), BY_DEFAULT + REST)
def test_on_meshes(make_mesh, name, tx, explicit):
    axis, options = MESHES[name]
    options = {"mesh": make_mesh((2, 2), ("stage", axis), explicit=explicit), "steps": 2} | options
    assert_equal(*(trained(ON_MESHES[tx], on_hosts, **options) for on_hosts in (True, False)))


def test_checkpoints_go_to_pipelines_without(tmp_path):
    old, new, tx = pipe_of(True, k=2), pipe_of(False, k=3, balance="even"), jpipe.per_layer(optax.lamb(1e-2))
    state, _ = old.train_step(old.create_state(jax.random.key(0), BATCH, tx), BATCH)
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(old, state)
    expected, _ = old.train_step(state, BATCH)
    with jpipe.Checkpointer(tmp_path) as saved:
        restored, _ = saved.restore(new, BATCH, tx)
    found, _ = new.train_step(restored, BATCH)
    assert_close(new.layer_variables(found.variables), old.layer_variables(expected.variables))


def test_a_state_goes_to_a_pipeline_with_another_offload():
    tx, (hosted, plain) = optax.adam(1e-2), map(pipe_of, (True, False))
    state = hosted.create_state(jax.random.key(0), BATCH, tx)
    assert_equal(plain.evaluate(state.variables, BATCH), hosted.evaluate(state.variables, BATCH))
    with pytest.raises(ValueError, match=r"state was made with another offload=, on the hosts; move it: state = pipe"):
        plain.train_step(state, BATCH)
    moved = plain.place_state(jax.tree.map(jnp.copy, state), tx)
    expected = hosted.layer_variables(hosted.train_step(state, BATCH)[0].variables)
    assert_equal(plain.layer_variables(plain.train_step(moved, BATCH)[0].variables), expected)
    back = hosted.place_state(plain.create_state(jax.random.key(0), BATCH, tx), tx)
    assert_equal(hosted.layer_variables(hosted.train_step(back, BATCH)[0].variables), expected)


# --- compiled programs ------------------------------------------------------------------------------------------------


def compiled_step(devices, tx, on_hosts):
    """A compiled step of four equal stages, and its state."""
    mesh = Mesh(np.asarray(devices[:4]), ("stage",))
    options = {"k": 4, "mesh": mesh, "balance": "even", "layers": [nn.Dense(256) for _ in range(16)]}
    batch = {name: jax.ShapeDtypeStruct((64, 256), jnp.float32) for name in ("inputs", "targets")}
    pipe = pipe_of(on_hosts, **options)
    state = pipe.abstract_state(batch, tx)
    lowered = jax.jit(pipe.train_step, donate_argnums=0).lower(state, batch)
    return lowered.compile(ABSENT if devices[0].platform == "gpu" else None), state


def on_a_host(state):
    """(arrays of a state on hosts, bytes of one device's parts of them)."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.memory_kind == HOST]
    return arrays, sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in arrays)


def order(computation):
    """The names of a computation's operations in the order in which they run."""
    return re.findall(r"^\s+(?:ROOT )?%([\w.-]+) = ", computation, re.MULTILINE)


def check_moves(text, beside, least):
    """All that moves (`least` a turn) does so asynchronously, a slice at a time, beside what `beside` matches."""
    assert not re.search(r"= \w+\[\d+,[\d,]*\]\{[^}]*S\(5\)[^}]*\} copy\(", text), "a copy of a whole array on the host"
    loops = [order(part) for part in re.split(r"\n(?=%|ENTRY)", text) if "dynamic-update-slice-start" in part]
    assert loops
    for names in loops:
        for way in ("dynamic-slice", "dynamic-update-slice"):
            starts = [i for i, name in enumerate(names) if name.startswith(f"{way}-start")]
            ends = [i for i, name in enumerate(names) if name.startswith(f"{way}-done")]
            assert len(starts) == len(ends) >= least
            between = names[starts[0] : ends[-1]]
            assert any(re.match(beside, name) for name in between), f"nothing beside {way}: {between}"


@pytest.mark.parametrize(
    ("tx", "by_layer"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), False),
        pytest.param(jpipe.per_layer(optax.lamb(1e-3)), True, marks=pytest.mark.slow),
        pytest.param(optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(), False, marks=pytest.mark.slow),
    ],
    ids=["adamw", "lamb", "several steps"],
)
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5e:2x2", marks=needs_tpu_compiler),
        pytest.param("v5p:2x2x1", marks=[needs_tpu_compiler, pytest.mark.slow]),
        pytest.param("h100:8", marks=[needs_gpu_compiler, pytest.mark.slow]),
    ],
)
def test_programs_move_slices_beside_work(topology, tx, by_layer, monkeypatch):
    monkeypatch.setattr(layout, "SLICE_BYTES", 2**17)
    devices = parse_topology(topology).devices()
    (plain, _), (step, state) = (compiled_step(devices, tx, on_hosts) for on_hosts in (False, True))
    before, after = plain.memory_analysis(), step.memory_analysis()
    on_hosts, size = on_a_host(state)
    # What goes layer by layer are matrices, both moments in one buffer; biases stay.
    dims = 4 if by_layer else 1
    floats = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim >= dims and leaf.dtype == np.float32]
    assert len(on_hosts) == len(floats) >= (1 if by_layer else 2)
    assert size >= 2 * 4 * 4 * 256 * 256
    # Small arrays are padded to tiles.
    np.testing.assert_allclose(before.argument_size_in_bytes - after.argument_size_in_bytes, size, rtol=0.02)
    np.testing.assert_allclose(after.host_argument_size_in_bytes, size, rtol=0.02)
    assert after.host_alias_size_in_bytes == after.host_argument_size_in_bytes, "donated, and written in place"
    assert after.host_temp_size_in_bytes < 2**16
    # Two slices of two moments, old and new; or the moments of one layer.
    assert after.temp_size_in_bytes - before.temp_size_in_bytes <= 2 * 4 * 256 * 256 * 4
    # On GPUs all of a layer's state arrives before `per_layer` begins with it.
    is_bare = topology.startswith("h100") and by_layer
    # Two slices of two moments; or the moments of one matrix.
    check_moves(step.as_text(), r".*" if is_bare else r".*fusion", 2 if by_layer else 4)
