"""Schemes of fsspec: `hf://`, `memory://`, `ftp://`, `sftp://` and many more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

from feedline.core.caches import PerProcess
from feedline.core.optional import load
from feedline.core.store_metrics import count
from feedline.errors import (
    AccessDeniedError,
    ArgumentError,
    FeedlineError,
    ObjectNotFoundError,
    RangeError,
    StoreError,
    TransientError,
)
from feedline.stores.base import ObjectInfo, Views, check_version, unversioned
from feedline.stores.options import StoreOptions
from feedline.stores.requests import Flight, Requests, Transfers, are_many, check_ranges, check_within
from feedline.stores.retry import Attempts, Retry
from feedline.stores.statuses import ErrorResponse, error_for
from feedline.stores.urls import check_path, join

T = TypeVar("T")


_VERSIONS = (
    *("etag", "version_id", "versionid", "generation", "oid", "sha", "blob_id", "md5hash", "content-md5", "checksum"),
    *("mtime", "lastmodified", "last_modified", "modificationtime", "modification_time", "modified", "updated"),
    *("modify", "created"),
)
"""Keys of metadata that change with an object, in lower case; the first that is present counts."""


class ForeignStore:
    """The objects below an address that fsspec can open."""

    def __init__(self, url: str, options: StoreOptions, retry: Retry, requests: Requests) -> None:
        self._arguments = (url, options, retry, requests)
        self._url = url
        self._requests = requests
        self._system = PerProcess(lambda: _open(url, options))
        self._transfers = Transfers(requests.max_concurrent, retry.hedge_quantile, url=url)
        self._attempts = Attempts(retry, limit=self._transfers.limit)

    @property
    def url(self) -> str:
        """The address of the store."""
        return self._url

    def __fingerprint__(self) -> str:
        """The address; its data do not depend on options or caches."""
        return self.url

    def __repr__(self) -> str:
        return f"ForeignStore({self._url!r}, {self._arguments[1]!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ForeignStore, self._arguments

    def info(self, path: str) -> ObjectInfo:
        """The current size and version of one object."""
        entry = self._call(path, lambda system, name: system.info(name))
        if entry.get("type") == "directory":
            raise ObjectNotFoundError(f"{join(self._url, path)}: this is a folder, not an object")
        return ObjectInfo(path, int(entry["size"]), _version(entry))

    def size(self, path: str) -> int:
        """The size of one object in bytes."""
        return self.info(path).size

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        """Read the bytes from `start` up to `stop`, or to the end."""
        if stop is None:
            stop = self.info(path).size
            check_within([(start, start)], stop, join(self._url, path))
        return self.read_many(path, [(start, stop)], version=version)[0]

    def read_many(self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None) -> Views:
        """One view for each range.

        Versions are compared before the first byte is read, because fsspec returns no version with the data.
        """
        check_ranges(ranges, join(self._url, path))
        if version is not None:
            check_version(version, self.info(path).version, join(self._url, path))
        if are_many(ranges, self._requests):
            check_within(ranges, self.info(path).size, join(self._url, path))
        return self._transfers.read(lambda flight: self._fetch(path, flight), ranges, self._requests)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List every object whose path begins with `prefix`, sorted by path."""
        folder = check_path(prefix)[: prefix.rfind("/") + 1]
        root = self._call("", lambda _, name: name).rstrip("/")
        entries = self._call(folder, lambda system, name: system.find(name, detail=True))
        for name in sorted(entries):
            path = name.removeprefix(root).lstrip("/")
            is_file = not path.endswith("/") and entries[name].get("type") != "directory"
            if is_file and path.startswith(prefix):
                yield ObjectInfo(path, int(entries[name]["size"]), _version(entries[name]))

    def _fetch(self, path: str, flight: Flight) -> memoryview:
        start, stop = flight.span

        def ask(system: Any, name: str) -> bytes:
            data: bytes = system.cat_file(name, start=start, end=stop)
            if len(data) == stop - start:
                return data
            if (size := int(system.info(name)["size"])) < stop:
                raise RangeError(f"{join(self._url, path)}, bytes [{start}, {stop}): the object has only {size} bytes")
            count(truncated=1)
            raise TransientError(f"the answer was cut short, {len(data)} of {stop - start} bytes")

        data = self._call(path, ask, f", bytes [{start}, {stop})")
        count(nbytes=len(data))
        return memoryview(data).toreadonly()

    def _call(self, path: str, ask: Callable[[Any, str], T], part: str = "") -> T:
        """Call `ask(file_system, its name for the path)` with retries."""
        what = join(self._url, check_path(path)) + part

        def attempt(_: TransientError | None) -> T:
            count(requests=1)
            try:
                system, root = self._system()
                return ask(system, f"{root.rstrip('/')}/{path}" if root and path else root or path)
            except (FeedlineError, TransientError):
                raise
            except Exception as error:  # noqa: BLE001 - any foreign error, whose text may hold secrets
                problem = _translate(error, what)
            raise problem  # without the foreign exception, whose text may contain keys and signatures

        return self._attempts.run(attempt, what)


def _open(url: str, options: StoreOptions) -> tuple[Any, str]:
    fsspec = load("fsspec", "stores", f"the store {url}")
    try:
        system, root = load("fsspec.core", "stores", "stores").url_to_fs(url, **options)
    except ImportError as error:
        raise ArgumentError(f"{url}: fsspec {fsspec.__version__} needs another package for it: {error}") from None
    except ValueError:
        raise ArgumentError(
            f"{url}: neither obstore nor fsspec {fsspec.__version__} knows this scheme; correct it"
        ) from None
    except TypeError:
        raise ArgumentError(
            f"{url}: fsspec {fsspec.__version__} lacks an argument to open it; pass the arguments of its file system "
            "in options={...}"
        ) from None
    return system, root


def _status(error: Exception) -> int | None:
    """The HTTP status in an exception of a client library."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            if isinstance(value := getattr(holder, name, None), int) and 400 <= value < 600:
                return value
    return None


def _translate(error: Exception, what: str) -> Exception:
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return ObjectNotFoundError(f"{what}: there is no such object")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{what}: the store refuses the credentials, or there are none; check options={{...}}")
    if (status := _status(error)) is not None:
        return error_for(ErrorResponse(status), what)
    if isinstance(error, OSError):
        return TransientError(f"{type(error).__name__} of fsspec")
    return StoreError(
        f"{what}: {type(error).__name__} of fsspec; its message is not shown, because it may contain secrets. Call "
        "fsspec directly to see it"
    )


def _version(entry: dict[str, Any]) -> str:
    metadata = {name.lower(): value for name, value in entry.items() if value is not None}
    value = next((metadata[name] for name in _VERSIONS if name in metadata), unversioned(int(entry["size"])))
    # Some file systems return a number in one answer, and a datetime in another.
    return str(value.timestamp() if isinstance(value, datetime) else value)
