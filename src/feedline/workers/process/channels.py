"""Channels of a pool: message sockets, request queue, and status table."""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic_ns
from typing import Any, NamedTuple, Self

MESSAGE_NBYTES = 1 << 17
"""Longest message in bytes. Transport bounds results, and `spill` bounds everything else, far below it."""


SPILL_NBYTES = 1 << 15
"""Longer payloads travel in a memfd attached to their message: one message must never fill a socket's buffer."""


_ANCILLARY_NBYTES = socket.CMSG_SPACE(253 * 4)  # the most descriptors that the kernel puts into one message


class ReceiveBuffer:
    """Reusable receive buffer; allocating one per message would cost more than receiving."""

    __slots__ = ("_buffer", "_view")

    def __init__(self) -> None:
        self._buffer = bytearray(MESSAGE_NBYTES)
        self._view = memoryview(self._buffer)

    def receive(self, channel: socket.socket, flags: int = 0) -> tuple[bytes, Sequence[int]]:
        """Receive a message and its descriptors; b"" at the end.

        The caller owns the descriptors. Raises BlockingIOError as `recv` does.
        """
        try:
            # CLOEXEC by the call itself: another thread may start a program between receiving a descriptor and marking
            # it.
            nbytes, ancillary, _, _ = channel.recvmsg_into(
                [self._buffer], _ANCILLARY_NBYTES, flags | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # the other side closed with unread messages
            return b"", ()
        if not ancillary:
            return bytes(self._view[:nbytes]), ()
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        return bytes(self._view[:nbytes]), fds


# A snapshot inherits every end that this process holds, also those of other pools, and must close its copies.
_pairs: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends of a socket that preserves message boundaries."""
    # Keeps the borders of messages, as datagrams do, and reports the end of the other side, as streams do.
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _pairs.update(ends)
    return ends


def close_inherited(kept: socket.socket) -> None:
    """Close this forked process's copies of every `pair` end but one.

    The other side of a socket sees its end only when the last copy is closed.
    """
    for end in _pairs:
        if end is not kept:
            end.close()


def send(channel: socket.socket, parts: Iterable[bytes], fds: Sequence[int] = (), flags: int = 0) -> None:
    """Send the joined parts as one message; the caller still owns `fds`."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg(parts, ancillary, flags | socket.MSG_NOSIGNAL)


def disconnect(channel: socket.socket) -> None:
    """Close a socket for both sides at once.

    `shutdown` reaches the other side even if another process has inherited a copy of this end.
    """
    with suppress(OSError):  # the other side has already closed
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()


class Descriptor:
    """File descriptor, closed with its object at the latest.

    An interrupt may prevent its regular end.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        """Close it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def close_all(fds: Iterable[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


def spill(data: bytes) -> int:
    """Write `data` to a memfd; the caller owns the descriptor."""
    fd = os.memfd_create("feedline-message", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def read_all(fd: int) -> bytes:
    """Read a file from its beginning and close the descriptor."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


_HEADER = struct.Struct("<q")


STOP = 0
"""Task number that asks the worker that takes it to stop."""


class QueuedRequest(NamedTuple):
    """Task number and pickled request, as a worker reads them."""

    task: int
    payload: bytes


class RequestQueue:
    """Queue of requests that one or more workers read through `fd`.

    Idle workers read from the socket directly, with no dispatcher in between. The queue outlives its workers: unread
    requests stay. `put` never blocks; requests that the socket does not take wait for the next `flush`. That suffices:
    a full socket means that workers have yet to answer, and the pool flushes after each answer.
    """

    def __init__(self) -> None:
        self._mine, self._theirs = pair()
        self._mine.setblocking(False)
        self._backlog: deque[QueuedRequest] = deque()
        self._receive_buffer: ReceiveBuffer | None = None

    @property
    def fd(self) -> int:
        """Descriptor of the end that workers read."""
        return self._theirs.fileno()

    def put(self, task: int, payload: bytes) -> None:
        """Queue a request; does not block."""
        self._backlog.append(QueuedRequest(task, payload))
        # Behind others it has to wait: they are here because the socket was full.
        if len(self._backlog) == 1:
            self.flush()

    def stop_one(self) -> None:
        """Ask one worker to stop: the first one that is idle."""
        self.put(STOP, b"")

    def flush(self) -> None:
        """Send as many waiting requests as the socket takes."""
        backlog = self._backlog
        while backlog:
            try:
                self._send(backlog[0])
            except BlockingIOError:
                return
            backlog.popleft()

    def withdraw(self) -> None:
        """Remove every request that no worker has taken; keep stop requests."""
        if self._receive_buffer is None:
            self._receive_buffer = ReceiveBuffer()
        stopping = sum(request.task == STOP for request in self._backlog)
        self._backlog.clear()
        # The end that workers read is open here, too: what is still in it, no worker has taken.
        while True:
            try:
                message, fds = self._receive_buffer.receive(self._theirs, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            close_all(fds)
            stopping += _task(message) == STOP
        for _ in range(stopping):
            self.stop_one()

    def finish(self) -> None:
        """Close the queue; workers first read what is left in it."""
        disconnect(self._mine)
        self._theirs.close()

    def close(self) -> None:
        """Drop unread requests and close the queue."""
        self.withdraw()
        self.finish()

    def _send(self, request: QueuedRequest) -> None:
        if len(request.payload) <= SPILL_NBYTES:
            self._mine.send(_HEADER.pack(request.task) + request.payload)
            return
        fd = spill(request.payload)
        try:
            send(self._mine, [_HEADER.pack(request.task)], [fd])
        finally:
            close_all([fd])


class RequestReader:
    """A worker's end of a `RequestQueue`."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._receive_buffer = ReceiveBuffer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def take(self) -> QueuedRequest | None:
        """Wait for a request; None when the pool has closed the queue."""
        message, fds = self._receive_buffer.receive(self._socket)
        if not message:
            return None
        return QueuedRequest(_task(message), read_all(fds[0]) if fds else message[_HEADER.size :])


def _task(message: bytes) -> int:
    (task,) = _HEADER.unpack_from(message)
    return int(task)


MOST_WORKERS = 1024


MOST_INDICES = 256
"""Samples of a batch that the status table names."""


_FIGURES = 6


_CELLS = _FIGURES + MOST_INDICES


_NBYTES = 8 * _CELLS * MOST_WORKERS  # pages of the memory that nothing was written to take no room


_TASK, _ROW, _SINCE, _READY, _NUMBER, _COUNT = range(_FIGURES)


_IDLE = 0


class StatusTable:
    """Shared table with the current activity of each worker, without locks.

    Each worker has a row of 64-bit cells, which it writes and the training process reads. A cell is written atomically,
    and a value may be out of date when it is read. Decisions must hold for older values too: a request that wrongly
    counts as lost is built twice, and its second answer is dropped.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._descriptor = _memory() if fd is None else Descriptor(fd)
        self._memory = mmap.mmap(self.fd, _NBYTES)
        self._cells = memoryview(self._memory).cast("q")

    @property
    def fd(self) -> int:
        """Descriptor of the table's memory."""
        return self._descriptor.fd

    def task(self, worker: int) -> int | None:
        """Current task of the worker; None if it is idle."""
        return self._cells[worker * _CELLS + _TASK] or None

    def row(self, worker: int) -> int:
        """Row of its request that the worker is fetching.

        -1 before the first row, and where rows are fetched many at once.
        """
        return self._cells[worker * _CELLS + _ROW]

    def since_ns(self, worker: int) -> int:
        """Start of the current task, in ns on CLOCK_MONOTONIC."""
        return self._cells[worker * _CELLS + _SINCE]

    def is_ready(self, worker: int) -> bool:
        """True once the worker answers `STACK_SIGNAL`."""
        return bool(self.pid(worker))

    def pid(self, worker: int) -> int:
        """Process id of a worker that is ready; 0 before."""
        return self._cells[worker * _CELLS + _READY]

    def number(self, worker: int) -> int:
        """Number of the batch that the worker builds, or built last."""
        return self._cells[worker * _CELLS + _NUMBER]

    def index(self, worker: int) -> int | None:
        """Index of the sample that the worker fetches.

        None where it is unknown: indices that are not integers, samples after the first `MOST_INDICES`, and streams.
        """
        row = self.row(worker)
        if not 0 <= row < self._cells[worker * _CELLS + _COUNT]:
            return None
        return self._cells[worker * _CELLS + _FIGURES + row]

    def clear(self, worker: int) -> None:
        """Zero a row before another process gets it."""
        first = worker * _CELLS
        self._cells[first : first + _FIGURES] = memoryview(bytes(8 * _FIGURES)).cast("q")

    def close(self) -> None:
        """Unmap the table and close its descriptor."""
        # The mapping cannot be closed while a view of it exists.
        self._cells.release()
        self._memory.close()
        self._descriptor.close()


class StatusRow:
    """A worker's own row of the status table."""

    __slots__ = ("_cells", "_first", "_ready", "_row", "_since", "_task")

    def __init__(self, status: StatusTable, worker: int) -> None:
        self._cells = status._cells
        self._first = first = worker * _CELLS
        self._task, self._row, self._since, self._ready = (first + cell for cell in range(4))

    @property
    def progress(self) -> Callable[[int], None]:
        """Function `progress(row)` that records the row being fetched.

        It takes about 40 ns, so it may be called for every sample.
        """
        # No function of Python: a frame for each sample would cost more than the write.
        return partial(self._cells.__setitem__, self._row)

    def set_ready(self) -> None:
        """Record that signal handlers are installed."""
        self._cells[self._ready] = os.getpid()

    def begin(self, task: int) -> None:
        """Record the start of a task."""
        cells = self._cells
        cells[self._row] = -1  # before the task: a reader must not combine the new task with the old row
        cells[self._since] = monotonic_ns()
        cells[self._task] = task

    def describe(self, request: Any) -> None:
        """Record batch and samples of the task.

        Readers in other processes do not have the request.
        """
        cells, first = self._cells, self._first
        cells[first + _COUNT] = 0
        cells[first + _NUMBER] = request.number
        try:
            indices = array.array("q", request.indices[:MOST_INDICES])
        except (AttributeError, TypeError, OverflowError):  # a stream, or indices that are not integers
            return
        start = first + _FIGURES
        cells[start : start + len(indices)] = memoryview(indices)
        cells[first + _COUNT] = len(indices)

    def end(self) -> None:
        """Record that the answer was sent."""
        self._cells[self._task] = _IDLE


def _memory() -> Descriptor:
    descriptor = Descriptor(os.memfd_create("feedline-status", os.MFD_CLOEXEC))
    os.truncate(descriptor.fd, _NBYTES)
    return descriptor
