"""Channels of a pool: message sockets, request queue, and status table."""

from __future__ import annotations

import _socket
import array
import mmap
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, starmap, tee
from operator import attrgetter, itemgetter, methodcaller
from time import monotonic_ns
from typing import Any, NamedTuple, Self

from feedline.core.descriptors import Descriptors, opened

MESSAGE_NBYTES = 1 << 17
"""Size of the receive buffer, in bytes. All messages are far smaller: the transport bounds answers, and `spill` bounds
the others.
"""


SPILL_NBYTES = 1 << 15
"""Longer payloads are sent in a memfd, in bytes: a single message must never fill the buffer of a socket."""


_ANCILLARY_NBYTES = socket.CMSG_SPACE(253 * 4)  # the most descriptors that the kernel puts into one message


class ReceiveBuffer:
    """Reusable receive buffer; allocating one per message would cost more than receiving."""

    __slots__ = ("_buffer", "_view")

    def __init__(self) -> None:
        self._buffer = bytearray(MESSAGE_NBYTES)
        self._view = memoryview(self._buffer)

    def receive(self, channel: Channel, flags: int = 0) -> tuple[bytes, Descriptors]:
        """Receive a message and its descriptors.

        The message is b"" once the other side has closed. Raises BlockingIOError as `recv` does.
        """
        # CLOEXEC by the call itself: another thread may start a program between receiving a descriptor and marking it.
        arguments = [self._buffer], _ANCILLARY_NBYTES, flags | socket.MSG_CMSG_CLOEXEC
        # One result for two readers: the first one finds its descriptors before Python runs the next instruction.
        results, again = tee(starmap(channel.recvmsg_into, [arguments]))
        try:
            fds = Descriptors(_fds_in(results))
        except ConnectionResetError:  # the other side closed with unread messages
            return b"", Descriptors()
        return bytes(self._view[: next(again)[0]]), fds


def _fds_in(results: Iterable[Any]) -> Iterable[int]:
    """Descriptors in results of `recvmsg`; iterated without a step of the interpreter."""
    return chain.from_iterable(map(_integers, map(itemgetter(2), chain.from_iterable(map(itemgetter(1), results)))))


_integers: Callable[[bytes], Iterable[int]] = partial(array.array, "i")


class Channel(_socket.socket):
    """Socket that preserves message boundaries, closed with this object."""

    # The base class is that of `socket.socket`, which wraps each new socket by code of Python: an interrupt there would
    # lose its descriptor.
    __slots__ = ("__weakref__",)

    __del__ = property(attrgetter("close"))  # no code of Python either: see `Descriptors`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# A snapshot inherits every end that this process holds, also those of other pools, and must close its copies.
_pairs: weakref.WeakSet[Channel] = weakref.WeakSet()


# Keeps the borders of messages, as datagrams do, and reports the end of the other side, as streams do.
_KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET


def pair() -> tuple[Channel, Channel]:
    """Create two connected channels, which `close_inherited` closes in forks."""
    ends = list[Channel]()
    made = map(methodcaller("detach"), chain.from_iterable(starmap(_socket.socketpair, [_KIND])))
    ends.extend(map(partial(Channel, *_KIND, 0), made))
    _pairs.update(ends)
    return ends[0], ends[1]


def connect(fd: int) -> Channel:
    """Channel over a descriptor; takes ownership."""
    return Channel(*_KIND, 0, fd)


def close_inherited(kept: Collection[int]) -> None:
    """Close this forked process's copies of channels of `pair`, except `kept`.

    `kept` holds descriptors. The other side of a socket is notified only when the last copy is closed.
    """
    for end in _pairs:
        if end.fileno() not in kept:
            end.close()


def send(channel: Channel, parts: Iterable[bytes], fds: Sequence[int] = ()) -> None:
    """Send the joined parts as one message; the caller still owns `fds`."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg(parts, ancillary, socket.MSG_NOSIGNAL)


def disconnect(channel: Channel) -> None:
    """Close a socket for both sides at once.

    `shutdown` notifies the other side even if another process has inherited a copy of this end.
    """
    with suppress(OSError):  # the other side has already closed
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()


def close_all(fds: Iterable[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


def spill(data: bytes) -> Descriptors:
    """Write `data` to a memfd, as it may exceed a message.

    The descriptor is sent in its place; `read_all` reads it.
    """
    memory = opened(os.memfd_create, "feedline-message", os.MFD_CLOEXEC)
    with open(memory.fd, "wb", closefd=False) as file:
        file.write(data)
    return memory


def read_all(fd: int) -> bytes:
    """Read a file from its beginning and close the descriptor."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


_HEADER = struct.Struct("<q")


STOP = 0
"""Task number of a request to stop, for the worker that takes it."""


class QueuedRequest(NamedTuple):
    """Task number and pickled request, as a worker reads them."""

    task: int
    payload: bytes


