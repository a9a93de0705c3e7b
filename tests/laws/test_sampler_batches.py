"""The laws of samplers that combine others, divide them among ranks, or return whole batches."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sampler_orders import EPOCHS, LABELS, LENGTHS, SEEDS, SIZES, batched, buckets, permutations, simple, whole
from torch.utils.data import DataLoader, DistributedSampler

from feedline.samplers import (
    BatchIndexSampler,
    Distributed,
    DistributedBatches,
    IndexSampler,
    Infinite,
    LengthBuckets,
    Mixture,
    Sequential,
    Shuffled,
    StratifiedBatches,
    TorchDistributed,
    VirtualEpochs,
)


@given(simple, st.integers(0, 5), st.integers(0, 300))
def test_infinite_is_epoch_after_epoch(sampler: IndexSampler, turns: int, count: int) -> None:
    endless = Infinite(sampler)
    start = turns * len(sampler) // 2
    epochs = range(2, 3 + -(-(start + count) // len(sampler)))
    expected = list(chain.from_iterable(whole(sampler, epoch) for epoch in epochs))
    assert endless.take(2, start, start + count).tolist() == expected[start : start + count]
    endless.set_epoch(2)
    assert list(islice(endless, len(expected))) == expected
    with pytest.raises(TypeError, match="endless"):
        len(endless)


@given(simple, st.integers(1, 400))
def test_virtual_epochs_cut_the_endless_order(sampler: IndexSampler, num_samples: int) -> None:
    virtual = VirtualEpochs(sampler, num_samples)
    orders = list(chain.from_iterable(whole(virtual, epoch) for epoch in range(3)))
    assert orders == Infinite(sampler).take(0, 0, 3 * num_samples).tolist()


@given(permutations, st.integers(1, 40), EPOCHS, st.booleans())
def test_ranks_together_have_the_whole_order(
    sampler: IndexSampler, world_size: int, epoch: int, drop_last: bool
) -> None:
    n = len(sampler)
    drop_last = drop_last and n >= world_size
    ranks = [Distributed(sampler, rank, world_size, drop_last) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    dealt = np.stack([rank.take(epoch, 0, len(rank)) for rank in ranks], axis=1).ravel()
    order = sampler.take(epoch, 0, n)
    assert np.array_equal(dealt, np.resize(order, len(dealt)))
    assert 0 <= (n - len(dealt) if drop_last else len(dealt) - n) < world_size


@given(SIZES, st.integers(1, 12), st.integers(0, 50), st.booleans(), st.booleans(), st.integers(-5, 5))
def test_torchs_distributed_order_is_torchs(
    n: int, world_size: int, epoch: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    drop_last = drop_last and n >= world_size
    for rank in range(world_size):
        theirs = DistributedSampler(range(n), world_size, rank, shuffle, 7 + seed, drop_last)  # type: ignore[arg-type]
        ours = Distributed(TorchDistributed(theirs), rank, world_size, drop_last)
        theirs.set_epoch(epoch)
        assert whole(ours, epoch) == list(theirs)
        assert len(ours) == len(theirs)


@given(st.lists(SIZES, min_size=1, max_size=5), st.data(), SEEDS, EPOCHS)
def test_a_mixture_gives_each_dataset_its_share_at_any_moment(
    sizes: list[int], data: st.DataObject, seed: int, epoch: int
) -> None:
    weights = data.draw(st.lists(st.floats(0.05, 5), min_size=len(sizes), max_size=len(sizes)))
    mixture = Mixture(sizes, weights, seed, stop=data.draw(st.integers(1, 4000)))
    datasets, _ = mixture.locate(mixture.take(epoch, 0, len(mixture)))
    shares = np.array(weights) / sum(weights)
    had = np.cumsum(datasets[:, None] == np.arange(len(sizes)), axis=0)
    wanted = shares * np.arange(1, len(datasets) + 1)[:, None]
    assert (np.abs(had - wanted) < 3 + 2 * len(sizes) * shares).all()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.data(), SEEDS, EPOCHS)
def test_a_mixture_ends_with_the_first_or_last_dataset(
    sizes: list[int], data: st.DataObject, seed: int, epoch: int
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 5), min_size=len(sizes), max_size=len(sizes)))
    for stop, is_through in (("first_exhausted", any), ("all_exhausted", all)):
        mixture = Mixture(sizes, weights, seed, stop)
        datasets, indices = mixture.locate(mixture.take(epoch, 0, len(mixture)))
        seen = [len(set(indices[datasets == k].tolist())) for k in range(len(sizes))]
        assert is_through(have == size for have, size in zip(seen, sizes, strict=True))
        last, before = datasets[-1], indices[:-1][datasets[:-1] == datasets[-1]]
        assert len(set(before.tolist())) == sizes[last] - 1  # one position less would not have been enough
        if stop == "first_exhausted":
            assert len(set(zip(datasets.tolist(), indices.tolist(), strict=True))) == len(mixture)


@given(st.integers(2, 60), st.floats(0.2, 5), SEEDS)
def test_a_dataset_in_a_mixture_comes_in_its_samplers_order(n: int, weight: float, seed: int) -> None:
    mixture = Mixture([Shuffled(n, 5), Sequential(9)], [weight, 1], seed, stop=500)
    datasets, indices = mixture.locate(mixture.take(0, 0, 500))
    mine = indices[datasets == 0]
    assert np.array_equal(mine, Infinite(Shuffled(n, 5)).take(0, 0, len(mine)))


@given(batched, EPOCHS, st.data())
def test_any_way_to_cut_an_epoch_gives_the_same_batches(
    sampler: BatchIndexSampler, epoch: int, data: st.DataObject
) -> None:
    n = len(sampler)
    cut = data.draw(st.integers(0, n))
    order = [batch.tolist() for batch in sampler.take_batches(epoch, 0, n + 3)]
    parts = sampler.take_batches(epoch, 0, cut) + sampler.take_batches(epoch, cut, n)
    assert len(order) == n
    assert [batch.tolist() for batch in parts] == order
    assert not sampler.take_batches(epoch, n, n + 1)
    copy = pickle.loads(pickle.dumps(sampler))
    sampler.take_batches(epoch + 1, 0, n)
    for each in (copy, sampler):
        assert [batch.tolist() for batch in each.take_batches(epoch, 0, n)] == order
    for batch in parts:
        batch[:] = -1
    assert [batch.tolist() for batch in sampler.take_batches(epoch, 0, n)] == order


@given(batched, st.integers(0, 3))
def test_torch_takes_it_as_batch_sampler(sampler: BatchIndexSampler, epoch: int) -> None:
    sampler.set_epoch(epoch)
    batches = list(DataLoader(range(200), batch_sampler=sampler, collate_fn=list))  # type: ignore[arg-type]
    assert batches == [batch.tolist() for batch in sampler.take_batches(epoch, 0, len(sampler))]
    assert {type(index) for batch in sampler for index in batch} == {int}


@given(buckets, st.integers(1, 12), EPOCHS)
def test_ranks_together_have_all_batches(sampler: LengthBuckets, world_size: int, epoch: int) -> None:
    ranks = [DistributedBatches(sampler, rank, world_size) for rank in range(world_size)]
    dealt = [rank.take_batches(epoch, 0, len(rank)) for rank in ranks]
    rounds = list(chain.from_iterable(zip(*dealt, strict=True)))
    batches = sampler.take_batches(epoch, 0, len(sampler))
    assert 0 <= len(rounds) - len(batches) < world_size
    assert all(np.array_equal(mine, batches[i % len(batches)]) for i, mine in enumerate(rounds))


@given(LABELS, st.integers(0, 40), SEEDS, EPOCHS, st.booleans())
def test_every_batch_holds_every_class_in_its_share(
    labels: list[int], more: int, seed: int, epoch: int, drop_last: bool
) -> None:
    sizes = Counter(labels)
    size = min(len(sizes) + more, len(labels))
    sampler = StratifiedBatches(labels, size, seed, drop_last)
    batches = [Counter(labels[i] for i in batch) for batch in sampler.take_batches(epoch, 0, len(sampler))]
    assert all(batch.total() == size and batch.keys() == sizes.keys() for batch in batches)
    for label in sizes:
        counts = [batch[label] for batch in batches]
        assert max(counts) - min(counts) <= 1
    times = Counter(chain.from_iterable(batch.tolist() for batch in sampler.take_batches(epoch, 0, len(sampler))))
    common = [i for i, label in enumerate(labels) if sizes[label] > len(sampler)]
    if drop_last:
        assert all(times[i] <= 1 for i in common)
    else:
        assert len(times) == len(labels)


@given(LABELS, st.integers(1, 9), SEEDS, EPOCHS)
def test_equal_shares_are_equal(labels: list[int], each: int, seed: int, epoch: int) -> None:
    classes = len(set(labels))
    sampler = StratifiedBatches(labels, classes * each, seed, shares="equal")
    for batch in sampler.take_batches(epoch, 0, len(sampler)):
        assert set(Counter(labels[i] for i in batch.tolist()).values()) == {each}
    assert len(sampler) == -(-len(labels) // (classes * each))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(1, 30))
def test_a_set_that_divides_evenly_is_dealt_exactly_once(sizes: list[int], batches: int) -> None:
    labels = list(chain.from_iterable([c] * (size * batches) for c, size in enumerate(sizes)))
    sampler = StratifiedBatches(labels, sum(sizes), seed=3)
    assert len(sampler) == batches
    assert sorted(chain.from_iterable(sampler)) == list(range(len(labels)))


@given(LENGTHS, st.integers(1, 20), st.one_of(st.none(), st.integers(90, 900)), SEEDS, EPOCHS, st.booleans())
def test_buckets_hold_their_bounds_and_lose_nothing(
    lengths: list[int], batch_size: int, max_tokens: int | None, seed: int, epoch: int, drop_last: bool
) -> None:
    drop_last = drop_last and len(lengths) >= batch_size
    sampler = LengthBuckets(lengths, batch_size, max_tokens=max_tokens, seed=seed, drop_last=drop_last)
    batches = sampler.take_batches(epoch, 0, len(sampler))
    padded = [max(lengths[i] for i in batch) * len(batch) for batch in batches]
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    assert max_tokens is None or max(padded) <= max_tokens
    given_out = list(chain.from_iterable(batch.tolist() for batch in batches))
    assert len(set(given_out)) == len(given_out)
    assert len(given_out) == len(lengths) or (drop_last and len(lengths) - len(given_out) < batch_size)
    tokens = sum(lengths[i] for i in given_out)
    assert sampler.padding_share(epoch) == pytest.approx(1 - tokens / sum(padded) if sum(padded) else 0)


@given(st.integers(20, 200), st.integers(2, 10), EPOCHS)
def test_torch_and_feedline_epochs_of_one_sampler_agree(n: int, batch_size: int, epoch: int) -> None:
    """One object, two ways to read it."""
    sampler = Shuffled(n, 4)
    sampler.set_epoch(epoch)
    batches = list(DataLoader(torch.arange(n), batch_size, sampler=sampler))  # type: ignore[arg-type]
    assert torch.cat(batches).tolist() == sampler.take(epoch, 0, n).tolist()
