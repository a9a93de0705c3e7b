"""Garbage collected in every locked region, and signals handled there; run by test_garbage.py.

Each lock that feedline creates is replaced by one that reports a wait for itself. When it is acquired at a new
place, it drops a live iteration in a cycle, and collects it; later, it raises a signal there, whose handler requests
statistics and closes a loader. The argument is multiprocessing's start method.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator

ORIGINAL = threading.Lock
OWN = f"feedline{os.sep}"
SKIPPED = {__file__, threading.__file__}


class Places:
    """The places where locks were acquired, and what happens there."""

    def __init__(self) -> None:
        self.act: Callable[[], bool] | None = None
        self.seen: set[tuple[str, int]] = set()
        self.acting = False

    def reached(self, place: tuple[str, int]) -> None:
        if self.act is None or self.acting or place in self.seen or threading.current_thread() is not MAIN:
            return
        self.acting = True
        try:
            if self.act():
                self.seen.add(place)
        finally:
            self.acting = False


PLACES, MAIN = Places(), threading.main_thread()


class WatchedLock:
    """A lock that ends the process if its own thread would wait for it."""

    def __init__(self) -> None:
        self._lock, self._owner = ORIGINAL(), 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if blocking and timeout < 0 and self._owner == me and PLACES.acting:
            print("a lock waits for itself", flush=True)
            faulthandler.dump_traceback(sys.stdout.fileno(), all_threads=False)
            os._exit(3)
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner = me
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename in SKIPPED:
            frame = frame.f_back
        if OWN in frame.f_code.co_filename:
            PLACES.reached((frame.f_code.co_filename, frame.f_lineno))
        return True

    def release(self) -> None:
        self._owner = 0
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock, self._owner = ORIGINAL(), 0


threading.Lock = WatchedLock  # type: ignore[misc,assignment]

import multiprocessing  # noqa: E402 - after the locks
import signal  # noqa: E402
import tempfile  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

import feedline as fl  # noqa: E402


class Numbers:
    """64 samples."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5_000,), index)


def loaders(folder: str) -> Iterator[fl.DataLoader]:
    """One of each kind, endlessly."""
    stored = fl.datasets.ArrayFile(f"file://{folder}/array.npy")
    while True:
        yield fl.DataLoader(Numbers(), 8, num_workers=2, worker_method="thread", seed=0)
        yield fl.DataLoader(stored, 8, num_workers=2, worker_method="thread")
        yield fl.DataLoader(Numbers(), 8, num_workers=1, worker_method="process", persistent_workers=True)
        yield fl.DataLoader(Numbers(), 8, num_workers=1, worker_method="process")


class Cycle:
    """An iteration that only a collection ends."""

    def __init__(self, loader: fl.DataLoader) -> None:
        self.held = loader, iter(loader)
        next(self.held[1])
        self.me = self


class Doomed:
    """Iterations to drop and collect in a locked region."""

    def __init__(self, folder: str) -> None:
        self._source, self._waiting = loaders(folder), list[Cycle]()

    def add(self, count: int) -> None:
        while len(self._waiting) < count:
            self._waiting.append(Cycle(next(self._source)))

    def collect(self) -> bool:
        """Collect one; False if there is none."""
        if not self._waiting:
            return False
        self._waiting.pop()
        gc.collect()
        return True


KINDS, ROUNDS, LEAST = 4, 4, 5


def use_all(folder: str) -> None:
    """Use each kind of loader as a script does, with figures in between."""
    for _, loader in zip(range(KINDS), loaders(folder), strict=False):
        for _ in loader:
            loader.stats()
        loader.state_dict()
        loader.close()


def main(start_method: str) -> None:
    gc.disable()
    multiprocessing.set_start_method(start_method)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/array.npy", np.arange(4_096, dtype=np.float32).reshape(512, 8))
        use_all(folder)
        gc.freeze()  # existing objects are no garbage, and need no collection
        doomed, kept = Doomed(folder), fl.DataLoader(Numbers(), 8, num_workers=1, worker_method="process")

        def handle(*_: object) -> None:
            kept.stats()
            kept.state_dict()
            kept.close()

        def signaled() -> bool:
            signal.raise_signal(signal.SIGUSR1)
            return True

        signal.signal(signal.SIGUSR1, handle)
        for number, act in enumerate([*[doomed.collect] * ROUNDS, signaled]):
            if act is signaled:
                print(len(PLACES.seen) > LEAST or PLACES.seen, flush=True)
                PLACES.seen.clear()
            else:
                doomed.add(KINDS)
            following = iter(kept)
            PLACES.act = act
            for _ in following:
                kept.stats()
            if number % 2 == 0:
                use_all(folder)
            PLACES.act = None
        for thread in threading.enumerate():
            if thread.name == "feedline-finalizer":
                thread.join()
    print(len(PLACES.seen) > LEAST or PLACES.seen, flush=True)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(120, exit=True, file=sys.stdout)
    main(sys.argv[1])
