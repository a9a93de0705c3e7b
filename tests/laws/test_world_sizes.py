"""Elastic: another world size or batch size re-slices the same global order; whole global batches stay equal."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from laws_reference import LARGEST, ORDERS, Augmented, Hands, Row, Work, rows_of, saved, share, taken
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.distributed import DistributedSampler

import feedline as fl

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
WORKS = st.builds(
    Work,
    st.integers(1, LARGEST),
    st.sampled_from(ORDERS),
    st.sampled_from([0, 7, 2**40]),
    st.booleans(),
    st.just(False),
)


INLINE = Hands()


@dataclass(frozen=True)
class Fleet:
    """A run of some ranks: their number, batch size, steps and workers."""

    world: int
    batch_size: int
    steps: int
    hands: Hands = INLINE


FLEETS = st.builds(
    Fleet,
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 6),
    st.sampled_from([INLINE, INLINE, INLINE, Hands("thread", 1)]),
)


def run(work: Work, fleet: Fleet, state: Any) -> tuple[list[list[list[Row]]], Any]:
    """The batches of each rank, and the common state afterwards."""
    received, states = [], []
    for rank in range(fleet.world):
        with work.loader(fleet.batch_size, fleet.hands, (rank, fleet.world)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            received.append([rows_of(batch) for batch in taken(loader, fleet.steps)])
            states.append(saved(loader))
    assert all(other == states[0] for other in states), "the state must not depend on the rank"
    return received, states[0]


def expected(work: Work, fleet: Fleet, epoch: int, position: int) -> list[list[list[Row]]]:
    """The same by the reference, from a place in the global order."""
    steps = list(islice(work.steps(fleet.batch_size * fleet.world, epoch, position), fleet.steps))
    length = len(work.indices(0))
    return [
        [[work.row(e, p) for p in share(span, length, rank, fleet.world)] for e, span in steps]
        for rank in range(fleet.world)
    ]


@given(WORKS, st.lists(FLEETS, min_size=1, max_size=4))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_other_ranks_and_batch_sizes_go_on_in_the_same_global_order(work: Work, fleets: list[Fleet]) -> None:
    assume(all(work.has_batches(fleet.batch_size * fleet.world) for fleet in fleets))
    state, epoch, position = None, 0, 0
    for fleet in fleets:
        received, state = run(work, fleet, state)
        assert received == expected(work, fleet, epoch, position)
        assert [len(batches) for batches in received] == [fleet.steps] * fleet.world
        last = list(islice(work.steps(fleet.batch_size * fleet.world, epoch, position), fleet.steps))[-1:]
        for at, span in last:
            epoch, position = at, span.stop


@given(WORKS, st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]), st.integers(0, 6))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_whole_global_batches_are_equal_when_their_size_stays(work: Work, cut: tuple[int, int], steps: int) -> None:
    """The rows of all ranks together are, row by row, the batch of a single rank."""
    world, batch_size = cut
    assume(work.has_batches(12))
    received, _ = run(work, Fleet(world, batch_size, steps), None)
    whole = work.batches(12, steps)
    together = [[row for batch in step for row in batch] for step in zip(*received, strict=True)]
    assert [rows[: len(alone)] for rows, alone in zip(together, whole, strict=True)] == whole
    assert all(len(rows) - len(alone) < world for rows, alone in zip(together, whole, strict=True))


@given(WORKS, st.integers(1, 5), st.integers(1, 5))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_every_rank_takes_as_many_steps_as_its_length_says(work: Work, world: int, batch_size: int) -> None:
    lengths = set()
    for rank in range(world):
        loader = work.loader(batch_size, Hands(), (rank, world))
        lengths.add((len(loader), len(list(loader))))
    assert len(lengths) == 1
    reported, seen = lengths.pop()
    assert reported == seen


@given(
    st.integers(1, 4),
    st.integers(1, LARGEST),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_a_distributed_sampler_gives_torchs_batches_and_its_epoch_advances(
    world: int, n: int, batch_size: int, shuffle: bool, sampler_drops: bool, drop_last: bool
) -> None:
    """Without `set_epoch`, equal to torch with `set_epoch` before each epoch."""
    assume(not sampler_drops or n >= world)
    dataset = Augmented(n, legacy=False)

    def sampler(rank: int) -> DistributedSampler[Any]:
        return DistributedSampler(dataset, world, rank, shuffle=shuffle, seed=5, drop_last=sampler_drops)

    for rank in range(world):
        theirs = sampler(rank)
        indices: Any = range(n)
        reference = TorchDataLoader(indices, batch_size=batch_size, sampler=theirs, drop_last=drop_last)
        ours = fl.DataLoader(indices, batch_size=batch_size, sampler=sampler(rank), drop_last=drop_last)
        for epoch in range(3):
            theirs.set_epoch(epoch)
            assert [b.tolist() for b in ours] == [b.tolist() for b in reference]
        assert len(ours) == len(reference)


@given(
    st.integers(1, LARGEST), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5)), max_size=4)
)
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_a_distributed_sampler_is_elastic(n: int, runs: list[tuple[int, int, int]]) -> None:
    """After cuts and resumes with other numbers of ranks, the strided rows still follow one global order."""
    indices: Any = range(n)
    work = Work(n, ORDERS[0], 0)
    state, epoch, position = None, 0, 0
    for world, batch_size, count in runs:
        received = []
        for rank in range(world):
            sampler: Any = DistributedSampler(indices, world, rank, shuffle=True, seed=9)
            loader = fl.DataLoader(indices, batch_size=batch_size, sampler=sampler)
            if state is not None:
                loader.load_state_dict(state)
            received.append([batch.tolist() for batch in taken(loader, count)])
            following = saved(loader)
        steps = list(islice(work.steps(world * batch_size, epoch, position), count))
        for step, (at, span) in enumerate(steps):
            order = permutation(n, 9 + at)
            columns = [batches[step] for batches in received]
            rows = [column[row] for row in range(len(columns[0])) for column in columns]
            assert rows[: len(span)] == [order[p] for p in span]
            assert len(rows) - len(span) < world
            epoch, position = at, span.stop
        state = following


def permutation(n: int, seed: int) -> list[int]:
    """torch's order for a DistributedSampler of `seed + epoch`."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_batch_sampler_is_dealt_out_by_whole_batches(world: int) -> None:
    """Rank r takes every world-th batch; the last round is completed with the epoch's first batches."""
    indices: Any = range(20)
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    padded = [*batches, *batches][: -(-len(batches) // world) * world]
    for rank in range(world):
        loader = fl.DataLoader(indices, batch_sampler=batches, distributed=(rank, world))
        assert [batch.tolist() for batch in loader] == padded[rank::world]
        assert len(loader) == len(padded[rank::world])


class Counted(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(12))


def draw(_samples: list[Any]) -> float:
    return torch.rand(()).item()


@pytest.mark.filterwarnings("ignore:.*has no partitions. each of")
@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": range(12), "batch_size": 2},
        {"dataset": range(12), "batch_sampler": [[2 * n, 2 * n + 1] for n in range(6)]},
        {"dataset": Counted(), "batch_size": 2},
        {"dataset": fl.streams.from_items([6, 6], range), "batch_size": 2},
    ],
    ids=["rows", "batches", "strided", "partitions"],
)
def test_collate_functions_draw_other_numbers_on_each_rank(arguments: Any) -> None:
    ranks = [list(fl.DataLoader(**arguments, collate_fn=draw, seed=3, distributed=(rank, 2))) for rank in range(2)]
    assert [len(draws) for draws in ranks] == [3, 3]
    assert len({*ranks[0], *ranks[1]}) == 6
