"""A broker of Kafka that asks for SASL and refuses every password: librdkafka's mock cluster has no SASL."""

from __future__ import annotations

import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_HANDSHAKE, _VERSIONS, _AUTHENTICATE = 17, 18, 36
_UNSUPPORTED_VERSION, _REFUSED = 35, 58


class _Connection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while len(head := self.rfile.read(4)) == 4:
            request = self.rfile.read(struct.unpack(">i", head)[0])
            kind, version, number = struct.unpack(">hhi", request[:8])
            answer = struct.pack(">i", number) + _answer(kind, version)
            self.wfile.write(struct.pack(">i", len(answer)) + answer)


def _answer(kind: int, version: int) -> bytes:
    if kind == _VERSIONS:
        known = [(3, 0, 4), (_HANDSHAKE, 0, 1), (_VERSIONS, 0, 0), (_AUTHENTICATE, 0, 0)]
        error = _UNSUPPORTED_VERSION if version else 0
        return struct.pack(">hi", error, len(known)) + b"".join(struct.pack(">hhh", *each) for each in known)
    if kind == _HANDSHAKE:
        return struct.pack(">hih", 0, 1, 5) + b"PLAIN"
    said = b"invalid user or password"
    return struct.pack(">hh", _REFUSED, len(said)) + said + struct.pack(">i", 0)


@contextmanager
def sasl_broker() -> Iterator[str]:
    """Its address."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Connection) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
