"""Shards owned by ranks: one order for every world size, and each rank reads its share of the shards."""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import feedline as fl
from feedline.core.cursor import Cursor
from feedline.core.schedule import Schedule, Share
from feedline.errors import ArgumentError
from feedline.samplers import ShardShuffled


class Case(NamedTuple):
    """A sampler, and an epoch of it."""

    sampler: ShardShuffled
    epoch: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any))
    partitions = draw(st.integers(1, 12))
    rows = draw(st.integers(partitions, 60))
    window = draw(st.integers(1, 6))
    sampler = ShardShuffled(sizes, draw(st.integers(0, 3)), window, partitions=partitions, global_batch_size=rows)
    return Case(sampler, draw(st.integers(0, 2)))


def shard_of(sampler: ShardShuffled, indices: np.ndarray) -> np.ndarray:
    """Shard number of each index."""
    return np.cumsum(sampler.shard_sizes).searchsorted(indices, side="right")


@given(cases())
def test_an_epoch_has_every_index_once(case: Case) -> None:
    order = case.sampler.take(case.epoch, 0, len(case.sampler))
    assert sorted(order.tolist()) == list(range(len(case.sampler)))


@given(cases(), st.data())
def test_any_cut_gives_the_same_indices(case: Case, data: st.DataObject) -> None:
    sampler, epoch = case
    start = data.draw(st.integers(0, len(sampler)))
    stop = data.draw(st.integers(start, len(sampler)))
    whole = sampler.take(epoch, 0, len(sampler))
    assert sampler.take(epoch, start, stop).tolist() == whole[start:stop].tolist()


@example(Case(ShardShuffled([3] * 9, window=16, partitions=4, global_batch_size=8), 0), 2)
@example(Case(ShardShuffled([3] * 9, window=16, partitions=4, global_batch_size=8), 0), 8)  # ranks with padding alone
@given(cases(), st.integers(1, 12))
def test_a_rank_reads_no_shard_but_its_own(case: Case, world_size: int) -> None:
    sampler, epoch = case
    rows = sampler.global_batch_size or len(sampler)
    world_size = gcd(rows, world_size)
    for rank in range(world_size):
        schedule = Schedule(sampler, rows // world_size, share=Share(rank, world_size))
        read = [shard_of(sampler, request.indices) for request in schedule.requests(Cursor(epoch))]
        own = sampler.shards_of(rank, world_size, epoch).tolist()
        assert len(own) == len(set(own))
        assert set(np.concatenate(read).tolist()) <= set(own)


@given(cases())
def test_at_most_a_window_of_shards_is_open_in_a_partition(case: Case) -> None:
    sampler, epoch = case
    if sampler.partitions == 1 or sampler.global_batch_size is None:
        return
    rows = sampler.global_batch_size
    order = shard_of(sampler, sampler.take(epoch, 0, len(sampler) // rows * rows)).reshape(-1, rows)
    bounds = np.arange(sampler.partitions + 1) * rows // sampler.partitions
    for low, high in pairwise(bounds):
        stream = order[:, low:high].ravel()
        last = {shard: place for place, shard in enumerate(stream.tolist())}
        first = {shard: place for place, shard in reversed(list(enumerate(stream.tolist())))}
        for place in range(len(stream)):
            opened = sum(first[shard] <= place <= last[shard] for shard in last)
            assert opened <= sampler.window


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 3))
def test_one_partition_is_the_order_without_partitions(window: int, epochs: int, seed: int) -> None:
    sizes = [3, 0, 7, 5, 11, 2]
    plain, one = (
        ShardShuffled(sizes, seed, window),
        ShardShuffled(sizes, seed, window, partitions=1, global_batch_size=9),
    )
    for epoch in range(epochs):
        assert plain.take(epoch, 0, 28).tolist() == one.take(epoch, 0, 28).tolist()


@pytest.mark.parametrize("worlds", [(4, 3, 5), (1, 2, 8), (8, 1, 6)])
def test_the_global_stream_survives_changes_of_the_world(worlds: tuple[int, ...]) -> None:
    """The number of ranks changes at two cuts; together they read every sample once, in the order of one rank."""
    sampler = ShardShuffled([17] * 60, seed=1, window=3, partitions=16, global_batch_size=120)
    data = np.arange(len(sampler))
    whole = sampler.take(0, 0, len(sampler)).tolist()
    states: list[dict[str, object]] | None = None
    seen: list[int] = []
    for number, world in enumerate(worlds):
        loaders = [
            fl.DataLoader(
                data, batch_size=120 // world, sampler=sampler, seed=0, distributed=(rank, world), drop_last=False
            )  # type: ignore[arg-type]
            for rank in range(world)
        ]
        for loader in loaders:
            if states is not None:
                loader.load_state_dict(states[0])
        iterators = [iter(loader) for loader in loaders]
        steps = 3 if number + 1 < len(worlds) else 1 << 30
        while steps and (rows := [next(iterator, None) for iterator in iterators])[0] is not None:
            seen += [int(value) for part in rows for value in part]
            steps -= 1
        states = [loader.state_dict() for loader in loaders]
        for loader in loaders:
            loader.close()
    assert seen[: len(whole)] == whole
    assert set(seen[len(whole) :]) <= set(whole[:120])  # the last batch is completed with the first samples


def test_each_of_four_nodes_reads_about_a_quarter_of_the_shards() -> None:
    sampler = ShardShuffled([1000] * 4000, seed=0, window=8, partitions=32, global_batch_size=4096)
    for epoch in range(2):
        counts = [len(sampler.shards_of(node, 4, epoch)) for node in range(4)]
        assert max(counts) <= 1.01 * 1000
        assert len(sampler.shards_of(0, 1, epoch)) == 4000
    union = np.unique(np.concatenate([sampler.shards_of(node, 5) for node in range(5)]))
    assert len(union) == 4000
    assert max(len(sampler.shards_of(node, 5)) for node in range(5)) <= 1.1 * 4000 / 5 + 4000 / 32


def test_a_batch_of_a_rank_mixes_the_windows_of_its_partitions() -> None:
    single = ShardShuffled([100] * 640, seed=0, window=4).mixing(64)
    several = ShardShuffled([100] * 640, seed=0, window=4, partitions=64, global_batch_size=512).mixing(64)
    assert several.same_shard_pairs < single.same_shard_pairs
    assert several.shards_per_batch > single.shards_per_batch
    assert several.same_shard_pairs_ideal == single.same_shard_pairs_ideal


def test_partitions_need_the_global_batch_that_they_divide() -> None:
    with pytest.raises(ArgumentError, match="partitions= needs global_batch_size="):
        ShardShuffled([5, 5], partitions=2)
    with pytest.raises(ArgumentError, match="at least partitions=8, a row for each; got 4"):
        ShardShuffled([5, 5], partitions=8, global_batch_size=4)
    with pytest.raises(ArgumentError, match="rank must be below world_size=2; got 2"):
        ShardShuffled([5, 5]).shards_of(2, 2)
    with pytest.raises(ArgumentError, match="for one partition"):
        ShardShuffled([5, 5], partitions=2, global_batch_size=4).nbytes_per_sample([1, 1])
