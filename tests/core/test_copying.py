"""Rates of copying, compared with copies of another size."""

from __future__ import annotations

import threading
from math import inf
from time import thread_time
from typing import Any

import numpy as np
import pytest

from feedline.core import copying
from feedline.core.copying import measure_copy_rates

NBYTES = 32 << 20


def test_a_copy_of_another_size_takes_as_long_as_the_rate_says() -> None:
    source, target = np.ones(NBYTES, np.uint8), np.ones(NBYTES, np.uint8)
    ratios = list[float]()
    for _ in range(5):
        measure_copy_rates.cache_clear()
        rates = measure_copy_rates(2)
        began_s = thread_time()
        np.copyto(target, source)
        ratios.append(rates.thread_rate * (thread_time() - began_s) / NBYTES)
        assert rates.copiers >= 1
        if 0.5 < ratios[-1] < 2:  # other programs use memory, too
            return
    raise AssertionError(ratios)


@pytest.mark.parametrize("cpus", [2, 3, 8])
def test_no_copy_finds_the_bytes_of_an_earlier_one_in_a_cache(cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = list[int]()
    copy = copying._copy

    def recorded(pair: copying.Pair) -> Any:
        copied.append(id(pair[0]))
        return copy(pair)

    measure_copy_rates.cache_clear()
    monkeypatch.setattr(copying, "_copy", recorded)
    measure_copy_rates(cpus)
    for place, source in enumerate(copied):
        earlier = [number for number, other in enumerate(copied[:place]) if other == source]
        assert not earlier or place - earlier[-1] > 8


def test_the_rates_are_measured_once_and_one_cpu_has_no_limit() -> None:
    assert measure_copy_rates(1) is measure_copy_rates(1)
    assert measure_copy_rates(1).copiers == inf


def test_without_room_for_another_thread_nothing_waits_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    measure_copy_rates.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        measure_copy_rates(2)
    (thread,) = started
    assert not thread.is_alive()
