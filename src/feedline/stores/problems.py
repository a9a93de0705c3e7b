"""What can go wrong between a store and its reader, sorted by what may help: waiting, or nothing but a change."""

from __future__ import annotations

from feedline.errors import FeedlineError


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
