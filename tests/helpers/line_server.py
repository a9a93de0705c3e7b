"""A server of lines with acknowledgements, in threads of this process, as docs/how-to/live-streams.md describes it."""

from __future__ import annotations

import select
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any


class LineServer(socketserver.ThreadingTCPServer):
    """Keeps lines from number `first` on; `drop(n)` forgets those before n."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int = 0, token: str = "") -> None:
        super().__init__(("127.0.0.1", port), _Connection)
        self.token = token
        self.first, self.lines = 0, list[bytes]()
        self.acks: dict[str, int] = {}
        self.commits: list[int] = []
        self.changed = threading.Condition()
        self.open: list[Any] = []
        self.running = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def send(self, lines: Sequence[bytes]) -> None:
        with self.changed:
            self.lines += lines
            self.changed.notify_all()

    def drop(self, before: int) -> None:
        with self.changed:
            del self.lines[: before - self.first]
            self.first = before

    def disconnect(self) -> None:
        """Close all connections."""
        with self.changed:
            for each in self.open:
                with suppress(OSError):  # the other end closed first
                    each.shutdown(socket.SHUT_RDWR)
            self.open.clear()
            self.changed.notify_all()


class _Connection(socketserver.StreamRequestHandler):
    server: LineServer

    def handle(self) -> None:
        with self.server.changed:
            self.server.running += 1
            self.server.open.append(self.connection)
        is_known = not self.server.token
        for line in self.rfile:
            word, *arguments = line.decode().split()
            if word == "TOKEN":
                is_known = arguments == [self.server.token]
            elif not is_known:
                self.wfile.write(b"ERROR access denied\n")
                return
            elif word == "READ":
                self.write_from(int(arguments[0]))
                return
            else:
                self.wfile.write(f"{self.answer(word, arguments)}\n".encode())

    def finish(self) -> None:
        super().finish()
        with self.server.changed:
            self.server.running -= 1
            self.server.changed.notify_all()
            with suppress(ValueError):  # hung up
                self.server.open.remove(self.connection)

    def answer(self, word: str, arguments: list[str]) -> str:
        server = self.server
        if word == "KEPT":
            return f"{server.first} {server.first + len(server.lines)}"
        if word == "ACKED":
            return str(server.acks.get(arguments[0], "-"))
        server.acks[arguments[1]] = int(arguments[0])
        server.commits.append(int(arguments[0]))
        return "OK"

    def has_gone(self) -> bool:
        """True if the reader has closed its end."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0))

    def write_from(self, number: int) -> None:
        server = self.server
        self.wfile.write(b"OK\n")
        while True:
            with server.changed:
                while number >= server.first + len(server.lines):
                    if self.connection not in server.open or self.has_gone():
                        return
                    server.changed.wait(0.05)
                lines = server.lines[number - server.first :]
            number += len(lines)
            try:
                self.wfile.write(b"".join(line + b"\n" for line in lines))
            except OSError:  # the reader has gone
                return


@contextmanager
def line_server(port: int = 0, token: str = "") -> Iterator[LineServer]:
    """A running server; its connections end with the block."""
    with LineServer(port, token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            server.disconnect()
            thread.join()
            with server.changed:
                server.changed.wait_for(lambda: not server.running, 60)
