"""`jpipe.initialize`: wrong arguments, a taken port; what joined processes do is in `test_processes.py`."""

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
        (("localhost:1234", "2", 0), TypeError, "num_processes='2' is not an integer"),
    ],
)
def test_wrong_arguments_of_initialize(arguments, kind, message):
    with pytest.raises(kind, match=message):
        jpipe.initialize(*arguments)


def test_a_taken_port_is_an_error_even_for_one_process_alone():
    """JAX 0.12 ends with a segmentation fault."""
    with socket.create_server(("", 0)) as taken, pytest.raises(RuntimeError, match="process 0 can't listen on port"):
        jpipe.initialize(f"localhost:{taken.getsockname()[1]}", 1, 0)
