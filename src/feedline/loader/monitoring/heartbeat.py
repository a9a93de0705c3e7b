"""Heartbeat of an iteration: clock, page and queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, NamedTuple

from feedline.core.histogram import SpanSums
from feedline.core.kernels import native
from feedline.core.page import BATCHES, PHASE_START, Page, PageWords
from feedline.core.telemetry import MAIN, SpanTuple

NEVER_NS = 1 << 62


class QueueState(NamedTuple):
    """Requests in flight of one iteration."""

    ready: int = 0
    """Batches that are complete."""
    in_flight: int = 0
    """Requests whose batch was not delivered."""
    ahead: int = 0
    """Requests in flight while the loop computes."""


def _keep_nothing() -> None:
    """Keep no figures: for an iteration without a loader."""


def _skip_publishing(_: Callable[[], QueueState], *, epoch_ends: bool = False, error: Exception | None = None) -> None:
    """Publish nothing: for an iteration without a loader."""


class LoopClock:
    """Clock of a loop: its spans, and the words of its page.

    For each batch, `call` comes before the wait for it, and `deliver` after.
    """

    __slots__ = ("_called_ns", "_left_ns", "_sampled_ns", "_words")

    def __init__(self, words: PageWords) -> None:
        self._words = words
        self._left_ns = self._called_ns = monotonic_ns()
        self._sampled_ns = 0

    def call(self) -> int:
        """Record that the loop waits for a batch; returns the time."""
        self._called_ns = monotonic_ns()
        self._words[PHASE_START] = -self._called_ns
        return self._called_ns

    def sample(self, draw: Callable[[], bool]) -> bool:
        """Return `draw()`, and count its time for the sampler if true."""
        begun_ns = monotonic_ns()
        drew = draw()
        if drew:
            self._sampled_ns += monotonic_ns() - begun_ns
        return drew

    def deliver(self, sums: SpanSums, spans: list[SpanTuple], samples: int, epoch: int, number: int) -> int:
        """Count a delivered batch and the spans of the loop.

        Returns the result of `SpanSums.add`.
        """
        now_ns = monotonic_ns()
        spans.append(("step", self._left_ns, self._called_ns, MAIN))
        spans.append(("wait", self._called_ns, now_ns, MAIN))
        if self._sampled_ns:
            spans.append(("sample", now_ns - self._sampled_ns, now_ns, MAIN))
            self._sampled_ns = 0
        self._words[BATCHES] += 1
        self._words[PHASE_START] = self._left_ns = now_ns
        return sums.add(spans, samples, epoch, number)

    def leave(self) -> None:
        """Begin a step without a batch, after an error."""
        self._left_ns = monotonic_ns()


_new_clock: Callable[[PageWords], LoopClock] = getattr(native, "LoopClock", LoopClock)


@dataclass(slots=True)
class Heartbeat:
    """The page that the loop writes with each batch."""

    page: Page = field(default_factory=lambda: Page(shared=False))
    due_ns: int = NEVER_NS
    """Time of the next publication."""
    publish: Callable[..., None] = _skip_publishing
    """Called by the loop with a function that returns its `QueueState`: with `epoch_ends=True` at the end of an epoch,
    and with an `error` before the loop gets it."""
    keep_workers: Callable[[], None] = _keep_nothing
    """Called before the workers end: their last figures count until the end of the epoch."""
    inspect: Callable[[Any], object] | None = None
    """Called once with the next batch."""
    clock: LoopClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = _new_clock(self.page.words)

    @property
    def waits_from_ns(self) -> int:
        """Start of the current wait, by the monotonic clock; 0 without one."""
        return max(-self.page.words[PHASE_START], 0)

    def mark_idle(self) -> None:
        """Record that the loop neither waits nor computes."""
        self.page.words[PHASE_START] = 0
