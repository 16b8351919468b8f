"""The page's server: what it gives, to whom."""

import contextlib
import http.client
import threading

import pytest

from jpipe.view.page import PAGE
from jpipe.view.server import HOST, address_of, make_server


@contextlib.contextmanager
def serving():
    with make_server(0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("method", "path", "status", "length"),
    [
        ("GET", "/", 200, PAGE.stat().st_size),
        ("GET", "/?from=mail", 200, PAGE.stat().st_size),
        ("HEAD", "/", 200, 0),
        ("GET", "/page.html/../server.py", 404, None),
        ("GET", "/etc/passwd", 404, None),
        ("POST", "/", 501, None),
    ],
)
def test_the_page_alone_is_served(method, path, status, length):
    with serving() as server, contextlib.closing(http.client.HTTPConnection(HOST, server.server_address[1])) as client:
        client.request(method, path)
        answer = client.getresponse()
        body = answer.read()
        assert answer.status == status
        assert length is None or len(body) == length
        if status == 200:
            assert answer.getheader("Content-Type") == "text/html; charset=utf-8"


def test_it_listens_on_this_machine_alone():
    with make_server(0) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert address_of(server) == f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_does_not_exist_is_named(port):
    with pytest.raises(ValueError, match=f"port {port} does not exist; use 1024 to 65535, or 0"):
        make_server(port)
