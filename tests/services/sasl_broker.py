"""A broker of Kafka that asks for SASL in front of librdkafka's mock cluster, which has none.

Clients make the real exchange of SASL/PLAIN with it. All else goes to the mock cluster and back.
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

_HANDSHAKE, _VERSIONS, _AUTHENTICATE = 17, 18, 36
_UNSUPPORTED_VERSION, _REFUSED = 35, 58


class _Broker(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, behind: tuple[str, int], password: str) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.behind, self.password = behind, password
        self.clients: set[socket.socket] = set()

    def change(self, password: str) -> None:
        """Take another password from now on, and close all connections."""
        self.password = password
        for client in list(self.clients):
            with suppress(OSError):  # it has gone by itself
                client.shutdown(socket.SHUT_RDWR)

    def readdressed(self, answer: bytes) -> bytes:
        """An answer in which this broker stands for the one behind it."""
        host, port = self.behind
        mine = struct.pack(">i", self.server_address[1])
        return answer.replace(host.encode() + struct.pack(">i", port), host.encode() + mine)


class _Connection(socketserver.StreamRequestHandler):
    server: _Broker

    def handle(self) -> None:
        self.server.clients.add(self.connection)
        with (
            suppress(ConnectionError),
            socket.create_connection(self.server.behind) as behind,
            behind.makefile("rwb") as further,
        ):
            while request := _read(self.rfile):
                _write(self.wfile, self._answer(request, further))

    def finish(self) -> None:
        self.server.clients.discard(self.connection)
        with suppress(ConnectionError):
            super().finish()

    def _answer(self, request: bytes, further: Any) -> bytes:
        kind, version, number, client = struct.unpack(">hhih", request[:10])
        head = struct.pack(">i", number)
        if kind == _VERSIONS:
            _write(further, struct.pack(">hhih", _VERSIONS, 0, number, -1))
            return head + _with_sasl(_read(further)[6:], _UNSUPPORTED_VERSION if version else 0)
        if kind == _HANDSHAKE:
            return head + struct.pack(">hih", 0, 1, 5) + b"PLAIN"
        if kind == _AUTHENTICATE:
            token = request[10 + max(client, 0) + 4 :]
            if token.rpartition(b"\0")[2] == self.server.password.encode():
                return head + struct.pack(">hhi", 0, -1, 0)
            said = b"invalid user or password"
            return head + struct.pack(">hh", _REFUSED, len(said)) + said + struct.pack(">i", 0)
        _write(further, request)
        return self.server.readdressed(_read(further))


def _with_sasl(known: bytes, error: int) -> bytes:
    """A list of the requests that a broker answers, with those of SASL."""
    (count,) = struct.unpack(">i", known[:4])
    more = struct.pack(">hhhhhh", _HANDSHAKE, 0, 1, _AUTHENTICATE, 0, 0)
    return struct.pack(">hi", error, count + 2) + known[4 : 4 + 6 * count] + more


def _read(stream: BinaryIO) -> bytes:
    """One frame; nothing at the end."""
    head = stream.read(4)
    return stream.read(struct.unpack(">i", head)[0]) if len(head) == 4 else b""


def _write(stream: BinaryIO, frame: bytes) -> None:
    stream.write(struct.pack(">i", len(frame)) + frame)
    stream.flush()


@contextmanager
def sasl_broker(servers: str, password: str) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Its address, in front of one broker, and a function that changes the password."""
    host, _, port = servers.rpartition(":")
    with _Broker((host, int(port)), password) as broker:
        thread = threading.Thread(target=broker.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{broker.server_address[1]}", broker.change
        finally:
            broker.shutdown()
            broker.change(password)
            thread.join()
