"""`kill -9` of any worker at any moment: the batches of the loop stay bit-identical."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from diagonals import at_night
from process_cases import default_start_method
from rounds import rounds
from torch.utils.data import IterableDataset, get_worker_info

import feedline
from feedline.workers.process import fork_server

pytestmark = pytest.mark.stress

KILLS = rounds(12, 50)


class Augmented:
    """Images with random noise from the global generators, of a size that travels in slots."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        noise = np.random.standard_normal((3, 24, 24))  # noqa: NPY002 - what users' transforms draw from
        return {"image": torch.from_numpy(noise) + index, "crop": random.random(), "index": index}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id, 600, info.num_workers))


@pytest.fixture(autouse=True)
def undisturbed(no_debris: Any, caplog: Any) -> None:
    fork_server.start()
    caplog.set_level(logging.ERROR, "feedline")


class Killer:
    """Kills random processes of an iterator at random times, up to a number of kills."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.count = 0

    def strike(self, processes: list[Any]) -> None:
        if self.count < KILLS and self.chance.random() < 0.6:
            victim = self.chance.choice(processes)
            victim.kill()
            self.count += 1


def loader(dataset: Any, **more: Any) -> Any:
    many = feedline.Recovery(deaths_per_epoch=10 * KILLS)
    return feedline.DataLoader(dataset, batch_size=8, recovery=many, worker_method="process", **more)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(torch.equal(left, right))


@pytest.mark.parametrize(
    ("method", "persistent"), [("fork", False), ("forkserver", True), *at_night(("fork", True), ("forkserver", False))]
)
def test_many_kills(method: str, persistent: bool) -> None:
    killer = Killer(seed=1)
    undisturbed = loader(Augmented(), shuffle=True, seed=5)
    disturbed = loader(Augmented(), shuffle=True, seed=5, num_workers=2, persistent_workers=persistent)
    with default_start_method(method), disturbed:
        while killer.count < KILLS:
            expected = list(undisturbed)
            iterator = iter(disturbed)
            for want in expected:
                assert same(next(iterator), want)
                killer.strike(iterator._workers)
            assert next(iterator, None) is None
            del iterator
    assert killer.count == KILLS


def test_many_kills_of_partitions() -> None:
    killer = Killer(seed=2)
    with loader(Stream(), num_workers=2) as disturbed:
        while killer.count < KILLS:
            iterator = iter(disturbed)
            seen = []
            for batch in iterator:
                seen.append(batch.tolist())
                killer.strike(iterator._workers)
            turns = [[*range(2 * 8 * (n // 2) + n % 2, 600, 2)][:8] for n in range(76)]
            assert seen == turns
            del iterator


def test_many_kills_out_of_order() -> None:
    killer = Killer(seed=3)
    with loader(Augmented(), num_workers=2, seed=5, in_order=False) as disturbed:
        while killer.count < KILLS:
            iterator = iter(disturbed)
            seen = []
            for batch in iterator:
                seen += batch["index"].tolist()
                killer.strike(iterator._workers)
            assert sorted(seen) == list(range(300))
            del iterator


def forkers_of(iterator: Any) -> list[psutil.Process]:
    """The processes that the last worker was forked from, the nearest first; empty for an orphan of an earlier kill."""
    own = {1, os.getpid(), *(each.pid for each in psutil.Process().parents())}
    with suppress(psutil.NoSuchProcess):
        return [each for each in psutil.Process(iterator._workers[-1].pid).parents() if each.pid not in own]
    return []


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_kills_of_what_they_were_forked_from(method: str) -> None:
    chance = random.Random(4)
    expected = list(loader(Augmented(), seed=5))
    with default_start_method(method), loader(Augmented(), num_workers=2, seed=5) as disturbed:
        iterator = iter(disturbed)
        kills, due = 0, 5
        for number, want in enumerate(expected):
            assert same(next(iterator), want)
            if number >= due and (forkers := forkers_of(iterator)):
                (forkers[0] if method == "fork" else chance.choice(forkers[:2])).kill()
                kills, due = kills + 1, number + 12
        assert kills >= len(expected) // 24
        del iterator
