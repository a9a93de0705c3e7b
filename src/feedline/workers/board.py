"""What each worker is doing at this moment: a few numbers in memory that all processes of a pool share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial
from time import monotonic_ns

MOST_WORKERS = 1024
_CELLS = 4
_NBYTES = 8 * _CELLS * MOST_WORKERS
_TASK, _ROW, _SINCE, _READY = range(_CELLS)
_IDLE = 0


class Board:
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


class Line:
    """A worker's own line of the board."""

    __slots__ = ("_cells", "_ready", "_row", "_since", "_task")

    def __init__(self, board: Board, worker: int) -> None:
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
