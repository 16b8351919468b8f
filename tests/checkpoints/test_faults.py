"""What goes wrong while a run saves: it is killed, told to end, or the disk is full."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jpipe
from jpipe.checkpoints import files
from quick import flags_for

SAVER = Path(__file__).parents[1] / "helpers" / "saver.py"


def start(directory: Path, *how: str) -> subprocess.Popen:
    """A process that saves step after step (`saver.py`)."""
    environment = os.environ | {"XLA_FLAGS": flags_for(8), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(SAVER), str(directory), *how]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def expected(step: int) -> float:
    """The value of every parameter in the checkpoint of a step (`saver.py`)."""
    return float(step)


def test_killed_within_a_save_the_last_whole_checkpoint_is_there(tmp_path):
    saver = start(tmp_path)
    try:
        deadline = time.monotonic() + 120
        in_save = lambda: any(tmp_path.glob("*tmp*")) and len(files.steps_in(files.epath.Path(tmp_path))) > 0
        while not in_save():
            assert saver.poll() is None and time.monotonic() < deadline, saver.communicate()[1][-2000:]
        saver.send_signal(signal.SIGKILL)
    finally:
        saver.kill()
        saver.communicate()
    (newest, *_) = files.steps_in(files.epath.Path(tmp_path))
    trees = jpipe.load_layers(tmp_path)
    assert jax.tree.leaves(trees)
    for leaf in jax.tree.leaves(trees):
        np.testing.assert_array_equal(leaf, expected(newest))
    with jpipe.Checkpointer(tmp_path) as saved:
        assert saved.latest_step == newest
        while any(tmp_path.glob("*tmp*")):
            assert time.monotonic() < deadline, "what was not finished is removed, in the background"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Two directories, and what a process printed that found the disk full, and at last saved without a `with`."""
    folder = tmp_path_factory.mktemp("ended")
    saver = start(folder / "full", "--full-after", "1", "--forget", str(folder / "forgotten"))
    output, errors = saver.communicate(timeout=120)
    assert saver.returncode == 0, errors[-2000:]
    return folder / "full", folder / "forgotten", output, errors


def test_a_full_disk_is_an_error_that_loses_nothing(ended):
    directory, _, output, _ = ended
    assert "RuntimeError: saving step 3" in output or "RuntimeError: waiting for the last checkpoint" in output, output
    assert "last whole checkpoint: 1" in output
    assert "again: steps 3 and 9 saved" in output, "with room again the run goes on"
    for step in (1, 3, 9):
        for leaf in jax.tree.leaves(jpipe.load_layers(directory, step=step)):
            np.testing.assert_array_equal(leaf, expected(step))


# https://github.com/python/cpython/issues/113964
@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 3), reason="no thread can be started at the program's end")
def test_without_with_the_last_checkpoint_is_written_all_the_same(ended):
    _, directory, _, errors = ended
    _, begun, errors = errors.partition("without with:")  # before it orbax logs that the disk is full
    assert begun and "Traceback" not in errors
    for leaf in jax.tree.leaves(jpipe.load_layers(directory)):
        np.testing.assert_array_equal(leaf, expected(1))
