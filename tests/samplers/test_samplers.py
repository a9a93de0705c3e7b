"""Orders and errors of feedline's samplers, by example and by count."""

from __future__ import annotations

import pickle
from collections import Counter
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch

from feedline.core.caches import RecentResults
from feedline.errors import ArgumentError
from feedline.samplers import (
    ClassBalanced,
    Curriculum,
    Distributed,
    DistributedBatches,
    Infinite,
    LengthBuckets,
    MaterializedSampler,
    Mixture,
    Sequential,
    ShardShuffled,
    Shuffled,
    StratifiedBatches,
    Subset,
    VirtualEpochs,
    Weighted,
)
from feedline.samplers._random import endless_permutation, exponential, permutations, uniform

DRAWS = 100_000


def chi_square(counts: Any, expected: Any) -> float:
    """Pearson's statistic divided by its expectation: near 1 for many cells if the counts are as expected."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    return float(((counts - expected) ** 2 / expected).sum() / max(len(counts) - 1, 1))


def test_a_temperature_draws_more_from_small_datasets() -> None:
    sizes = [10_000, 100]
    for temperature, share in ((1.0, 100 / 10_100), (2.0, 1 / 11), (1e9, 0.5)):
        order = Mixture(sizes, sizes, stop=5_000, temperature=temperature).take(0, 0, 5_000)
        assert (order >= 10_000).mean() == pytest.approx(share, abs=2e-3)


def test_repeats_are_bounded_and_the_rest_goes_to_the_others() -> None:
    order = Mixture([100, 1_000, 50], [0.5, 0.2, 0.3], stop=1_000, max_repeats=3).take(0, 0, 1_000)
    counts = np.bincount(order, minlength=1_150)
    assert counts[:100].max() <= 3
    assert counts[1_100:].max() <= 3
    assert np.diff([0, *np.cumsum(counts)[[99, 1_099, 1_149]]]).tolist() == pytest.approx([300, 550, 150], abs=5)


def test_weights_of_a_mixture_need_no_sum() -> None:
    """They are shares of their sum."""
    sums = [10, 1.25, 100]
    orders = [Mixture([50, 30, 20], [0.5 * of, 0.3 * of, 0.2 * of], 3, stop=120) for of in sums]
    assert [order.draws() for order in orders] == [[60, 36, 24]] * 3
    assert len({tuple(order.take(0, 0, 120).tolist()) for order in orders}) == 1


def test_weights_for_each_epoch_are_those_of_its_samples() -> None:
    mixture = Mixture([500, 300], [[1, 0], [3, 1], [0, 1]], seed=1, stop=400)
    orders = [mixture.take(epoch, 0, 400) for epoch in range(5)]
    assert [int((order >= 500).sum()) for order in orders] == [0, 100, 400, 400, 400]
    assert [mixture.draws(epoch) for epoch in range(3)] == [[400, 0], [300, 100], [0, 400]]
    assert len({tuple(order.tolist()) for order in orders}) == 5
    assert [int(np.bincount(order).max()) for order in orders] == [1, 1, 2, 2, 2]  # 400 draws of 300 samples
    capped = Mixture([500, 30], [[1, 0], [1, 1]], stop=400, max_repeats=2)
    assert np.bincount(capped.take(1, 0, 400)).max() <= 2
    warm = Mixture([500, 300], [[500, 300], [500, 300]], stop=400, temperature=1e9)
    assert warm.draws(1) == [200, 200]


def test_phases_of_a_curriculum_go_on_where_the_others_ended() -> None:
    course = Curriculum([500, 300], [(400, [3, 1]), (100, [0, 1]), (200, [1, 1])], seed=2)
    order = course.take(0, 0, 700)
    assert len(order) == len(course) == 700
    hard = [int((order[low:high] >= 500).sum()) for low, high in ((0, 400), (400, 500), (500, 700))]
    assert hard == pytest.approx([100, 100, 100], abs=2)
    assert np.bincount(order).max() <= 1 + (sum(hard) > 300), "a dataset is used up before one of its samples repeats"
    pieces = [course.take(0, start, start + 37) for start in range(0, 700, 37)]
    assert np.concatenate(pieces).tolist() == order.tolist()
    assert course.take(1, 0, 700).tolist() != order.tolist()
    assert course.fingerprint() != Curriculum([500, 300], [(400, [3, 1]), (300, [1, 1])], seed=2).fingerprint()


def test_orders_are_fixed_for_all_time() -> None:
    """A saved position must mean the same samples in every later release."""
    assert Shuffled(10, 0).take(0, 0, 10).tolist() == [6, 9, 2, 8, 1, 7, 4, 0, 3, 5]
    assert Shuffled(10**12, 1).take(3, 10**11, 10**11 + 3).tolist() == [187349864388, 492816242323, 462129657449]
    assert ShardShuffled([3, 2, 4], 0, 2).take(0, 0, 9).tolist() == [1, 4, 3, 2, 0, 6, 5, 8, 7]
    assert Weighted([1, 2, 3], 8, seed=0).take(0, 0, 8).tolist() == [0, 1, 1, 1, 2, 2, 2, 0]
    assert Weighted([1, 2, 3, 4], replacement=False).take(0, 0, 4).tolist() == [2, 3, 1, 0]
    assert ClassBalanced([0, 0, 0, 1, 2], 9).take(0, 0, 9).tolist() == [2, 3, 4, 3, 4, 1, 4, 3, 0]
    assert Mixture([5, 3], [2, 1]).take(0, 0, 9).tolist() == [1, 6, 4, 5, 0, 7]
    assert [b.tolist() for b in StratifiedBatches([0, 0, 0, 1, 1], 3).take_batches(0, 0, 9)] == [[3, 2, 1], [1, 4, 0]]
    assert [b.tolist() for b in LengthBuckets([5, 1, 5, 1, 5], 2).take_batches(0, 0, 9)] == [[1, 4], [3], [2, 0]]


MIXED: dict[str, tuple[Mixture | Curriculum, int, str]] = {
    "few blocks": (Mixture([500, 300, 170], [6, 3, 1], 5, "all_exhausted"), 0, "ee20a1b6f81393cf"),
    "many blocks": (Mixture([60_000, 30_000, 10_000], [6, 3, 1]), 777, "afbf31c3db97f4a0"),
    "weights that are no short fractions": (
        Mixture([9_000, 70, 8], [0.004, 0.01, 3.14159], 1, 10**15),
        10**14,
        "17765ce8a26970c1",
    ),
    "phases": (
        Curriculum([9_000, 500, 70], [(7_000, [0.8, 0.1, 0.1]), (3_000, [0, 1, 0]), (9_000, [1, 2, 3])], 4),
        0,
        "55a22750ccad91f7",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_long_mixture_is_fixed_for_all_time_however_it_is_cut(name: str) -> None:
    order, start, digest = MIXED[name]
    stop = min(start + 19_000, len(order))
    for size in (257, 1_024, 5_000, 19_000):
        pieces = [order.take(2, first, min(first + size, stop)) for first in range(start, stop, size)]
        assert blake2b(np.concatenate(pieces).tobytes(), digest_size=8).hexdigest() == digest, size


def test_a_far_position_of_a_huge_order_is_there_at_once() -> None:
    order = Shuffled(10**12, seed=7)
    assert len(order) == 10**12
    assert np.array_equal(order.take(5, 10**12 - 3, 10**12 + 9), order.take(5, 10**12 - 3, 10**12))


def test_the_stream_of_uniform_draws_is_flat_and_addressed() -> None:
    draws = uniform(42, 0, DRAWS)
    assert chi_square(np.bincount((draws * 100).astype(int), minlength=100), np.full(100, DRAWS / 100)) < 1.5
    assert np.array_equal(uniform(42, 777, 999), draws[777:999])
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.02


def test_exponential_draws_are_logarithms_of_the_uniform_ones() -> None:
    assert np.allclose(exponential(9, 0, 1000), -np.log1p(-uniform(9, 0, 1000)), rtol=1e-13, atol=0)


def test_all_permutations_of_a_few_elements_are_equally_frequent() -> None:
    rows = Counter(map(tuple, permutations(3, 4, 0, 24_000).tolist()))
    assert len(rows) == 24
    assert chi_square(list(rows.values()), np.full(24, 1000)) < 2


@pytest.mark.parametrize("length", [1, 2, 511, 512, 513, 1000])
def test_reshuffled_gives_whole_permutations_wherever_it_is_cut(length: int) -> None:
    passes = endless_permutation(5, length, 0, 3 * length).reshape(3, length)
    assert np.array_equal(np.sort(passes, axis=1), np.tile(np.arange(length), (3, 1)))
    assert np.array_equal(
        endless_permutation(5, length, length // 2, 2 * length), passes.ravel()[length // 2 : 2 * length]
    )
    assert not len(endless_permutation(5, length, length, length))


def test_weighted_draws_follow_the_weights() -> None:
    weights = np.arange(50.0)
    counts = np.bincount(Weighted(weights, DRAWS, seed=3).take(0, 0, DRAWS), minlength=50)
    assert counts[0] == 0
    assert chi_square(counts[1:], weights[1:] / weights.sum() * DRAWS) < 1.6


def test_weighted_without_replacement_begins_with_heavy_ones() -> None:
    """The first of each order is distributed as one weighted draw."""
    sampler = Weighted([1, 2, 3, 4], replacement=False, seed=5)
    firsts = np.bincount([sampler.take(epoch, 0, 1)[0] for epoch in range(4000)], minlength=4)
    assert chi_square(firsts, [400, 800, 1200, 1600]) < 3


def test_weights_that_differ_by_many_orders_of_magnitude() -> None:
    assert set(Weighted([1e-300, 1e300], 1000).take(0, 0, 1000).tolist()) == {1}
    assert Weighted([1e-320, 0, 1e308, 1e308], replacement=False).take(0, 0, 5).tolist()[2:] == [0]
    assert set(Weighted([1e308, 1e308, 0], 100).take(0, 0, 100).tolist()) == {0, 1}


def test_shards_mix_as_they_say() -> None:
    sizes = np.random.default_rng(0).integers(50, 150, 40)
    shard_of = np.repeat(np.arange(40), sizes)
    for window in (1, 4, 40):
        sampler = ShardShuffled(sizes, 11, window)
        shards = shard_of[sampler.take(2, 0, len(sampler))]
        reported = sampler.mixing(batch_size=64, epoch=2)
        batches = [shards[at : at + 64] for at in range(0, len(shards), 64)]
        same = [((batch[:, None] == batch).sum() - len(batch), len(batch) * (len(batch) - 1)) for batch in batches]
        assert np.divide(*np.sum(same, axis=0)) == pytest.approx(reported.same_shard_pairs, rel=0.05)
        number = np.mean([len(set(batch.tolist())) for batch in batches])
        assert number == pytest.approx(reported.shards_per_batch, rel=0.02)
    assert reported.same_shard_pairs == pytest.approx(reported.same_shard_pairs_ideal)
    assert reported.same_shard_pairs_ideal == pytest.approx(1 / 40, rel=0.2)


def test_shards_of_one_sample_and_one_shard() -> None:
    assert ShardShuffled([1], 0, 1).mixing().same_shard_pairs == 0
    assert ShardShuffled([5], 0, 3).mixing(batch_size=2).same_shard_pairs == 1
    assert ShardShuffled([1] * 500, 0, 1).mixing(64).shards_per_batch == pytest.approx(500 / 8)


def test_batches_that_span_windows_are_counted_as_they_are() -> None:
    reported = ShardShuffled([50] * 4, 0, 1).mixing(200)
    assert reported.shards_per_batch == pytest.approx(4)
    assert reported.same_shard_pairs == pytest.approx(49 / 199)


def test_no_batch_is_left_when_the_only_one_is_dropped() -> None:
    reported = ShardShuffled([5], 0, 3).mixing(10, drop_last=True)
    assert (reported.same_shard_pairs, reported.shards_per_batch) == (0, 0)
    assert ShardShuffled([5], 0, 3).nbytes_per_sample([100], 10, drop_last=True) == 0


def test_shards_that_stay_in_memory_are_read_once() -> None:
    order, nbytes = ShardShuffled([10] * 20, 0, 5), [1000, 3000] * 10
    assert order.nbytes_per_sample(nbytes, 32) == pytest.approx(200)
    assert order.nbytes_per_sample(nbytes, 32, kept_shards=5) == pytest.approx(200)
    none_kept = order.nbytes_per_sample([1000] * 20, 32, kept_shards=0)
    assert none_kept == pytest.approx(order.mixing(32).shards_per_batch * 7 * 1000 / 200)


def test_bytes_of_other_shards_are_refused() -> None:
    with pytest.raises(ArgumentError, match="shard_nbytes has 2 values for 3 shards"):
        ShardShuffled([1, 2, 3]).nbytes_per_sample([1, 2])


def test_lengths_are_padded_less_in_buckets_than_in_random_batches() -> None:
    lengths = np.random.default_rng(1).lognormal(5, 1, 20_000).astype(int) + 1
    buckets = LengthBuckets(lengths, 32, seed=0, tolerance=0.1)
    assert buckets.padding_share() < 0.1
    assert LengthBuckets(lengths, 32, tolerance=0.02).padding_share() < 0.6 * buckets.padding_share()
    assert LengthBuckets(lengths, 32, tolerance=0.99).padding_share() > 0.5
    full = LengthBuckets(lengths, max_tokens=8192)
    rows = [len(batch) * lengths[batch].max() for batch in full.take_batches(0, 0, len(full))]
    assert np.mean(rows) > 0.85 * 8192


def test_equal_lengths_make_one_bucket_that_mixes_everything() -> None:
    batches = LengthBuckets([7] * 1000, 10, seed=1).take_batches(0, 0, 100)
    assert np.mean([np.ptp(batch) for batch in batches]) > 600


def test_stratified_rare_class_is_repeated_in_turn() -> None:
    labels = ["rare"] * 3 + ["often"] * 97
    sampler = StratifiedBatches(labels, 10, seed=0)
    assert len(sampler) == 11  # nine places a batch for 97 samples
    rare = [index for batch in sampler for index in batch if labels[index] == "rare"]
    assert sorted(Counter(rare).values()) == [3, 4, 4]


def test_a_mixture_of_equal_datasets_does_not_beat_in_step_with_ranks() -> None:
    """If datasets took strict turns, each of three ranks would see one dataset only."""
    mixture = Mixture([90_000, 90_000, 90_000], [1, 1, 1], seed=0)
    datasets, _ = mixture.locate(mixture.take(0, 0, 90_000))
    for rank in range(3):
        assert np.bincount(datasets[rank::3]) == pytest.approx([10_000] * 3, rel=0.1)


def test_a_mixture_locates_indices_as_concat_dataset_does() -> None:
    mixture = Mixture([Subset([8, 3]), 5], [1, 1], sizes=[10, 5], stop=100)
    parts = torch.utils.data.ConcatDataset([range(100, 110), range(200, 205)])  # type: ignore[list-item]
    indices = mixture.take(0, 0, 100)
    datasets, within = mixture.locate(indices)
    assert [parts[i] for i in indices] == [(100, 200)[k] + i for k, i in zip(datasets, within, strict=True)]
    assert set(within[datasets == 0].tolist()) == {3, 8}


def test_a_dataset_of_weight_zero_in_a_mixture_is_left_alone() -> None:
    mixture = Mixture([5, 5, 5], [1, 0, 1], stop="all_exhausted")
    datasets, _ = mixture.locate(mixture.take(0, 0, len(mixture)))
    assert set(datasets.tolist()) == {0, 2}


def test_fingerprints_name_what_decides_the_order() -> None:
    assert Shuffled(10, 3).fingerprint() == "Shuffled(n=10, seed=3)"
    texts = {
        Weighted(weights, 5, replacement, seed).fingerprint()
        for weights in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
        for replacement in (True, False)
        for seed in (0, 1)
    }
    assert len(texts) == 8
    assert (
        ClassBalanced([1, 2, 2]).fingerprint() == ClassBalanced(torch.tensor([1, 2, 2], dtype=torch.int8)).fingerprint()
    )
    assert len(Mixture([5] * 100, [1] * 100).fingerprint()) < 200
    of_epochs = [[1, 2]], [[1, 2], [2, 1]], [[1, 2], [2, 2]]
    assert len({Mixture([5, 5], weights, stop=5).fingerprint() for weights in of_epochs}) == 3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: VirtualEpochs(Sequential(5), 3), "VirtualEpochs(sampler=Sequential(n=5), num_samples=3)"),
        (lambda: Infinite(Sequential(5)), "Infinite(sampler=Sequential(n=5))"),
        (
            lambda: Distributed(Sequential(5), 1, 2),
            "Distributed(sampler=Sequential(n=5), rank=1, world_size=2, drop_last=False)",
        ),
    ],
)
def test_fingerprints_of_views_hold_that_of_the_whole(make: Any, text: str) -> None:
    assert make().fingerprint() == text
    assert pickle.loads(pickle.dumps(make())).fingerprint() == text


def test_every_argument_of_a_batch_sampler_is_in_its_fingerprint() -> None:
    samplers = [
        StratifiedBatches([1, 2, 2], 2),
        StratifiedBatches([1, 2, 2], 3),
        StratifiedBatches([1, 1, 2], 2),
        StratifiedBatches([1, 2, 2], 2, seed=1),
        StratifiedBatches([1, 2, 2], 2, drop_last=True),
        StratifiedBatches([1, 2, 2], 2, shares="equal"),
        LengthBuckets([1, 2, 2], 2),
        LengthBuckets([1, 2, 2], 2, max_tokens=9),
        LengthBuckets([1, 2, 2], 2, tolerance=0.2),
        LengthBuckets([1, 2, 2], 2, seed=1),
        LengthBuckets([1, 2, 2], 2, drop_last=True),
        DistributedBatches(LengthBuckets([1, 2, 2], 2), 0, 2),
        DistributedBatches(LengthBuckets([1, 2, 2], 2), 1, 2),
    ]
    assert len({sampler.fingerprint() for sampler in samplers}) == len(samplers)


def test_recent_results_are_shared_and_few() -> None:
    made: list[int] = []
    recent = RecentResults(lambda key: made.append(key) or np.array([key]), keep=2)
    assert recent(1) is recent(1)
    recent(2), recent(3), recent(1)
    assert made == [1, 2, 3, 1]


def test_an_empty_dataset_has_an_order_but_cannot_be_shuffled() -> None:
    assert list(Sequential(0)) == []
    with pytest.raises(ArgumentError, match=r"n must be at least 1, but is 0.*empty"):
        Shuffled(0)


def wrong(match: str, make: Any) -> Any:
    return pytest.param(make, match, id=match)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        wrong("n must be an integer, but is 2.5", lambda: Shuffled(2.5)),  # type: ignore[arg-type]
        wrong("n must be an integer, but is True", lambda: Shuffled(True)),
        wrong("n must be below 2", lambda: Shuffled(2**62)),
        wrong("seed must be an integer, but is None", lambda: Shuffled(5, None)),  # type: ignore[arg-type]
        wrong("n must be at least 0, but is -1: pass len", lambda: Sequential(-1)),
        wrong("window must be at least 1, but is 0: 1 reads shard after shard", lambda: ShardShuffled([1], 0, 0)),
        wrong("shard_sizes are all zero", lambda: ShardShuffled([0, 0])),
        wrong(r"shard_sizes must be at least 0, but shard_sizes\[1\] is -4", lambda: ShardShuffled([3, -4])),
        wrong("shard_sizes is empty", lambda: ShardShuffled([])),
        wrong("shard_sizes must hold integers", lambda: ShardShuffled([1.5])),  # type: ignore[list-item]
        wrong(r"weights must be finite and not negative, but weights\[1\] is -2.0", lambda: Weighted([1, -2])),
        wrong(r"weights\[0\] is nan", lambda: Weighted([float("nan"), 1])),
        wrong(r"weights\[1\] is inf", lambda: Weighted([1, float("inf")])),
        wrong("weights are all zero", lambda: Weighted([0, 0])),
        wrong("weights must be one-dimensional", lambda: Weighted([[1.0]])),  # type: ignore[list-item]
        wrong("weights must be one-dimensional: .*inhomogeneous", lambda: Weighted([1, [2, 3]])),  # type: ignore[list-item]
        wrong("labels must be of one type", lambda: ClassBalanced(np.array(["a", None], object))),
        wrong("weights must hold numbers", lambda: Weighted(["a"])),  # type: ignore[list-item]
        wrong("only 1 weights are above 0", lambda: Weighted([1, 0], 2, replacement=False)),
        wrong("num_samples must be at least 1, but is 0", lambda: Weighted([1], 0)),
        wrong("labels is empty", lambda: ClassBalanced([])),
        wrong("needs at least 3 samples", lambda: StratifiedBatches([1, 2, 3], 2)),
        wrong("leaves no full batch", lambda: StratifiedBatches([1, 2, 3], 4, drop_last=True)),
        wrong("shares must be one of 'proportional', 'equal'; got", lambda: StratifiedBatches([1], 1, shares="half")),
        wrong("pass batch_size=, max_tokens= or both", lambda: LengthBuckets([1])),
        wrong(r"lengths\[1\] is 9, more than max_tokens=8", lambda: LengthBuckets([1, 9], max_tokens=8)),
        wrong("tolerance must be at least 0 and below 1, but is 1", lambda: LengthBuckets([1], 1, tolerance=1)),
        wrong("leaves no full batch", lambda: LengthBuckets([1, 1], 3, drop_last=True)),
        wrong("2 weights for 1 datasets", lambda: Mixture([5], [1, 2])),
        wrong("1 sizes for 2 datasets", lambda: Mixture([5, 5], [1, 2], sizes=[5])),
        wrong(r"samplers\[0\] must be at least 1, but is 0", lambda: Mixture([0], [1])),
        wrong("pass sizes=", lambda: Mixture([Subset([4])], [1])),
        wrong("gives indices up to 5, but its size is 4", lambda: Mixture([5], [1], sizes=[4])),
        wrong("stop must be one of 'first_exhausted'", lambda: Mixture([5], [1], stop="never")),
        wrong("stop must be at least 1, but is 0: or one of", lambda: Mixture([5], [1], stop=0)),
        wrong(r"weights\[1\] is 1.0e-12 of the sum", lambda: Mixture([5, 5], [1, 1e-12])),
        wrong("temperature must be above 0, but is 0", lambda: Mixture([5, 5], [1, 1], temperature=0)),
        wrong("max_repeats= needs stop= as a number", lambda: Mixture([5, 5], [1, 1], max_repeats=2)),
        wrong("max_repeats must be at least 1", lambda: Mixture([5, 5], [1, 1], stop=9, max_repeats=0.5)),
        wrong("31 samples are more than", lambda: Mixture([5, 5], [1, 1], stop=31, max_repeats=3)),
        wrong(r"2 weights\[1\] for 1 datasets", lambda: Mixture([5], [[1], [1, 2]], stop=5)),
        wrong(r"weights\[1\] must be finite.*weights\[1\]\[0\] is -1", lambda: Mixture([5], [[1], [-1]], stop=5)),
        wrong(r"weights\[0\] are all zero", lambda: Mixture([5], [[0]], stop=5)),
        wrong(r"weights\[1\] must be one-dimensional", lambda: Mixture([5], [[1], 1], stop=5)),  # type: ignore[list-item]
        wrong("weights for each epoch need stop= as a number", lambda: Mixture([5], [[1]])),
        wrong("a function, which a resumed run cannot compare", lambda: Mixture([5], lambda _: [1])),  # type: ignore[arg-type]
        wrong("weights is empty", lambda: Mixture([5], [])),
        wrong("phases is empty", lambda: Curriculum([5], [])),
        wrong(r"phases\[1\] must be at least 1, but is 0", lambda: Curriculum([5], [(3, [1]), (0, [1])])),
        wrong(r"phases\[1\]: weights .*weights\[0\] is -1", lambda: Curriculum([5], [(3, [1]), (3, [-1])])),
        wrong(r"phases\[0\]: 2 weights for 1 datasets", lambda: Curriculum([5], [(3, [1, 2])])),
        wrong(r"phases\[0\]: weights are all zero: at least one dataset needs", lambda: Curriculum([5], [(3, [0])])),
        wrong(r"phases\[0\]: the weights are lists", lambda: Curriculum([5, 5], [(9, [[1, 0], [0, 1]])])),  # type: ignore[list-item]
        wrong(r"phases\[1\] is 3: pass \(samples, weights\)", lambda: Curriculum([5], [(3, [1]), 3])),  # type: ignore[list-item]
        wrong(r"weights must be finite and not negative, but weights\[1\] is -1", lambda: Mixture([5, 5], [1, -1])),
        wrong(r"weights\[0\] is nan", lambda: Mixture([5, 5], [float("nan"), 1])),
        wrong("weights are all zero: at least one dataset needs a weight above 0", lambda: Mixture([5, 5], [0, 0])),
        wrong("weights must hold numbers", lambda: Mixture([5, 5], ["a", 1])),  # type: ignore[list-item]
        wrong("samplers must be a list of lengths or samplers, but is 5", lambda: Mixture(5, [1])),  # type: ignore[arg-type]
        wrong("is already endless", lambda: Infinite(Infinite(Sequential(3)))),
        wrong("is empty", lambda: Infinite(Sequential(0))),
        wrong("have no random access", lambda: Infinite(MaterializedSampler([1]))),  # type: ignore[arg-type]
        wrong("num_samples must be at least 1, but is 0", lambda: VirtualEpochs(Sequential(3), 0)),
        wrong("rank must be below world_size=2, but is 2", lambda: Distributed(Sequential(3), 2, 2)),
        wrong("leaves no sample of 3 for 4 ranks: omit it", lambda: Distributed(Sequential(3), 0, 4, drop_last=True)),
        wrong("Distributed takes samplers of indices", lambda: DistributedBatches(Sequential(3), 0, 1)),  # type: ignore[arg-type]
        wrong("counts up to 5, but there are 2 indices", lambda: Subset([1, 2], Sequential(5))),
        wrong(
            r"below 2\*\*63, but indices\[1\] is 9223372036854775813",
            lambda: Subset(np.array([1, 2**63 + 5], np.uint64)),
        ),  # type: ignore[arg-type]
        wrong("start must be at least 0, but is -1", lambda: Sequential(5).take(0, -1, 2)),
        wrong("epoch must be at least 0, but is -1", lambda: Sequential(5).set_epoch(-1)),
    ],
)
def test_wrong_arguments_are_refused_with_name_value_and_remedy(make: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        make()
