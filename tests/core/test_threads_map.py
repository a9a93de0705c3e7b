"""Work of several threads whose results come in order."""

from __future__ import annotations

import pickle
import threading

import pytest
from debris import DebrisGuard

from feedline.core.threads import BoundedMap


def test_results_come_in_order_and_work_is_done_at_once(no_debris: DebrisGuard) -> None:
    together = threading.Barrier(4)

    def work(number: int) -> int:
        together.wait(timeout=30)
        return number * 10

    concurrently = BoundedMap()
    assert list(concurrently.map(work, range(8), lambda _: 1, 100)) == [number * 10 for number in range(8)]
    assert list(pickle.loads(pickle.dumps(concurrently)).map(abs, [-1], lambda _: 1, 1)) == [1]


def test_what_is_begun_ahead_fits_into_the_limit() -> None:
    begun: list[int] = []
    done = BoundedMap().map(lambda number: begun.append(number) or number, range(10), lambda _: 40, 100)
    assert next(done) == 0
    assert max(begun) <= 1
    assert list(done) == list(range(1, 10))


def test_a_failure_is_raised_in_its_turn_and_the_rest_left_undone() -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise KeyError(number)
        return number

    done = BoundedMap().map(work, range(1000), lambda _: 1, 100)
    assert [next(done) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(done)
    assert max(begun) < 100
