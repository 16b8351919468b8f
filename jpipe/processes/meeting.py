"""Lets processes find one another before JAX's service begins at the same address.

If a process doesn't come in time, or comes twice, JAX ends the others from C++, in its client's `Connect`, so that no
process can say why (jax 0.10 and 0.12; in 0.12 a port that is taken even causes a segmentation fault). So processes
first meet here, by plain sockets, and JAX's service begins once all have come:

    process 0      listens     ............ all have come: "go" to all ... closes, JAX's service begins
    process k      connects, says "process k of n" ... waits ........ goes on to JAX's client

Meanwhile the port is open to anybody, so no message there is trusted. A message is read once, at most `LONGEST` bytes.
It has to be the greeting to the letter. And no sender can keep process 0 from hearing the others.
"""

from __future__ import annotations

import re
import selectors
import socket
import time
from contextlib import ExitStack, suppress

GREETING = re.compile(rb"jpipe: process (\d{1,9}) of (\d{1,9})\n")
ANSWER = b"jpipe: "
GO = "go"
LONGEST = 1024
"""Bytes of a greeting or an answer at most."""


def gather(port: int, num_processes: int, timeout: float) -> None:
    """Does process 0's part: waits for the others, and tells them to go on, or why they can't.

    Raises:
      ValueError: two processes came with one index, or one that was given another number of processes.
      RuntimeError: the port is taken, or not all processes came within the timeout.
    """
    came, word = dict[socket.socket, int](), "it was interrupted"
    with ExitStack() as opened:
        listener = opened.enter_context(_listen(port))
        try:
            _wait(listener, opened, num_processes, came, time.monotonic() + timeout)
            if len(came) < num_processes - 1:
                missing = sorted(set(range(1, num_processes)) - set(came.values()))
                raise RuntimeError(
                    f"processes {missing} of {num_processes} did not come to port {port} within {timeout:g} s; "
                    "start them with the same coordinator, or give a longer timeout"
                )
            word = GO
        except (RuntimeError, ValueError) as error:
            word = str(error)
            raise
        finally:
            for other in came:
                with suppress(OSError):
                    other.send(ANSWER + word.encode()[: LONGEST - len(ANSWER)])


def _wait(
    listener: socket.socket, opened: ExitStack, num_processes: int, came: dict[socket.socket, int], deadline: float
) -> None:
    """Reads from all connections, each when it has sent something, until all processes are in `came` or it is too late.

    Args:
      listener: the socket that others connect to.
      opened: closes their sockets at its end.
      num_processes: of the program, this one among them.
      came: the index of the process behind each socket, which is filled here.
      deadline: by `time.monotonic`.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(came) < num_processes - 1 and time.monotonic() < deadline:
            for key, _ in selector.select(deadline - time.monotonic()):
                other = key.fileobj
                assert isinstance(other, socket.socket)
                if other is listener:
                    with suppress(OSError):  # the other side has gone again
                        new = opened.enter_context(listener.accept()[0])
                        new.setblocking(False)
                        selector.register(new, selectors.EVENT_READ)
                elif other in came or not _welcome(other, num_processes, came):
                    # A stranger (a scanner of ports, say), or one that came and has left since.
                    came.pop(other, None)
                    selector.unregister(other)
                    other.close()


def _listen(port: int) -> socket.socket:
    """Opens a socket on all addresses of this machine, as JAX's service will."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
    except OSError as error:
        raise RuntimeError(f"process 0 can't listen on port {port}: {error}; use another port") from error
    listener.setblocking(False)
    return listener


def _welcome(other: socket.socket, num_processes: int, came: dict[socket.socket, int]) -> bool:
    """Reads a greeting, and returns whether a process of this program sent it; notes it in `came` then."""
    with suppress(OSError):
        if greeting := GREETING.fullmatch(other.recv(LONGEST)):
            index, wanted = map(int, greeting.groups())
            is_twice = index in came.values()
            came[other] = index
            if wanted != num_processes:
                raise ValueError(
                    f"process {index} was given num_processes={wanted}, process 0 {num_processes}; give all the same "
                    "number"
                )
            if is_twice:
                raise ValueError(f"two processes came with process_id={index}; give each its own, from 0")
            return 0 < index < num_processes  # `initialize` lets no process of the program come with another one
    return False


def come(host: str, port: int, num_processes: int, process_id: int, timeout: float) -> None:
    """Does the other processes' part: greets process 0, and waits for its word.

    Raises:
      RuntimeError: nobody listens there within the timeout, another program answers, or process 0 gave up.
    """
    deadline, answer, trouble = time.monotonic() + timeout, b"", ""
    greeting = f"jpipe: process {process_id} of {num_processes}\n".encode()
    while not answer:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"process {process_id} found nobody listening at coordinator={host}:{port} within {timeout:g} s "
                f"({trouble}); start process 0 there, or correct the address"
            )
        try:
            answer, trouble = _ask(host, port, greeting, deadline), "it hung up"
        except OSError as error:
            trouble = str(error)
        if not answer:
            time.sleep(0.2)
    if not answer.startswith(ANSWER):
        raise RuntimeError(
            f"process {process_id} got no answer at coordinator={host}:{port}, but {answer[:40]!r}; is it process 0 of "
            "this program, and did it call jpipe.initialize too?"
        )
    word = answer.removeprefix(ANSWER).decode(errors="replace")
    if word != GO:
        raise RuntimeError(f"process 0 gave up: {word}")


def _ask(host: str, port: int, greeting: bytes, deadline: float) -> bytes:
    """Returns process 0's answer to a greeting; empty if it hangs up."""
    left = lambda: max(0.01, deadline - time.monotonic())
    with socket.create_connection((host, port), timeout=min(5.0, left())) as first:
        first.sendall(greeting)
        first.settimeout(left() + 5)  # process 0 may have begun to wait later than this one
        try:
            return first.recv(LONGEST)
        except TimeoutError:
            return b"nothing"
