"""Histograms of durations with fixed bounds on a logarithmic scale."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import sqrt

import numpy as np

PER_OCTAVE = 4
"""Bounds per doubling: a quantile is at most a tenth off."""


_OCTAVES = 30


BOUNDS_NS = tuple(round(1000 * 2 ** (step / PER_OCTAVE)) for step in range(PER_OCTAVE * _OCTAVES + 1))
"""Upper bounds, inclusive, of all bins but the last: 1 µs to 18 minutes. All histograms share them, so they add up."""


_FEW = 48
"""Durations below which a loop is faster than NumPy's calls."""


class Histogram:
    """Numbers of durations per bin. Not thread-safe."""

    __slots__ = ("counts",)

    def __init__(self, counts: Iterable[int] = ()) -> None:
        self.counts: list[int] = list(counts) or [0] * (len(BOUNDS_NS) + 1)

    def add(self, durations_ns: Sequence[int]) -> None:
        """Count durations."""
        counts = self.counts
        if len(durations_ns) < _FEW:
            for duration in durations_ns:
                counts[bisect_left(BOUNDS_NS, duration)] += 1
            return
        bins = np.searchsorted(_BOUNDS, np.fromiter(durations_ns, np.int64, len(durations_ns)))
        for place, number in enumerate(np.bincount(bins).tolist()):
            counts[place] += number

    def merge(self, counts: Iterable[int]) -> None:
        """Add the numbers of another histogram."""
        self.counts = [mine + other for mine, other in zip(self.counts, counts, strict=True)]


_BOUNDS = np.array(BOUNDS_NS, np.int64)


def quantile_s(counts: Sequence[int], share: float) -> float:
    """Duration in seconds below which lies this share of the durations.

    0 for an empty histogram. Exact to a tenth between 1 µs and 18 minutes.
    """
    total = sum(counts)
    if not total:
        return 0.0
    place = bisect_left(list(accumulate(counts)), max(1.0, share * total))
    low = BOUNDS_NS[max(place - 1, 0)]
    high = BOUNDS_NS[min(place, len(BOUNDS_NS) - 1)]
    return sqrt(low * high) / 1e9  # the middle on this scale


def octaves(counts: Sequence[int]) -> list[tuple[float, int]]:
    """Cumulative numbers at every doubling.

    Pairs of an upper bound in seconds and the durations up to it.
    """
    cumulative = list(accumulate(counts))
    return [(BOUNDS_NS[place] / 1e9, cumulative[place]) for place in range(0, len(BOUNDS_NS), PER_OCTAVE)]
