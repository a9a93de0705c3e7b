"""Limits on the time and memory of a loader's checks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from feedline.cli.doctor.findings import Finding, Severity
from feedline.loader.report.stats import seconds, size

CHECKS_S = 15.0
"""Seconds that all checks of a loader may take."""


MEMORY_SHARE = 0.25
"""Share of the free memory that the samples of one check may take."""


class TimeUp(BaseException):
    """Ends a check that takes too long.

    No `Exception`: code of the user must not handle it.
    """


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise `TimeUp` in a block that takes over `limit_s`.

    Only in the main thread. A call of C code ends first. A limit around the block still holds. Other threads, and
    systems without interval timers, have no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeUp

    began, before = monotonic(), signal.signal(signal.SIGALRM, stop)
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, max(limit_s, _SHORTEST_S))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(outer_s - (monotonic() - began), _SHORTEST_S) if outer_s else 0)
        signal.signal(signal.SIGALRM, before)


_SHORTEST_S = 1e-6
"""Shortest time of a timer; 0 would turn it off."""


class LoaderCheck(NamedTuple):
    """One check of a loader."""

    find: Callable[[], Iterable[Finding]]
    name: str = ""
    reads: int = 0
    """Samples that it reads one after the other."""
    holds: int = 0
    """Samples that it holds in memory at once."""


@dataclass(slots=True)
class CheckBudget:
    """Time and memory of all checks, and the checks left out."""

    nbytes: int
    deadline: float = field(default_factory=lambda: monotonic() + CHECKS_S)
    left_out: list[str] = field(default_factory=list)

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - monotonic()

    def run(self, check: LoaderCheck, sample_s: float = 0.0, sample_nbytes: int = 0) -> list[Finding]:
        """Findings of a check; none if such samples make it too expensive."""
        wanted_s, wanted = check.reads * sample_s, check.holds * sample_nbytes
        if wanted > self.nbytes:
            self.left_out.append(f"{check.name} ({size(wanted)} of samples)")
        elif wanted_s > self.left_s():
            self.left_out.append(f"{check.name} ({seconds(wanted_s)} of reading)")
        else:
            found: list[Finding] = []
            try:
                with time_limit(self.left_s()):
                    found += check.find()
            except TimeUp:
                self.left_out.append(f"{check.name} (time was up)")
            return found
        return []

    def finding(self) -> Iterator[Finding]:
        """The checks that were left out, if any."""
        if self.left_out:
            evidence = (
                f"{', '.join(self.left_out)}: the checks take at most {seconds(CHECKS_S)} and {size(self.nbytes)}"
            )
            remedy = "check a loader with a smaller batch_size, or with samples that are smaller or faster"
            yield Finding("left out", evidence, Severity.NOTE, remedy)
