"""Growth of the workers' memory, from readings with a known trend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.core.cgroups import Cgroup
from feedline.core.proc import meminfo
from feedline.loader.monitoring.memory_trend import MOST_POINTS, MemoryTrend, memory_left

MIB = 1 << 20


def trend_of(slope: float, epochs: int, *, persistent: bool, each: int = 20, warm_up: int = 200 * MIB) -> MemoryTrend:
    """Workers that warm up in the first third of an epoch, and then grow by `slope` an epoch."""
    trend = MemoryTrend(persistent)
    for step in range(1, epochs * each + 1):
        place = step / each
        age = place if persistent else (place - 1e-9) % 1
        grown = slope * place + warm_up * min(3 * age, 1.0)
        trend.add(place, int(100 * MIB + grown), ends=step % each == 0)
    return trend


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("epochs", [2, 3, 20])
@given(slope=st.integers(-50, 500))
def test_the_slope_is_found_from_two_epochs_on_without_the_warm_up(persistent: bool, epochs: int, slope: int) -> None:
    growth = trend_of(slope * MIB, epochs, persistent=persistent).growth()
    assert growth == pytest.approx(slope * MIB, abs=MIB)


@pytest.mark.parametrize("persistent", [False, True])
def test_one_epoch_says_nothing_and_no_workers_do_neither(persistent: bool) -> None:
    assert trend_of(9 * MIB, 1, persistent=persistent).growth() is None
    without = MemoryTrend(persistent)
    for epoch in range(3):
        without.add(epoch + 1.0, 0, ends=True)
    assert without.growth() is None


@pytest.mark.parametrize("persistent", [False, True])
def test_more_workers_are_no_growth(persistent: bool) -> None:
    trend = MemoryTrend(persistent)
    for epoch in range(4):
        workers = 1 if epoch < 2 else 6
        trend.add(epoch + 0.5, 90 * MIB * workers, workers=workers)
        trend.add(epoch + 1.0, 100 * MIB * workers, ends=True, workers=workers)
    assert trend.growth() == pytest.approx(0, abs=MIB)


def test_a_long_run_keeps_few_readings() -> None:
    trend = trend_of(MIB, 1000, persistent=True, each=7)
    assert len(trend._readings) <= MOST_POINTS
    assert trend.growth() == pytest.approx(MIB, rel=0.2)


def test_epochs_without_readings_between_are_compared_at_their_ends() -> None:
    trend = MemoryTrend(persistent=True)
    trend.add(1.0, 100 * MIB, ends=True)
    trend.add(2.0, 150 * MIB, ends=True)
    assert trend.growth() == pytest.approx(50 * MIB)


def test_epochs_that_end_where_they_were_resumed_say_nothing() -> None:
    trend = MemoryTrend(persistent=True)
    for _ in range(3):
        trend.add(1.0, 100 * MIB, ends=True)
    assert trend.growth() is None


def test_what_is_left_is_the_lesser_of_machine_and_group(tmp_path: Path) -> None:
    unlimited = memory_left(cast("Cgroup", SimpleNamespace(memory_limit=lambda: None)))
    assert unlimited is not None
    assert unlimited == pytest.approx(meminfo()["MemAvailable"], rel=0.3)
    assert memory_left(cast("Cgroup", SimpleNamespace(memory_limit=lambda: 1))) == 0
    (tmp_path / "memory.max").write_text(str(1 << 45))
    left = memory_left(Cgroup(memory=(tmp_path,)))
    assert left is not None
    assert left <= meminfo()["MemTotal"]
