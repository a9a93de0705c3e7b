"""Workers of streams, most with a state, killed from outside around the ends of epochs; run by test_stream_kills.py.

The arguments are the number of runs and a seed. Prints each run whose batches, or states after batches, differ from
those of the undisturbed run.
"""

from __future__ import annotations

import logging
import pickle
import random
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

import feedline

EPOCHS, SAMPLES, BATCH_SIZE = 3, 11, 2
BATCHES = -(-SAMPLES // BATCH_SIZE)
LONGEST_S = 0.01


def worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002 - users' transforms


class Place:
    """A position, a generator, and the number of epochs begun; travels as a state."""

    def __init__(self) -> None:
        self.next, self.epochs, self.generator = 0, 0, torch.Generator().manual_seed(1)

    def take(self) -> list[float]:
        number, self.next = self.next, self.next + 1
        own = float(torch.rand((), generator=self.generator))
        return [float(worker()), float(self.epochs), float(number), own, *draws()]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "epochs": self.epochs, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.epochs = state["next"], state["epochs"]
        self.generator.set_state(state["generator"])


class OfDataset(Place, IterableDataset[Any]):
    """Keeps its place, also from epoch to epoch."""

    def __iter__(self) -> Iterator[list[float]]:
        while self.next < SAMPLES - worker():
            yield self.take()
        self.next, self.epochs = 0, self.epochs + 1


class StatefulIterator(Place):
    def __iter__(self) -> Iterator[list[float]]:
        return self

    def __next__(self) -> list[float]:
        if self.next == SAMPLES - worker():
            raise StopIteration
        return self.take()


class OfIterator(IterableDataset[Any]):
    """Its iterators keep their places."""

    def __iter__(self) -> Iterator[list[float]]:
        return StatefulIterator()


class OfBoth(OfDataset):
    """The dataset has a generator that its iterators draw from, and counts epochs at their ends.

    Not in `__iter__`: as with torchdata's loader, a loaded state is that after `__iter__`, which is then called again.
    """

    def __iter__(self) -> Any:
        return DrawingIterator(self)


class DrawingIterator(StatefulIterator):
    def __init__(self, dataset: OfBoth) -> None:
        super().__init__()
        self.dataset = dataset

    def __next__(self) -> list[float]:
        if self.next == SAMPLES - worker():
            self.dataset.epochs += 1
        return super().__next__()

    def take(self) -> list[float]:
        drawn = float(torch.rand((), generator=self.dataset.generator))
        return [*super().take(), drawn, float(self.dataset.epochs)]


class Stateless(IterableDataset[Any]):
    """Shuffles through a buffer with the global generators, and keeps a generator and a count of its own."""

    def __init__(self) -> None:
        self.generator, self.epochs = np.random.default_rng(1), 0

    def __iter__(self) -> Iterator[list[float]]:
        self.epochs += 1
        buffer: list[list[float]] = []
        for number in range(SAMPLES - worker()):
            buffer.append([float(worker()), float(self.epochs), float(number), self.generator.random(), *draws()])
            if len(buffer) == 4:
                yield buffer.pop(random.randrange(4))
        yield from buffer


class Killer:
    """Kills one worker of an iterator, once, a moment after one of its batches."""

    def __init__(self, chance: random.Random) -> None:
        self.epoch = chance.randrange(EPOCHS)
        # Most of the time among the last batches of the epoch, which workers build while the loop is at earlier ones.
        self.step = chance.choice([chance.randrange(3 * BATCHES), 3 * BATCHES - chance.randrange(9)])
        self.delay_s = chance.choice([0, chance.uniform(0, LONGEST_S)])
        self.victim = chance.randrange(3)
        self.pause_s = chance.choice([0, chance.uniform(0, LONGEST_S)])
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"worker {self.victim}, {self.delay_s:.6f} s after step {self.step} of epoch {self.epoch}"

    def after(self, epoch: int, step: int, processes: list[Any]) -> None:
        """Start to wait for the moment of the kill, if it follows this step."""
        if (epoch, step) == (self.epoch, self.step) and self.victim < len(processes):
            self._thread = threading.Thread(target=self._kill, args=(processes[self.victim],))
            self._thread.start()
        if epoch == self.epoch and step >= self.step:
            time.sleep(self.pause_s)

    def _kill(self, process: Any) -> None:
        time.sleep(self.delay_s)
        with suppress(ProcessLookupError, ValueError):
            process.kill()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


def run(make: Callable[[], Any], persistent: bool, prefetch: int, killer: Killer | None) -> list[Any]:
    """All batches, each with the state after it."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    loader = feedline.DataLoader(
        make(), BATCH_SIZE, num_workers=3, persistent_workers=persistent, prefetch_factor=prefetch,
        recovery=feedline.Recovery(deaths_per_epoch=100),
    )  # fmt: skip
    seen: list[Any] = []
    with loader:
        for epoch in range(EPOCHS):
            iterator: Any = iter(loader)
            for step, batch in enumerate(iterator, 1):
                seen.append((pickle.dumps([part.tolist() for part in batch]), pickle.dumps(loader.state_dict())))
                if killer is not None:
                    killer.after(epoch, step, iterator._workers)
            seen.append((pickle.dumps("end of epoch"), pickle.dumps(loader.state_dict())))
            if killer is not None:
                killer.after(epoch, 3 * BATCHES, iterator._workers)
        if killer is not None:
            killer.join()
    return seen


def difference(seen: list[Any], expected: list[Any]) -> str | None:
    """The first difference of two runs."""
    for number, (one, other) in enumerate(zip(seen, expected, strict=False)):
        for what, got, wanted in zip(("batch", "state after batch"), one, other, strict=True):
            if got != wanted:
                return f"{what} {number} is {shortened(got)} instead of {shortened(wanted)}"
    return None if len(seen) == len(expected) else f"{len(seen)} batches instead of {len(expected)}"


def shortened(packed: bytes) -> str:
    return re.sub(r"[\w+/=]{40,}", "...", str(pickle.loads(packed)))


CASES = list(product([OfDataset, OfIterator, OfBoth, Stateless], [False, True], [1, 2, 4]))


@cache
def undisturbed(case: tuple[Any, bool, int]) -> list[Any]:
    return run(*case, None)


def main(count: int, seed: int) -> None:
    logging.getLogger("feedline").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # on a machine with few CPUs
    for number in range(count):
        chance = random.Random(f"{seed}/{number}")
        case, killer = chance.choice(CASES), Killer(chance)
        if found := difference(run(*case, killer), undisturbed(case)):
            kind, persistent, prefetch = case
            print(f"run {number}: {kind.__name__}, {persistent=}, {prefetch=}, {killer}: {found}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
