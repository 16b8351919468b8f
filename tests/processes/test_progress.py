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
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.processes import progress
from jpipe.processes.progress import compiles, first_call, task, warn_user
from terminals import Streams, display_of_a_user, lines_on, shown_on, wait_for, without_codes

CALLS = "def inner():\n    warn_user('mine')\n\ndef outer():\n    inner()\n"


@pytest.mark.parametrize("name", ["jpipe.deep", "jax._src.api"])
def test_a_warning_points_past_the_package_and_jax(name):
    module = {"__name__": name, "warn_user": warn_user}
    exec(CALLS, module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module["outer"]()
    assert [(w.filename, str(w.message), w.category) for w in caught] == [(__file__, "mine", UserWarning)]


# --- warnings ---------------------------------------------------------------------------------------------------------


BATCH = np.ones((8, 4), np.float32)
LAYERS = [nn.Dense(4), nn.Dense(4), nn.Dense(4), nn.Dense(2)]


def make_pipe(**options):
    return jpipe.Pipeline(LAYERS, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2, **options)


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
    inner = {task.description: task for task in tasks}
    assert inner["measuring costs"].completed == inner["measuring costs"].total == 3
    assert {"tracing 4 layers", "tracing forward and backward"} <= set(inner)
    assert all(task.total in (None, task.completed) for task in tasks)

    tasks.clear()
    state, _ = pipe.train_step(state, BATCH)  # warm: no task begins
    assert not tasks
    pipe.train_step(state, np.ones((4, 4), np.float32))
    assert f"compiling the training step {shape}" in [task.description for task in tasks]

    tasks.clear()
    variables = pipe.init(jax.random.key(0), BATCH)
    pipe.evaluate(variables, BATCH)
    pipe.apply(variables, BATCH)
    pipe.value_and_grad(variables, BATCH)
    found = [task.description for task in tasks if task.description.startswith("compiling")]
    forward = "(3 groups of layers, forward, K=2, M=2)"
    whats = [f"the loss {forward}", f"the forward pass {forward}", f"loss and gradients {shape}"]
    assert found == [f"compiling {what}" for what in whats]


def test_without_a_terminal_nothing_waits_for_the_first_step(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    with first_call("the step", BATCH) as done:
        jax.jit(lambda x: (progress.is_shown(), x)[1])(BATCH)
        compiles("a test")
        assert done(BATCH) is BATCH
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
        "waiting for the last checkpoint",
        "waiting for the last checkpoint",
        f"restoring step 1 ({size})",
    ]
    assert "reading the layers of step 1" in lines_on(terminal)
    bars = [task for task in tasks if task.total]
    assert len(bars) == 2 and all(task.completed == task.total for task in bars)


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_what_takes_half_a_second_is_drawn_and_what_takes_a_second_leaves_a_line(terminal):
    with task("quick"), task("quicker"):
        pass
    assert terminal.getvalue() == ""
    with task("long enough to be drawn"):
        wait_for("long enough", terminal)
    assert lines_on(terminal) == []
    with task("long enough to stay"):
        time.sleep(1.01)
    assert lines_on(terminal) == ["long enough to stay"]


def test_a_task_is_drawn_with_its_bar_and_leaves_a_line_unless_it_fails(terminal, soon):
    """What is printed meanwhile stays whole; threads beside show nothing, nor does what has no total show a share."""
    error, before = ValueError("mine"), sys.stderr
    with pytest.raises(ValueError, match="mine") as raised, task("tracing [4, 8] layers"):  # no markup of rich's
        wait_for("tracing [4, 8] layers", terminal)
        raise error
    assert raised.value is error and "%" not in shown_on(terminal)
    with task("measuring costs", total=5, unit="layers") as advance:
        wait_for("measuring costs", terminal)
        advance(2)
        wait_for("40%", terminal)
        print("a message", file=sys.stderr)
        thread = threading.Thread(target=lambda: task("beside").__enter__())
        thread.start()
        thread.join()
    assert lines_on(terminal) == ["measuring costs (5 layers)"]
    assert "a message" in shown_on(terminal).splitlines() and "beside" not in shown_on(terminal)
    assert sys.stderr is before


# --- where it is quiet ------------------------------------------------------------------------------------------------


def is_quiet(stream):
    with task("working"):
        time.sleep(0.05)
    return stream.getvalue() == ""


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


@pytest.mark.parametrize("where", ["FORCE_COLOR", "TTY_COMPATIBLE", "dumb", "another process"])
def test_it_is_quiet_elsewhere(where, terminal, monkeypatch, soon):
    """In files and pipes, even coloured ones, on terminals that move no cursor, and in other processes."""
    if where == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    elif where == "another process":
        monkeypatch.setattr(jax, "process_index", lambda: 1)
    else:
        terminal = io.StringIO()
        monkeypatch.setattr(progress, "sys", Streams(terminal))
        monkeypatch.setenv(where, "1")
        jpipe.show_progress(True)
    assert is_quiet(terminal)


def test_it_is_quiet_within_a_display_of_the_users(terminal, soon):
    display, own = display_of_a_user()
    with display as bar:
        for _ in bar.track(range(2), description="mine"):
            assert is_quiet(terminal)
    assert "mine" in own.getvalue()
    assert "working" not in own.getvalue()


# --- a real terminal --------------------------------------------------------------------------------------------------

PROGRAM = """
import flax.linen as nn, jax, jax.numpy as jnp, optax
import jpipe
from jpipe.processes import progress
progress.SHOWN_AFTER = progress.KEPT_AFTER = 0.01
pipe = jpipe.Pipeline([nn.Dense(4)] * 3, lambda y, _: jnp.mean(y**2), num_stages=2, num_microbatches=2)
state = pipe.create_state(jax.random.key(0), jnp.ones((4, 4)), optax.sgd(0.1))
pipe.train_step(state, jnp.ones((4, 4)))
print("trained")
"""


LOGS = r"WARNING: All log messages before absl|[IW]\d{4} \d\d:\d\d"


def seen_in_terminal():
    """What a run of the program writes to a pseudo-terminal that is its stderr, but for what XLA logs.

    Where its plugin for GPUs is installed, it says that there is no GPU.
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(jpipe.__file__).parents[1]), "COLUMNS": "100"}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # the end, on Linux
            while data := os.read(ours, 65536):
                seen += data
        assert process.stdout.read() == "trained\n"
    os.close(ours)
    assert process.returncode == 0
    return "".join(line for line in seen.decode().splitlines(keepends=True) if not re.match(LOGS, line))


def test_a_terminal_sees_the_compilation():
    seen = seen_in_terminal()
    assert "\x1b[2K" in seen  # lines are drawn over
    begin = "compiling the training step (3 groups of layers, 1f1b, K=2, M=2) ... "
    assert any(line.startswith(begin) for line in without_codes(seen).splitlines())
