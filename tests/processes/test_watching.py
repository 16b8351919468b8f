"""`jpipe.watch`: what counts as a step that ended, and what is said when none does.

Watches of several processes are in `test_processes.py`.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

import jpipe
from jpipe.processes import progress
from jpipe.processes.progress import compiles, first_call
from jpipe.processes.watching import EXIT_CODE, Standing, report

X = np.ones((4, 3), np.float32)
SECONDS = 1.0


@pytest.fixture(scope="module")
def pipe():
    """A pipeline whose steps are compiled: the mean of tanh(tanh(x))."""
    pipe = jpipe.Pipeline([jax.nn.tanh] * 2, lambda y, _: y.mean(), num_stages=2, num_microbatches=2)
    pipe.evaluate(variables_of(pipe), X)
    return pipe


def variables_of(pipe):
    return pipe.init(jax.random.key(0), X)


class Ends(NamedTuple):
    """The exit codes with which the process would have ended; `over` is set when it first would have."""

    codes: set[int]
    over: threading.Event


@pytest.fixture
def ends(monkeypatch):
    """With what the process would have ended; it goes on."""
    found = Ends(set(), threading.Event())

    def end(code):
        found.codes.add(code)
        found.over.set()

    monkeypatch.setattr(os, "_exit", end)
    yield found
    assert not progress.followers, "nobody follows calls after the block"


# --- loops that go on ---


def test_an_ordinary_loop_is_let_alone_and_nothing_is_left(pipe, ends):
    """Longer than the seconds, all together; its numbers are those of plain JAX."""
    variables, threads, losses = variables_of(pipe), threading.active_count(), []
    with jpipe.watch(seconds=1.5) as watched:
        for _ in range(10):
            losses.append(pipe.evaluate(variables, X))
            time.sleep(0.2)
        assert threading.active_count() == threads + 1
        standing = watched._standing()
    assert (standing.entered, standing.ended, standing.last) == (10, 10, "the loss")
    assert not ends.codes
    assert threading.active_count() == threads
    np.testing.assert_allclose(losses, np.tanh(np.tanh(1.0)), rtol=1e-6)


def test_what_compiles_does_not_count(ends):
    with jpipe.watch(SECONDS / 2) as watched:
        with first_call("the step", X) as done:
            compiles("a test")
            time.sleep(SECONDS)
            done(X)
        watched.steps_of(lambda: time.sleep(SECONDS))()  # a first call is taken to compile
        assert watched._standing().ended == 2
    assert not ends.codes


def test_an_error_leaves_the_block_and_nothing_is_left(pipe, ends):
    threads = threading.active_count()
    with pytest.raises(KeyError, match="a user's own"), jpipe.watch(SECONDS):
        raise KeyError("a user's own")
    with pytest.raises(KeyError), jpipe.watch(60) as watched:  # within a step
        with pytest.raises(ZeroDivisionError), first_call("the step", X):
            raise ZeroDivisionError
        assert watched._standing().ended == 1
        with first_call("the step", X):
            raise KeyError
    assert threading.active_count() == threads
    assert not ends.codes


def test_steps_of_a_jit_of_ones_own(pipe, ends):
    """Its own calls count, and the pipeline within it, which is only traced, doesn't."""
    variables = variables_of(pipe)
    both = jax.jit(lambda x: {"loss": pipe.evaluate(variables, x), "outputs": pipe.apply(variables, x)})
    with jpipe.watch(60) as watched:
        step = watched.steps_of(both)
        found = [step(X) for _ in range(3)]
        jax.block_until_ready(found)
        standing = watched._standing()
        assert (standing.entered, standing.ended, standing.last) == (3, 3, "<lambda>")
        jax.eval_shape(step, X)
        assert watched._standing().entered == 3
    np.testing.assert_allclose(found[2]["outputs"], np.tanh(np.tanh(X)), rtol=1e-6)
    np.testing.assert_array_equal(step(X)["loss"], found[0]["loss"])  # outside of the block too


