"""`loader.tune()`: advice is taken where it changes neither order nor values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diagonals import at_night
from torch.utils.data import Dataset, IterableDataset

import feedline as fl
from feedline.core.dataset import Traits
from feedline.loader.report import Advice, Verdict

REFUSED = Advice("other values", {"worker_method": "process", "num_workers": 2})
MORE = Advice("more at once", {"num_workers": 4})


class Plain(Dataset[torch.Tensor]):
    traits = Traits(thread_safe=True, is_random=False, reads_batches=False)

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


class Draws(Plain):
    traits = Traits(thread_safe=True, reads_batches=False)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(torch.tensor, range(60))


def epoch(loader: Any) -> list[list[int]]:
    return [batch.flatten().tolist() for batch in loader]


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fixed pieces of advice."""
    verdict = Verdict("fetch", 0.9, "", "", advice=(REFUSED, MORE))
    monkeypatch.setattr(fl.DataLoader, "report", lambda *_, **__: verdict)


@pytest.mark.usefixtures("advised")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_waiting_dataset_gets_workers_and_the_same_batches(persistent: bool) -> None:
    arguments = {"batch_size": 4, "shuffle": True, "seed": 3, "worker_method": "thread", "num_workers": 1}
    with fl.DataLoader(Plain(), **arguments, persistent_workers=persistent) as loader:
        first = epoch(loader)
        assert loader.tune() == (MORE,)
        assert (loader.num_workers, loader.worker_method) == (4, "thread")
        second = []
        for batch in loader:
            second.append(batch.flatten().tolist())
            assert loader._fl_pools._latest.statistics().workers == 4
        assert loader.stats().batches >= len(second)
    with fl.DataLoader(Plain(), **arguments) as plain:
        assert [first, second] == [epoch(plain), epoch(plain)]


@pytest.mark.usefixtures("advised")
def test_the_running_epoch_continues_with_its_own_workers() -> None:
    arguments = {"batch_size": 4, "seed": 3, "worker_method": "thread", "num_workers": 1, "persistent_workers": True}
    with fl.DataLoader(Plain(), **arguments) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(batch.flatten().tolist())
            if number == 20:
                assert loader.tune() == (MORE,)
        assert found == epoch(loader)


@pytest.mark.usefixtures("advised")
def test_a_loader_that_draws_random_numbers_without_a_seed_keeps_its_workers() -> None:
    with fl.DataLoader(Draws(), 4, num_workers=1, worker_method="thread") as loader:
        epoch(loader)
        with pytest.warns(UserWarning, match="without seed, random values may depend on num_workers=1"):
            assert loader.tune() == ()
        assert loader.num_workers == 1


class Drawing(Draws):
    """Draws for one sample of the epoch."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index]) + (torch.randint(9, (1,)) if index == 150 else 0)


class Counting(Draws):
    """The values depend on how many samples the worker has read before."""

    def __init__(self) -> None:
        self.read = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return torch.tensor([index + self.read])


class Owning(Draws):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.generator.integers(9)])


@pytest.mark.usefixtures("advised")
@pytest.mark.parametrize("persistent", [True, *at_night(False)])
def test_an_epoch_of_worker_processes_shows_whether_samples_draw(persistent: bool) -> None:
    for dataset in (Draws(), Drawing(), Counting(), Owning()):
        may_change = type(dataset) is Draws
        arguments = {"num_workers": 1, "worker_method": "process", "persistent_workers": persistent}
        with fl.DataLoader(dataset, 4, shuffle=True, **arguments) as loader:
            iterator = iter(loader)
            next(iterator)
            with pytest.warns(UserWarning, match="after a whole epoch of worker processes"):
                assert loader.tune() == ()
            list(iterator)
            if may_change:
                assert loader.tune() == (MORE,)
            else:
                with pytest.warns(UserWarning, match="without seed"):
                    assert loader.tune() == ()
            assert loader.num_workers == (4 if may_change else 1)
            assert len(epoch(loader)) == 40


def test_advice_that_a_seed_would_not_allow_is_no_reason_to_warn(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(fl.DataLoader, "report", lambda *_, **__: Verdict("fetch", 0.9, "", "", advice=(REFUSED,)))
    for dataset in (Plain(), Draws()):
        with fl.DataLoader(dataset, 4, num_workers=1, worker_method="thread") as loader:
            epoch(loader)
            assert loader.tune() == ()
    assert not recwarn.list


def test_a_loop_with_a_timeout_keeps_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses a timeout without workers."""
    verdict = Verdict("fetch", 0.9, "", "", advice=(Advice("none", {"num_workers": 0}), MORE))
    monkeypatch.setattr(fl.DataLoader, "report", lambda *_, **__: verdict)
    loader: Any = fl.DataLoader(list(range(40)), 4, seed=0, num_workers=1, worker_method="thread", timeout=30)
    list(loader)
    assert loader.tune() == (MORE,)
    assert len(list(loader)) == 10
    loader.close()


@pytest.mark.usefixtures("advised")
def test_a_stream_keeps_its_workers() -> None:
    with fl.DataLoader(Stream(), 4) as loader:
        epoch(loader)
        assert loader.tune() == ()
        assert loader.num_workers == 0


def test_before_the_first_batch_there_is_nothing_to_tune() -> None:
    assert fl.DataLoader(Plain(), 4).tune() == ()
