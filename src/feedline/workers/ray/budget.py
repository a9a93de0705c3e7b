"""Deaths of actors and nodes, counted against the limit of each epoch."""

from __future__ import annotations

import logging

from feedline.workers.base import Recovery
from feedline.workers.ray.members import RayMember

_log = logging.getLogger("feedline")


class DeathBudget:
    """Counts deaths; those of all actors of a node count as one."""

    def __init__(self, recovery: Recovery) -> None:
        self._limit = recovery.deaths_per_epoch
        self._epoch: int | None = None
        self._count = 0
        self.restarts = 0

    @property
    def is_exceeded(self) -> bool:
        """True once there were more deaths than `Recovery.deaths_per_epoch`."""
        return self._count > self._limit

    def begin_epoch(self, epoch: int) -> None:
        """Reset the count if this epoch is a new one."""
        if epoch != self._epoch:
            self._epoch, self._count = epoch, 0

    def add(self, workers: int) -> None:
        """Count the death of these workers, which ended together."""
        self.restarts += workers
        self._count += 1

    def adjust(self, deaths: int) -> None:
        """Add deaths to the count, or take them back."""
        self._count = max(0, self._count + deaths)

    def log(self, text: str) -> None:
        """Log a death within the limit."""
        _log.warning(
            "%s\nA new actor takes its place. Deaths in this epoch: %d of %d allowed.", text, self._count, self._limit
        )


def describe_death(member: RayMember, doing: str, reason: BaseException, advice: str = "") -> str:
    """Compose the message about a dead worker; it begins like torch's."""
    what = str(reason).strip()
    pid = "" if member.pid is None else f" (pid(s) {member.pid})"
    parts = [f"DataLoader worker{pid} exited unexpectedly: {member}, a Ray actor{doing}.", f"Ray reports: {what}"]
    return "\n".join([*parts, advice] if advice else parts)
