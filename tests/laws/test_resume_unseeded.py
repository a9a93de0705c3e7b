"""Without `seed`, a resumed run draws the random values that the uninterrupted run would have drawn."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from diagonals import at_night
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from laws_reference import seed_all
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import feedline as fl

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
LENGTH = 14


def draws(which: int = 7) -> list[float]:
    """Numbers from the generators that transforms draw from; `which` selects them by bits."""
    drawn = []
    if which & 1:
        drawn.append(torch.rand(()).item())
    if which & 2:
        drawn.append(random.random())
    if which & 4:
        drawn.append(float(np.random.rand()))  # noqa: NPY002 - as users do
    return drawn


class Drawing(Dataset[Any]):
    """Samples that differ with each draw; some draw more often than others."""

    def __init__(self, which: int = 7) -> None:
        self.which = which

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> list[float]:
        for _ in range(index % 3):
            draws(self.which)
        return [float(index), *draws(self.which)]


class Shuffling(IterableDataset[Any]):
    """A stream that shuffles through a buffer: its samples depend on all earlier draws."""

    def __init__(self, which: int = 7) -> None:
        self.which = which

    def __iter__(self) -> Iterator[list[float]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        buffer: list[int] = []
        for index in range(first, 3 * LENGTH, step):
            buffer.append(index)
            if len(buffer) == 5:
                yield [float(buffer.pop(random.randrange(5))), *draws(self.which)]
        yield from ([float(index), *draws(self.which)] for index in buffer)


class Counting(Drawing):
    """Keeps a generator of its own, and its state."""

    def __init__(self, which: int = 7) -> None:
        super().__init__(which)
        self.own = torch.Generator().manual_seed(3)
        self.read = 0

    def __getitem__(self, index: int) -> list[float]:
        self.read += 1
        return [*super().__getitem__(index), torch.rand((), generator=self.own).item(), float(self.read)]

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own.get_state(), "read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.set_state(state["own"])
        self.read = state["read"]


def collated(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([[*sample, *draws()] for sample in samples], dtype=torch.float64)


def run(make: Any, cuts: list[int], epochs: int, **how: Any) -> list[Any]:
    """The batches of some epochs, stopped and resumed after each number of batches in `cuts`."""
    received: list[Any] = []
    state, begun = None, 0
    for cut in [*cuts, None]:
        seed_all(5 if state is None else 77)  # a new process has other generators
        with make() as loader:
            if state is not None:
                loader.load_state_dict(state)
            left = cut
            while begun < epochs and (left is None or left > 0):
                taken = [torch.stack(list(batch)).tolist() for batch in islice(loader, left)]
                received += taken
                if left is not None:
                    left -= len(taken)
                if left != 0:
                    begun += 1
            state = json.loads(json.dumps(loader.state_dict(**how)))
    return received


ARGUMENTS = st.fixed_dictionaries(
    {"batch_size": st.sampled_from([2, 3]), "collate_fn": st.sampled_from([None, collated])}
)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=3)


def check(kind: Any, which: int, cuts: list[int], workers: int, arguments: dict[str, Any]) -> None:
    more = {"shuffle": True} if issubclass(kind, Drawing) else {}

    def make() -> Any:
        return fl.DataLoader(kind(which), num_workers=workers, **arguments, **more)

    assert run(make, cuts, 2, random=True) == run(make, [], 2)


@given(st.sampled_from([Drawing, Shuffling, Counting]), st.integers(0, 7), CUTS, ARGUMENTS)
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_resuming_inline(kind: Any, which: int, cuts: list[int], arguments: dict[str, Any]) -> None:
    check(kind, which, cuts, 0, arguments)


@given(
    st.sampled_from([Drawing, Shuffling, Counting]), st.integers(0, 7), CUTS, st.integers(1, 3), st.booleans(),
    ARGUMENTS,
)  # fmt: skip
@law_settings(at_most=6, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_resuming_with_processes(
    kind: Any, which: int, cuts: list[int], workers: int, persistent: bool, arguments: dict[str, Any]
) -> None:
    check(kind, which, cuts, workers, {**arguments, "persistent_workers": persistent})


@pytest.mark.parametrize("kind", [Drawing, *at_night(Shuffling), Counting])
def test_persistent_workers_without_a_batch_of_the_rest_of_an_epoch_keep_their_states(kind: Any) -> None:
    check(kind, 1, [1, 2], 3, {"batch_size": 3, "persistent_workers": True})


def on_rank(rank: int, state: Any = None) -> tuple[list[Any], Any]:
    """The batches of a rank, and the state after the first of them."""
    seed_all(5 + rank if state is None else 77)
    with fl.DataLoader(
        Drawing(), 2, num_workers=1, worker_method="process", collate_fn=collated, distributed=(rank, 2)
    ) as loader:
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        received = [next(iterator)]
        after_first = json.loads(json.dumps(loader.state_dict()))
        received += iterator
    return [batch.tolist() for batch in received], after_first


def test_ranks_never_share_their_random_values() -> None:
    (first, state), (second, own) = on_rank(0), on_rank(1)
    elsewhere, _ = on_rank(1, state)
    assert indices_of(elsewhere) == indices_of(second[1:])
    assert not {sample[1] for batch in elsewhere for sample in batch} & {s[1] for batch in first for s in batch}
    assert on_rank(1, own)[0] == second[1:]
    merged = fl.merge_states([own, fl.merge_states([state, own])])
    assert on_rank(0, merged)[0] == first[1:]
    assert on_rank(1, merged)[0] == second[1:]


def indices_of(batches: list[Any]) -> list[float]:
    return [sample[0] for batch in batches for sample in batch]
