"""When a request is slow enough to be sent a second time."""

from __future__ import annotations

import threading
from collections import deque

_REMEMBERED = 128
_NEEDED = 20
"""So many requests of a size must have been seen before one of them can be called slow."""

_RENEWED = 8
"""The quantile is taken anew after so many more."""

_SHORTEST_S = 0.02
"""Nothing faster than this is slow: it would only measure how busy this machine is."""

_FACTOR = 2.0
"""Nor is what takes less than twice as long as usual: where all take about the same, a second request only costs."""

_SHARE = 0.1


class _Size:
    """The latest requests of about one size."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self.slow_after_s: float | None = None
        self._fresh = 0

    def add(self, seconds: float, quantile: float) -> None:
        self.seconds.append(seconds)
        self._fresh += 1
        if len(self.seconds) >= _NEEDED and (self.slow_after_s is None or self._fresh >= _RENEWED):
            ranked = sorted(self.seconds)
            typical_s, slow_s = ranked[len(ranked) // 2], ranked[min(int(len(ranked) * quantile), len(ranked) - 1)]
            self.slow_after_s = max(_SHORTEST_S, _FACTOR * typical_s, slow_s)
            self._fresh = 0


class Latencies:
    """How long requests took lately, by size. Safe to use from several threads."""

    def __init__(self, quantile: float | None) -> None:
        self._quantile = quantile
        self._lock = threading.Lock()
        self._sizes: dict[int, _Size] = {}
        self._sent = self._hedged = 0

    def add(self, nbytes: int, seconds: float) -> None:
        """A request for so many bytes took so long."""
        if self._quantile is not None:
            with self._lock:
                self._sent += 1
                self._sizes.setdefault(nbytes.bit_length(), _Size()).add(seconds, self._quantile)

    def slow_after_s(self, nbytes: int) -> float | None:
        """A request for so many bytes that takes longer is slow; None if that is not known, or nobody asks."""
        size = self._sizes.get(nbytes.bit_length())
        return None if size is None else size.slow_after_s

    def may_hedge(self) -> bool:
        """Whether a second request can be afforded, one for ten ordinary ones; if so, it is counted."""
        with self._lock:
            affordable = self._hedged < self._sent * _SHARE
            self._hedged += affordable
            return affordable
