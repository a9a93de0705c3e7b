"""Policy of retries: kinds of failures, number and waits."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from feedline.core import threads
from feedline.core.store_metrics import count
from feedline.errors import ArgumentError, StoreError, StoreUnavailableError, TransientError
from feedline.stores.concurrency import ConcurrencyLimit

T = TypeVar("T")


_log = logging.getLogger("feedline")


_LOG_AFTER_S, _LOG_EVERY_S = 5.0, 60.0
"""A failure that lasts this many seconds is logged, and then at most once per interval."""


_THROTTLED_S = 1.0
"""The shortest wait after a throttled answer: obstore does not show its Retry-After."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Retries of transient failures.

    These are resets, timeouts, truncated answers, 408, 409, 425, 429 and 5xx. The wait between attempts is random up to
    `first_wait_s`, doubled with each attempt up to `max_wait_s` (full jitter). After a throttled answer (429 or
    503) it is one to two seconds at least. Retry-After is not read.
    """

    attempts: int | None = None
    """The maximum number of consecutive requests that bring no bytes; None: as many as the deadline allows."""
    deadline_s: float = 120.0
    """Seconds after the first attempt, or after the last attempt that brought bytes, in which another may begin."""
    idle_timeout_s: float = 30.0
    """Seconds without a received byte after which a request fails: a slow answer is not a failure."""
    first_wait_s: float = 0.1
    max_wait_s: float = 10.0
    hedge_quantile: float | None = 0.95
    """A range that takes longer than this share of the recent ranges of its size, and than twice the median, is
    requested a second time. The first answer counts. At most one request in ten is a second one. None: no second
    requests.
    """

    def __post_init__(self) -> None:
        if self.attempts is not None and self.attempts < 1:
            raise ArgumentError(f"Retry(attempts={self.attempts}): give at least 1 attempt, or None")
        if self.deadline_s <= 0 or self.idle_timeout_s <= 0:
            raise ArgumentError("Retry: deadline_s and idle_timeout_s must be above 0")
        if self.first_wait_s < 0 or self.max_wait_s < self.first_wait_s:
            raise ArgumentError("Retry: give waits with 0 <= first_wait_s <= max_wait_s")
        if self.hedge_quantile is not None and not 0 < self.hedge_quantile < 1:
            raise ArgumentError(f"Retry(hedge_quantile={self.hedge_quantile}): give a share between 0 and 1, or None")

    def wait_s(self, failed: int, draw: float, last: TransientError | None = None) -> float:
        """The wait after `failed` attempts, the last with this failure.

        `draw` is a random number in [0, 1).
        """
        wait_s = draw * min(self.max_wait_s, self.first_wait_s * 2.0 ** min(failed - 1, 60))
        # Full jitter may draw a wait near 0, and Retry-After is not visible, so throttled answers have a minimum wait.
        throttled = last is not None and last.throttled
        return max(wait_s, _THROTTLED_S * (1 + draw)) if throttled else wait_s


class Clock(Protocol):
    """Time, and waiting for it to pass."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleep; WaitCancelledError once the result is no longer needed."""
        ...


class SystemClock:
    """Real time."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        threads.sleep(seconds)


_draw_uniform = random.SystemRandom().random
"""Not `random`, whose state belongs to the user and may be seeded for each sample."""


class Attempts:
    """Runs requests under a policy. Safe to use from several threads."""

    def __init__(
        self,
        retry: Retry,
        clock: Clock | None = None,
        draw: Callable[[], float] = _draw_uniform,
        limit: Callable[[], ConcurrencyLimit] | None = None,
    ) -> None:
        self.retry = retry
        self._limit = limit
        self._clock = clock or SystemClock()
        self._draw = draw
        self._logged_s = -_LOG_EVERY_S

    def run(self, attempt: Callable[[TransientError | None], T], what: str) -> T:
        """Call `attempt` until it raises no TransientError; return its result.

        Its argument is the previous failure. StoreUnavailableError about `what` when attempts or time are used up.
        """
        try:
            return self._run(attempt, what)
        except StoreError:
            count(failures=1)
            raise

    def _run(self, attempt: Callable[[TransientError | None], T], what: str) -> T:
        start, failed, last = self._clock.now(), 0, None
        while True:
            try:
                return self._limit().run(partial(attempt, last)) if self._limit else attempt(last)
            except TransientError as failure:
                last = failure
            threads.check_not_cancelled()
            if last.progressed:  # equivalent to a first attempt for the rest
                start, failed = self._clock.now(), 0
            failed += 1
            wait_s = self.retry.wait_s(failed, self._draw(), last)
            passed_s = self._clock.now() - start
            if failed == self.retry.attempts or passed_s + wait_s > self.retry.deadline_s:
                raise StoreUnavailableError(self._give_up_message(what, failed, passed_s, last)) from None
            self._log_failure(what, passed_s, last)
            count(retries=1, waited_s=wait_s)
            self._clock.wait(wait_s)

    def _give_up_message(self, what: str, failed: int, passed_s: float, last: TransientError) -> str:
        bound = "" if self.retry.attempts is None else f"{self.retry.attempts} attempts, "
        return (
            f"{what}: {failed} attempts failed within {passed_s:.1f} s, the last one with: {last}. Check the "
            f'server and the network; options={{"retry": Retry(deadline_s=...)}} allows more time (now {bound}'
            f"{self.retry.deadline_s:g} s)."
        )

    def _log_failure(self, what: str, passed_s: float, last: TransientError) -> None:
        now = self._clock.now()
        if passed_s >= _LOG_AFTER_S and now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            _log.warning(
                "%s has failed for %.0f s, the last time with: %s. It is retried for up to %g s",
                what,
                passed_s,
                last,
                self.retry.deadline_s,
            )
