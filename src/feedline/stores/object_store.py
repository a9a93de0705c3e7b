"""Object storage and web servers, through obstore."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from feedline.core.caches import PerProcess
from feedline.core.store_metrics import count
from feedline.core.threads import DaemonPool, check_not_cancelled
from feedline.errors import (
    AccessDeniedError,
    NoRangesError,
    ObjectNotFoundError,
    RangeError,
    StoreError,
    TransientError,
)
from feedline.stores.base import ByteRange, ObjectInfo, VersionedObject, Views, check_version
from feedline.stores.obstore_client import WEB, Client, ObstoreKind, PagedListing, RangeAnswer
from feedline.stores.options import StoreOptions
from feedline.stores.partial import PartialRange
from feedline.stores.requests import FetchedRanges, Flight, Requests, Transfers, are_many, check_ranges, check_within
from feedline.stores.retry import Attempts, Retry
from feedline.stores.signed_requests import SignedClient
from feedline.stores.urls import check_path, join, scheme_row
from feedline.stores.web import WebClient


class RemoteStore:
    """A bucket, container or web server, or a prefix of one."""

    def __init__(
        self, kind: ObstoreKind, root: str, prefix: str, options: StoreOptions, retry: Retry, requests: Requests
    ) -> None:
        self._arguments = (kind, root, prefix, options, retry, requests)
        self._root = root
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._requests = requests
        self._client = PerProcess(lambda: _client(kind, root, options, retry.idle_timeout_s))
        self._transfers = Transfers(requests.max_concurrent, retry.hedge_quantile, url=root)
        self._attempts = Attempts(retry, limit=self._transfers.limit)

    @property
    def url(self) -> str:
        """The address of the store."""
        return join(self._root, self._prefix.rstrip("/"))

    def __fingerprint__(self) -> str:
        """The address; its data do not depend on options or caches."""
        return self.url

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r}, {self._arguments[3]!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, self._arguments

    def info(self, path: str) -> ObjectInfo:
        """The current size and version of one object."""
        what, key = join(self.url, path), self._key(path)

        info = self._transfers.call(lambda: self._attempts.run(lambda _: self._client().info(key, what), what))
        return ObjectInfo(path, info.size, info.version)

    def size(self, path: str) -> int:
        """The size of one object in bytes."""
        return self.info(path).size

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        """Read the bytes from `start` up to `stop`, or to the end."""
        if stop is not None:
            return self.read_many(path, [(start, stop)], version=version)[0]
        return self._transfers.call(lambda: self._read_on(path, start, version)).data

    def read_versioned(self, path: str) -> VersionedObject:
        """Read one object with its version, without an additional request."""
        return self._transfers.call(lambda: self._read_on(path, 0, None))

    def read_many(self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None) -> Views:
        """One view for each range.

        Ranges that are close together share a request and its memory.
        """
        key, seen = self._key(path), _Versions(join(self.url, path), version)
        check_ranges(ranges, seen.what)
        if are_many(ranges, self._requests):
            info = self.info(path)
            seen.add(info.version)
            check_within(ranges, info.size, seen.what)
        return self._transfers.read(lambda flight: self._fetch(key, seen, flight), ranges, self._requests)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List every object whose path begins with `prefix`, sorted by path."""
        what, wanted = self._listing_prefix(prefix)
        listing = PagedListing(self._client, wanted[: wanted.rfind("/") + 1], what)
        while self._transfers.call(lambda: self._attempts.run(lambda _: listing.grow(), what)):
            pass
        yield from self._files(listing.infos(), wanted)

    def list_folder(self, folder: str = "") -> Sequence[ObjectInfo]:
        """List the objects directly in a folder, sorted by path.

        `folder` is "" or ends with a `/`. Its subfolders, however large, are not listed.
        """
        what, wanted = self._listing_prefix(folder)
        place = wanted[: wanted.rfind("/") + 1]
        infos, folders = self._transfers.call(
            lambda: self._attempts.run(lambda _: self._client().folder(place, what), what)
        )
        return self._files(sorted(infos, key=lambda info: info.path), place, folders)

    def _files(self, infos: Sequence[ObjectInfo], prefix: str, folders: Collection[str] = ()) -> Sequence[ObjectInfo]:
        """Objects below a prefix, named relative to this store.

        obstore lists the marker `folder/` of a prefix as `folder`, which is not below it.
        """
        below = [info for info in infos if info.path.startswith(prefix)]
        files = _without_markers(below, self._is_object, folders)
        return [ObjectInfo(info.path.removeprefix(self._prefix), info.size, info.version) for info in files]

    def _is_object(self, key: str) -> bool:
        try:
            self.info(key.removeprefix(self._prefix))
        except ObjectNotFoundError:
            return False
        except AccessDeniedError:  # the credentials may allow listing, but not looking up
            pass
        return True

    def _listing_prefix(self, prefix: str) -> tuple[str, str]:
        """The prefix to list, for messages and within the bucket."""
        what = join(self.url, prefix)
        if not scheme_row(self._root).lists:
            names = f"{what if prefix else what + '/'}part-{{000..127}}.tar"
            raise StoreError(f"{what}: web servers do not list; name the objects, as in {names}")
        return what, self._prefix + check_path(prefix)

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def _fetch(self, key: str, seen: _Versions, flight: Flight) -> memoryview:
        span = flight.span
        what = f"{seen.what}, bytes [{span.start}, {span.stop})"
        part = PartialRange(span, is_quick=flight.is_quick, check=flight.check)

        self._get(key, part, what, flight)
        seen.add(part.version)
        if part.nbytes != span.nbytes:
            raise RangeError(f"{what}: the object has only {part.size} bytes; its index belongs to another version")
        count(nbytes=span.nbytes)
        return part.data()

    def _get(self, key: str, part: PartialRange, what: str, flight: Flight | None = None) -> None:
        """Fetch a range with retries.

        Each attempt continues where the previous one stopped.
        """

        def attempt(last: TransientError | None) -> None:
            if flight is not None:
                flight.throttled = last is not None and last.throttled
            before = part.nbytes
            try:
                self._client().get(key, part, what)
            except TransientError as error:
                error.progressed = part.nbytes > before
                raise

        self._attempts.run(attempt, what)

    def _read_on(self, path: str, start: int, version: str | None) -> VersionedObject:
        """Read from `start` to an unknown end.

        The first request fetches as much as one request may; others fetch the rest.
        """
        key, what = self._key(path), join(self.url, path)
        check_ranges([(start, start)], what)
        first = ByteRange(start, start + self._requests.max_nbytes)
        seen = _Versions(what, version)
        part = PartialRange(first, check=check_not_cancelled)
        try:
            self._get(key, part, what)
            answer = RangeAnswer(part.data(), part.version, part.size)
        except NoRangesError:
            if start:
                raise
            answer = self._attempts.run(lambda _: self._client().whole(key, what), what)
            first = ByteRange(0, answer.size)
        except RangeError:
            if (info := self.info(path)).size > start:
                raise
            seen.add(info.version)
            check_within([(start, start)], info.size, what)
            return VersionedObject(memoryview(b""), info.version)  # at the end of the object, no range is left
        seen.add(answer.version)
        count(nbytes=answer.data.nbytes)
        if answer.size <= first.stop:
            return VersionedObject(answer.data, answer.version)
        rest = self.read_many(path, [(first.stop, answer.size)], version=answer.version)[0]
        both = FetchedRanges([first, ByteRange(first.stop, answer.size)], [answer.data, rest])
        return VersionedObject(both.cut(start, answer.size), answer.version)


