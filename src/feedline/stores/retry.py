"""The one policy of patience: what is tried again, when, and for how long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from feedline.errors import ArgumentError
from feedline.store_counts import count
from feedline.stores.problems import StoreUnavailableError, TransientError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """Patience with a store. What may pass is tried again: resets, timeouts, truncated answers, 408, 429 and 5xx.

    Between attempts it waits a random time up to `first_wait_s`, doubled with each attempt up to `longest_wait_s`
    (full jitter), and never shorter than the server asks for with Retry-After.
    """

    attempts: int = 10
    """At most so many requests for one range."""
    deadline_s: float = 120.0
    """No attempt begins later than this after the first."""
    attempt_timeout_s: float = 30.0
    """One request may take so long, its answer included."""
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    hedge_quantile: float | None = 0.95
    """A range that takes longer than this share of the recent ones of its size, and twice as long as usual, is asked
    for a second time, and the answer that comes first counts; None: never. At most one request in ten is a second."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ArgumentError(f"Retry(attempts={self.attempts}): at least one attempt is needed")
        if self.deadline_s <= 0 or self.attempt_timeout_s <= 0:
            raise ArgumentError("Retry: deadline_s and attempt_timeout_s must be above 0")
        if self.first_wait_s < 0 or self.longest_wait_s < self.first_wait_s:
            raise ArgumentError("Retry: 0 <= first_wait_s <= longest_wait_s must hold")
        if self.hedge_quantile is not None and not 0 < self.hedge_quantile < 1:
            raise ArgumentError(f"Retry(hedge_quantile={self.hedge_quantile}): a share between 0 and 1, or None")

    def wait_s(self, failed: int, draw: float) -> float:
        """How long to wait after `failed` attempts; `draw` is random in [0, 1)."""
        return draw * min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(failed - 1, 60))


class Clock(Protocol):
    """Time, and waiting for it to pass."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def wait(self, seconds: float) -> None:
        """Return after so many seconds."""
        ...


class SystemClock:
    """Real time."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


_DRAWN = random.SystemRandom().random
"""From nobody's state: that of `random` is the user's, and may be seeded for each sample."""


class Attempts:
    """Runs requests under a policy. Safe to use from several threads."""

    def __init__(self, retry: Retry, clock: Clock | None = None, draw: Callable[[], float] = _DRAWN) -> None:
        self.retry = retry
        self._clock = clock or SystemClock()
        self._draw = draw

    def run(self, attempt: Callable[[TransientError | None], T], what: str) -> T:
        """What `attempt` returns; it is given the failure before, and called again when it raises TransientError.

        StoreUnavailableError, about `what`, when patience is at its end.
        """
        start, failed, last = self._clock.now(), 0, None
        while True:
            try:
                return attempt(last)
            except TransientError as failure:
                last = failure
            failed += 1
            wait_s = max(self.retry.wait_s(failed, self._draw()), last.wait_s or 0.0)
            passed_s = self._clock.now() - start
            if failed >= self.retry.attempts or passed_s + wait_s > self.retry.deadline_s:
                raise StoreUnavailableError(self._despair(what, failed, passed_s, last)) from None
            count(retries=1, waited_s=wait_s)
            self._clock.wait(wait_s)

    def _despair(self, what: str, failed: int, passed_s: float, last: TransientError) -> str:
        asked = f", and the server asks to be left alone for {last.wait_s:g} s" if last.wait_s else ""
        return (
            f"{what}: {failed} attempts failed within {passed_s:.1f} s, the last one with: {last}{asked}. Check the "
            f"server and the network; retry=Retry(attempts=..., deadline_s=...) is more patient "
            f"(now {self.retry.attempts} and {self.retry.deadline_s:g} s)."
        )