# --- loops that don't ---


def test_a_device_that_never_ends_while_the_main_thread_waits_in_native_code(ends, capfd):
    """The second step's result doesn't come until the process would have ended."""

    def stuck(x):
        if x > 1:
            ends.over.wait(60)
        return x

    step = jax.jit(lambda x: jax.pure_callback(stuck, jax.ShapeDtypeStruct((), np.float32), x))
    with jpipe.watch(SECONDS) as watched:
        own = watched.steps_of(step)
        assert float(own(np.float32(1))) == 1
        assert float(own(np.float32(2))) == 2
    assert ends.codes == {EXIT_CODE}
    said = capfd.readouterr().err
    assert "no step has ended for 1 s; process 0 of 1 ends with exit code 75." in said
    assert "had entered 2 steps (the last: <lambda>), of which 1 ended" in said
    assert "had not entered" not in said
    assert "test_a_device_that_never_ends_while_the_main_thread_waits_in_native_code" in said, "the main thread's stack"
    assert "in stuck" in said, "the stack of another thread"


def test_a_loop_that_enters_no_step(pipe, ends, capfd):
    """One of its own under `jax.jit` is told what to call."""
    variables = variables_of(pipe)
    step = jax.jit(lambda x: pipe.evaluate(variables, x))
    step(X)
    with jpipe.watch(SECONDS):
        while not ends.over.wait(0.05):
            step(X)
    assert "is seen only if the loop calls watched.steps_of(step)" in capfd.readouterr().err


@pytest.mark.parametrize(
    "place", [pytest.param("with jpipe.watch(1):", marks=pytest.mark.slow), "with jpipe.watch(60), jpipe.watch(1):"]
)
def test_the_process_ends_with_the_exit_code(place):
    code = f"import time, jpipe\n{place}\n  print('begun')\n  time.sleep(60)"
    root = {"PYTHONPATH": str(Path(jpipe.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | root)
    assert (found.returncode, found.stdout) == (EXIT_CODE, "begun\n"), found.stderr
    assert 'File "<string>", line 4 in <module>' in found.stderr


# --- words and wrong arguments ---


def test_the_report_names_those_that_hold_the_others_up():
    at = lambda host, entered, ended, **more: Standing(
        host, entered, ended, "the loss", **{"is_compiling": False} | more
    )
    standings = {0: at("a", 842, 811), 1: at("b", 811, 811), 2: at("c", 840, 810), 5: at("d", 5, 5, is_compiling=True)}
    lines = report(2, 8, 600.0, standings).splitlines()
    assert lines[0] == "jpipe.watch: no step has ended for 600 s; process 2 of 8 ends with exit code 75."
    assert lines[1] == "Process 1, 5 had not entered step 812."
    assert lines[2:4] == [
        "  process 5 (d) had entered 5 steps (the last: the loss), of which 5 ended, it compiles",
        "  process 1 (b) had entered 811 steps (the last: the loss), of which 811 ended",
    ]
    assert lines[-2:] == ["Not in this block, or not reached: process 3, 4, 6, 7.", "The stacks of process 2:"]


@pytest.mark.parametrize(
    "seconds, kind",
    [
        *((number, ValueError) for number in (0, -1.0, float("nan"), float("inf"))),
        *((other, TypeError) for other in ("600", None, True)),
    ],
)
def test_wrong_seconds(seconds, kind):
    with pytest.raises(kind, match=f"seconds={seconds!r}.*give the seconds that no step may take"):
        jpipe.watch(seconds)


def test_a_watch_is_for_one_block(ends):
    with jpipe.watch(np.float32(60)) as watched, pytest.raises(RuntimeError, match="was entered before"):
        watched.__enter__()
    with pytest.raises(RuntimeError, match=r"call jpipe\.watch again"), watched:
        pass
    with pytest.raises(TypeError, match=r"function=3 can't be called; pass the step itself"):
        watched.steps_of(3)
