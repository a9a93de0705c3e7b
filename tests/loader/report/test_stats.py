"""Sums over spans."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.core.histogram import is_building
from feedline.core.telemetry import MAIN, Span
from feedline.loader.report import StageTimes, Stats, Totals

MS = 1_000_000


def span(stage: str, ms: int, worker: int = MAIN) -> Span:
    return Span(stage, 5 * MS, (5 + ms) * MS, worker)


def test_nothing_yet() -> None:
    stats = Totals().stats()
    assert stats == Stats()
    assert (stats.samples_per_s, stats.batches_per_s, stats.wait_share) == (0, 0, 0)


def test_count_sum_median_and_maximum_over_workers() -> None:
    totals = Totals()
    for worker, ms in ((0, 10), (1, 30), (0, 20), (1, 20)):
        totals.add([span("fetch", ms, worker), span("wait", 1), span("step", 4)], 8)
    fetch = totals.stats().stages["fetch"]
    assert fetch == StageTimes(count=4, total_s=0.08, median_s=0.02, max_s=0.03, workers=(0, 1))
    assert fetch.mean_s == pytest.approx(0.02)
    assert fetch.in_workers


def test_what_the_training_process_does_is_not_in_workers() -> None:
    totals = Totals()
    totals.add([span("receive", 1), span("fetch", 1, 0), span("collate", 1, MAIN), span("collate", 1, 2)])
    stages = totals.stats().stages
    assert [stages[stage].in_workers for stage in ("receive", "fetch", "collate")] == [False, True, True]


def test_the_first_wait_is_the_start_up_and_no_step_goes_before_it() -> None:
    totals = Totals()
    totals.add([span("step", 1000), span("wait", 50)], 4)
    totals.add([span("step", 30), span("wait", 20)], 4)
    stats = totals.stats()
    assert (stats.startup_s, stats.wait_s, stats.step_s, stats.wall_s) == pytest.approx((0.05, 0.07, 0.03, 0.1))
    assert stats.wait_share == pytest.approx(0.7)
    assert stats.samples_per_s == pytest.approx(80)
    assert stats.batches_per_s == pytest.approx(20)


def test_waits_and_steps_are_no_stages() -> None:
    totals = Totals()
    totals.add([span("step", 1), span("wait", 1), span("fetch", 1)])
    assert list(totals.stats().stages) == ["fetch"]


def test_the_last_batches_are_kept_for_exporters() -> None:
    totals = Totals(recent=2)
    for ms in range(1, 5):
        totals.add([span("fetch", ms)])
    assert totals.recent == [[span("fetch", 3)], [span("fetch", 4)]]
    assert totals.stats().stages["fetch"].median_s == pytest.approx(0.0035)
    assert totals.stats().stages["fetch"].count == 4


def test_stats_can_be_written_as_json() -> None:
    totals = Totals()
    totals.add([span("fetch", 1, 0), span("wait", 2)], 3)
    written = json.loads(json.dumps(dataclasses.asdict(totals.stats())))
    assert written["stages"]["fetch"]["workers"] == [0]
    assert written["samples"] == 3


SPANS = st.builds(
    lambda stage, start, length, worker: Span(stage, start, start + length, worker),
    st.sampled_from(["fetch", "collate", "serialize", "receive", "wait", "step"]),
    st.integers(0, 10**15),
    st.integers(0, 10**12),
    st.integers(-1, 3),
)


def waits_for_earlier_batches(batches: list[tuple[list[Span], int]]) -> list[Span]:
    """A span from the end of each batch that was built before its predecessors to the end of the latest of these."""
    waits, latest_ns = [], -1
    for spans, _ in batches:
        built_ns = max((span.stop_ns for span in spans if span.worker >= 0 and is_building(span.stage)), default=-1)
        if 0 <= built_ns < latest_ns:
            waits.append(Span("reorder", built_ns, latest_ns, -1))
        latest_ns = max(latest_ns, built_ns)
    return waits


@given(st.lists(st.tuples(st.lists(SPANS, max_size=8), st.integers(0, 100)), max_size=20))
def test_sums_agree_with_the_spans(batches: list[tuple[list[Span], int]]) -> None:
    totals = Totals()
    for spans, samples in batches:
        totals.add(spans, samples)
    stats = totals.stats()
    first = [span for span in batches[0][0] if span.stage != "step"] if batches else []
    counted = first + [span for spans, _ in batches[1:] for span in spans] + waits_for_earlier_batches(batches)
    for stage, times in stats.stages.items():
        lengths = [span.stop_ns - span.start_ns for span in counted if span.stage == stage]
        assert times.count == len(lengths)
        assert times.total_s == pytest.approx(sum(lengths) / 1e9)
        assert times.max_s == pytest.approx(max(lengths) / 1e9)
        assert 0 <= times.median_s <= times.max_s
    assert stats.batches == len(batches)
    assert stats.samples == sum(samples for _, samples in batches)
    assert 0 <= stats.startup_s <= stats.wait_s <= stats.wall_s
    assert 0 <= stats.wait_share <= 1


def test_cpu_time_of_measured_spans_stands_for_all() -> None:
    totals = Totals()
    totals.add([span("fetch", 10, 0), span("fetch.cpu", 4, 0), span("step", 5), span("wait", 1)])
    totals.add([span("fetch", 10, 0), span("step", 5), span("step.cpu", 2), span("wait", 1), span("run_delay", 3, 0)])
    stats = totals.stats()
    assert list(stats.stages) == ["fetch"]
    assert stats.stages["fetch"].cpu_s == pytest.approx(0.008)
    assert stats.run_delay_s == pytest.approx(0.003)
    assert stats.step_cpu_s == pytest.approx(0.002)


def test_without_measured_cpu_times_there_are_none() -> None:
    totals = Totals()
    totals.add([span("fetch", 10, 0)])
    assert (totals.stats().stages["fetch"].cpu_s, totals.stats().step_cpu_s) == (None, None)


def test_the_opening_of_an_iteration_is_a_wait_and_its_closing_is_not() -> None:
    whole = Totals()
    totals = Totals(whole=whole)
    totals.add_startup(40)
    totals.add([Span("step", 0, 100), Span("wait", 100, 110)])
    totals.add([Span("step", 110, 115), Span("wait", 115, 117)])
    totals.add_closing(7)
    for each in (totals.stats(), whole.stats()):
        assert each.startup_s == pytest.approx(50e-9)
        assert each.wait_s == pytest.approx(52e-9)
        assert each.closing_s == pytest.approx(7e-9)
        assert each.wall_s == each.wait_s + each.step_s
    assert totals.recent[0] == [Span("wait", 100, 110)]


def test_flat_figures_suit_every_logger() -> None:
    totals = Totals()
    for _ in range(2):
        totals.add([span("fetch", 10, 0), span("fetch.cpu", 4, 0), span("step", 5), span("wait", 1)], 8)
    figures = totals.stats().flat()
    assert figures["feedline/batches"] == 2
    assert figures["feedline/fetch_mean_s"] == pytest.approx(0.01)
    assert all(type(number) is float and math.isfinite(number) for number in figures.values())
    # MLflow allows the fewest characters.
    assert all(re.fullmatch(r"[A-Za-z0-9_\-. /]+", name) for name in figures)
    assert set(totals.stats().flat(prefix="data.")) == {name.replace("feedline/", "data.") for name in figures}


def test_printed_statistics_are_a_few_lines() -> None:
    totals = Totals()
    for _ in range(2):
        totals.add([span("fetch", 10, 0), span("step", 5), span("wait", 1)], 8)
    stats = dataclasses.replace(totals.stats(), restarts=1, skipped=2)
    assert str(stats).splitlines()[0].startswith("2 batches, 16 samples in ")
    assert "\nfetch: mean 10 ms, 99th percentile 10 ms\n" in str(stats)
    assert str(stats).endswith("1 restart of workers, 2 samples skipped")
    assert str(Stats()) == "no batch, no sample in 0 s: 0 samples/s\nwaited 0 s (0 %), the step took 0 s"


@pytest.mark.parametrize("columns", [40, 80])
def test_printed_statistics_fit_the_terminal_and_its_characters(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = Totals()
    totals.add([span("read s3://a-bucket-with-a-long-name", 10, 0), span("fetch", 10, 0)], 8)
    totals.add([Span("collate", 0, 5000, 0), span("step", 500_000), span("wait", 100_000)], 123_456)
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(totals.stats())
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    assert text.isascii()
    assert "5.0 us" in text
    words = " ".join(line.strip() for line in lines)
    assert "read s3://a-bucket-with-a-long-name: mean 10 ms, 99th percentile 10 ms" in words
