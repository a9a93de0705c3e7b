"""`loader.tune()`: advice is taken where it changes neither order nor values."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import feedline as fl
from feedline.core.dataset import Traits


class Waits(Dataset[torch.Tensor]):
    traits = Traits(thread_safe=True, is_random=False, reads_batches=False)

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.tensor([index])


class Draws(Waits):
    traits = Traits(thread_safe=True, reads_batches=False)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(60):
            time.sleep(0.002)
            yield torch.tensor([number])


def epoch(loader: Any) -> list[list[int]]:
    return [batch.flatten().tolist() for batch in loader]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_waiting_dataset_gets_workers_and_the_same_batches(persistent: bool) -> None:
    arguments = {"batch_size": 4, "shuffle": True, "seed": 3, "worker_method": "thread", "num_workers": 1}
    with fl.DataLoader(Waits(), **arguments, persistent_workers=persistent) as loader:
        first = epoch(loader)
        (advice,) = loader.tune()
        assert advice.arguments == {"num_workers": loader.num_workers}
        assert loader.num_workers > 1
        second = epoch(loader)
        assert loader.stats().batches >= len(second)
    with fl.DataLoader(Waits(), **arguments) as plain:
        assert [first, second] == [epoch(plain), epoch(plain)]


def test_the_running_epoch_goes_on_with_its_own_workers() -> None:
    arguments = {"batch_size": 4, "seed": 3, "worker_method": "thread", "num_workers": 1, "persistent_workers": True}
    with fl.DataLoader(Waits(), **arguments) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(batch.flatten().tolist())
            if number == 20:
                assert loader.tune()
        assert found == epoch(loader)


def test_a_loader_that_draws_random_numbers_without_a_seed_keeps_its_workers() -> None:
    with fl.DataLoader(Draws(), 4, num_workers=1, worker_method="thread") as loader:
        epoch(loader)
        loader.tune()
        assert loader.num_workers == 1


def test_a_stream_keeps_its_workers() -> None:
    with fl.DataLoader(Stream(), 4) as loader:
        epoch(loader)
        loader.tune()
        assert loader.num_workers == 0


def test_before_the_first_batch_there_is_nothing_to_tune() -> None:
    assert fl.DataLoader(Waits(), 4).tune() == ()
