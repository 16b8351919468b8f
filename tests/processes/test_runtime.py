"""What the seam to running programs relies on, in this version of JAX and Python, and what happens without it."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from gpu_program import needs_gpu_compiler
from jpipe.processes import runtime
from jpipe.processes.progress import warn_once

ROOT = Path(__file__).parents[2]
GPU_COMPILER = """
import os, jax
jax.devices()  # JAX looks for plugins now, and leaves that of GPUs out
from jpipe.tools.chips import parse_topology
before = os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
devices = parse_topology("h100:2x4").devices()
assert os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") == before
print(devices[0].device_kind, len(devices))
"""
CLUSTER = """
import json, sys, jax
from jpipe.processes.runtime import shared_store, wait_for
assert shared_store() is None
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize("127.0.0.1:" + sys.argv[1], 1, 0)
store = shared_store()
store.key_value_set("jpipe/a", "0")
store.key_value_set("jpipe/a", "1", True)
assert store.key_value_dir_get("jpipe/") == [("jpipe/a", "1")] and store.key_value_dir_get("other/") == []
found = [wait_for(store, "jpipe/a", 5), wait_for(store, "jpipe/b", 0.2)]
store.key_value_delete("jpipe/a")
print(json.dumps([*found, wait_for(store, "jpipe/a", 0.2)]))
"""


def run(code, *arguments, **environment):
    told = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=os.environ | told, timeout=120
    )


@needs_gpu_compiler
@pytest.mark.parametrize("skip", [pytest.param({}, marks=pytest.mark.slow), {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "0"}])
def test_the_gpu_compiler_is_there_though_jax_left_it_out(skip):
    """JAX_PLATFORMS=cpu was needed: "topology not implemented for cuda"."""
    found = run(GPU_COMPILER, JAX_PLATFORMS="", **skip)
    assert found.stdout.splitlines()[-1:] == ["NVIDIA H100 80GB HBM3 8"], f"JAX {jax.__version__}: {found.stderr}"


def test_the_shared_store(unused_tcp_port_number):
    """A value that is there; one that doesn't come, after a while; one that is deleted."""
    found = run(CLUSTER, str(unused_tcp_port_number))
    assert found.returncode == 0, f"JAX {jax.__version__} has changed the store that processes share: {found.stderr}"
    assert json.loads(found.stdout.splitlines()[-1]) == ["1", None, None]


@pytest.fixture
def unused_tcp_port_number():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_store_that_is_hidden(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="nobody checks whether they all want the same"):
        assert runtime.shared_store() is None
    assert runtime.shared_store() is None  # a second warning would be an error


def test_whether_an_array_is_computed(make_mesh):
    """Of one that takes a moment, of one that is there, of one that was donated."""
    split = jax.device_put(np.ones(2, np.float32), jax.NamedSharding(make_mesh((2,)), P("stage")))
    long = jax.jit(lambda x: jax.lax.fori_loop(0, 10**7, lambda _, x: x * 0.5 + 1, x)).lower(split).compile()
    array = long(split)
    assert not runtime.is_computed(array), f"JAX {jax.__version__} has changed is_ready, by which jpipe.watch looks on"
    assert runtime.is_computed(jax.block_until_ready(array))
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted() and runtime.is_computed(array)


def test_no_cluster():
    code = (
        "import jax\nfrom jpipe.processes.runtime import finds_no_cluster\n"
        "try: jax.distributed.initialize()\nexcept ValueError as error: print(finds_no_cluster(error), error)"
    )
    found = run(code).stdout
    assert found.startswith("True"), f"JAX {jax.__version__} says otherwise that it found no cluster: {found}"
    assert not runtime.finds_no_cluster(ValueError("Number of processes must be defined."))


AT_EXIT = """
import concurrent.futures
from jpipe.processes.runtime import before_threads_end
pool = concurrent.futures.ThreadPoolExecutor()
before_threads_end(lambda: print(pool.submit(lambda: "a thread ran").result()))
"""


def test_threads_run_at_the_end():
    found = run(AT_EXIT)
    assert found.stdout == "a thread ran\n", f"Python {sys.version} ends threads otherwise: {found.stderr}"


def test_an_end_without_threads(monkeypatch):
    called = []
    monkeypatch.delattr(threading, "_register_atexit")
    monkeypatch.setattr(runtime.atexit, "register", called.append)
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"use the Checkpointer in a `with` block"):
        runtime.before_threads_end(print)
    assert called == [print]


@pytest.mark.parametrize("spec", [P(None, "model", None), P("stage")], ids=["more dimensions", "a manual axis"])
def test_a_constraint_that_can_not_hold(spec):
    types = (AxisType.Manual, AxisType.Auto)
    mesh = AbstractMesh((2, 2), ("stage", "model"), axis_types=types)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError) as caught:
        jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, spec))(np.ones((4, 4), np.float32))
    assert runtime.is_of_a_constraint(caught.value), f"JAX says otherwise that a constraint can't hold: {caught.value}"
    assert not runtime.is_of_a_constraint(ValueError("shapes don't fit"))


def test_a_call_that_lacks_an_argument():
    def raised(call):
        with pytest.raises(TypeError) as caught:
            call()
        return caught.value

    of_few, of_many = raised(lambda: (lambda a, b: a)(1)), raised(lambda: (lambda a: a)(1, 2))
    assert runtime.lacks_an_argument(of_few), f"Python says otherwise that an argument lacks: {of_few}"
    assert not runtime.lacks_an_argument(of_many)
    with pytest.raises(ValueError) as caught:
        nn.Dropout(0.5).apply({}, jnp.ones(3))
    assert runtime.lacks_an_argument(caught.value), f"Flax says otherwise that it isn't told the mode: {caught.value}"
    assert not runtime.lacks_an_argument(ValueError("missing 1 required positional argument: 'b'"))


@pytest.mark.parametrize("module", [nnx.Dropout, lambda a, rngs: nnx.Linear(4, 4, rngs=rngs)])
def test_a_module_that_gets_an_array_for_its_random_numbers(module):
    with pytest.raises((AttributeError, TypeError)) as caught:
        jax.make_jaxpr(lambda x: module(0.5, rngs=x))(np.ones(3, np.float32))
    assert runtime.lacks_rngs(caught.value), f"Flax says otherwise that it needs nnx.Rngs: {caught.value}"
    assert not runtime.lacks_rngs(AttributeError("'Block' object has no attribute 'params'"))


def test_what_may_pass(tmp_path):
    """The words are gRPC's, which tensorstore puts in front; a file that isn't there is no such fault."""
    tensorstore = pytest.importorskip("tensorstore")
    assert runtime.may_pass("ValueError: UNAVAILABLE: no connection")
    with pytest.raises(ValueError) as caught:
        tensorstore.open({"driver": "zarr", "kvstore": {"driver": "file", "path": str(tmp_path)}}).result()
    assert str(caught.value).startswith("NOT_FOUND"), f"tensorstore names no status any more: {caught.value}"
    assert not runtime.may_pass(str(caught.value))


def test_a_device_without_room():
    refused = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.")
    assert runtime.found_no_room(refused)
    assert not runtime.found_no_room(jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such thing"))
