"""The figures that `ShardShuffled` reports of an order are the averages of its orders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from numpy.typing import NDArray

from feedline.samplers import ShardShuffled

SHARDS = st.lists(st.integers(0, 40), min_size=1, max_size=25).filter(any)
BATCH_SIZES = st.integers(1, 90)
WINDOWS = st.integers(1, 30)
SEEDS = 40


def batches(sizes: list[int], window: int, seed: int, batch_size: int, drop_last: bool) -> Iterator[NDArray[np.int64]]:
    """The shards of the samples of each batch of the real order."""
    order = shards_in_order(sizes, ShardShuffled(sizes, seed, window))
    stop = len(order) // batch_size * batch_size if drop_last else len(order)
    for at in range(0, stop, batch_size):
        yield order[at : min(at + batch_size, stop)]


def shards_in_order(sizes: list[int], order: ShardShuffled) -> NDArray[np.int64]:
    """The shard of each sample of the real order."""
    return np.repeat(np.arange(len(sizes)), sizes)[order.take(0, 0, len(order))]


def counted(order: NDArray[np.int64], batch_size: int, drop_last: bool) -> tuple[int, int, int, int]:
    """Pairs from one shard, pairs, shards of all batches, and batches."""
    stop = len(order) // batch_size * batch_size if drop_last else len(order)
    batch_of, shards = np.arange(stop) // batch_size, int(order.max()) + 1
    each = np.bincount(batch_of * shards + order[:stop])
    lengths = np.bincount(batch_of)
    return int((each * (each - 1)).sum()), int((lengths * (lengths - 1)).sum()), int((each > 0).sum()), len(lengths)


@law_settings(at_most=25, because=Reason.COSTLY)
@given(SHARDS, WINDOWS, BATCH_SIZES, st.booleans())
def test_pairs_and_shards_of_batches(sizes: list[int], window: int, batch_size: int, drop_last: bool) -> None:
    """Within six standard errors, plus a margin for rare events that no seed has shown; for each seed's layout."""
    apart = []
    for seed in range(SEEDS):
        order = ShardShuffled(sizes, seed, window)
        reported = order.mixing(batch_size, drop_last=drop_last)
        same, pairs, shards, count = counted(shards_in_order(sizes, order), batch_size, drop_last)
        real = same / max(pairs, 1), shards / max(count, 1)
        apart.append(np.subtract(real, (reported.same_shard_pairs, reported.shards_per_batch)))
    error = np.std(apart, axis=0) / np.sqrt(SEEDS)
    assert (np.abs(np.mean(apart, axis=0)) <= 6 * error + (0.01, 0.1)).all()


def reads(order: Iterator[NDArray[np.int64]], kept: int) -> int:
    """Number of shards read if the last `kept` stay, and those of a batch that stay are read first."""
    held, count = OrderedDict[int, None](), 0
    for batch in order:
        for shard in sorted(set(batch.tolist()), key=lambda shard: shard not in held):
            count += shard not in held
            held[shard] = None
            held.move_to_end(shard)
            while len(held) > max(kept, 0):
                held.popitem(last=False)
    return count


@law_settings(at_most=25, because=Reason.COSTLY)
@given(
    st.integers(2, 30), st.integers(10, 60), WINDOWS, st.integers(1, 60), st.integers(0, 30), st.booleans(), st.data()
)
def test_bytes_that_are_read_of_whole_shards(
    shards: int, size: int, window: int, batch_size: int, kept: int, drop_last: bool, data: st.DataObject
) -> None:
    """A model: exact if all of a window stays or nothing does, else within a tenth plus the shards kept in memory."""
    sizes, window = [size] * shards, min(window, shards)
    reported = real = 0.0
    for seed in range(20):
        order = ShardShuffled(sizes, seed, window)
        real += reads(batches(sizes, window, seed, batch_size, drop_last), kept) * 1000
        samples = len(order) // batch_size * batch_size if drop_last else len(order)
        reported += (
            order.nbytes_per_sample([1000] * shards, batch_size, kept_shards=kept, drop_last=drop_last) * samples
        )
    assert reported == pytest.approx(real, rel=0.1, abs=20 * 1000 * 0.3 * min(kept, window) * -(-shards // window))


@given(SHARDS, WINDOWS, BATCH_SIZES)
def test_everything_is_read_once_where_windows_stay(sizes: list[int], window: int, batch_size: int) -> None:
    order, nbytes = ShardShuffled(sizes, 0, window), [10 * size + 1 for size in sizes]
    stored = sum(each for each, size in zip(nbytes, sizes, strict=True) if size)
    assert order.nbytes_per_sample(nbytes, batch_size) * len(order) == pytest.approx(stored)
