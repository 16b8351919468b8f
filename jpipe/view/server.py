"""Serves the page to this machine alone, until it is told to stop.

The page needs no server; this one gives it an address that colleagues can open under, with a setting in it.
"""

import errno
import io
import os
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO

from jpipe.view.page import PAGE

HOST = "127.0.0.1"


class _Handler(SimpleHTTPRequestHandler):
    """Answers with the page at `/`, and with nothing elsewhere."""

    def send_head(self) -> io.BytesIO | BinaryIO | None:
        if self.path.partition("?")[0] != "/":
            return self.send_error(HTTPStatus.NOT_FOUND, "the page is at /")
        self.path = f"/{PAGE.name}"
        return super().send_head()

    def guess_type(self, path: object) -> str:
        return "text/html; charset=utf-8"

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")  # another version of jpipe may be behind this port tomorrow
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: a terminal that shows the address should go on showing it."""


class _Server(ThreadingHTTPServer):
    allow_reuse_address = os.name != "nt"  # where it would let two servers have one port


def make_server(port: int) -> ThreadingHTTPServer:
    """A server of the page on this machine's loopback address; `serve_forever` runs it.

    Args:
      port: 0 for any that is free, or 1 to 65535.

    Raises:
      ValueError: there is no such port.
      OSError: the port is in use, or needs rights that this user doesn't have; the message says what to do.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port} does not exist; use 1024 to 65535, or 0 for any that is free")
    try:
        return _Server((HOST, port), partial(_Handler, directory=PAGE.parent))
    except OSError as error:
        reasons = {errno.EADDRINUSE: "is in use", errno.EACCES: "may not be used by this user"}
        reason = reasons.get(error.errno or 0, f"can't be used ({error.strerror})")
        raise OSError(f"port {port} of {HOST} {reason}; choose another with --port, or any with --port 0") from error


def address_of(server: ThreadingHTTPServer) -> str:
    """Where a browser on this machine finds the page."""
    return f"http://{HOST}:{server.server_address[1]}/"
