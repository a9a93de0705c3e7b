"""Datasets whose samples do something to their worker, requests for them, and gates between test and worker."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import resource
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from feedline.core.schedule import BatchRequest
from feedline.loader.building.builder import BatchBuilder
from feedline.workers.process.context import ContextLauncher
from feedline.workers.process.launch import Launcher
from feedline.workers.process.pool import ProcessPool
from feedline.workers.process.snapshot import SnapshotLauncher
from feedline.workers.process.zygote import ZygoteLauncher

GONE_WITHIN_S = 60.0
"""Seconds after which a process counts as alive; one that dies with another ends in milliseconds on an idle machine."""
BATCH_SIZE = 4


class Squares:
    """Sample `i` is `[i, i * i]`."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, index * index])


class Faulty:
    """Twelve samples, of which 3 and 4 cannot be read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index in (3, 4):
            raise ValueError(f"sample {index} is broken")
        return index


class Acting(Squares):
    """Squares, but the samples in `acts` call their act first."""

    def __init__(self, acts: dict[int, Callable[[], object]], length: int = 1000) -> None:
        super().__init__(length)
        self.acts = acts

    def __getitem__(self, index: int) -> Any:
        if index in self.acts:
            self.acts[index]()
        return super().__getitem__(index)


class Facts:
    """The information that a worker has."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        assert info is not None
        return {
            "pid": os.getpid(),
            "id": info.id,
            "num_workers": info.num_workers,
            "seed": info.seed,
            "own": info.dataset is self,
            "draws": [random.random(), np.random.random(), torch.rand(()).item()],  # noqa: NPY002 - what transforms use
            "threads": torch.get_num_threads(),
            "daemon": multiprocessing.current_process().daemon,
            "interrupt": signal.getsignal(signal.SIGINT),
            "terminate": signal.getsignal(signal.SIGTERM),
        }


class Counting(IterableDataset[Any]):
    """Each partition yields `partition * 1000 + k`."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id * 1000, info.id * 1000 + 20))


class Call:
    """`function(*arguments, *more)` when called with `more`; picklable."""

    def __init__(self, function: Callable[..., object], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __call__(self, *more: Any) -> object:
        return self.function(*self.arguments, *more)


class Gate:
    """Reports to a test that a worker has arrived, and blocks the worker until the test opens the gate.

    The worker calls it; the test calls `wait_for`, which gives the worker's pid, and `open`.
    """

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.reached, self.opened = folder / f"{name}-reached", folder / f"{name}-opened"
        for fifo in (self.reached, self.opened):
            os.mkfifo(fifo)

    def __call__(self) -> None:
        self.reached.write_text(f"{os.getpid()}\n")
        self.opened.read_text()

    def wait_for(self, process: int | None = None) -> int:
        """Wait for a worker; fails if the process of this pidfd ends before one arrives."""
        fifo = os.open(self.reached, os.O_RDONLY | os.O_NONBLOCK)
        try:
            ready, _, _ = select.select([fifo, *([] if process is None else [process])], [], [])
            assert fifo in ready, "it has ended"
            return int(os.read(fifo, 100).split()[0])
        finally:
            os.close(fifo)

    def open(self) -> None:
        self.opened.write_text("")


class Once:
    """Calls `act` once: at the first call from any process."""

    def __init__(self, folder: Path, act: Callable[[], object], name: str = "once") -> None:
        self.flag, self.act = folder / name, act

    def __call__(self) -> None:
        try:
            self.flag.touch(exist_ok=False)
        except FileExistsError:
            return
        self.act()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def segfault() -> None:
    ctypes.string_at(0)


def complain_and_exit() -> None:
    os.write(2, b"the very last words\n")
    os._exit(3)


def exhaust_memory() -> None:
    """Allocate memory up to a limit, until an allocation fails."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    try:
        hoard = []
        while True:
            hoard.append(bytearray(8 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def leave() -> None:
    sys.exit(5)


def interrupt() -> None:
    raise KeyboardInterrupt


def request(number: int, size: int = BATCH_SIZE, epoch: int = 0) -> BatchRequest:
    start = number * size
    rows = range(start, start + size)
    return BatchRequest(epoch, number, start, start + size, np.arange(start, start + size), rows, None)


def squares_of(batch: torch.Tensor) -> list[int]:
    """The indices in a batch of squares, whose squares are checked."""
    assert torch.equal(batch[:, 1], batch[:, 0] ** 2)
    return batch[:, 0].tolist()


def numbers(pool: ProcessPool, count: int) -> list[int]:
    """The numbers of the batches that come of so many requests for squares."""
    futures = [pool.submit(request(number)) for number in range(count)]
    return [squares_of(future.result().batch)[0] // BATCH_SIZE for future in futures]


def launcher_of(kind: str, builder: Any, init_fn: Callable[[int], object] | None = None) -> Launcher:
    if kind == "snapshot":
        return SnapshotLauncher(builder, init_fn)
    if kind == "zygote":
        return ZygoteLauncher(builder, init_fn)
    return ContextLauncher(builder, init_fn, context=multiprocessing.get_context(kind))


@contextmanager
def default_start_method(name: str) -> Iterator[None]:
    """Another default start method of multiprocessing: workers come from the fork server where it is not fork."""
    former = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(name, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(former, force=True)  # type: ignore[arg-type] # None: not chosen yet


def squares(acts: dict[int, Callable[[], object]] | None = None, action: str = "raise") -> BatchBuilder:
    return BatchBuilder(Acting(acts or {}), action=action)


def gone(pidfd: int, within_s: float = GONE_WITHIN_S) -> bool:
    """True if a process ends within that time."""
    return bool(select.select([pidfd], [], [], within_s)[0])


def pools() -> Iterator[Callable[..., Any]]:
    """For a fixture: a function that opens pools over a builder. They, and their launchers, are closed at the end."""
    opened: list[Any] = []

    def open_one(builder: Any, workers: int = 2, *, kind: str = "snapshot", init_fn: Any = None, **more: Any) -> Any:
        launcher = launcher_of(kind, builder, init_fn)
        opened.append(launcher)
        pool = ProcessPool(launcher, workers, **more)
        opened.append(pool)
        return pool

    yield open_one
    while opened:
        opened.pop().close()
