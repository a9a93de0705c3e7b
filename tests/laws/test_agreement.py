"""Agreement and recovery: every kind of worker gives the same bits, and so do workers that are killed on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from extensions import registered
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from laws_reference import ORDERS, Augmented, Hands, KeptLoaders, Work, draws, rows_of, seed_torch, taken
from torch.utils.data import Dataset, Subset, TensorDataset

import feedline as fl

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
N = 30


@pytest.fixture(scope="module", autouse=True)
def executor() -> Iterator[None]:
    """The pool "executor"."""
    with registered():
        yield


class Images(Dataset[Any]):
    """Arrays with noise, a label and a name, in nested containers."""

    def __getitem__(self, index: int) -> Any:
        noise = fl.sample_rng().standard_normal((3, 4)).astype(np.float32)
        return {"image": noise + index, "target": (index, [torch.tensor([index, -index])]), "name": f"image {index}"}

    def __len__(self) -> int:
        return N


class Many(Dataset[Any]):
    """Fetches many samples at once, each with a draw of its own."""

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, fl.sample_rng(row).integers(1 << 30)) for row, index in enumerate(indices)]

    def __len__(self) -> int:
        return N


def summed(samples: list[Any]) -> Any:
    """A random collate function of the user's own."""
    return len(samples), fl.sample_rng(0).random(), repr(samples)


DATASETS: dict[str, Callable[[], Any]] = {
    "images": Images,
    "many": Many,
    "tensors": lambda: TensorDataset(torch.arange(N * 6).reshape(N, 6), torch.arange(N) * 0.5),
    "subset": lambda: Subset(TensorDataset(torch.arange(N)), [*range(0, N, 2), *range(N)][:N]),
    "list": lambda: [(i, str(i)) for i in range(N)],
}
CREWS = (
    *(Hands("thread", 1), Hands("thread", 3), Hands("process", 1)),
    Hands("process", 3, 1, {"persistent_workers": True}),
    Hands("executor", 3),  # a pool from outside, of `examples/extending`
)


def same(a: Any, b: Any) -> bool:
    """Equal, container by container and bit by bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(
    st.sampled_from(sorted(DATASETS)),
    st.sampled_from([None, summed]),
    st.sampled_from([None, 1, 4, 7, N]),
    st.booleans(),
    st.integers(0, 2**63),
    st.sampled_from(CREWS),
)
@law_settings(at_most=10, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_every_kind_of_new_worker_gives_the_same_batches(
    name: str, collate_fn: Any, batch_size: int | None, shuffle: bool, seed: int, crew: Hands
) -> None:
    arguments = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "collate_fn": collate_fn}
    alone = fl.DataLoader(DATASETS[name](), **arguments)
    with fl.DataLoader(DATASETS[name](), **arguments, **crew.arguments()) as crewed:
        for _ in range(2):
            assert same(list(alone), list(crewed))


KEPT = [
    ("images", {"batch_size": 4, "shuffle": True}),
    ("many", {"batch_size": 7, "collate_fn": summed}),
    ("tensors", {"batch_size": N, "shuffle": True}),
    ("list", {"batch_size": None}),
]


@given(st.integers(0, len(KEPT) - 1), st.sampled_from(["process", "executor"]), st.integers(0, 2**31))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_every_kind_of_worker_gives_the_same_batches(kept: KeptLoaders, case: int, method: str, epoch: int) -> None:
    """In any epoch, which determines the order and each draw, like the seed."""
    name, arguments = KEPT[case]
    crew = Hands(method, 2, more={"persistent_workers": True})
    dataset = DATASETS[name]()
    crewed = kept.begin((case, method), lambda: fl.DataLoader(dataset, **arguments, seed=3, **crew.arguments()))
    alone = fl.DataLoader(dataset, **arguments, seed=3)
    for loader in (alone, crewed):
        loader.set_epoch(epoch)
    assert same(list(alone), list(crewed))


@given(st.integers(0, 2**63), st.integers(0, 2**63))
@law_settings(at_most=25, because=Reason.COSTLY)
def test_another_seed_draws_otherwise_and_each_position_for_itself(seed: int, other: int) -> None:
    assume(seed != other)
    rows = [row for epoch in (0, 1) for row in draws(seed, epoch, legacy=True, length=16)]
    for column in zip(*rows, strict=True):
        assert len(set(column)) == len(column), "two positions drew the same"
    assert not set(rows) & set(draws(other, 0, legacy=True, length=16))


@given(st.integers(0, 2**40))
@law_settings()
def test_inline_work_leaves_the_generators_of_the_loop_alone(seed: int) -> None:
    """With a seed, inline draws of samples from the global generators do not affect the training code."""
    seed_torch(3)
    before = torch.get_rng_state()
    list(fl.DataLoader(Augmented(12, legacy=True), batch_size=3, seed=seed))
    assert torch.equal(torch.get_rng_state(), before)


@given(
    st.builds(Work, st.integers(8, 40), st.sampled_from(ORDERS), st.sampled_from([0, 7]), st.booleans(), st.just(True)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=3),
)
@law_settings(at_most=10, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_killed_workers_do_not_change_the_stream(
    work: Work, batch_size: int, workers: int, prefetch: int, kills: list[tuple[int, int]]
) -> None:
    """`kill -9` of worker `which` after batch `number`, for each of `kills`."""
    count = 2 * (work.n // batch_size)
    number = 0

    def strike(iterator: Any) -> None:
        nonlocal number
        for when, which in kills:
            if when == number:
                victim = iterator._workers[which % len(iterator._workers)].pid
                with suppress(ProcessLookupError):  # it has built its last batch of the epoch
                    os.kill(victim, signal.SIGKILL)
        number += 1

    crew = Hands("process", workers, prefetch, {"recovery": fl.Recovery(deaths_per_epoch=10)})
    with work.loader(batch_size, crew) as loader:
        received = [rows_of(batch) for batch in taken(loader, count, strike)]
    assert received == work.batches(batch_size, count)
