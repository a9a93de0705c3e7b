"""Latest error of a loader, for its report."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from time import time
from typing import Any, NamedTuple, Self

from feedline.loader.report.stats import count

_MOST_CHARACTERS = 500
"""Length at which a message is cut: some contain what a server has sent."""


_NOTE = "feedline: "
"""Beginning of feedline's notes on an error."""


class RaisedError(NamedTuple):
    """Error that a loader has raised, in words."""

    error: str
    """Type, and the first line of the message."""
    details: str
    """Sentences of feedline's notes: sample, address, remedy; empty without notes."""
    batches: int
    """Batches that the loop had received, in all epochs."""
    time_s: float
    """Seconds since 1970."""
    went_on: bool = False
    """True if the loop has received a batch since, or has begun again."""

    @classmethod
    def of(cls, error: BaseException, batches: int) -> Self:
        """The error that a loader raises after a number of batches."""
        message = ""
        with suppress(Exception):  # the `__str__` of a user's class may raise anything
            message = next(iter(str(error).strip().splitlines()), "")
        name = type(error).__name__
        notes = (note for note in getattr(error, "__notes__", ()) if isinstance(note, str) and note.startswith(_NOTE))
        details = " ".join(map(_sentence, notes))
        return cls(_cut(f"{name}: {message}" if message else name), _cut(details), batches, time())

    def headline(self, subject: str = "The loader") -> str:
        """One clause on the error, without a full stop."""
        when = f"after {count(self.batches, 'batch')}" if self.batches else "before its first batch"
        return f"{subject} raised {self.error} {'and went on ' if self.went_on else ''}{when}"

    @property
    def text(self) -> str:
        """The error with its details."""
        return f"{self.headline()}. {self.details}".rstrip()


def raised_error_of(figures: Mapping[str, Any]) -> RaisedError | None:
    """The error in published figures; None without one."""
    raised = figures.get("raised")
    return RaisedError(**raised) if raised else None


def _sentence(note: str) -> str:
    text = next(iter(note.removeprefix(_NOTE).splitlines()), "").rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …"
