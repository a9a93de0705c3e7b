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

    kind: str
    """Name of its type."""
    message: str
    """First line of its message; empty without one."""
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
        notes = (note for note in getattr(error, "__notes__", ()) if isinstance(note, str) and note.startswith(_NOTE))
        details = " ".join(map(_sentence, notes))
        return cls(type(error).__name__, _cut(message.rstrip(".")), _cut(details), batches, time())

    def headline(self, subject: str = "The loader") -> str:
        """One clause on the error, without a full stop."""
        when = f"after {count(self.batches, 'batch')}" if self.batches else "before its first batch"
        went_on = " and went on" if self.went_on else ""
        return f"{subject} raised {self.kind}{went_on} {when}{self._message}"

    @property
    def error(self) -> str:
        """Type and message, as at the end of a traceback."""
        return f"{self.kind}{self._message}"

    @property
    def _message(self) -> str:
        return f": {self.message}" if self.message else ""

    @property
    def text(self) -> str:
        """The error with its details, in sentences."""
        return sentences(self.headline(), self.details)


def sentences(headline: str, details: str) -> str:
    """Text of a headline and its details."""
    return f"{headline}{'' if headline.endswith('…') else '.'} {details}".rstrip()


def raised_error_of(figures: Mapping[str, Any]) -> RaisedError | None:
    """The error in published figures; None without one."""
    raised = figures.get("raised")
    if not isinstance(raised, Mapping) or not raised.keys() >= set(RaisedError._fields):
        return None
    return RaisedError(*map(raised.__getitem__, RaisedError._fields))


def _sentence(note: str) -> str:
    text = next(iter(note.removeprefix(_NOTE).splitlines()), "").rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …"
