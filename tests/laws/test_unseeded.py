"""Without `seed`, batches are torch's bit for bit, random values included, for every number of workers."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diagonals import at_night
from laws_reference import seed_torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import feedline as fl

LENGTH = 23


def draws() -> list[float]:
    """One number from each generator that transforms draw from."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]  # noqa: NPY002 - as users do


class Drawing(Dataset[Any]):
    """Samples that differ with each draw; some draw more often than others."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> list[float]:
        for _ in range(index % 3):
            draws()
        return [float(index), float(worker()), *draws()]


class Stream(IterableDataset[Any]):
    """Each worker's own samples, of which some workers have more."""

    def __iter__(self) -> Iterator[list[float]]:
        for index in range(5 + 3 * worker()):
            yield [float(index), float(worker()), *draws()]


def worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id + 1


def drawing_collate(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([[*sample, *draws()] for sample in samples], dtype=torch.float64)


def seed_everything() -> None:
    seed_torch(5)
    random.seed(6)
    np.random.seed(7)  # noqa: NPY002 - as users do


def epochs(loader: Any, number: int = 2) -> list[Any]:
    return [[torch.as_tensor(np.asarray(batch, dtype=np.float64)) for batch in loader] for _ in range(number)]


def run(loader_class: Any, dataset: Callable[[], Any], **arguments: Any) -> list[Any]:
    seed_everything()
    loader = loader_class(dataset(), batch_size=3, **arguments)
    batches = epochs(loader)
    after = draws()  # the next draw of the training process itself
    if isinstance(loader, fl.DataLoader):
        loader.close()
    return [batches, after]


def same(first: list[Any], second: list[Any]) -> bool:
    return (
        first[1] == second[1]
        and [len(epoch) for epoch in first[0]] == [len(epoch) for epoch in second[0]]
        and all(
            torch.equal(a, b)
            for one, two in zip(first[0], second[0], strict=True)
            for a, b in zip(one, two, strict=True)
        )
    )


# Workers share nothing but the base seed: each argument need not meet each number of them.
WORKERS = {
    "plain": [0, 1, 4],
    "shuffle": [3],
    "drop_last": [2],
    "collate": [0, 2],
    "persistent": [3],
    "prefetch": [2],
    "init": [3],
}
AT_NIGHT = [("plain", 2), ("shuffle", 0), ("collate", 3), ("persistent", 1), ("init", 0)]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffle": {"shuffle": True},
    "drop_last": {"drop_last": True},
    "collate": {"collate_fn": drawing_collate},
    "persistent": {"persistent_workers": True},
    "prefetch": {"prefetch_factor": 4},
    "init": {"worker_init_fn": lambda worker_id: random.seed(worker_id)},
}


@pytest.mark.filterwarnings("ignore:.*will create .* worker processes:UserWarning")
@pytest.mark.parametrize(
    ("case", "workers"),
    [*((case, workers) for case in CASES for workers in WORKERS[case]), *at_night(*AT_NIGHT)],
)
def test_batches_are_torchs(case: str, workers: int) -> None:
    arguments = {**CASES[case], "num_workers": workers}
    theirs = run(torch.utils.data.DataLoader, Drawing, **arguments)
    assert same(run(fl.DataLoader, Drawing, **arguments), theirs)


@pytest.mark.filterwarnings("ignore:.*will create .* worker processes:UserWarning")
@pytest.mark.parametrize(
    ("case", "workers"),
    [*(("plain", 0), ("plain", 1), ("collate", 3)), *at_night(("plain", 3), ("collate", 0), ("init", 3))],
)
def test_streams_are_torchs(case: str, workers: int) -> None:
    arguments = {**CASES[case], "num_workers": workers}
    theirs = run(torch.utils.data.DataLoader, Stream, **arguments)
    assert same(run(fl.DataLoader, Stream, **arguments), theirs)


class Deadly(Drawing):
    """Kills its worker at one sample, the first time only."""

    def __init__(self, once: Path, at: int) -> None:
        self.once, self.at = once, at

    def __getitem__(self, index: int) -> list[float]:
        if index == self.at and worker() and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class DeadlyStream(Stream):
    """Shuffles through a buffer, and kills its worker at one sample, the first time only."""

    def __init__(self, once: Path, at: int) -> None:
        self.once, self.at = once, at

    def __iter__(self) -> Iterator[list[float]]:
        buffer: list[list[float]] = []
        for number, sample in enumerate(super().__iter__()):
            if number == self.at and worker() and not self.once.exists():
                self.once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            buffer.append(sample)
            if len(buffer) == 4:
                yield buffer.pop(random.randrange(4))
        yield from buffer


