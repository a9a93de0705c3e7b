"""Exact over iterable datasets: by partitions, with the dataset's own state or by fast-forward, for any workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from laws_reference import Hands, KeptLoaders, taken
from torch.utils.data import IterableDataset, get_worker_info

import feedline as fl

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


class Sharded(IterableDataset[Any]):
    """`0 .. n - 1` divided among the workers, each with a draw; it has no state of its own."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.n, step):
            yield index, float(fl.sample_rng().random())


class Stateful(IterableDataset[Any]):
    """The same with a state of its own, in the way of torch's StatefulDataLoader: it counts how much it reads."""

    def __init__(self, n: int) -> None:
        self.n, self.at, self.read = n, 0, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while (index := first + self.at * step) < self.n:
            self.at += 1
            self.read += 1
            yield index, self.read
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.read = state["at"], state["read"]


class Partitioned(IterableDataset[Any]):
    """Shards itself into partitions of uneven length, in another order in every epoch."""

    traits = fl.Traits(thread_safe=True)

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.num_partitions = sizes, len(sizes)

    def __iter__(self) -> Iterator[Any]:
        for partition in range(self.num_partitions):
            yield from self.partition(partition, 0)

    def partition(self, partition: int, epoch: int) -> Iterator[Any]:
        for number in range(self.sizes[partition]):
            yield partition, epoch, number, float(fl.sample_rng().random())


def received(batch: Any) -> Any:
    """A batch as plain numbers."""
    return [torch.as_tensor(column).tolist() for column in batch]


@dataclass(frozen=True)
class Leg:
    """One run between two checkpoints."""

    hands: Hands
    count: int


def relay(dataset: Any, batch_size: int | None, legs: list[Leg], **more: Any) -> list[Any]:
    """The batches of all runs, each from the checkpoint of the previous one."""
    seen: list[Any] = []
    state = None
    for leg in legs:
        with fl.DataLoader(dataset(), batch_size, seed=3, **leg.hands.arguments(), **more) as loader:
            if state is not None:
                loader.load_state_dict(state)
            seen += [received(batch) for batch in taken(loader, leg.count)]
            state = json.loads(json.dumps(loader.state_dict()))
    return seen


def uninterrupted(dataset: Any, batch_size: int | None, hands: Hands, count: int, **more: Any) -> list[Any]:
    return relay(dataset, batch_size, [Leg(hands, count)], **more)


COUNTS = st.lists(st.integers(0, 8), min_size=2, max_size=4)


@given(st.sampled_from([Sharded, Stateful]), st.integers(1, 25), st.sampled_from([None, 1, 3]), st.booleans(), COUNTS)
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_resuming_inline(kind: Any, n: int, batch_size: int | None, drop_last: bool, counts: list[int]) -> None:
    more = {"drop_last": drop_last and batch_size is not None}
    legs = [Leg(Hands(), count) for count in counts]
    seen = relay(lambda: kind(n), batch_size, legs, **more)
    assert seen == uninterrupted(lambda: kind(n), batch_size, Hands(), sum(counts), **more)


