"""Lines that are too slow for their requests: reads end, and received data is not sent again."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from fault_proxy import Line, serving
from hypothesis import given
from hypothesis import strategies as st
from undisturbed import ATTEMPTS

from feedline import stores
from feedline.core.threads import CancelScope, WaitCancelledError
from feedline.errors import TransientError
from feedline.stores.base import ByteRange
from feedline.stores.concurrency import ConcurrencyLimit
from feedline.stores.partial import PartialRange

CONTENT = random.Random(5).randbytes(12 << 20)
_BLOCK = 8 << 10
KEYS = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}


@dataclass
class SlowServer:
    """One object in `/b/`, sent over a line that all answers share; `breaks_after` bytes each connection is reset."""

    nbytes_per_s: float = 0.0
    breaks_after: int | None = None
    is_versioned: bool = True
    sent: int = 0
    most_at_once: int = 0
    port: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint": f"http://127.0.0.1:{self.port}", **KEYS}

    async def serve(self, ready: threading.Event) -> None:
        self._loop, self._over, self._line = asyncio.get_running_loop(), asyncio.Event(), Line(self.nbytes_per_s)
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._over.wait()
        server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def leave(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)
        self._open.add(writer)
        self.most_at_once = max(self.most_at_once, len(self._open))
        try:
            while True:
                await self._answer(writer, await reader.readuntil(b"\r\n\r\n"))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has disconnected
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _answer(self, writer: asyncio.StreamWriter, head: bytes) -> None:
        wanted = re.search(rb"(?i)\r\nrange: bytes=(\d+)-(\d+)", head)
        start, stop = (int(wanted[1]), min(int(wanted[2]) + 1, len(CONTENT))) if wanted else (0, len(CONTENT))
        tag = '\r\nETag: "1"' if self.is_versioned else ""
        writer.write(
            f"HTTP/1.1 206 Partial Content\r\nContent-Length: {stop - start}{tag}\r\n"
            f"Content-Range: bytes {start}-{stop - 1}/{len(CONTENT)}\r\n\r\n".encode()
        )
        if head.startswith(b"HEAD"):
            return
        for number, at in enumerate(range(start, stop, _BLOCK)):
            if self.breaks_after is not None and number * _BLOCK >= self.breaks_after:
                raise ConnectionError
            block = CONTENT[at : min(at + _BLOCK, stop)]
            await self._line.passed(len(block))
            if writer.transport.is_closing():
                raise ConnectionError
            writer.write(block)
            await writer.drain()
            self.sent += len(block)


def test_a_read_over_a_narrow_line_ends_and_little_is_sent_twice() -> None:
    """A busy machine has not read all that has come when a request is given up, but not in each of five reads."""
    assert any(sent_over_a_narrow_line() <= 1.2 * len(CONTENT) for _ in range(ATTEMPTS))


def sent_over_a_narrow_line() -> int:
    """64 requests that share 2 MB/s get a block every quarter of a second each, and wait a tenth for it."""
    retry = stores.Retry(idle_timeout_s=0.1, first_wait_s=0.01, max_wait_s=0.1, deadline_s=60)
    requests = stores.Requests(max_nbytes=256 << 10)
    server = SlowServer(nbytes_per_s=2e6)
    with serving(server):
        store = stores.open_store("s3://b", options=server.options, retry=retry, requests=requests)
        before = stores.statistics()
        assert store.read("big", 0, len(CONTENT)) == CONTENT
    assert stores.statistics().retries > before.retries, "the line was wide enough for all at once"
    return server.sent


def test_a_line_that_breaks_again_and_again_sends_each_byte_about_once() -> None:
    retry = stores.Retry(first_wait_s=0.001, max_wait_s=0.002, attempts=6, hedge_quantile=None)
    server = SlowServer(breaks_after=600_000)
    with serving(server):
        store = stores.open_store("s3://b", options=server.options, retry=retry)
        assert store.read("big", 1, len(CONTENT)) == CONTENT[1:]
    assert server.sent <= 1.2 * len(CONTENT)


def test_parts_of_an_object_without_a_version_are_not_joined() -> None:
    retry = stores.Retry(first_wait_s=0.001, max_wait_s=0.002, attempts=3, hedge_quantile=None)
    server = SlowServer(breaks_after=600_000, is_versioned=False)
    with serving(server):
        store = stores.open_store("s3://b", options=server.options, retry=retry)
        with pytest.raises(stores.StoreUnavailableError, match="3 attempts failed"):
            store.read("big", 0, 4 << 20)


def test_a_silent_server_is_given_up_after_the_idle_time() -> None:
    retry = stores.Retry(idle_timeout_s=0.2, attempts=2, first_wait_s=0, max_wait_s=0)
    server = SlowServer(nbytes_per_s=0.001)
    with serving(server):
        store = stores.open_store("s3://b", options=server.options, retry=retry)
        with pytest.raises(stores.StoreUnavailableError, match=r"2 attempts failed .*no answer in time"):
            store.read("big", 0, 100_000)


SIZES = st.lists(st.integers(1, 40), max_size=20)


@given(SIZES, st.data())
def test_a_range_is_complete_however_often_the_line_broke(sizes: list[int], data: st.DataObject) -> None:
    content = random.Random(1).randbytes(sum(sizes))
    part = PartialRange(ByteRange(100, 100 + len(content)))
    for size in sizes:
        begun = part.remaining
        part.accept("v1", 1000, begun)
        part.add(memoryview(content[begun.start - 100 :][:size]))
        if data.draw(st.booleans()):
            assert part.remaining.start == 100 + part.nbytes
    assert part.data() == content
    assert part.remaining.nbytes == 0


def test_parts_of_two_versions_are_not_joined() -> None:
    part = PartialRange(ByteRange(0, 10))
    part.accept("v1", 10, part.remaining)
    part.add(memoryview(b"01234"))
    with pytest.raises(TransientError, match="changed while"):
        part.accept("v2", 10, part.remaining)
    assert part.remaining == ByteRange(0, 10)
    part.accept("v2", 10, part.remaining)


def fail() -> None:
    raise TransientError("no answer in time")


def failing_slot(limit: ConcurrencyLimit) -> None:
    with suppress(TransientError):
        limit.run(fail)


def good_slot(limit: ConcurrencyLimit) -> None:
    limit.run(bool)


def test_requests_that_fail_together_halve_the_limit_once() -> None:
    limit, all_in = ConcurrencyLimit(8), threading.Barrier(8)

    def fail_together() -> None:
        all_in.wait(60)
        fail()

    def ask() -> None:
        with suppress(TransientError):
            limit.run(fail_together)

    run_all([ask] * 8)
    assert limit.now == 4, "all eight were sent before the limit was lowered"
    for _ in range(2):
        failing_slot(limit)
    assert limit.now == 2
    for _ in range(100):
        good_slot(limit)
    assert limit.now == 8


def run_all(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_single_failures_lower_nothing() -> None:
    limit = ConcurrencyLimit(8)
    for _ in range(50):
        failing_slot(limit)
        for _ in range(8):
            good_slot(limit)
    assert limit.now == 8


def test_a_limit_never_reaches_zero_and_holds() -> None:
    limit = ConcurrencyLimit(4)
    for _ in range(100):
        failing_slot(limit)
    assert limit.now == 1
    inside, most = 0, 0
    lock = threading.Lock()

    def request() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        with lock:
            inside -= 1
        fail()

    def work() -> None:
        for _ in range(3):
            with suppress(TransientError):
                limit.run(request)

    run_all([work] * 8)
    assert most == 1


def test_a_wait_for_a_slot_can_be_canceled_and_passes_the_slot_on() -> None:
    limit = ConcurrencyLimit(2)
    for _ in range(10):
        failing_slot(limit)
    scope, ended = CancelScope(), list[str]()

    def wait() -> None:
        with scope.enter():
            try:
                limit.run(lambda: ended.append("entered"))
            except WaitCancelledError:
                ended.append("canceled")

    def hold() -> None:
        waiter = threading.Thread(target=wait)
        waiter.start()
        while not limit.waiting:
            waiter.join(0.01)
        scope.cancel()
        waiter.join(60)

    limit.run(hold)
    good_slot(limit)
    assert ended == ["canceled"]
