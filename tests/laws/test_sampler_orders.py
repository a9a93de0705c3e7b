"""The laws of feedline's own samplers: pure, independent of cuts, and with the promised distribution."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feedline.samplers import (
    ClassBalanced,
    Curriculum,
    Distributed,
    DistributedBatches,
    IndexSampler,
    LengthBuckets,
    Mixture,
    Sequential,
    ShardShuffled,
    Shuffled,
    StratifiedBatches,
    Subset,
    VirtualEpochs,
    Weighted,
)

SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 2**40)
SIZES = st.integers(1, 700)
WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=40).filter(any)
LABELS = st.lists(st.integers(-3, 3), min_size=1, max_size=200)
SHARDS = st.lists(st.integers(0, 60), min_size=1, max_size=20).filter(any)
LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=200)

permutations = st.one_of(
    st.builds(Sequential, SIZES),
    st.builds(Shuffled, SIZES, SEEDS),
    st.builds(ShardShuffled, SHARDS, SEEDS, st.integers(1, 25)),
)
simple = st.one_of(
    permutations,
    st.builds(Weighted, WEIGHTS, st.one_of(st.none(), st.integers(1, 300)), seed=SEEDS),
    st.builds(Weighted, WEIGHTS, replacement=st.just(False), seed=SEEDS),
    st.builds(ClassBalanced, LABELS, st.one_of(st.none(), st.integers(1, 300)), SEEDS),
)


@st.composite
def distributed(draw: st.DrawFn, samplers: Any = simple, kind: Any = Distributed) -> Any:
    world_size = draw(st.integers(1, 9))
    sampler = draw(samplers)
    drop_last = len(sampler) >= world_size and draw(st.booleans())
    return kind(sampler, draw(st.integers(0, world_size - 1)), world_size, drop_last)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    parts = draw(st.lists(st.one_of(SIZES, simple), min_size=1, max_size=4))
    weights = draw(st.lists(st.floats(0.1, 10), min_size=len(parts), max_size=len(parts)))
    stop = draw(st.one_of(st.sampled_from(["first_exhausted", "all_exhausted"]), st.integers(1, 3000)))
    return Mixture(parts, weights, draw(SEEDS), stop)


@st.composite
def curricula(draw: st.DrawFn) -> Curriculum:
    parts = draw(st.lists(st.one_of(SIZES, simple), min_size=1, max_size=3))
    weights = st.lists(st.floats(0.1, 10), min_size=len(parts), max_size=len(parts))
    return Curriculum(
        parts, draw(st.lists(st.tuples(st.integers(1, 1500), weights), min_size=1, max_size=3)), draw(SEEDS)
    )


@st.composite
def subsets(draw: st.DrawFn) -> Subset:
    n, seed = draw(SIZES), draw(st.integers(0, 2**64))  # to draw each index takes as long as all tests of the sampler
    return Subset(np.random.default_rng(seed).integers(0, 10**12, n, endpoint=True).tolist(), Shuffled(n))


finite = st.one_of(
    curricula(),
    simple,
    distributed(),
    mixtures(),
    st.builds(VirtualEpochs, simple, SIZES),
    subsets(),
)


@st.composite
def stratified(draw: st.DrawFn) -> StratifiedBatches:
    labels = draw(LABELS)
    classes, shares = len(set(labels)), draw(st.sampled_from(["proportional", "equal"]))
    return StratifiedBatches(labels, draw(st.integers(classes, classes + 40)), draw(SEEDS), shares=shares)


buckets = st.one_of(
    st.builds(LengthBuckets, LENGTHS, st.integers(1, 20), seed=SEEDS, tolerance=st.floats(0, 0.9)),
    st.builds(LengthBuckets, LENGTHS, max_tokens=st.integers(90, 900), seed=SEEDS),
    st.builds(LengthBuckets, LENGTHS, st.integers(1, 20), max_tokens=st.integers(90, 900), seed=SEEDS),
)
batched = st.one_of(stratified(), buckets, distributed(buckets, DistributedBatches))


def whole(sampler: IndexSampler, epoch: int = 0) -> list[int]:
    return sampler.take(epoch, 0, len(sampler)).tolist()


@given(finite, EPOCHS, st.data())
def test_any_way_to_cut_an_epoch_gives_the_same_indices(sampler: IndexSampler, epoch: int, data: st.DataObject) -> None:
    n = len(sampler)
    inner = data.draw(st.lists(st.integers(0, n), max_size=6).map(sorted))
    parts = [sampler.take(epoch, low, high) for low, high in pairwise([0, *inner, n])]
    order = sampler.take(epoch, 0, n + 10)  # past the end
    assert order.dtype == np.int64
    assert len(order) == n
    assert np.array_equal(np.concatenate(parts), order)
    assert not len(sampler.take(epoch, n, n + 5))


@given(finite, EPOCHS, EPOCHS)
def test_an_epoch_does_not_depend_on_earlier_requests(sampler: IndexSampler, epoch: int, other: int) -> None:
    fresh = pickle.loads(pickle.dumps(sampler))
    order = whole(sampler, epoch)
    whole(sampler, other)
    whole(sampler, other + 1)
    assert whole(sampler, epoch) == order
    assert whole(fresh, epoch) == order
    assert fresh.fingerprint() == sampler.fingerprint()


@given(finite, st.integers(0, 5))
def test_it_is_a_torch_sampler_of_python_integers(sampler: IndexSampler, epoch: int) -> None:
    sampler.set_epoch(epoch)
    listed = list(sampler)
    assert listed == whole(sampler, epoch)
    assert {type(index) for index in listed} <= {int}
    assert sampler.extent is None or 0 <= min(listed) <= max(listed) < sampler.extent


@given(finite, EPOCHS)
def test_the_result_of_take_belongs_to_the_caller(sampler: IndexSampler, epoch: int) -> None:
    order = sampler.take(epoch, 0, len(sampler))
    kept = order.copy()
    order[:] = -1
    assert np.array_equal(sampler.take(epoch, 0, len(sampler)), kept)


@given(permutations, EPOCHS)
def test_permutations_give_every_index_once(sampler: IndexSampler, epoch: int) -> None:
    assert sorted(whole(sampler, epoch)) == list(range(len(sampler)))


@given(st.integers(100, 700), SEEDS, EPOCHS)
def test_epochs_and_seeds_give_unrelated_orders(n: int, seed: int, epoch: int) -> None:
    order = Shuffled(n, seed).take(epoch, 0, n)
    others = [Shuffled(n, seed).take(epoch + 1, 0, n), Shuffled(n, seed + 1).take(epoch, 0, n)]
    assert all((order == other).sum() < 30 for other in others)  # expected: 1


@given(st.integers(1, 2**62 - 1), EPOCHS, st.data())
def test_no_length_is_too_long_to_be_shuffled(n: int, epoch: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n))
    taken = Shuffled(n).take(epoch, start, start + 10)
    assert len(set(taken.tolist())) == min(10, n - start)
    assert ((taken >= 0) & (taken < n)).all()


@given(SHARDS, SEEDS, st.integers(1, 25), EPOCHS)
def test_at_most_a_window_of_shards_is_open_at_a_time(sizes: list[int], seed: int, window: int, epoch: int) -> None:
    order = whole(ShardShuffled(sizes, seed, window), epoch)
    shard = np.searchsorted(np.cumsum(sizes), order, side="right").tolist()
    first, last = {s: shard.index(s) for s in shard}, {s: len(shard) - 1 - shard[::-1].index(s) for s in shard}
    open_at_once = [sum(first[s] <= at <= last[s] for s in first) for at in range(len(shard))]
    assert max(open_at_once) <= window


@given(WEIGHTS, SEEDS, EPOCHS)
def test_without_replacement_every_drawable_index_comes_once(weights: list[float], seed: int, epoch: int) -> None:
    order = whole(Weighted(weights, replacement=False, seed=seed), epoch)
    assert sorted(order) == [i for i, weight in enumerate(weights) if weight]


@given(WEIGHTS, SEEDS, EPOCHS)
def test_a_weight_of_zero_is_never_drawn(weights: list[float], seed: int, epoch: int) -> None:
    assert all(weights[index] for index in whole(Weighted(weights, 500, seed=seed), epoch))


@given(LABELS, st.integers(1, 50), SEEDS, EPOCHS)
def test_rounds_hold_every_class_once_and_classes_repeat_late(
    labels: list[int], rounds: int, seed: int, epoch: int
) -> None:
    sizes = Counter(labels)
    order = whole(ClassBalanced(labels, rounds * len(sizes), seed), epoch)
    assert Counter(labels[index] for index in order) == dict.fromkeys(sizes, rounds)
    times = Counter(order)
    for label, size in sizes.items():
        counts = [times[index] for index, other in enumerate(labels) if other == label]
        assert max(counts) <= -(-rounds // size)
        assert min(counts) >= rounds // size
