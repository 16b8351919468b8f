"""What is shown of long work: on terminals, only there, and at no cost to what is computed."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console
from rich.progress import Progress

import jpipe
from jpipe.terminal import progress
from jpipe.terminal.first_calls import Call
from jpipe.terminal.progress import task

BATCH = np.ones((8, 4), np.float32)
LAYERS = [nn.Dense(4), nn.Dense(4), nn.Dense(4), nn.Dense(2)]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


class Streams:
    """`sys` for `progress`, with a stderr of its own: pytest sets its own one after the fixtures."""

    def __init__(self, stderr):
        self.stderr = stderr

    @property
    def stdout(self):
        return sys.stdout


def shown_on(stream):
    """The lines written to a stream, those drawn over too, without codes for colours and the cursor."""
    return without_codes(stream.getvalue())


def without_codes(text):
    return CODES.sub("", text.replace("\r", "\n"))


def lines_on(stream):
    """The lines that stay: those with a time after dots; and nothing else has them."""
    return [line.partition(" ... ")[0] for line in shown_on(stream).splitlines() if " ... " in line]


def make_pipe(**options):
    return jpipe.Pipeline(LAYERS, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2, **options)


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setattr(progress, "_chosen", None)
    for name in ("JPIPE_PROGRESS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal(monkeypatch):
    """Stderr, a terminal of 100 columns."""
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "sys", Streams(stream))
    return stream


@pytest.fixture
def soon(monkeypatch):
    """Tasks are shown at once, and all of them leave a line."""
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(progress, "KEPT_AFTER", 0.0)


@pytest.fixture
def tasks(monkeypatch):
    """All tasks that begin, shown or not."""
    begun, make = [], progress._Task
    monkeypatch.setattr(progress, "_Task", lambda *given: begun.append(make(*given)) or begun[-1])
    return begun


def wait_for(text, stream):
    deadline = time.monotonic() + 20
    while text not in shown_on(stream):
        assert time.monotonic() < deadline, shown_on(stream)
        time.sleep(0.01)


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_a_task_is_drawn_with_its_bar_and_leaves_a_line(terminal, soon):
    before = sys.stderr
    with task("measuring costs", total=5, unit="layers") as advance:
        wait_for("measuring costs", terminal)
        advance(2)
        wait_for("2 of 5 layers", terminal)
        with task("copying", total=3_000_000, unit="bytes") as copied:
            copied(1_500_000)
            wait_for("1.5 MB of 3.0 MB", terminal)
    assert lines_on(terminal) == ["measuring costs (5 layers)"]
    assert sys.stderr is before


def test_what_is_quick_shows_nothing(terminal):
    with task("quick"), task("quicker"):
        pass
    assert terminal.getvalue() == ""


def test_errors_pass_and_leave_no_line(terminal, soon):
    error, before = ValueError("mine"), sys.stderr
    with pytest.raises(ValueError, match="mine") as raised, task("failing"):
        wait_for("failing", terminal)
        raise error
    assert raised.value is error
    assert lines_on(terminal) == []
    assert sys.stderr is before
    with task("the next"):
        pass
    assert lines_on(terminal) == ["the next"]


def test_what_is_printed_meanwhile_stays_whole(terminal, soon):
    with task("working"):
        wait_for("working", terminal)
        print("a message", file=sys.stderr)
    assert "a message" in shown_on(terminal).splitlines()
    assert lines_on(terminal) == ["working"]


def test_other_threads_show_nothing(terminal, soon):
    def work():
        with task("beside") as advance:
            advance()

    with task("in front"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert lines_on(terminal) == ["in front"]
    assert "beside" not in shown_on(terminal)


# --- where it is quiet ------------------------------------------------------------------------------------------------


def is_quiet(stream):
    with task("working"):
        time.sleep(0.05)
    return stream.getvalue() == ""


def test_it_is_shown_on_a_terminal(terminal, soon):
    assert not is_quiet(terminal)


def test_it_can_be_switched_off_and_on(terminal, soon, monkeypatch):
    jpipe.show_progress(False)
    assert is_quiet(terminal)
    monkeypatch.setenv("JPIPE_PROGRESS", "0")
    monkeypatch.setattr(progress, "_chosen", None)
    assert is_quiet(terminal)
    jpipe.show_progress(True)
    assert not is_quiet(terminal)
    with pytest.raises(TypeError, match="no bool"):
        jpipe.show_progress("off")


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_it_is_quiet_in_files_and_pipes_even_coloured_ones(name, monkeypatch, soon):
    stream = io.StringIO()
    monkeypatch.setattr(progress, "sys", Streams(stream))
    monkeypatch.setenv(name, "1")
    jpipe.show_progress(True)
    assert is_quiet(stream)


@pytest.mark.parametrize("stream", [None, Terminal()], ids=["none", "closed"])
def test_it_is_quiet_without_stderr(stream, monkeypatch):
    if stream is not None:
        stream.close()
    monkeypatch.setattr(progress, "sys", Streams(stream))
    with task("working"):
        pass


def test_it_is_quiet_on_terminals_that_move_no_cursor(terminal, soon, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert is_quiet(terminal)


def test_it_is_quiet_but_in_the_first_process(terminal, soon, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert is_quiet(terminal)


def test_it_is_quiet_within_a_display_of_the_users(terminal, soon):
    pipe, tx, own = make_pipe(), optax.sgd(0.1), Terminal()
    with Progress(console=Console(file=own, force_terminal=True)) as bar:
        for _ in bar.track(range(2), description="mine"):
            state = pipe.create_state(jax.random.key(0), BATCH, tx)
            pipe.train_step(state, BATCH)
    assert "mine" in own.getvalue()
    assert "compiling" not in own.getvalue()
    assert terminal.getvalue() == ""


# --- pipelines --------------------------------------------------------------------------------------------------------


def test_a_pipeline_shows_what_takes_long_and_nothing_else(terminal, soon, tasks):
    pipe, tx = make_pipe(balance="time"), optax.sgd(0.1)
    state = pipe.create_state(jax.random.key(0), BATCH, tx)
    state, _ = pipe.train_step(state, BATCH)
    shape = "(3 groups of layers, 1f1b, K=2, M=2)"
    assert lines_on(terminal) == [
        "planning 4 layers",
        "compiling the initialisation (3 groups of layers)",
        "first run of the initialisation",
        "initialising the optimiser's state",
        f"compiling the training step {shape}",
        "first run of the training step",
    ]
    inner = {task.what: task for task in tasks}
    assert inner["measuring costs"].done == inner["measuring costs"].total == 3
    assert {"tracing 4 layers", "tracing forward and backward"} <= set(inner)
    assert all(task.total in (None, task.done) for task in tasks)

    tasks.clear()
    state, _ = pipe.train_step(state, BATCH)  # warm: no task begins
    assert not tasks
    pipe.train_step(state, np.ones((4, 4), np.float32))
    assert f"compiling the training step {shape}" in [task.what for task in tasks]

    tasks.clear()
    variables = pipe.init(jax.random.key(0), BATCH)
    pipe.evaluate(variables, BATCH)
    pipe.apply(variables, BATCH)
    pipe.value_and_grad(variables, BATCH)
    found = [task.what for task in tasks if task.what.startswith("compiling")]
    forward = "(3 groups of layers, forward, K=2, M=2)"
    whats = [f"the loss {forward}", f"the forward pass {forward}", f"loss and gradients {shape}"]
    assert found == [f"compiling {what}" for what in whats]


def test_nothing_compiles_under_a_jit_of_the_users(terminal, soon, tasks):
    pipe = make_pipe()
    variables = pipe.init(jax.random.key(0), BATCH)
    tasks.clear()
    outputs = jax.jit(pipe.apply)(variables, BATCH)
    jax.jit(pipe.value_and_grad).lower(variables, BATCH)
    assert not [task.what for task in tasks if "compiling" in task.what or "first run" in task.what]
    np.testing.assert_array_equal(outputs, pipe.apply(variables, BATCH))


def test_without_a_terminal_nothing_waits_for_the_first_step(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    with Call("the step", BATCH) as call:
        jax.jit(lambda x: (progress.is_shown(), x)[1])(BATCH)
        call.begin("a test")
        assert call.done(BATCH) is BATCH
    assert not waited


def test_checkpoints_show_their_bytes(terminal, soon, tasks, tmp_path):
    pipe, tx = make_pipe(), optax.sgd(0.1, momentum=0.9)
    state = pipe.create_state(jax.random.key(0), BATCH, tx)
    state, _ = pipe.train_step(state, BATCH)
    terminal.truncate(0)
    tasks.clear()
    with jpipe.Checkpointer(tmp_path) as saved:
        saved.save(pipe, state)
        saved.wait()
        saved.restore(pipe, BATCH, tx)
        jpipe.load_layers(tmp_path)
    size = f"{2 * 4 * (3 * (16 + 4) + 8 + 2)} bytes"  # parameters and momentum
    assert lines_on(terminal)[:4] == [
        f"saving step 1 ({size})",
        f"waiting until step 1 ({size}) is on disk",
        f"waiting until step 1 ({size}) is on disk",
        f"restoring step 1 ({size})",
    ]
    assert "reading the layers of step 1" in lines_on(terminal)
    bars = [task for task in tasks if task.unit == "bytes"]
    assert len(bars) == 2 and all(task.done == task.total for task in bars)


# --- a real terminal --------------------------------------------------------------------------------------------------

PROGRAM = """
import flax.linen as nn, jax, jax.numpy as jnp, optax
import jpipe
from jpipe.terminal import progress
progress.SHOWN_AFTER = progress.KEPT_AFTER = 0.01
pipe = jpipe.Pipeline([nn.Dense(4)] * 3, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2)
state = pipe.create_state(jax.random.key(0), jnp.ones((4, 4)), optax.sgd(0.1))
pipe.train_step(state, jnp.ones((4, 4)))
print("trained")
"""


def run_program(stderr, **environment):
    environment = {**os.environ, "PYTHONPATH": str(Path(jpipe.__file__).parents[1]), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True
    )


def seen_in_terminal(**environment):
    """What a run of the program writes to a pseudo-terminal that is its stderr."""
    ours, theirs = pty.openpty()
    with run_program(theirs, **environment) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # the end, on Linux
            while data := os.read(ours, 65536):
                seen += data
        assert process.stdout.read() == "trained\n"
    os.close(ours)
    assert process.returncode == 0
    return seen.decode()


def test_a_terminal_sees_the_compilation():
    seen = seen_in_terminal(COLUMNS="100")
    assert "\x1b[2K" in seen  # lines are drawn over
    lines = [line for line in without_codes(seen).splitlines() if " ... " in line]
    assert any(
        line.startswith("compiling the training step (3 groups of layers, 1f1b, K=2, M=2) ... ") for line in lines
    )


@pytest.mark.slow
def test_a_pipe_or_a_terminal_without_progress_sees_nothing():
    assert seen_in_terminal(JPIPE_PROGRESS="0") == ""
    with run_program(subprocess.PIPE, FORCE_COLOR="1") as process:
        assert process.communicate() == ("trained\n", "")
