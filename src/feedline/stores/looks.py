"""How often files that are in use are looked at: one that is cut short while it is mapped would end the process."""

from __future__ import annotations

from time import monotonic
from typing import Any

LOOK_EVERY_S = 0.1
"""Seldom enough to cost nothing, even where a look is a question to a server."""


class Looks:
    """When something is due to be looked at; what was found wanting stays due. Pickles as new."""

    def __init__(self) -> None:
        self._next = 0.0

    def due(self) -> bool:
        """Whether it is time."""
        return monotonic() >= self._next

    def done(self) -> None:
        """It was looked at, and nothing was wrong."""
        self._next = monotonic() + LOOK_EVERY_S

    def __reduce__(self) -> tuple[Any, ...]:
        return Looks, ()
