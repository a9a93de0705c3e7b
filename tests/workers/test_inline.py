"""The pool without workers keeps a batch for a second look, as other pools do."""

from __future__ import annotations

import random
from typing import Any

import pytest

from feedline.errors import WorkerError
from feedline.workers.inline import InlinePool


def draw(request: Any, _: Any) -> Any:
    if request == "broken":
        raise ValueError("broken on purpose")
    if request == "interrupted" and not interrupts:
        interrupts.append(KeyboardInterrupt())
        raise interrupts[0]
    return [request, random.random()]


interrupts: list[BaseException] = []


def test_a_batch_is_built_once() -> None:
    pool = InlinePool(draw)
    future, other = pool.submit("first"), pool.submit("broken")
    assert pool.statistics().in_flight == 2
    built = future.result()
    assert future.result() is built
    with pytest.raises(ValueError, match="on purpose"):
        other.result()
    assert pool.statistics().in_flight == 0
    with pytest.raises(WorkerError, match="broken was canceled, or its error was raised before"):
        other.result()
    future.cancel()
    with pytest.raises(WorkerError, match="first was canceled"):
        future.result()


def test_an_interrupted_batch_is_built_again() -> None:
    interrupts.clear()
    pool = InlinePool(draw)
    future = pool.submit("interrupted")
    with pytest.raises(KeyboardInterrupt):
        future.result()
    assert pool.statistics().in_flight == 1
    assert future.result() is future.result()
