"""A terminal for what `jpipe.processes.progress` draws, and what was drawn on it."""

import io
import re
import sys
import time

import pytest
from rich.console import Console
from rich.progress import Progress

from jpipe.processes import progress

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


@pytest.fixture
def terminal(monkeypatch):
    """Stderr, a terminal of 100 columns; nothing is chosen."""
    stream = Terminal()
    monkeypatch.setattr(progress, "_chosen", None)
    for name in ("JPIPE_PROGRESS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "sys", Streams(stream))
    return stream


@pytest.fixture
def soon(monkeypatch):
    """Tasks are shown at once, and all of them leave a line."""
    monkeypatch.setattr(progress, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(progress, "KEPT_AFTER", 0.0)


@pytest.fixture
def tasks(terminal, monkeypatch):
    """All tasks that begin on the terminal, as rich has them."""
    begun = []

    class Recorded(progress._Display):
        def add_task(self, *given, **options):
            index = super().add_task(*given, **options)
            begun.append(self._tasks[index])
            return index

    monkeypatch.setattr(progress, "_Display", Recorded)
    return begun


def without_codes(text):
    return CODES.sub("", text.replace("\r", "\n"))


def shown_on(stream):
    """The lines written to a stream, those drawn over too, without codes for colours and the cursor."""
    return without_codes(stream.getvalue())


def lines_on(stream):
    """The lines that stay: those with a time after dots; and nothing else has them."""
    return [line.partition(" ... ")[0] for line in shown_on(stream).splitlines() if " ... " in line]


def wait_for(text, stream):
    """Waits until a text is drawn."""
    deadline = time.monotonic() + 20
    while text not in shown_on(stream):
        assert time.monotonic() < deadline, shown_on(stream)
        time.sleep(0.01)


def display_of_a_user():
    """A display of rich that is drawn already, and its terminal."""
    own = Terminal()
    return Progress(console=Console(file=own, force_terminal=True)), own
