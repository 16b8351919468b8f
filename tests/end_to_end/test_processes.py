"""Several processes on one machine are one pipeline, and say clearly what keeps them from it.

`process_worker.py` is one of them; a start of all of them runs many cases.
"""

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jpipe
import process_worker
from cases import assert_close, assert_equal, model, params_of, pipeline
from jpipe.processes import watching
from quick import flags_for

WORKER = Path(process_worker.__file__)
SECONDS = 240
"""After which processes are killed."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(directory: Path, index: int, processes: int, devices: int, port: int, *more: str) -> subprocess.Popen:
    known = {
        "XLA_FLAGS": flags_for(devices),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    options = ["--port", port, "--processes", processes, "--index", index, "--out", directory, *more]
    with (directory / f"{index}.log").open("w") as log:
        command = [sys.executable, str(WORKER), *map(str, options)]
        return subprocess.Popen(command, env=os.environ | known, stdout=log, stderr=subprocess.STDOUT)


def finish(directory: Path, workers: dict[int, subprocess.Popen]) -> dict[int, Any]:
    """What each process wrote down. None is left running, whatever happens."""
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end and any(worker.poll() is None for worker in workers.values()):
            time.sleep(0.1)
            if any(worker.poll() for worker in workers.values()):  # the others would wait for the one that failed
                end = min(end, time.monotonic() + 5)
    finally:
        for worker in workers.values():
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    found = {}
    for index in workers:
        file = directory / f"{index}.pickle"
        assert file.exists(), (directory / f"{index}.log").read_text()[-3000:]
        found[index] = pickle.loads(file.read_bytes())
    return found


def run_all(directory: Path, processes: int, devices: int, cases: list[str]) -> dict[int, Any]:
    port = free_port()
    workers = {i: start(directory, i, processes, devices, port, *cases) for i in range(processes)}
    return finish(directory, workers)


STEP = "stage across, data within"
"""That of `make test`; a loop and a run that goes on have the other axis across."""


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What `make` gives: the first worker of pytest-xdist that asks makes it, the others wait."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    made, part, claim = (folder / f"{name}.{suffix}" for suffix in ("pickle", "part", "claim"))
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        end = time.monotonic() + 2 * SECONDS
        while not made.exists() and time.monotonic() < end:
            time.sleep(0.2)
    else:
        part.write_bytes(pickle.dumps(make()))
        part.replace(made)
    assert made.exists(), f"the worker that makes {name} failed"
    return pickle.loads(made.read_bytes())


def save_run(directory: Path) -> tuple[Path, list[float]]:
    """The directory with a run of one process at K=4, saved after a step, and the losses of two more."""
    truth = model("linen", "float32")
    pipe, losses = pipeline(truth, "1f1b", 4, 2, balance="even"), []
    with jax.numpy_dtype_promotion("standard"), jpipe.Checkpointer(directory / "saved") as saved:
        state = pipe.create_state(jax.random.key(3), truth.batch, optax.adamw(1e-2))
        for step in range(3):
            state, metrics = pipe.train_step(state, truth.batch)
            losses.append(float(metrics["loss"]))
            if step == 0:
                saved.save(pipe, state, position=1)
    return directory, losses[1:]


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A directory with the run of one process, in which two have gone on, and the losses that they should have."""
    return once(tmp_path_factory, "saved_run", lambda: save_run(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def two(tmp_path_factory, saved_run):
    """What two processes of two devices each found."""
    cases = [STEP, "training", "own loop", "there and back", "resumed", "errors", "late"]
    return once(tmp_path_factory, "two", lambda: run_all(saved_run[0], 2, 2, cases))


@pytest.fixture
def four_devices(monkeypatch):
    """The cases of the worker in this process, on as many devices as the processes have together."""
    monkeypatch.setattr(process_worker, "in_order", lambda: jax.devices()[:4])


def check_step(found: dict[int, Any], case: str) -> None:
    """A step equals the sequential model's and that of one process, in all processes."""
    truth, alone = model("plain", "float32"), process_worker.CASES[case]()
    loss, outputs, gradients = truth.truth
    expected = [params_of(layer, tree) for layer, tree in zip(truth.sequence, gradients, strict=True)]
    for index, by_case in found.items():
        step = by_case[case]
        np.testing.assert_allclose(step["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(step["evaluated"], loss, rtol=1e-5)
        assert_close(step["outputs"], outputs, f"{case}: outputs in process {index}")
        assert_close(step["gradients"], expected, f"{case}: gradients in process {index}")
        assert_close(step["gradients"], alone["gradients"], f"{case}: gradients of one process")
        np.testing.assert_allclose(step["loss"], alone["loss"], rtol=1e-6)


def test_a_step_of_two_processes_is_that_of_one(two, four_devices):
    check_step(two, STEP)


@pytest.mark.slow
def test_a_step_of_four_processes_is_that_of_one(tmp_path, four_devices):
    cases = ["stage across", "both across", "stage within, data across", "training"]
    found = run_all(tmp_path, 4, 1, cases)
    for case in cases[:3]:
        check_step(found, case)
    check_training(found)


def check_training(found: dict[int, Any]) -> None:
    alone = process_worker.training()
    for index, by_case in found.items():
        losses = by_case["training"]["losses"]
        assert losses == found[0]["training"]["losses"], "the same metrics in all processes"
        for step, expected in zip(losses, alone["losses"], strict=True):
            assert step == pytest.approx(expected, rel=1e-5), index
        assert_close(by_case["training"]["params"], alone["params"], f"parameters in process {index}")


def test_steps_of_training_are_those_of_one_process(two, four_devices):
    check_training(two)


def test_a_loop_of_ones_own_is_that_of_one_process_and_compiles_once(two, four_devices):
    alone = process_worker.own_loop()
    for by_case in two.values():
        found = by_case["own loop"]
        assert (found["compiled"], found["step"]) == (1, 3)
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["losses"][0] == pytest.approx(float(model("plain", "float32").truth[0]), rel=1e-5)


def test_variables_go_from_mesh_to_mesh_though_no_process_has_them_whole(two):
    for by_case in two.values():
        found = by_case["there and back"]
        assert found["split"]
        assert_close(found["after"], found["before"])
        assert found["differ"].startswith("ValueError: trees[0] and trees[5] differ"), found["differ"]


@pytest.mark.slow
def test_a_model_that_is_one_module_trains_and_goes_on(four_devices, tmp_path, tmp_path_factory, monkeypatch):
    """A scan's parameters are stacked on the hosts alone, once its checkpoint is read."""
    found = run_all(tmp_path_factory.mktemp("processes"), 2, 2, ["whole model"])
    monkeypatch.setattr(process_worker, "OUT", tmp_path)
    alone = process_worker.whole_model()
    for by_case in found.values():
        found = by_case["whole model"]
        np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-5)
        assert_equal(found["loaded"], found["trained"])
        assert_close(found["trained"], jax.device_get(alone["trained"]))


def test_a_run_of_one_process_goes_on_in_two_under_another_layout_and_back(two, saved_run):
    directory, expected = saved_run
    for by_case in two.values():
        found = by_case["resumed"]
        assert found["position"] == 1
        np.testing.assert_allclose(found["losses"], expected, rtol=1e-6)
    assert_equal(jpipe.load_layers(directory / "saved", step=3), two[0]["resumed"]["layers"])
    truth = model("linen", "float32")
    pipe = pipeline(truth, "gpipe", 1, 2)
    with jpipe.Checkpointer(directory / "saved") as saved, jax.numpy_dtype_promotion("standard"):
        state, position = saved.restore(pipe, truth.batch, optax.adamw(1e-2))
    assert (int(state.step), position) == (3, 3)
    assert_equal(jax.device_get(pipe.layer_variables(state.variables)), two[0]["resumed"]["layers"])


@pytest.mark.parametrize(
    "case, message",
    [
        ("committed", r"ValueError: batch\['inputs'\] is on devices of process . alone.*give pipe.place\(batch\)"),
        ("placed", r"ValueError: batch\['inputs'\] is spread over processes already; place takes the rows of this"),
        ("rows", r"ValueError: batch size 6 is not divisible by num_microbatches=4; use 1, 2, 3 or 6"),
        ("num_microbatches", "ValueError: the processes disagree on num_microbatches: 2 in process 0, 6 in process 1"),
        ("balance", r"ValueError: the processes disagree on cuts: \(4,\) in process 0, \(3,\) in process 1"),
        ("mesh", "ValueError: the processes disagree on mesh: .* in process 0, .* in process 1"),
        ("key", r"ValueError: the processes disagree on key: \[0, 0\] in process 0, \[0, 1\] in process 1"),
        ("values", r"ValueError: the processes disagree on the values of batch\['inputs'\] .*pipe.place"),
        ("shapes", r"ValueError: the processes disagree on batch\['inputs'\]: .*\[4, ?\d.* in process 0, .*\[8"),
        ("none", "nothing"),
        (
            "elsewhere",
            r"ValueError: an array float32\[.* only a part; bring it to the hosts first: .*process_allgather",
        ),
        ("brought", "nothing"),
    ],
)
def test_bad_input_is_an_error_in_each_process_and_nothing_is_lost(two, case, message):
    for by_case in two.values():
        assert re.match(message, by_case["errors"][case]), by_case["errors"][case]


def test_a_process_that_does_not_come_is_missed(two):
    assert "RuntimeError: process 1 did not come to the same step within 2 s" in two[0]["late"]


def exit_codes(directory: Path, processes: int, devices: int, case: str) -> list[int]:
    """With what processes end that don't come to the end of a case."""
    port = free_port()
    workers = [start(directory, i, processes, devices, port, case) for i in range(processes)]
    try:
        return [worker.wait(SECONDS) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_a_process_that_hangs_is_named_and_all_end(tmp_path):
    """Process 1 sleeps, and process 0 waits for it in native code; each prints its stacks and ends by itself."""
    assert exit_codes(tmp_path, 2, 2, "hangs") == [watching.EXIT_CODE] * 2
    first, second = ((tmp_path / f"{index}.log").read_text() for index in range(2))
    for index, log in enumerate((first, second)):
        assert f"no step has ended for 4 s; process {index} of 2 ends with exit code 75." in log, log
        assert "Process 1 had not entered step 3." in log, log
        assert re.search(r"process 0 \(.+\) had entered 3 steps \(the last: the loss\), of which 2 ended", log), log
        assert re.search(r"process 1 \(.+\) had entered 2 steps \(the last: the loss\), of which 2 ended", log), log
        assert " in hangs" in log, "the main thread's stack"
    assert " in asleep" in second
    assert " in asleep" not in first


@pytest.mark.slow
def test_a_process_that_hangs_before_the_first_step_is_named(tmp_path):
    assert exit_codes(tmp_path, 2, 2, "hangs at once") == [watching.EXIT_CODE] * 2
    log = (tmp_path / "0.log").read_text()
    assert "Process 1 had not entered step 1." in log, log
    assert "had entered 1 steps (the last: the comparison of configurations with the other processes)" in log, log


@pytest.mark.slow
def test_a_process_that_compiles_for_long_ends_none(tmp_path):
    for by_case in run_all(tmp_path, 2, 2, ["one compiles"]).values():
        found = by_case["one compiles"]
        assert found["loss"] == pytest.approx(np.tanh(np.tanh(np.tanh(np.tanh(1.0)))), rel=1e-6)
        assert found["left"] == [], "in the store of all processes"


@pytest.mark.slow
def test_a_process_that_an_error_ends_ends_the_others(tmp_path):
    begin = time.monotonic()
    codes = exit_codes(tmp_path, 2, 2, "one raises")
    assert all(codes), codes
    assert "ValueError: on purpose" in (tmp_path / "1.log").read_text()
    assert time.monotonic() - begin < 90, "start, and twice the heartbeat"
