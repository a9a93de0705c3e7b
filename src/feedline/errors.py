"""One tree of exceptions; each also inherits the built-in that a caller would catch."""

from __future__ import annotations

from contextlib import suppress


def note(error: BaseException, text: str) -> None:
    """Add a note; an exception that refuses, such as a frozen dataclass, is left as it is."""
    with suppress(Exception):
        error.add_note(text)


class FeedlineError(Exception):
    """Root of every exception that feedline itself raises."""


class ArgumentError(FeedlineError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class MissingExtraError(FeedlineError, ImportError):
    """An optional dependency is not installed; the message holds the pip command."""


class StateError(FeedlineError, ValueError):
    """A saved state that does not belong to this loader, or is damaged."""


class SampleError(FeedlineError, ValueError):
    """A sample that cannot be read or decoded."""


class SampleIndexError(FeedlineError, IndexError):
    """A sampler gave an index that the dataset does not have."""


class CollateError(FeedlineError, TypeError):
    """Samples that cannot be put together into one batch."""


class NotPicklableError(FeedlineError, TypeError):
    """Something that must travel to a worker process cannot be pickled; the message names its path."""


class WorkerError(FeedlineError, RuntimeError):
    """A worker failed as a process or thread, not with an exception of the user's code."""


class WorkerDiedError(WorkerError):
    """A worker process ended without answering (killed, out of memory, crashed, or exited)."""


class WorkerStalledError(WorkerError, TimeoutError):
    """No batch arrived within `timeout` seconds."""


class ErrorLimitError(FeedlineError, RuntimeError):
    """More samples failed than `ErrorPolicy.limit` allows."""


class ReprError(FeedlineError, RuntimeError):
    """Stands for an exception of a worker that could not itself be carried to this process."""
