"""Histograms of durations: exact counts, and quantiles to a tenth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.core.histogram import (
    BOUNDS_NS,
    SpanSum,
    SpanSums,
    add_counts,
    in_use_share,
    new_sums,
    octaves,
    quantile_s,
)  # fmt: skip
from feedline.core.telemetry import SpanTuple

DURATIONS = st.lists(st.integers(0, 10**13), max_size=200)
STAGES = [
    *(
        "fetch",
        "fetch.cpu",
        "reorder",
        "parts",
        "read a.nbytes",
        "step.switches",
        "wait",
        "sample",
        "run_delay",
        "lock",
    ),
    "µs",
]
SPANS = st.builds(
    lambda stage, start, elapsed, worker: ("".join(list(stage)), start, start + elapsed, worker),
    st.sampled_from(STAGES), st.integers(0, 10**15), st.integers(-5, 10**13), st.integers(-1, 3),
)  # fmt: skip
BATCHES = st.lists(st.lists(SPANS, max_size=8), max_size=20)


def counted(durations: Iterable[int]) -> Sequence[int]:
    sums = new_sums()
    sums.add([("fetch", 0, duration, 0) for duration in durations])
    return add_counts([SpanSum(*fields).counts for fields in sums.cells().values()])


@given(DURATIONS, DURATIONS)
def test_parts_add_up_to_the_whole(first: list[int], second: list[int]) -> None:
    assert add_counts([counted(first), counted(second)]) == counted(first + second)
    assert sum(counted(first)) == len(first)


@given(st.lists(st.tuples(BATCHES, st.integers(0, 9)), max_size=3))
def test_the_native_sums_of_spans_equal_those_in_python(epochs: list[tuple[list[list[SpanTuple]], int]]) -> None:
    native, python = new_sums(), SpanSums()
    assert type(native) is not type(python)
    for batches, samples in epochs:
        epoch, wanted = new_sums(native, 5), SpanSums(python, 5)
        epoch.opening_ns = wanted.opening_ns = 1000 * samples
        epoch.in_order = wanted.in_order = bool(samples % 2)
        for number, spans in enumerate(batches):
            place = (samples, 3, number)
            assert epoch.add(tuple(spans), *place) == wanted.add(spans, *place)
        assert epoch.recent(4) == wanted.recent(4)
        assert sums_of(epoch) == sums_of(wanted)
    assert sums_of(native) == sums_of(python)


@given(st.lists(st.lists(SPANS, max_size=80), min_size=1, max_size=20), st.integers(1, 6))
def test_the_kept_batches_are_the_latest_ones_with_all_their_spans(batches: list[list[SpanTuple]], most: int) -> None:
    native, python = new_sums(None, most), SpanSums(None, most)
    for spans in batches:
        native.add(spans)
        python.add(spans)
        kept, wanted = native.recent(most), python.recent(most)
        assert kept == wanted[len(wanted) - len(kept) :]
        # The memory is that of twelve spans a batch.
        lengths = [len(spans) for spans, *_ in reversed(wanted)]
        assert len(kept) == sum(total <= 12 * most for total in accumulate(lengths))


def sums_of(sums: SpanSums) -> Any:
    cells = {key: SpanSum(*fields) for key, fields in sums.cells().items()}
    counted = {key: cell._replace(counts=list(cell.counts)) for key, cell in cells.items()}
    return counted, sums.batches, sums.samples, sums.startup_ns


@pytest.mark.parametrize("span", [("fetch", 0, 1), ["fetch", 0, 1, 0], ("fetch", 0, "1", 0), ("fetch", 0, 1 << 70, 0)])
def test_what_is_no_span_is_refused(span: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        new_sums().add([span])


@given(st.lists(st.integers(1000, BOUNDS_NS[-1]), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1]))
def test_a_quantile_is_at_most_a_tenth_off(durations: list[int], share: float) -> None:
    histogram = counted(durations)
    true = sorted(durations)[max(0, -int(-share * len(durations) // 1) - 1)]
    assert quantile_s(histogram, share) == pytest.approx(true / 1e9, rel=0.1)


def test_cumulative_numbers_are_exact_at_their_bounds() -> None:
    histogram = counted([1000, 1001, 2000, 2001])
    assert octaves(histogram)[:3] == [(1e-6, 1), (2e-6, 3), (4e-6, 4)]


def test_nothing_has_no_quantile() -> None:
    assert quantile_s(counted([]), 0.5) == 0


def probes(*microseconds: float) -> tuple[int, ...]:
    total = SpanSum()
    for each in microseconds:
        total = total.plus(round(1000 * each))
    return tuple(total.counts)


@pytest.mark.parametrize(
    ("waits", "share"),
    [
        ([60, 62, 65, 70, 75, 80], 0.0),  # the same time, as for a free lock
        ([120, 125, 130, 290, 400, 5000], 0.5),
        ([110] * 9 + [900], 0.1),
        ([3000, 4000, 5000, 5000], 1.0),  # none of them found it free
    ],
)
def test_probes_tell_how_often_a_lock_is_in_use(waits: list[float], share: float) -> None:
    assert in_use_share(probes(*waits)) == pytest.approx(share)


def test_few_probes_tell_nothing() -> None:
    assert in_use_share(probes(100, 5000)) is None
