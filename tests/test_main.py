"""`python -m jpipe` is the command `jpipe`."""

import subprocess
import sys

import jpipe


def test_the_module_runs_the_command():
    found = subprocess.run([sys.executable, "-m", "jpipe", "--version"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, f"jpipe {jpipe.__version__}\n"), found.stderr
