"""Finds the samples that kill whoever fetches them, by halving."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def poisonous(rows: Sequence[int], kills: Callable[[Sequence[int]], bool], *, every: bool) -> list[int]:
    """The rows that kill on their own, the first one or every one; `rows` together are known to kill.

    Empty if no single row does, as when a batch kills by its size. Costs about 2 log2(len(rows)) trials per row found.
    """
    if len(rows) == 1:
        return list(rows)
    found: list[int] = []
    middle = len(rows) // 2
    for half in (rows[:middle], rows[middle:]):
        if (every or not found) and kills(half):
            found += poisonous(half, kills, every=every)
    return found
