"""What is wrong with one of many, in a line."""

from __future__ import annotations

from feedline.errors import FeedlineError


def problem(name: str, error: Exception) -> str:
    """What is wrong with something of this name, which feedline's own messages say already."""
    told = str(error) if isinstance(error, FeedlineError) else f"{type(error).__name__}: {error}"
    return told if name in told else f"{name}: {told}"