def _client(kind: ObstoreKind, root: str, options: StoreOptions, idle_timeout_s: float) -> Client:
    if kind == WEB:
        return WebClient(root, options, idle_timeout_s)
    return SignedClient(kind, root, options, idle_timeout_s)


class _Versions:
    """The version that all answers for an object must have.

    The requested one, or the first that was received.
    """

    def __init__(self, what: str, version: str | None) -> None:
        self.what = what
        self._version = version

    def add(self, version: str) -> None:
        """Raise ObjectChangedError if this version differs from an earlier one."""
        self._version = self._version or version
        check_version(self._version, version, self.what)


_HADOOP = "_$folder$"


def _without_markers(
    infos: Sequence[ObjectInfo], is_object: Callable[[str], bool], folders: Collection[str] = ()
) -> list[ObjectInfo]:
    """Leave out markers of folders; `infos` are sorted by path.

    Consoles, Hadoop and rclone make an empty object `folder/` for a folder, and Azure one named `folder`. obstore lists
    all of them without the final slash.

    `folders` are the known folders. For other empty objects that may be markers, `is_object(path)` queries the store.
    """
    paths = [info.path for info in infos]
    doubtful = [path for path in (info.path for info in infos if not info.size) if not path.endswith("/")]
    markers = {path for path in doubtful if path in folders or path.endswith(_HADOOP) or _has_children(path, paths)}
    left = [path for path in doubtful if path not in markers]
    with DaemonPool() as pool:
        markers.update(path for path, there in zip(left, pool.map(is_object, left), strict=True) if not there)
    return [info for info in infos if info.path not in markers and not info.path.endswith("/")]


def _has_children(path: str, paths: Sequence[str]) -> bool:
    at = bisect_left(paths, f"{path}/")
    return at < len(paths) and paths[at].startswith(f"{path}/")
