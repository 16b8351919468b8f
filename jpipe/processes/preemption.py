"""Notices that the job is told to end (SIGTERM), while some seconds are left to save its state."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from types import FrameType

import jax
from jax.experimental import multihost_utils


class Preemption:
    """A context in which SIGTERM doesn't end the process but is noted.

    In a cluster JAX's preemption service notes it, from `jpipe.initialize` on, and tells all processes. Elsewhere a
    signal handler notes it, if this is the main thread; it also calls the handler that was there before.
    """

    def __init__(self) -> None:
        self._told, self._at_exit = False, ExitStack()

    def __enter__(self) -> Preemption:
        if not jax.distributed.is_initialized() and threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGTERM)

            def note(number: int, frame: FrameType | None) -> None:
                self._told = True
                if callable(before):
                    before(number, frame)

            signal.signal(signal.SIGTERM, note)
            self._at_exit.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL if before is None else before)
        return self

    def __exit__(self, *exception: object) -> None:
        self._at_exit.close()

    def reached(self, step: int) -> bool:
        """Whether the job was told to end: in a cluster at the same step in all processes, which all have to ask."""
        if jax.distributed.is_initialized():
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return self._told
