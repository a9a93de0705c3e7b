"""Requests to S3 for keys that obstore refuses.

Those with empty parts or control characters. obstore signs them as links, with whatever credentials it has, and
`WebReader` sends them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote, unquote
from xml.etree import ElementTree as ET

from feedline.core.caches import PerProcess
from feedline.errors import InvalidNameError, RegionError, StoreError, TransientError
from feedline.stores.base import ObjectInfo, unversioned
from feedline.stores.links import as_link, split_link
from feedline.stores.obstore_client import S3, Client, RangeAnswer, open_checked
from feedline.stores.options import StoreOptions
from feedline.stores.partial import PartialRange
from feedline.stores.web import WebReader

_ODD = re.compile(r"(?:^|/)(?:/|$)|[\x00-\x1f\x7f]|(?:^|/)\.\.?(?:/|$)")
"""Keys that obstore refuses as paths."""


_DOTS = re.compile(r"(?:^|/)\.\.?(?:/|$)")
"""Keys that no address can hold: `.` and `..` are resolved before an address is signed."""


_VALID = timedelta(hours=1)


class S3Client(Client):
    """Single requests to S3, of which some are sent as signed links."""

    def __init__(self, root: str, options: StoreOptions, idle_timeout_s: float) -> None:
        super().__init__(S3, root, options, idle_timeout_s)
        self._reader = PerProcess(lambda: _SignedReader(self._library, root, options, idle_timeout_s))

    def _call(self, what: str, call: Any) -> Any:
        try:
            return super()._call(what, call)
        except RegionError as error:
            if error.region:
                raise
            problem = error
        try:
            self._reader().refuse_elsewhere(what)
        except RegionError as error:
            problem = error
        except (StoreError, TransientError):
            pass  # then it stays unnamed
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
        """The next of these pages; None after the last."""
        return next(pages, None) if isinstance(pages, _Pages) else super().page(pages, what)

    def odd_pages(self, prefix: str, offset: str | None, what: str) -> Iterator[Any] | None:
        """Pages of objects with any keys."""
        return _Pages(self._reader(), prefix, offset or "", what)

    def folder(self, prefix: str, what: str) -> tuple[list[ObjectInfo], set[str]]:
        """List the objects and folders directly in a folder, in any order."""
        try:
            return super().folder(prefix, what)
        except InvalidNameError:
            pages = _Pages(self._reader(), prefix, "", what, delimiter="/")
            return [info for page in pages for info in page], pages.folders


def _check_key(key: str, what: str) -> str:
    if _DOTS.search(key):
        raise StoreError(
            f"{what}: the key has a part . or .., which no address can hold. Copy the object to another key, or leave "
            "it out"
        )
    return key


class _SignedReader(WebReader):
    """Requests for any key or query of a bucket."""

    def __init__(self, library: Any, root: str, options: StoreOptions, idle_s: float) -> None:
        super().__init__(root, options, idle_s)
        self._library, self._options = library, options
        self._is_anonymous = str(options.get("skip_signature", False)).lower() == "true"
        # The keys only serve to learn the address of the bucket: they sign nothing that is sent.
        keys = {"access_key_id": "-", "secret_access_key": "-"} if self._is_anonymous else {}
        self._base = self._sign(keys).partition("?")[0].removesuffix("/-")

    def refuse_elsewhere(self, what: str) -> None:
        """Raise RegionError if the server names another region."""
        with self._request("", what):
            pass

    def _sign(self, more: dict[str, Any]) -> str:
        store = open_checked(self._library, S3, self._root, StoreOptions({**self._options.raw(), **more}), self._idle_s)
        link: str = self._library.sign(store, "GET", "-", _VALID)
        return link

    def _address(self, key: str) -> str:
        name, query = split_link(key)
        address = f"{self._base}/{quote(name, safe='/~')}".removesuffix("/" if not name else "\0")
        if self._is_anonymous:
            return f"{address}?{query}" if query else address
        # obstore appends a path to what it takes for the server: S3 ignores parameters that begin with x-.
        place = f"{address}?{query}{'&' if query else ''}x-part="
        return self._sign({"endpoint": place, "virtual_hosted_style_request": True})

    def _refuse_disguises(self, headers: Any, key: str, what: str) -> None:
        """Accept all: what a bucket holds is what was put there."""


class _Pages:
    """Pages of a listing whose keys may be any text.

    `folders` are those seen so far.
    """

    def __init__(self, reader: _SignedReader, prefix: str, offset: str, what: str, delimiter: str = "") -> None:
        self._reader, self._what = reader, what
        self._fixed = {"delimiter": delimiter, "encoding-type": "url", "list-type": "2", "prefix": prefix}
        self._next: dict[str, str] | None = {"start-after": offset}
        self.folders: set[str] = set()

    def __iter__(self) -> Iterator[list[ObjectInfo]]:
        return self

    def __next__(self) -> list[ObjectInfo]:
        if self._next is None:
            raise StopIteration
        query = {name: value for name, value in sorted({**self._fixed, **self._next}.items()) if value}
        written = "&".join(f"{name}={quote(value, safe='~')}" for name, value in query.items())
        answer = self._reader.whole(as_link("", written), self._what)
        try:
            page = ET.fromstring(bytes(answer.data))  # noqa: S314 - expat bounds what entities expand to
        except ET.ParseError:
            raise TransientError("a listing that cannot be read") from None
        space = page.tag.partition("}")[0] + "}" if page.tag.startswith("{") else ""
        token = page.findtext(f"{space}NextContinuationToken", "")
        self._next = {"continuation-token": token} if token else None
        # Not all relatives of S3 encode keys when asked to.
        decode = unquote if page.findtext(f"{space}EncodingType") == "url" else str
        for folder in page.iter(f"{space}CommonPrefixes"):
            self.folders.add(decode(folder.findtext(f"{space}Prefix", "")).removesuffix("/"))
        return [_info(each, space, decode) for each in page.iter(f"{space}Contents")]


def _info(entry: ET.Element, space: str, decode: Callable[[str], str]) -> ObjectInfo:
    size = int(entry.findtext(f"{space}Size", "0"))
    etag = entry.findtext(f"{space}ETag", "").replace('"', "")
    return ObjectInfo(decode(entry.findtext(f"{space}Key", "")), size, etag or unversioned(size))
