"""Batches of samples of similar length, to reduce padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from feedline.core.rng import derive, permuted
from feedline.errors import ArgumentError
from feedline.samplers import _arguments
from feedline.samplers.base import BatchIndexSampler, Indices


class _Bucket(NamedTuple):
    """Samples [first, first + size) in descending order of length.

    Each epoch distributes them over new batches of `rows`.
    """

    first: int
    size: int
    rows: int


class LengthBuckets(BatchIndexSampler):
    """Batches of similar lengths in random order; every sample once an epoch.

    Bound the batches by `batch_size`, by `max_tokens` (longest length times rows, so padding counts), or by both.

    Samples are sorted by length and cut into buckets. The shortest sample of a bucket is at most `tolerance` (a
    fraction) shorter than the longest, as far as whole batches allow. Each epoch shuffles, by `seed`, inside the
    buckets, and then the batches. A lower tolerance gives less padding and less mixing.

    The number of batches is the same in every epoch, and so is the number of rows in the batches of a bucket. Only one
    batch, of the shortest samples, can be smaller than the others of its bucket: `drop_last=True` leaves it out (other
    samples each epoch).
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        seed: int = 0,
        tolerance: float = 0.1,
        drop_last: bool = False,
    ) -> None:
        self.lengths = _arguments.integers("lengths", lengths, 0)
        if batch_size is None and max_tokens is None:
            raise ArgumentError("LengthBuckets needs a bound on its batches: pass batch_size=, max_tokens= or both")
        self.batch_size = None if batch_size is None else _arguments.integer("batch_size", batch_size, 1)
        self.max_tokens = None if max_tokens is None else _arguments.integer("max_tokens", max_tokens, 1)
        self.seed = _arguments.seed(seed)
        if not 0 <= tolerance < 1:
            raise ArgumentError(f"tolerance must be at least 0 and below 1, but is {tolerance!r}")
        self.tolerance = float(tolerance)
        self.drop_last = bool(drop_last)
        self._check_longest()
        self._order: Indices = (-self.lengths).argsort(kind="stable")
        self._buckets = list(self._split())
        batches = [size // rows if drop_last else -(-size // rows) for _, size, rows in self._buckets]
        self._firsts = np.cumsum([0, *batches])
        self.length = int(self._firsts[-1])
        if not self.length:
            raise ArgumentError(f"drop_last=True leaves no full batch of {len(self.lengths)} samples: lower batch_size")

    def _check_longest(self) -> None:
        at = int(self.lengths.argmax())
        if self.max_tokens is not None and self.lengths[at] > self.max_tokens:
            raise ArgumentError(
                f"lengths[{at}] is {self.lengths[at]}, more than max_tokens={self.max_tokens}: "
                "raise max_tokens, cut such samples, or leave them out"
            )

    def _split(self) -> Iterator[_Bucket]:
        falling = -self.lengths[self._order]
        first = 0
        while first < len(falling):
            longest = -int(falling[first])
            rows = self._rows(longest)
            similar = int(falling.searchsorted(-longest * (1.0 - self.tolerance), side="right")) - first
            size = min(-(-similar // rows) * rows, len(falling) - first)
            yield _Bucket(first, size, rows)
            first += size

    def _rows(self, longest: int) -> int:
        by_tokens = None if self.max_tokens is None else self.max_tokens // max(longest, 1)
        return min(bound for bound in (by_tokens, self.batch_size) if bound is not None)

    def batches(self, epoch: int, start: int, stop: int) -> list[Indices]:
        numbers = permuted(derive(self.seed, epoch, "batches"), self.length, start, stop)
        buckets = self._firsts.searchsorted(numbers, side="right") - 1
        within = numbers - self._firsts[buckets]
        return [self._batch(epoch, bucket, n) for bucket, n in zip(buckets.tolist(), within.tolist(), strict=True)]

    def _batch(self, epoch: int, bucket: int, number: int) -> Indices:
        first, size, rows = self._buckets[bucket]
        start = number * rows
        places = permuted(derive(self.seed, epoch, "bucket", bucket), size, start, min(start + rows, size))
        return self._order[first + places]

    def padding_share(self, epoch: int = 0) -> float:
        """Fraction of the tokens of `epoch` that are padding; O(n)."""
        tokens = padded = 0
        for number, (first, size, rows) in enumerate(self._buckets):
            places = permuted(derive(self.seed, epoch, "bucket", number), size, 0, size - size % rows * self.drop_last)
            lengths = self.lengths[self._order[first + places]]
            starts = np.arange(0, len(lengths), rows)
            heights = np.diff(starts, append=len(lengths))
            tokens += int(lengths.sum())
            padded += int((np.maximum.reduceat(lengths, starts) * heights).sum()) if len(lengths) else 0
        return 1.0 - tokens / padded if padded else 0.0
