"""States of datasets and iterators that hold the process-wide generators, as many written for torchdata do."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import pytest
import torch
from diagonals import at_night, by_day
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import feedline as fl

SAMPLES = 23


class Drawn(Iterator[tuple[int, float]]):
    """Numbers with draws of torch's generator, which is part of the state."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.at = numbers, 0

    def __next__(self) -> tuple[int, float]:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1], torch.rand(()).item()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        torch.set_rng_state(state["torch"])


class OfDrawn(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        torch.rand(3)  # such as a shuffle of its files
        return Drawn(list(range(worker, SAMPLES, workers)))


class DrawnItself(Drawn, IterableDataset[Any]):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__([])

    def __iter__(self) -> DrawnItself:
        info = get_worker_info()
        self.numbers = list(range(SAMPLES)) if info is None else list(range(info.id, SAMPLES, info.num_workers))
        return self


class OfArrays(OfDrawn):
    """The state of its iterators has no truth value."""

    class Iterator(Drawn):
        def state_dict(self) -> Any:
            return torch.cat([torch.tensor([self.at], dtype=torch.uint8), torch.get_rng_state()])

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict({"at": int(state[0]), "torch": state[1:].clone()})

    def __iter__(self) -> Iterator[Any]:
        return self.Iterator(super().__iter__().numbers)  # type: ignore[attr-defined]


class ByDataset(IterableDataset[Any]):
    """The dataset has the state, and its iterator is a generator."""

    def __init__(self) -> None:
        self.at = self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self.at, self.begun = self.begun, 0
        for number in range(worker + self.at * workers, SAMPLES, workers):
            self.at += 1
            yield number, torch.rand(()).item()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun = state["at"]
        torch.set_rng_state(state["torch"])


def drawing_collate(samples: list[Any]) -> Any:
    return samples, torch.rand(()).item()


KINDS = [OfDrawn, OfArrays, DrawnItself, ByDataset]
TAKEN = [0, 1, 3]


@pytest.mark.parametrize(
    ("kind", "workers", "taken"),
    [(kind, 0, taken) for kind, taken in product(KINDS, TAKEN)]
    + by_day(
        list(product(KINDS, [2], TAKEN)), [(OfDrawn, 2, 0), *((kind, 2, 3) for kind in KINDS[1:]), (ByDataset, 2, 1)]
    ),
)
def test_a_resumed_epoch_has_the_same_draws(kind: type[IterableDataset[Any]], workers: int, taken: int) -> None:
    batches = iter(loader := fl.DataLoader(kind(), 4, num_workers=workers, collate_fn=drawing_collate))
    for _ in islice(batches, taken):
        pass
    state = loader.state_dict()
    rest = list(batches)
    again = fl.DataLoader(kind(), 4, num_workers=workers, collate_fn=drawing_collate)
    again.load_state_dict(state)
    torch.manual_seed(5)  # a resumed process is somewhere else
    assert list(again) == rest


def test_generators_that_are_not_in_the_state_go_on() -> None:
    batches = iter(loader := fl.DataLoader(OfDrawn(), 4))
    next(batches)
    again = fl.DataLoader(OfDrawn(), 4)
    again.load_state_dict(loader.state_dict())
    random.seed(3)
    list(again)
    assert random.random() == random.Random(3).random()


@pytest.mark.parametrize(
    ("kind", "workers", "persistent"),
    [
        *((kind, 0, False) for kind in (OfDrawn, DrawnItself, ByDataset)),
        *((OfDrawn, 2, False), (DrawnItself, 2, True), (ByDataset, 2, True)),
        *at_night((OfDrawn, 2, True), (DrawnItself, 2, False), (ByDataset, 2, False)),
    ],
)
def test_a_finished_epoch_is_followed_by_the_next(
    kind: type[IterableDataset[Any]], workers: int, persistent: bool
) -> None:
    def loader() -> fl.DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        arguments: Any = {"num_workers": workers, "persistent_workers": persistent, "collate_fn": drawing_collate}
        return fl.DataLoader(kind(), 4, generator=generator, **arguments)

    first = loader()
    assert len(list(first)) >= 6
    state, process = first.state_dict(), torch.get_rng_state()
    following = list(first)
    again = loader()
    again.load_state_dict(state)
    torch.set_rng_state(process)  # without workers, only `random=True` saves it
    assert list(again) == following
    assert following or kind is DrawnItself


def test_a_worker_that_is_killed_between_two_epochs_changes_nothing() -> None:
    epochs = []
    for dies in (False, True):
        loader = fl.DataLoader(
            ByDataset(), 4, num_workers=2, persistent_workers=True, generator=torch.Generator().manual_seed(2)
        )
        list(loader)
        if dies:
            os.kill(loader._iterator._workers[1].pid, signal.SIGKILL)
        epochs.append([[part.tolist() for part in batch] for batch in loader])
        loader.close()
    assert len(epochs[0]) >= 6
    assert epochs[1] == epochs[0]


class MapDrawn(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


@pytest.mark.parametrize(
    ("workers", "persistent", "taken"),
    [
        *((0, False, 0), (0, False, 2), (2, False, 2), (2, True, 0)),
        *at_night((2, False, 0), (2, True, 2)),
    ],
)
def test_loading_on_the_way_rewinds_the_draws(workers: int, persistent: bool, taken: int) -> None:
    """The order is drawn from the same generator, with the first batch."""
    loader = fl.DataLoader(
        MapDrawn(), 4, shuffle=True, num_workers=workers, persistent_workers=persistent, collate_fn=drawing_collate
    )
    batches = iter(loader)
    for _ in islice(batches, taken):
        pass
    state = loader.state_dict()
    rest = [*islice(batches, 2)]
    middle = loader.state_dict()
    loader.load_state_dict(middle)
    rest += loader
    loader.load_state_dict(state)
    assert list(loader) == rest
