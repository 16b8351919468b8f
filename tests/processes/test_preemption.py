"""SIGTERM is noted, and handlers that were there before are called and come back."""

import os
import signal
import threading

import pytest

from jpipe.processes.preemption import Preemption


@pytest.fixture
def handled():
    """The signals that a user's own handler was told of."""
    numbers = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_a_signal_is_noted_and_the_users_handler_called(handled):
    own = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.reached(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.reached(1)
    assert handled == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is own


def test_other_threads_handle_no_signals(handled):
    own, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with Preemption() as preemption:
            seen.append((signal.getsignal(signal.SIGTERM), preemption.reached(0)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(own, False)]
