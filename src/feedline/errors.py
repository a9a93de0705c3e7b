"""The exception tree of feedline.

Every class also inherits the built-in exception that a caller would catch.
"""

from __future__ import annotations

from contextlib import suppress


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception.

    An exception that refuses notes, such as a frozen dataclass, stays unchanged.
    """
    with suppress(Exception):
        error.add_note(text)


def note_rank(error: BaseException, rank: int, world_size: int) -> None:
    """Add a note with the rank, if there are several."""
    text = f"feedline: on rank {rank} of {world_size}"
    if world_size > 1 and text not in getattr(error, "__notes__", ()):
        note(error, text)


class FeedlineError(Exception):
    """The root of all exceptions that feedline raises."""


class ArgumentError(FeedlineError, ValueError):
    """An argument, or a combination of arguments, is invalid."""


class MissingExtraError(FeedlineError, ImportError):
    """An optional dependency is missing; the message holds the pip command."""


class StateError(FeedlineError, ValueError):
    """A saved state is damaged, or belongs to another loader."""


class SampleError(FeedlineError, ValueError):
    """A sample cannot be read or decoded."""


class SampleIndexError(FeedlineError, IndexError):
    """An index is out of range for the dataset."""


class CollateError(FeedlineError, TypeError):
    """Samples cannot be collated into one batch."""


class NotPicklableError(FeedlineError, TypeError):
    """An object cannot be sent to a worker process.

    The message names the path to the part that cannot be pickled.
    """


class WorkerError(FeedlineError, RuntimeError):
    """A worker failed as a process or thread.

    Exceptions of the user's code keep their own type.
    """


class WorkerDiedError(WorkerError):
    """A worker process died: killed, out of memory, crashed, or exited."""


class WorkerStalledError(WorkerError, TimeoutError):
    """No batch arrived within `timeout` seconds."""


class ErrorLimitError(FeedlineError, RuntimeError):
    """More samples failed than `ErrorPolicy.limit` allows."""


class RankError(FeedlineError, RuntimeError):
    """The ranks of a distributed run contradict each other.

    They differ in data, order or position, or one of them has no batch left, or does not arrive.
    """


class ReprError(FeedlineError, RuntimeError):
    """A worker's exception that could not be pickled, as its repr."""


class StoreError(FeedlineError, OSError):
    """A store cannot be read."""


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """The object, or its bucket, does not exist."""


class AccessDeniedError(StoreError, PermissionError):
    """The store refuses the credentials, or there are none."""


class RangeError(StoreError):
    """The object ends before the range, or the server has no ranges."""


class NoRangesError(RangeError):
    """The server only returns whole objects."""


class RegionError(StoreError):
    """The bucket is in another region than the request.

    `region` is its name, or "" if the server does not give it.
    """

    def __init__(self, message: str, region: str = "") -> None:
        super().__init__(message)
        self.region = region


class InvalidNameError(StoreError):
    """An object has a name that its store cannot read."""


class NoLengthError(StoreError):
    """The server sends content without a length."""


class ObjectChangedError(StoreError):
    """The object changed since it was opened, or while it was read."""


class StoreUnavailableError(StoreError, ConnectionError):
    """The store kept failing until all retries were used."""


class SourceError(FeedlineError, OSError):
    """A live source cannot be read."""


class SourceUnavailableError(SourceError, ConnectionError):
    """A live source does not answer."""


class SourceAccessError(SourceError, PermissionError):
    """A live source refuses the credentials, or there are none."""


class OffsetLostError(SourceError, LookupError):
    """A live source has deleted messages that were not delivered."""


class MessageTooLargeError(SampleError):
    """A message is larger than the stream allows."""


class CacheWarning(UserWarning):
    """The cache cannot be used; reading continues without it."""


class TransientError(Exception):
    """A request failed, but a retry may succeed.

    Internal: it never leaves the package. `throttled`: the server asked for fewer requests. `progressed`: a part of the
    answer has arrived, and is kept.
    """

    def __init__(self, reason: str, *, throttled: bool = False) -> None:
        super().__init__(reason)
        self.throttled = throttled
        self.progressed = False
