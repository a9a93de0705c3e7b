"""One tree of exceptions; each also inherits the built-in that a caller would catch.

What can go wrong between a store and its reader, sorted by what may help: waiting, or nothing but a change.
"""

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


class StoreError(FeedlineError, OSError):
    """A store that cannot be read as it was asked."""


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """The store has no such object, or no such bucket."""


class AccessDeniedError(StoreError, PermissionError):
    """The store refuses the credentials, or there are none."""


class RangeError(StoreError):
    """A range that cannot be had: the object ends before it, or the server does not know ranges."""


class NoRangesError(RangeError):
    """A server that gives whole objects only."""


class ObjectChangedError(StoreError):
    """An object is no longer the one that was asked for, or changed while it was read."""


class StoreUnavailableError(StoreError, ConnectionError):
    """The store failed again and again, in ways that waiting might have helped, until patience was at its end."""


class CacheWarning(UserWarning):
    """The cache cannot do its part; reading goes on without it."""


class TransientError(Exception):
    """One attempt failed in a way that another may not. It never leaves the package.

    `throttled`: the server asks for fewer requests.
    """

    def __init__(self, reason: str, *, throttled: bool = False) -> None:
        super().__init__(reason)
        self.throttled = throttled
