"""Requests to buckets for keys that obstore refuses.

These are keys with empty parts or control characters. The requests are sent as signed links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from feedline.core.caches import PerProcess
from feedline.errors import InvalidNameError, RegionError, StoreError, TransientError
from feedline.stores.base import ObjectInfo
from feedline.stores.obstore_client import Client, ObstoreKind, RangeAnswer
from feedline.stores.options import StoreOptions
from feedline.stores.partial import PartialRange
from feedline.stores.signed_reader import READERS, S3Reader, SignedReader

_ODD = re.compile(r"(?:^|/)(?:/|$)|[\x00-\x1f\x7f]|(?:^|/)\.\.?(?:/|$)")
"""Keys that obstore refuses as paths."""


_DOTS = re.compile(r"(?:^|/)\.\.?(?:/|$)")
"""Keys that no address can hold: `.` and `..` are resolved before an address is signed."""


class SignedClient(Client):
    """Single requests to a bucket, some as signed links."""

    def __init__(self, kind: ObstoreKind, root: str, options: StoreOptions, idle_timeout_s: float) -> None:
        super().__init__(kind, root, options, idle_timeout_s)
        self._reader = PerProcess(lambda: READERS[kind](self._library, root, options, idle_timeout_s))

    def _call(self, what: str, call: Any) -> Any:
        try:
            return super()._call(what, call)
        except RegionError as error:
            if error.region:
                raise
            problem = error
        try:
            reader = self._reader()
            if isinstance(reader, S3Reader):
                reader.check_region(what)
        except RegionError as error:
            problem = error
        except (StoreError, TransientError):
            pass  # then the message does not name it
        raise problem

    def info(self, key: str, what: str) -> ObjectInfo:
        """Size and version of an object; its path is the key."""
        return self._reader().info(_check_key(key, what), what) if _ODD.search(key) else super().info(key, what)

    def get(self, key: str, part: PartialRange, what: str) -> None:
        """Fetch the rest of a range into `part`, as `Client.get` does."""
        if _ODD.search(key):
            self._reader().get(_check_key(key, what), part, what)
        else:
            super().get(key, part, what)

    def whole(self, key: str, what: str, most: int | None = None) -> RangeAnswer:
        """Read an object without a range request, as `Client.whole` does."""
        if _ODD.search(key):
            return self._reader().whole(_check_key(key, what), what)
        return super().whole(key, what, most)

    def page(self, pages: Iterator[Any], what: str) -> list[ObjectInfo] | None:
        """The next of these pages; None after the last one."""
        return next(pages, None) if isinstance(pages, _ListingPages) else super().page(pages, what)

    def odd_pages(self, prefix: str, offset: str | None, what: str) -> Iterator[Any]:
        """Pages of objects with any keys.

        StoreError if the credentials sign no links.
        """
        self._reader().check()
        return _ListingPages(self._reader(), prefix, offset or "", what)

    def folder(self, prefix: str, what: str) -> tuple[list[ObjectInfo], set[str]]:
        """List the objects and folders directly in a folder, in any order."""
        try:
            return super().folder(prefix, what)
        except InvalidNameError:
            pages = _ListingPages(self._reader(), prefix, "", what, delimiter="/")
            return [info for page in pages for info in page], pages.folders


def _check_key(key: str, what: str) -> str:
    if _DOTS.search(key):
        raise StoreError(
            f"{what}: the key has a part . or .., which no address can hold. Copy the object to another key, or leave "
            "it out"
        )
    return key


class _ListingPages:
    """Pages of a listing whose keys may be any text.

    `folders` are the folders that were found before.
    """

    def __init__(self, reader: SignedReader, prefix: str, offset: str, what: str, delimiter: str = "") -> None:
        self._reader, self._what = reader, what
        self._next: dict[str, str] | None = reader.first_page(prefix, offset, delimiter)
        self.folders: set[str] = set()

    def __iter__(self) -> Iterator[list[ObjectInfo]]:
        return self

    def __next__(self) -> list[ObjectInfo]:
        if self._next is None:
            raise StopIteration
        page = self._reader.page(self._next, self._what)
        self._next = page.following
        self.folders |= page.folders
        return page.infos
