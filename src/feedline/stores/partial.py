"""Received parts of ranges, kept over failed attempts."""

from __future__ import annotations

from collections.abc import Callable

from feedline.core.store_metrics import count
from feedline.errors import TransientError
from feedline.stores.base import ByteRange, FileVersion
from feedline.stores.requests import join_views

_SMALL_NBYTES = 64 << 10
"""Below this size, a repeated request costs less than keeping parts."""


_PARTS, _SMALLEST_NBYTES = 32, 16 << 10
"""Number of parts that a range arrives in, and their least size: only one part is lost with a broken connection."""


def _do_nothing() -> None:
    pass


class PartialRange:
    """A range that one thread fetches, in one attempt or several.

    `is_quick`: requests are so fast that a lost attempt costs less than joining parts. `check` is called for each part
    that arrives; it raises if the range is no longer needed.
    """

    def __init__(self, span: ByteRange, *, is_quick: bool = False, check: Callable[[], None] = _do_nothing) -> None:
        self.span = span
        self.version = ""
        self.size = 0
        """The size of the whole object."""
        self.nbytes = 0
        """The bytes that have arrived."""
        self._stop = span.stop
        self._views: list[memoryview] = []
        self._is_quick, self._check, self._attempts = is_quick, check, 0

    @property
    def remaining(self) -> ByteRange:
        """The bytes that have not arrived yet."""
        return ByteRange(self.span.start + self.nbytes, self._stop)

    def accept(self, version: str, size: int, span: ByteRange) -> None:
        """Accept an answer with the bytes `span` of the object.

        TransientError if the earlier parts are of another or an unknown version; those parts are then dropped.
        """
        self._attempts += 1
        # Without a version, parts of the object and of a new one of the same size cannot be distinguished.
        if self.nbytes and (version != self.version or not FileVersion(size, version).is_known):
            self._drop()
            raise TransientError("the object changed while it was read, or has no version that would show it")
        self.version, self.size = version, size
        self._stop = min(self.span.stop, span.stop)

    @property
    def part_nbytes(self) -> int | None:
        """The size of the parts of an answer; None: all at once."""
        nbytes = self._stop - self.span.start - self.nbytes
        if nbytes <= _SMALL_NBYTES or (self._is_quick and self._attempts <= 1) or not self._is_versioned:
            return None
        return _SMALLEST_NBYTES if self._attempts > 1 else max(_SMALLEST_NBYTES, nbytes // _PARTS)

    @property
    def _is_versioned(self) -> bool:
        return FileVersion(self.size, self.version).is_known

    def add(self, view: memoryview) -> None:
        """Append a received part."""
        self._check()
        self._views.append(view)
        self.nbytes += view.nbytes

    def check_complete(self) -> None:
        """Raise TransientError for an answer of another length than it announced."""
        arrived, expected = self.nbytes, self._stop - self.span.start
        if arrived > expected or (arrived < expected and not self._is_versioned):
            self._drop()
        check_complete(arrived, expected)

    def _drop(self) -> None:
        self._views.clear()
        self.nbytes, self._stop = 0, self.span.stop

    def data(self) -> memoryview:
        """All received bytes; a view of a single part without a copy."""
        return self._views[0] if len(self._views) == 1 else join_views(self._views)


def check_complete(nbytes: int, expected: int) -> None:
    """Raise TransientError for an answer of another length than it announced."""
    if nbytes > expected:
        raise TransientError(f"the answer had more bytes than it announced, {nbytes} instead of {expected}")
    if nbytes != expected:
        count(truncated=1)
        raise TransientError(f"the answer was cut short, {nbytes} of {expected} bytes")
