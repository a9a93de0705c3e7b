"""A web proxy that injects faults: it resets, stalls, truncates and refuses requests to a real server, seeded.

As a script: `python fault_proxy.py HOST:PORT '{"share": 0.05, "latency_s": 0.04}'` prints its own port and serves until
standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

KINDS = ("reset", "503", "503 Retry-After", "slow", "truncated", "short")
"""Faults of a request. "truncated" ends before the announced length, "short" announces half of the length."""

_BLOCK = 1 << 18
_LOOK_AGAIN_S = 0.05
_ROUNDS = 5
"""Rounds of the event loop after which aborted connections are closed."""

_DENIED = b"<Error><Code>ExpiredToken</Code><Message>key FEEDLINETESTKEY</Message></Error>"
_CANNED = {
    "503": b"HTTP/1.1 503 Slow Down\r\nContent-Length: 4\r\n\r\nbusy",
    "503 Retry-After": b"HTTP/1.1 503 Slow Down\r\nRetry-After: %d\r\nContent-Length: 4\r\n\r\nbusy",
    "expired": b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(_DENIED), _DENIED),
}


@dataclass(frozen=True)
class Faults:
    """Faults of the proxy: their share of the requests, and their seed."""

    share: float = 0.0
    latency_s: float = 0.0
    retry_after_s: int = 1
    slow_s: float = 0.3
    seed: int = 0
    kinds: tuple[str, ...] = KINDS
    nbytes_per_s: float = 0.0
    """Bytes per second of all answers together; 0 for no limit."""
    nbytes_per_s_each: float = 0.0
    """Bytes per second of each answer; 0 for no limit."""


class Line:
    """A limit of bytes per second; 0 for none."""

    def __init__(self, nbytes_per_s: float) -> None:
        self._nbytes_per_s, self._free_s = nbytes_per_s, 0.0

    async def passed(self, nbytes: int) -> None:
        """Wait until this number of further bytes has passed."""
        if self._nbytes_per_s:
            now = asyncio.get_running_loop().time()
            self._free_s = max(now, self._free_s) + nbytes / self._nbytes_per_s
            await asyncio.sleep(self._free_s - now)


@dataclass
class FaultProxy:
    """Listens on `port`; `happened` counts faults by kind, and "none"; `forced` are the next faults."""

    upstream: tuple[str, int]
    faults: Faults = field(default_factory=Faults)
    port: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    forced: deque[str] = field(default_factory=deque)
    _ends: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._line = Line(self.faults.nbytes_per_s)

    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, ready: threading.Event) -> None:
        """Serve until `leave` is called; no connection outlives it."""
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=_BLOCK * 4)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._over.wait()
        # If asyncio's server is closed while it accepts, it loses the sockets that it has just accepted.
        for listener in server.sockets:
            self._loop.remove_reader(listener.fileno())
        # A task canceled while it connects would leave its socket open. So tasks end by themselves, after their
        # connections.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for end in self._ends:
                end.transport.abort()
            await asyncio.wait(tasks, timeout=_LOOK_AGAIN_S)
        server.close()
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)

    def leave(self) -> None:
        """End `serve`; from any thread."""
        self._loop.call_soon_threadsafe(self._over.set)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one client, one after the other, over one connection of its own to the server."""
        self._ends.add(writer)
        try:
            here, there = await asyncio.open_connection(*self.upstream, limit=_BLOCK * 4)
        except ConnectionError:
            self._end(writer)
            return
        self._ends.add(there)
        try:
            while await self._request(reader, writer, here, there):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # one of the two is gone
        finally:
            self._end(writer, there)

    def _end(self, *ends: asyncio.StreamWriter) -> None:
        for end in ends:
            end.transport.abort()
            self._ends.discard(end)

    async def _request(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        here: asyncio.StreamReader,
        there: asyncio.StreamWriter,
    ) -> bool:
        """True if the connection stays open."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_length(head) or 0)
        fault = self._dice()
        self.happened[fault] += 1
        await asyncio.sleep(self.faults.latency_s)
        if fault == "reset":
            _reset(writer)
            return False
        if fault in _CANNED:
            canned = _CANNED[fault]
            writer.write(canned % self.faults.retry_after_s if b"%d" in canned else canned)
            await writer.drain()
            return True
        there.write(head + body)
        answer = await here.readuntil(b"\r\n\r\n")
        return await self._answer(head, answer, fault, here, writer)

    async def _answer(
        self, head: bytes, answer: bytes, fault: str, here: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        length = 0 if head.startswith(b"HEAD") or answer.split()[1] in (b"204", b"304") else _length(answer)
        if length is None:
            return await self._chunked(answer, here, writer)
        if fault == "short" and length:
            answer = answer.replace(b"ength: %d" % length, b"ength: %d" % (length // 2))
        writer.write(answer)
        own = Line(self.faults.nbytes_per_s_each)
        sent, end = 0, length // 2 if fault in ("truncated", "short") else length
        while sent < end:
            if fault == "slow" and sent >= length // 2:
                fault = "none"
                await asyncio.sleep(self.faults.slow_s)
            part = await here.read(min(_BLOCK, end - sent))
            if not part:
                return False
            await self._line.passed(len(part))
            await own.passed(len(part))
            writer.write(part)
            await writer.drain()
            sent += len(part)
        return sent == length

    async def _chunked(self, answer: bytes, here: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer)
        while True:
            line = await here.readuntil(b"\r\n")
            nbytes = int(line, 16)
            writer.write(line + await here.readexactly(nbytes + 2))
            await writer.drain()
            if not nbytes:
                return True

    def _dice(self) -> str:
        if self.forced:
            return self.forced.popleft()
        dice = random.Random(f"{self.faults.seed} {self.happened.total()}")
        return dice.choice(self.faults.kinds) if dice.random() < self.faults.share else "none"


def _length(head: bytes) -> int | None:
    """The announced length of a body; None for one in chunks."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
        if name.lower() == b"transfer-encoding":
            return None
    return 0


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class AsyncServer(Protocol):
    """A server whose `serve` sets `ready` once it listens, and returns after `leave`."""

    async def serve(self, ready: threading.Event) -> None: ...

    def leave(self) -> None: ...


@contextmanager
def serving(server: AsyncServer) -> Iterator[None]:
    """Run the server in a thread of this process."""
    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(ready)), name=type(server).__name__)
    thread.start()
    assert ready.wait(60)
    try:
        yield
    finally:
        server.leave()
        thread.join()


@contextmanager
def fault_proxy(endpoint: str, faults: Faults | None = None) -> Iterator[FaultProxy]:
    """A proxy before the server at `http://HOST:PORT`, in a thread of this process."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    proxy = FaultProxy((host, int(port)), faults or Faults())
    with serving(proxy):
        yield proxy


def main() -> None:
    settings = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    with fault_proxy(sys.argv[1], Faults(**settings)) as proxy:
        print(proxy.port, flush=True)
        with suppress(KeyboardInterrupt):
            sys.stdin.read()


if __name__ == "__main__":
    main()
