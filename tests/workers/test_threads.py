"""Worker threads: what their futures and statistics say after errors and during a close."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from feedline.errors import WorkerError
from feedline.workers.threads import ThreadPool

LIMIT_S = 60.0
"""Longest wait for an event; only a failing test reaches it."""


def broken(request: Any, _: Any) -> Any:
    raise ValueError(f"{request} is broken")


def test_a_second_result_after_an_error_says_what_has_happened() -> None:
    with ThreadPool(broken, 1, timeout_s=LIMIT_S) as pool:
        future = pool.submit("request 7")
        with pytest.raises(ValueError, match="is broken"):
            future.result()
        with pytest.raises(WorkerError, match="request 7 was canceled, or its error was raised before"):
            future.result()


def test_close_ends_the_waits_for_queued_requests_which_no_longer_count() -> None:
    begun, go = threading.Event(), threading.Event()

    def build(request: Any, _: Any) -> Any:
        begun.set()
        go.wait(LIMIT_S)
        return request

    errors: list[BaseException] = []

    def wait_for(future: Any) -> None:
        try:
            future.result()
        except WorkerError as error:
            errors.append(error)

    pool = ThreadPool(build, 1)
    running, queued, later, canceled = (pool.submit(number) for number in range(4))
    begun.wait(LIMIT_S)
    assert pool.statistics().in_flight == 4
    canceled.cancel()
    assert pool.statistics().in_flight == 3
    waiting = threading.Thread(target=wait_for, args=(queued,), daemon=True)
    closing = threading.Thread(target=pool.close)
    waiting.start()
    closing.start()
    try:
        waiting.join(LIMIT_S)  # the thread still builds the first batch
        assert [type(error) for error in errors] == [WorkerError]
        assert later.done()
        with pytest.raises(WorkerError, match="2 was canceled"):
            later.result()
    finally:
        go.set()
        closing.join()
    built: Any = running.result()
    assert built == 0
    assert pool.statistics().in_flight == 0
    running.cancel()
    with pytest.raises(WorkerError, match="0 was canceled"):
        running.result()
    with pytest.raises(WorkerError, match="worker threads of this iterator have been closed"):
        pool.submit(3)