class RequestQueue:
    """Queue of requests that one or more workers read through `fd`.

    Idle workers read from the socket directly, with no dispatcher in between. The queue outlives its workers: unread
    requests stay. `put` never blocks: requests that do not fit into the socket wait for the next `flush`. This
    suffices, because workers must answer the requests in a full socket, and the pool flushes after each answer.
    """

    def __init__(self) -> None:
        self._mine, self._theirs = pair()
        self._mine.setblocking(False)
        self._backlog: deque[QueuedRequest] = deque()
        self._receive_buffer: ReceiveBuffer | None = None
        self._finished = False

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
        """Remove all requests that no worker has taken, except stop requests."""
        if self._receive_buffer is None:
            self._receive_buffer = ReceiveBuffer()
        stopping = sum(request.task == STOP for request in self._backlog)
        self._backlog.clear()
        # The end that workers read is open here, too: no worker has taken the requests that are still in it.
        while True:
            try:
                message, fds = self._receive_buffer.receive(self._theirs, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            fds.close()
            stopping += _task(message) == STOP
        for _ in range(stopping):
            self.stop_one()

    def finish(self) -> None:
        """Close the queue; workers first read the remaining requests. Idempotent."""
        self._finished = True
        disconnect(self._mine)
        self._theirs.close()

    def close(self) -> None:
        """Drop unread requests and close the queue."""
        if not self._finished:  # a signal handler may come here in the middle of `finish`
            self.withdraw()
        self.finish()

    def _send(self, request: QueuedRequest) -> None:
        if len(request.payload) <= SPILL_NBYTES:
            self._mine.send(_HEADER.pack(request.task) + request.payload)
            return
        with spill(request.payload) as memory:
            send(self._mine, [_HEADER.pack(request.task)], [memory.fd])


class RequestReader:
    """A worker's end of a `RequestQueue`."""

    def __init__(self, fd: int) -> None:
        self._socket = connect(fd)
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
        return QueuedRequest(_task(message), read_all(fds.disown()[0]) if fds else message[_HEADER.size :])


def _task(message: bytes) -> int:
    (task,) = _HEADER.unpack_from(message)
    return int(task)


MOST_WORKERS = 1024


MOST_INDICES = 256
"""Highest number of samples of a batch whose indices the status table holds."""


_FIGURES = 6


_CELLS = _FIGURES + MOST_INDICES


_NBYTES = 8 * _CELLS * MOST_WORKERS  # pages of the memory that nothing was written to take no room


_TASK, _ROW, _TASK_START, _READY, _NUMBER, _COUNT = range(_FIGURES)


_IDLE = 0


class StatusTable:
    """Shared table with the current activity of each worker, without locks.

    Each worker has a row of 64-bit cells, which it writes and the training process reads. A cell is written atomically,
    and a value may be out of date when it is read. Decisions must be correct for older values too: a request wrongly
    counted as lost is built twice, and its second answer is dropped.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._descriptor = _memory() if fd is None else Descriptors([fd])
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
        """Row of the request that the worker is fetching.

        -1 before the first row, and if many rows are fetched at once.
        """
        return self._cells[worker * _CELLS + _ROW]

    def task_start_ns(self, worker: int) -> int:
        """Start of the current task, in ns on CLOCK_MONOTONIC."""
        return self._cells[worker * _CELLS + _TASK_START]

    def is_ready(self, worker: int) -> bool:
        """True once the worker answers `STACK_SIGNAL`."""
        return bool(self.pid(worker))

    def pid(self, worker: int) -> int:
        """Process id of a worker that is ready; 0 before."""
        return self._cells[worker * _CELLS + _READY]

    def batch_number(self, worker: int) -> int:
        """Number of the batch that the worker builds, or built last."""
        return self._cells[worker * _CELLS + _NUMBER]

    def sample_index(self, worker: int) -> int | None:
        """Index of the sample that the worker fetches.

        None if unknown: for indices that are not integers, samples after the first `MOST_INDICES`, and streams.
        """
        row = self.row(worker)
        if not 0 <= row < self._cells[worker * _CELLS + _COUNT]:
            return None
        return self._cells[worker * _CELLS + _FIGURES + row]

    def clear(self, worker: int) -> None:
        """Zero the row of an id that another process will get."""
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

    def set_request(self, request: Any) -> None:
        """Record the batch number and sample indices of the task.

        Processes that read the table may not have the request.
        """
        cells, first = self._cells, self._first
        cells[first + _COUNT] = 0
        cells[first + _NUMBER] = request.number
        # A stream has none. A request for one sample has whatever its sampler yields, and its methods are the user's.
        found: Any = getattr(request, "indices", None)
        if not isinstance(found, (list, range)) and not hasattr(type(found), "dtype"):
            return
        try:
            indices = array.array("q", found[:MOST_INDICES])
        except Exception:  # noqa: BLE001 - keys of a dataset need not be numbers
            return
        start = first + _FIGURES
        cells[start : start + len(indices)] = memoryview(indices)
        cells[first + _COUNT] = len(indices)

    def end(self) -> None:
        """Record that the answer was sent."""
        self._cells[self._task] = _IDLE


def _memory() -> Descriptors:
    memory = opened(os.memfd_create, "feedline-status", os.MFD_CLOEXEC)
    os.truncate(memory.fd, _NBYTES)
    return memory
