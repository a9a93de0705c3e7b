"""Histograms of durations: exact counts, and quantiles to a tenth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.core.histogram import BOUNDS_NS, Histogram, octaves, quantile_s

DURATIONS = st.lists(st.integers(0, 10**13), max_size=200)


@given(DURATIONS, DURATIONS)
def test_parts_add_up_to_the_whole(first: list[int], second: list[int]) -> None:
    whole, left, right = Histogram(), Histogram(), Histogram()
    whole.add(first + second)
    left.add(first)
    right.add(second)
    left.merge(right.counts)
    assert left.counts == whole.counts
    assert sum(whole.counts) == len(first) + len(second)


@given(DURATIONS)
def test_many_durations_are_counted_as_one_by_one(durations: list[int]) -> None:
    together, singly = Histogram(), Histogram()
    together.add(durations)
    for duration in durations:
        singly.add([duration])
    assert together.counts == singly.counts


@given(st.lists(st.integers(1000, BOUNDS_NS[-1]), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1]))
def test_a_quantile_is_at_most_a_tenth_off(durations: list[int], share: float) -> None:
    histogram = Histogram()
    histogram.add(durations)
    true = sorted(durations)[max(0, -int(-share * len(durations) // 1) - 1)]
    assert quantile_s(histogram.counts, share) == pytest.approx(true / 1e9, rel=0.1)


def test_cumulative_numbers_are_exact_at_their_bounds() -> None:
    histogram = Histogram()
    histogram.add([1000, 1001, 2000, 2001])
    assert octaves(histogram.counts)[:3] == [(1e-6, 1), (2e-6, 3), (4e-6, 4)]


def test_nothing_has_no_quantile() -> None:
    assert quantile_s(Histogram().counts, 0.5) == 0
