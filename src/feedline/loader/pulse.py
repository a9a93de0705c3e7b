"""Signs of life of an iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from feedline.core.page import SINCE, Page

NEVER_NS = 1 << 62


class QueueState(NamedTuple):
    """Requests in flight of one iteration."""

    ready: int = 0
    """Batches that are complete."""
    in_flight: int = 0
    """Requests whose batch was not delivered."""
    ahead: int = 0
    """Requests in flight while the loop computes."""


def _publish_nothing(_: Callable[[], QueueState], *, epoch_ends: bool = False) -> None:
    """Publish nothing: the pulse of an iteration without a loader."""


@dataclass(slots=True)
class Pulse:
    """The page that the loop writes with each batch."""

    page: Page = field(default_factory=lambda: Page(shared=False))
    due_ns: int = NEVER_NS
    """Time of the next publication."""
    publish: Callable[..., None] = _publish_nothing
    """Called by the loop with a function that returns its `QueueState`; `epoch_ends=True` at the end of an epoch."""
    inspect: Callable[[Any], object] | None = None
    """Called once with the next batch."""

    def rests(self) -> None:
        """Record that the loop neither waits nor computes."""
        self.page.words[SINCE] = 0
