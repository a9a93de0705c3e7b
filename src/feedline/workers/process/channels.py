"""Messages between processes: each arrives whole or not at all, and may carry descriptors.

Requests on their way to the workers: whoever is idle takes the next one, without a dispatcher in between.

What each worker is doing at this moment: a few numbers in memory that all processes of a pool share.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic_ns
from typing import NamedTuple, Self

MESSAGE_NBYTES = 1 << 17
"""No message is longer: transport keeps results, and `spill` everything else, far below it."""


SPILL_NBYTES = 1 << 15
"""What is longer travels in a memfd beside its message, so that one message never fills a socket's buffer."""


_ANCILLARY_NBYTES = socket.CMSG_SPACE(253 * 4)  # the most descriptors that the kernel puts into one message


class ReceiveBuffer:
    """A reusable buffer to receive into: a fresh one per message would cost more than the message itself."""

    __slots__ = ("_buffer", "_view")

    def __init__(self) -> None:
        self._buffer = bytearray(MESSAGE_NBYTES)
        self._view = memoryview(self._buffer)

    def receive(self, channel: socket.socket, flags: int = 0) -> tuple[bytes, Sequence[int]]:
        """The next message and its descriptors; b"" when the other side is gone. Raises BlockingIOError as `recv`."""
        try:
            nbytes, ancillary, _, _ = channel.recvmsg_into(
                [self._buffer], _ANCILLARY_NBYTES, flags | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # the other side left with messages of ours unread
            return b"", ()
        if not ancillary:
            return bytes(self._view[:nbytes]), ()
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        return bytes(self._view[:nbytes]), fds


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends of a socket that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, parts: Iterable[bytes], fds: Sequence[int] = (), flags: int = 0) -> None:
    """One message of these parts, joined; the caller keeps, and closes, its own copies of the descriptors."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg(parts, ancillary, flags | socket.MSG_NOSIGNAL)


def hang_up(channel: socket.socket) -> None:
    """Close for both sides at once, also where another process has inherited a copy of this end."""
    with suppress(OSError):  # the other side was first
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def spill(data: bytes) -> int:
    """A descriptor from which `slurp` reads `data`; it is the caller's."""
    fd = os.memfd_create("feedline-message", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def slurp(fd: int) -> bytes:
    """All that the file behind a descriptor holds; closes it."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


_HEADER = struct.Struct("<q")


LEAVE = 0
"""The task that asks the worker which takes it to leave."""


class QueuedRequest(NamedTuple):
    """A request as a worker takes it: the number of its task, and the pickled request."""

    task: int
    payload: bytes


class RequestQueue:
    """One queue of requests, read by one or more workers through `fd`. It outlives them: unread requests stay.

    `put` never blocks: what the socket does not take waits here for the next `flush`. That is enough, because a full
    socket means workers that have yet to answer, and each answer is an occasion to flush.
    """

    def __init__(self) -> None:
        self._mine, self._theirs = pair()
        self._mine.setblocking(False)
        self._backlog: deque[QueuedRequest] = deque()
        self._post: ReceiveBuffer | None = None

    @property
    def fd(self) -> int:
        """The workers' end."""
        return self._theirs.fileno()

    def put(self, task: int, payload: bytes) -> None:
        """Hand in a request."""
        self._backlog.append(QueuedRequest(task, payload))
        if len(self._backlog) == 1:
            self.flush()

    def leave(self) -> None:
        """Ask one worker to leave; which one is decided by who is idle first."""
        self.put(LEAVE, b"")

    def flush(self) -> None:
        """Send as much as the socket takes."""
        backlog = self._backlog
        while backlog:
            try:
                self._send(backlog[0])
            except BlockingIOError:
                return
            backlog.popleft()

    def withdraw(self) -> None:
        """Take out again every request that no worker has taken yet; wishes to leave stay."""
        if self._post is None:
            self._post = ReceiveBuffer()
        leaving = sum(order.task == LEAVE for order in self._backlog)
        self._backlog.clear()
        while True:
            try:
                message, fds = self._post.receive(self._theirs, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            close_all(fds)
            leaving += _task(message) == LEAVE
        for _ in range(leaving):
            self.leave()

    def finish(self) -> None:
        """Let the workers see the end after what they have yet to read."""
        hang_up(self._mine)
        self._theirs.close()

    def close(self) -> None:
        """Drop what is unread, and let every worker see the end."""
        self.withdraw()
        self.finish()

    def _send(self, order: QueuedRequest) -> None:
        if len(order.payload) <= SPILL_NBYTES:
            self._mine.send(_HEADER.pack(order.task) + order.payload)
            return
        fd = spill(order.payload)
        try:
            send(self._mine, [_HEADER.pack(order.task)], [fd])
        finally:
            close_all([fd])


class RequestReader:
    """A worker's end of an outlet."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._post = ReceiveBuffer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def take(self) -> QueuedRequest | None:
        """Wait for a request; None when the pool has closed."""
        message, fds = self._post.receive(self._socket)
        if not message:
            return None
        return QueuedRequest(_task(message), slurp(fds[0]) if fds else message[_HEADER.size :])


def _task(message: bytes) -> int:
    (task,) = _HEADER.unpack_from(message)
    return int(task)


MOST_WORKERS = 1024


_CELLS = 4


_NBYTES = 8 * _CELLS * MOST_WORKERS


_TASK, _ROW, _SINCE, _READY = range(_CELLS)


_IDLE = 0


class StatusTable:
    """One line of 64-bit cells per worker, written by the worker and read by the training process; no locks.

    A cell is written in one piece, and what is read may be a moment old. Whatever is concluded from it must be right
    for an older picture too: a request taken for lost is built twice, and nobody notices.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _memory() if fd is None else fd
        self._memory = mmap.mmap(self.fd, _NBYTES)
        self._cells = memoryview(self._memory).cast("q")

    def task(self, worker: int) -> int | None:
        """The task that the worker has in hand."""
        return self._cells[worker * _CELLS + _TASK] or None

    def row(self, worker: int) -> int:
        """The row of its request that it fetches; -1 before the first, and where rows are fetched many at once."""
        return self._cells[worker * _CELLS + _ROW]

    def since_ns(self, worker: int) -> int:
        """When it took its task, on CLOCK_MONOTONIC."""
        return self._cells[worker * _CELLS + _SINCE]

    def ready(self, worker: int) -> bool:
        """Whether it answers the signal that asks for its stack."""
        return bool(self._cells[worker * _CELLS + _READY])

    def clear(self, worker: int) -> None:
        """Wipe a line before another process gets it."""
        first = worker * _CELLS
        self._cells[first : first + _CELLS] = memoryview(bytes(8 * _CELLS)).cast("q")

    def close(self) -> None:
        """Unmap."""
        self._cells.release()
        self._memory.close()
        os.close(self.fd)


class StatusRow:
    """A worker's own line of the board."""

    __slots__ = ("_cells", "_ready", "_row", "_since", "_task")

    def __init__(self, board: StatusTable, worker: int) -> None:
        self._cells = board._cells
        first = worker * _CELLS
        self._task, self._row, self._since, self._ready = (first + cell for cell in range(_CELLS))

    @property
    def progress(self) -> Callable[[int], None]:
        """`progress(row)` notes the row being fetched; 40 ns, so that it may be called for every sample."""
        return partial(self._cells.__setitem__, self._row)

    def be_ready(self) -> None:
        """Signals may come."""
        self._cells[self._ready] = 1

    def begin(self, task: int) -> None:
        """A task is in hand."""
        cells = self._cells
        cells[self._row] = -1
        cells[self._since] = monotonic_ns()
        cells[self._task] = task

    def end(self) -> None:
        """Its answer has been sent."""
        self._cells[self._task] = _IDLE


def _memory() -> int:
    fd = os.memfd_create("feedline-board", os.MFD_CLOEXEC)
    os.truncate(fd, _NBYTES)
    return fd
