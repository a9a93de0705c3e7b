"""HTTP servers in a thread of the test process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Generic, TypeVar

State = TypeVar("State")


class Handler(BaseHTTPRequestHandler):
    """Answers with known lengths over connections that stay open; a HEAD is a GET without its body."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        raise NotImplementedError

    def do_HEAD(self) -> None:
        self.do_GET()

    @property
    def state(self) -> Any:
        """The state that the test gave to `serving`."""
        assert isinstance(self.server, WebServer)
        return self.server.state

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.start(status, {**(headers or {}), "Content-Length": str(len(body))})
        if self.command == "GET":
            self.wfile.write(body)

    def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send an answer up to its body."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class WebServer(ThreadingHTTPServer, Generic[State]):
    """A server on a port of its own; its handlers and the test share `state`."""

    daemon_threads = True

    def __init__(self, handler: type[Handler], state: State) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.state = state
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:  # a client that has disconnected
        pass


@contextmanager
def serving(handler: type[Handler], state: State) -> Iterator[WebServer[State]]:
    with WebServer(handler, state) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