@pytest.mark.parametrize(
    ("deadly", "at", "persistent"),
    [
        *((Deadly, 0, False), (Deadly, 22, True), (DeadlyStream, 4, False), (DeadlyStream, 7, True)),
        *at_night((Deadly, 4, True), (Deadly, 10, False), (DeadlyStream, 0, True)),
    ],
)
def test_a_killed_worker_changes_nothing(tmp_path: Path, deadly: Any, at: int, persistent: bool) -> None:
    own = {"shuffle": True} if deadly is Deadly else {"collate_fn": drawing_collate}
    arguments: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent, **own}
    once = tmp_path / "once"
    once.touch()
    whole = run(fl.DataLoader, lambda: deadly(once, at), **arguments)
    once.unlink()
    killed = run(fl.DataLoader, lambda: deadly(once, at), **arguments)
    assert once.exists()
    assert same(killed, whole)


class Kept:
    """A dataset with state between samples: generators, counters, lists, and a part with the same."""

    def __init__(self, part: Any = None) -> None:
        self.python, self.numpy, self.torch = random.Random(1), np.random.default_rng(2), torch.Generator()
        self.count, self.seen, self.part, self.lazy = 0, [0], part, None

    def draw(self) -> list[float]:
        self.count += 1
        self.seen = [*self.seen[-3:], self.count]
        self.lazy = self.lazy or np.random.RandomState(4)
        own = [self.python.random(), self.numpy.random(), torch.rand((), generator=self.torch).item()]
        return [
            *own,
            self.lazy.rand(),
            float(self.count),
            float(sum(self.seen)),
            *(self.part.draw() if self.part else []),
        ]


class Mortal:
    """Kills its worker at one of the samples that it counts, if the file `once` does not exist yet."""

    def __init__(self, once: Path, at: int) -> None:
        self.once, self.at, self.kept, self.epoch = once, at, Kept(Kept()), 0

    def sample(self) -> list[float]:
        drawn = self.kept.draw()
        if self.kept.count == self.at and worker() == 2 and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [*drawn, float(self.epoch), *draws()]


class MortalMap(Mortal, Dataset[Any]):
    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), *self.sample()]


class MortalStream(Mortal, IterableDataset[Any]):
    def __iter__(self) -> Iterator[list[float]]:
        self.epoch += 1
        order = random.sample(range(7), 7)
        for index in order:
            yield [float(worker()), float(index), *self.sample()]


class MortalState(Mortal, IterableDataset[Any]):
    """Keeps its place in an iterator, which cannot be copied, and therefore has a state of its own."""

    place = 0

    def __iter__(self) -> Iterator[list[float]]:
        self.numbers = iter(range(self.place, 7))
        for number in self.numbers:
            drawn = self.sample()
            self.place = number + 1
            yield [float(worker()), *drawn]
        self.place, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "epoch": self.epoch, "kept": pickle.dumps(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.epoch, self.kept = state["place"], state["epoch"], pickle.loads(state["kept"])


@pytest.mark.parametrize(
    ("mortal", "at", "persistent"),
    [
        *((MortalMap, 5, False), (MortalMap, 17, True), (MortalStream, 15, True), (MortalState, 16, True)),
        *at_night((MortalStream, 3, True), (MortalStream, 16, True), (MortalState, 3, True)),
    ],
)
def test_a_killed_worker_changes_nothing_that_its_dataset_keeps(
    tmp_path: Path, mortal: Any, at: int, persistent: bool
) -> None:
    arguments: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}

    def outcome(loader_class: Any, *, kills: bool) -> list[Any]:
        once = tmp_path / "once"
        once.unlink() if kills else once.touch()
        seed_everything()
        outcome = epochs(loader_class(mortal(once, at), batch_size=2, **arguments), 3)
        assert once.exists()
        return [outcome, None]

    theirs = outcome(torch.utils.data.DataLoader, kills=False)
    assert same(outcome(fl.DataLoader, kills=False), theirs)
    assert same(outcome(fl.DataLoader, kills=True), theirs)


class Iterating(Mortal, Dataset[Any]):
    """Takes its values from an iterator, which nothing can copy."""

    def __init__(self, once: Path, at: int) -> None:
        super().__init__(once, at)
        self.values = iter(range(0))

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> list[float]:
        self.sample()
        self.values = iter([*self.values, index])
        return [float(index)]


def test_changes_that_a_replacement_starts_without_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batches = list(fl.DataLoader(Iterating(tmp_path / "once", 5), batch_size=2, num_workers=2))
    assert len(batches) == 7
    text = next(record.getMessage() for record in caplog.records if "starts without" in record.getMessage())
    assert "dataset.values" in text
