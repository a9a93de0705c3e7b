"""The one policy of patience: what is tried again, when, and for how long."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from feedline.core import threads
from feedline.core.store_metrics import count
from feedline.errors import ArgumentError, StoreUnavailableError, TransientError

T = TypeVar("T")


_log = logging.getLogger("feedline")


_TOLD_AFTER_S, _TOLD_EVERY_S = 5.0, 60.0
"""A store that fails for so long is told of, and then no oftener than this."""


_THROTTLED_S = 1.0
"""The shortest wait where a server asks for fewer requests: obstore does not show its Retry-After."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Patience with a store. What may pass is tried again: resets, timeouts, truncated answers, 408, 429 and 5xx.

    Between attempts it waits a random time up to `first_wait_s`, doubled with each attempt up to `longest_wait_s`
    (full jitter). After a throttled answer (429 or 503) it waits one to two seconds at least. Retry-After is not read.
    """

    attempts: int | None = None
    """At most so many requests for one range; None: as many as the deadline allows."""
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
        if self.attempts is not None and self.attempts < 1:
            raise ArgumentError(f"Retry(attempts={self.attempts}): at least one attempt is needed")
        if self.deadline_s <= 0 or self.attempt_timeout_s <= 0:
            raise ArgumentError("Retry: deadline_s and attempt_timeout_s must be above 0")
        if self.first_wait_s < 0 or self.longest_wait_s < self.first_wait_s:
            raise ArgumentError("Retry: 0 <= first_wait_s <= longest_wait_s must hold")
        if self.hedge_quantile is not None and not 0 < self.hedge_quantile < 1:
            raise ArgumentError(f"Retry(hedge_quantile={self.hedge_quantile}): a share between 0 and 1, or None")

    def wait_s(self, failed: int, draw: float, last: TransientError | None = None) -> float:
        """How long to wait after `failed` attempts and the `last` failure; `draw` is random in [0, 1)."""
        wait_s = draw * min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(failed - 1, 60))
        throttled = last is not None and last.throttled
        return max(wait_s, _THROTTLED_S * (1 + draw)) if throttled else wait_s


class Clock(Protocol):
    """Time, and waiting for it to pass."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def wait(self, seconds: float) -> None:
        """Return after so many seconds; WaitCancelledError once nobody wants what is waited for."""
        ...


class SystemClock:
    """Real time."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        threads.sleep(seconds)


_DRAWN = random.SystemRandom().random
"""From nobody's state: that of `random` is the user's, and may be seeded for each sample."""


class Attempts:
    """Runs requests under a policy. Safe to use from several threads."""

    def __init__(self, retry: Retry, clock: Clock | None = None, draw: Callable[[], float] = _DRAWN) -> None:
        self.retry = retry
        self._clock = clock or SystemClock()
        self._draw = draw
        self._told_s = -_TOLD_EVERY_S

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
            threads.check()
            failed += 1
            wait_s = self.retry.wait_s(failed, self._draw(), last)
            passed_s = self._clock.now() - start
            if failed == self.retry.attempts or passed_s + wait_s > self.retry.deadline_s:
                raise StoreUnavailableError(self._despair(what, failed, passed_s, last)) from None
            self._tell(what, passed_s, last)
            count(retries=1, waited_s=wait_s)
            self._clock.wait(wait_s)

    def _despair(self, what: str, failed: int, passed_s: float, last: TransientError) -> str:
        bound = "" if self.retry.attempts is None else f"{self.retry.attempts} attempts, "
        return (
            f"{what}: {failed} attempts failed within {passed_s:.1f} s, the last one with: {last}. Check the "
            f'server and the network; options={{"retry": Retry(deadline_s=...)}} is more patient (now {bound}'
            f"{self.retry.deadline_s:g} s)."
        )

    def _tell(self, what: str, passed_s: float, last: TransientError) -> None:
        now = self._clock.now()
        if passed_s >= _TOLD_AFTER_S and now - self._told_s >= _TOLD_EVERY_S:
            self._told_s = now
            _log.warning(
                "%s fails since %.0f s, the last time with: %s. It is tried for up to %g s",
                what,
                passed_s,
                last,
                self.retry.deadline_s,
            )
