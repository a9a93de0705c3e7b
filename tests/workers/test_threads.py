"""Worker threads: what their futures and statistics say after errors and during a close."""

from __future__ import annotations

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