@given(
    st.sampled_from([Sharded, Stateful]),
    st.integers(1, 25),
    st.sampled_from([None, 1, 3]),
    st.integers(1, 2),
    st.lists(st.integers(0, 4), min_size=2, max_size=4),
)
@law_settings(at_most=8, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_resuming_with_new_processes(
    kind: Any, n: int, batch_size: int | None, workers: int, counts: list[int]
) -> None:
    crew = Hands("process", workers)
    seen = relay(lambda: kind(n), batch_size, [Leg(crew, count) for count in counts])
    assert seen == uninterrupted(lambda: kind(n), batch_size, crew, sum(counts))


@given(
    st.sampled_from([Sharded, Stateful]),
    st.integers(12, 25),
    st.sampled_from([None, 2]),
    st.integers(2, 3),
    st.lists(st.integers(1, 3), min_size=1, max_size=2),
)
@law_settings(at_most=8, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_the_partitions_of_the_first_run_stay_whatever_the_new_workers_of_later_runs(
    kind: Any, n: int, batch_size: int | None, partitions: int, later: list[int]
) -> None:
    """Until the end of its epoch, a stream that shards itself continues as with its initial workers."""

    def loader(workers: int) -> Any:
        return fl.DataLoader(kind(n), batch_size, seed=3, num_workers=workers)

    with loader(partitions) as whole:
        expected = [received(batch) for batch in whole]
    seen: list[Any] = []
    state = None
    for workers in (partitions, *later):
        with loader(workers) as part:
            if state is not None:
                part.load_state_dict(state)
            seen += [received(batch) for batch in islice(part, 2)]
            state = json.loads(json.dumps(part.state_dict()))
    with loader(1) as last:
        last.load_state_dict(state)
        seen += [received(batch) for batch in last]
    assert seen == expected


STREAMS = [(25, None), (16, 3), (12, 2)]
"""Lengths and batch sizes of streams, each with workers that live as long as these tests.

They have no state of their own: a loader gives every state of a dataset to new workers.
"""


def kept_stream(kept: KeptLoaders, number: int, workers: int, state: Any = None) -> Any:
    """A loader of one of `STREAMS`, at a state."""
    n, batch_size = STREAMS[number]
    more = {"num_workers": workers, "persistent_workers": True}
    return kept.begin((number, workers), lambda: fl.DataLoader(Sharded(n), batch_size, seed=3, **more), state)


@cache
def whole_epoch(number: int, partitions: int) -> list[Any]:
    """One epoch of one of `STREAMS`, uninterrupted."""
    n, batch_size = STREAMS[number]
    return [received(batch) for batch in fl.DataLoader(Sharded(n), batch_size, seed=3, num_workers=partitions)]


@given(
    st.integers(0, len(STREAMS) - 1),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=4),
)
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_resuming_with_any_kept_processes_within_an_epoch(
    kept: KeptLoaders, number: int, partitions: int, later: list[tuple[int, int]]
) -> None:
    expected = whole_epoch(number, partitions)
    seen: list[Any] = []
    state = None
    for workers, count in [(partitions, 1), *later]:
        loader = kept_stream(kept, number, workers, state)
        count = min(count, len(expected) - len(seen) - 1)
        seen += [received(batch) for batch in islice(loader, count)]
        state = json.loads(json.dumps(loader.state_dict()))
    seen += [received(batch) for batch in kept_stream(kept, number, 1, state)]
    assert seen == expected


LANES = st.lists(st.integers(0, 7), min_size=1, max_size=5)
CREWS = st.sampled_from([Hands(), Hands(), Hands("thread", 1), Hands("thread", 2), Hands("thread", 3)])


@given(LANES, st.sampled_from([None, 1, 3]), st.lists(st.builds(Leg, CREWS, st.integers(0, 8)), min_size=1, max_size=4))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_partitions_do_not_know_their_workers(sizes: list[int], batch_size: int | None, legs: list[Leg]) -> None:
    seen = relay(lambda: Partitioned(sizes), batch_size, legs)
    total = sum(leg.count for leg in legs) if sum(sizes) else 0
    assert seen == uninterrupted(lambda: Partitioned(sizes), batch_size, Hands(), total)


def faulty(states: list[Any], rank: int, late: Any) -> list[list[Any]]:
    """The states of all ranks, without that of `rank`, with it twice, and with an earlier one of it."""
    before, after = states[:rank], states[rank + 1 :]
    wrong = [before + after, [*states, states[rank]]]
    return wrong if late == states[rank] else [*wrong, [*before, late, *after]]


@pytest.mark.filterwarnings("ignore:.* ranks cannot share equally:UserWarning")
@given(
    LANES,
    st.sampled_from([None, 1, 3]),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.data(),
)
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_partition_datasets_are_elastic(
    sizes: list[int], batch_size: int | None, legs: list[tuple[int, int]], after: int, data: st.DataObject
) -> None:
    """Stops with some ranks and resumes with others deliver every batch of the epoch exactly once.

    States merge only if they are those of all ranks, of each rank once, and of the same step.
    """

    def loader(rank: int, world: int, state: Any) -> Any:
        made = fl.DataLoader(Partitioned(sizes), batch_size, seed=3, distributed=(rank, world))
        if state is not None:
            made.load_state_dict(state)
        return made

    seen, merged = [], None
    for ranks, steps in legs:
        world = min(ranks, len(sizes))
        saved: list[list[Any]] = []  # by rank, its states after each step
        for rank in range(world):
            run = loader(rank, world, merged)
            saved.append([json.loads(json.dumps(run.state_dict()))])
            for batch in islice(run, steps):
                seen.append(received(batch))
                saved[rank].append(json.loads(json.dumps(run.state_dict())))
            if run.state_dict()["epoch"]:
                return  # a rank had reached the end of its epoch, so there is no common step of all states
        states = [each[steps] for each in saved]
        if world > 1:
            one = data.draw(st.integers(0, world - 1))
            late = saved[one][data.draw(st.integers(0, max(0, steps - 1)))]
            for wrong in faulty(states, one, late):
                with pytest.raises(fl.errors.StateError, match=f"rank {one}"):
                    fl.merge_states(data.draw(st.permutations(wrong)))
        merged = fl.merge_states(data.draw(st.permutations(states)))
    for rank in range(world := min(after, len(sizes))):
        seen += [received(batch) for batch in loader(rank, world, merged)]
    assert sorted(map(repr, seen)) == sorted(repr(received(batch)) for batch in loader(0, 1, None))
