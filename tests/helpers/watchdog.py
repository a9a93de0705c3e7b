"""A limit on the time of each test: the process ends with the stacks of all threads."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

LIMIT_S = 300.0
"""Seconds for a test, unless it is marked `timeout(seconds)`."""

SHARED_S = 10.0
"""Seconds for which the tests of a process share one timer: a new one for each test would start a thread."""


class Watchdog:
    """Plugin that ends this process if a test takes too long, even one that holds Python's lock."""

    def __init__(self, config: pytest.Config) -> None:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            self._stderr = os.dup(2)  # the captured one would not be shown
        self._limit_s, self._began_s = 0.0, 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("timeout")
        self._watch(LIMIT_S if marker is None else float(marker.args[0]))
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        limit_s, self._limit_s = self._limit_s, 0.0  # pytest has canceled the timer, for a debugger
        self._watch(limit_s)

    def _watch(self, limit_s: float) -> None:
        now_s = monotonic()
        if limit_s != self._limit_s or now_s > self._began_s + SHARED_S:
            self._limit_s, self._began_s = limit_s, now_s
            faulthandler.dump_traceback_later(limit_s + SHARED_S, exit=True, file=self._stderr)

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self._stderr)
