"""`jpipe.initialize`: wrong arguments, a taken port; what joined processes do is in `test_processes.py`."""

import math
import socket

import pytest

import jpipe


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        (("localhost:1234",), ValueError, "num_processes is missing; pass coordinator, num_processes and process_id"),
        (("localhost", 2, 0), ValueError, "coordinator='localhost' is no address; pass 'host:port'"),
        (("localhost:99999", 2, 0), ValueError, "coordinator='localhost:99999' is no address"),
        (("localhost:1234", 2, 2), ValueError, "process_id=2 is not among num_processes=2"),
        (("localhost:1234", "2", 0), TypeError, "num_processes='2' is no integer"),
        (("localhost:1234", 2, -1), ValueError, "process_id=-1 is less than 0; count processes from 0"),
        (("localhost:1234", 0, 0), ValueError, "num_processes=0 is less than 1"),
    ],
)
def test_wrong_arguments_of_initialize(arguments, kind, message):
    with pytest.raises(kind, match=message):
        jpipe.initialize(*arguments)


@pytest.mark.parametrize("name", ["timeout", "heartbeat_timeout"])
@pytest.mark.parametrize(
    "seconds, kind", [("60", TypeError), (None, TypeError), (0, ValueError), (math.inf, ValueError)]
)
def test_seconds_that_are_none(name, seconds, kind):
    with pytest.raises(kind, match=rf"^{name}={seconds!r} .*; give seconds, such as 60"):
        jpipe.initialize("localhost:1234", 2, 0, **{name: seconds})


def test_a_taken_port_is_an_error_even_for_one_process_alone():
    """JAX 0.12 ends with a segmentation fault."""
    with socket.create_server(("", 0)) as taken, pytest.raises(RuntimeError, match="process 0 can't listen on port"):
        jpipe.initialize(f"localhost:{taken.getsockname()[1]}", 1, 0)
