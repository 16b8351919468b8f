"""`jpipe.initialize`: wrong arguments, a taken port; what joined processes do is in `test_processes.py`."""

import contextlib
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jpipe
from jpipe.processes.joining import come, gather

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def met(*calls) -> list[str]:
    """What each call raised, all at once; empty of one that returned."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures: list[Future] = [threads.submit(*call) for call in calls]
    errors = [future.exception() for future in futures]
    return ["" if error is None else f"{type(error).__name__}: {error}" for error in errors]


def knock(port: int, data: bytes) -> socket.socket:
    """A stranger's connection, once somebody listens."""
    deadline = time.monotonic() + 10
    while True:
        try:
            stranger = socket.create_connection((HOST, port), timeout=5)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with contextlib.suppress(OSError):
        stranger.sendall(data)
    return stranger


def test_who_is_missing_is_named_to_all():
    port = free_port()
    message = f"processes [2] of 3 did not come to port {port} within 1 s; start them with the same coordinator, or"
    first, second = met((gather, port, 3, 1), (come, HOST, port, 3, 1, 1))
    assert first.startswith(f"RuntimeError: {message}")
    assert second.startswith(f"RuntimeError: process 0 gave up: {message}")


def test_two_with_one_index_are_refused():
    port = free_port()
    first, *others = met((gather, port, 3, 10), *[(come, HOST, port, 3, 1, 10)] * 2)
    assert first == "ValueError: two processes came with process_id=1; give each its own, from 0"
    assert others == [f"RuntimeError: process 0 gave up: {first.partition(': ')[2]}"] * 2


@pytest.mark.parametrize("index", [1, 4])
def test_another_number_of_processes_is_told(index):
    port = free_port()
    first, other = met((gather, port, 2, 10), (come, HOST, port, 5, index, 10))
    assert first == (f"ValueError: process {index} has num_processes=5, not 2; give all the same")
    assert other == f"RuntimeError: process 0 gave up: {first.partition(': ')[2]}"


def test_a_process_that_left_may_come_again():
    port = free_port()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(gather, port, 3, 10)
        knock(port, b"jpipe: process 1 of 3\n").close()
        time.sleep(0.2)  # until it is noticed
        assert met((come, HOST, port, 3, 1, 10), (come, HOST, port, 3, 2, 10)) == ["", ""]
        assert first.result() is None


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for call in (lambda: gather(port, 1, 1), lambda: jpipe.initialize(f"localhost:{port}", 1, 0)):
            with pytest.raises(RuntimeError, match=rf"process 0 can't listen on port {port}: .*; use another port"):
                call()


def test_nobody_listens_and_somebody_else_does():
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"process 1 found nobody listening at coordinator=127.0.0.1:\d+ within 1 s"):
        come(HOST, free_port(), 2, 1, 1)
    assert time.monotonic() - begin < 5
    with socket.create_server((HOST, 0)) as other:

        def answer():
            with other.accept()[0] as caller:
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RuntimeError, match=r"coordinator=.* answers b'HTTP/1.1 400 .*; pass the address of proc"):
            come(HOST, other.getsockname()[1], 2, 1, 10)
        thread.join()


GREETINGS = st.builds("jpipe: process {} of {}\n".format, st.integers(-3, 10**12), st.just(2)).map(str.encode)
OWN = b"jpipe: process 1 of 2\n"


@settings(max_examples=60)
@given(st.lists(st.one_of(st.binary(max_size=2000), GREETINGS).filter(lambda data: data != OWN), max_size=4))
@example([b'{"jpipe": [99, 2]}\n'])
@example([b'{"jpipe": [[1], 2]}\n', b"", b"jpipe: process 0 of 2\n", b"jpipe: process 2 of 2\n", OWN[:-1]])
def test_whatever_strangers_say_the_processes_meet(said):
    """Strangers speak first, some say nothing and stay; none counts, none keeps process 1 from coming."""
    port, strangers = free_port(), []
    with ThreadPoolExecutor() as threads:
        first = threads.submit(gather, port, 2, 10)
        try:
            strangers += [knock(port, data) for data in said]
            assert met((come, HOST, port, 2, 1, 10)) == [""]
            assert first.result() is None
        finally:
            for stranger in strangers:
                stranger.close()


# --- processes meet ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("localhost:1234",), "num_processes is missing; pass coordinator, num_processes and process_id"),
        (("localhost", 2, 0), "coordinator='localhost' is no address; pass 'host:port'"),
        (("localhost:99999", 2, 0), "coordinator='localhost:99999' is no address"),
        (("localhost:1234", 2, 2), "process_id=2 is not among num_processes=2"),
    ],
)
def test_wrong_arguments_of_initialize(arguments, message):
    with pytest.raises(ValueError, match=message):
        jpipe.initialize(*arguments)
