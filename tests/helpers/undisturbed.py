"""Measurements of real loops on machines that also run other programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from feedline.loader.report import Verdict

Found = TypeVar("Found")

ATTEMPTS = 5


def blames_others(verdict: Verdict) -> bool:
    """True if a verdict says that other programs took the CPUs."""
    return "had no CPU" in " ".join(str(verdict).split())


class Measurement(NamedTuple, Generic[Found]):
    """The finding, the verdict, and whether a loop took much longer than its sleeps."""

    found: Found
    verdict: Verdict
    was_slowed: bool


def was_slowed(elapsed_s: float, slept_s: float) -> bool:
    """True if other programs, or a slow machine, made a loop much longer than the sum of its sleeps."""
    return elapsed_s > 1.25 * slept_s


def measured(measure: Callable[[], Measurement[Found]], is_right: Callable[[Found], bool]) -> Found:
    """The first right measurement of five; one of a busy machine, if other programs disturbed all of them.

    A loop that gets no CPU is limited by the CPU in any case.
    """
    undisturbed = []
    for _ in range(ATTEMPTS):
        found, verdict, slowed = measure()
        if is_right(found):
            break
        if not slowed and not blames_others(verdict):
            undisturbed.append(f"{found}\n{verdict}")
    else:
        assert not undisturbed, undisturbed[0]
    return found
