"""A store that is read through a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from feedline.core.caches import LRUCache, PerProcess
from feedline.core.stage_parts import read_part
from feedline.core.store_metrics import count
from feedline.core.threads import DaemonPool
from feedline.errors import ObjectChangedError, StoreError
from feedline.stores.base import ObjectInfo, Range, Store, VersionedObject, Views, check_version
from feedline.stores.cache.entries import MissingPieceError, PieceKey, Pieces
from feedline.stores.cache.folder import Folder
from feedline.stores.cache.locks import WAIT_S
from feedline.stores.cache.settings import Cache
from feedline.stores.requests import FetchedRanges, check_ranges, check_within
from feedline.stores.urls import join

_GROUP_NBYTES = 64 << 20
"""Bytes fetched at a time: one read may need far more than fits into memory."""


_RUN_NBYTES = 4 << 20
"""Consecutive missing pieces are fetched together up to this size."""


_PART_NBYTES = 8 << 20
"""An object that is needed as a file is fetched in concurrent parts of this size."""


_FETCHERS = 16
"""Fewer than for reads alone: these threads write to the disk, too, and each has up to `_RUN_NBYTES` in memory."""


_KNOWN = 100_000


class CachedStore:
    """The objects of `store`, kept in pieces in a local folder.

    An object is looked up once per process and then assumed to be unchanged. If it does change, a read of bytes that
    are not in the cache raises ObjectChangedError, and the next read finds the new version. If the store reports no
    versions, pieces are kept only for this CachedStore and its unpickled copies.
    """

    def __init__(self, store: Store, cache: Cache, own: str | None = None) -> None:
        self.store = store
        self.cache = cache
        self._own = own or uuid4().hex
        self._shared = PerProcess(lambda: _Shared(cache))

    @property
    def url(self) -> str:
        """The address of the store itself."""
        return self.store.url

    def __fingerprint__(self) -> str:
        """The address; its data do not depend on options or caches."""
        return self.url

    def __repr__(self) -> str:
        return f"CachedStore({self.store!r}, {self.cache!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedStore, (self.store, self.cache, self._own)

    def info(self, path: str) -> ObjectInfo:
        """The current size and version of one object."""
        return self._shared().infos.put(path, self.store.info(path))

    def record_info(self, info: ObjectInfo) -> None:
        """Record the size and version of an object.

        This saves a request for them.
        """
        self._shared().infos.put(info.path, info)

    def size(self, path: str) -> int:
        """The size of one object in bytes."""
        return self._look_up_info(path, None).size

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List every object whose path begins with `prefix`, sorted by path."""
        for info in self.store.list(prefix):
            yield self._shared().infos.put(info.path, info)

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        """Read the bytes from `start` up to `stop`, or to the end."""
        stop = max(start, self._look_up_info(path, version).size) if stop is None else stop
        return self.read_many(path, [(start, stop)], version=version)[0]

    def read_versioned(self, path: str) -> VersionedObject:
        """Read one object with its version, without an additional request."""
        known = self._look_up_info(path, None)
        return VersionedObject(self.read(path, 0, known.size, version=known.version), known.version)

    def read_many(self, path: str, ranges: Sequence[Range], *, version: str | None = None) -> Views:
        """One view for each range."""
        with read_part(self.store.url):
            return self._read_many(path, ranges, version)

    def _read_many(self, path: str, ranges: Sequence[Range], version: str | None) -> Views:
        check_ranges(ranges, join(self.url, path))
        object_ = self._object(path, version)
        check_within(ranges, object_.info.size, object_.address)
        numbers = _pieces_of(ranges, self.cache.piece_nbytes)
        fetched = FetchedRanges([object_.span(number) for number in numbers], list(object_.pieces(numbers)))
        return [fetched.cut(start, stop) for start, stop in ranges]

    def in_memory(self, path: str, ranges: Sequence[Range], *, version: str) -> Views | None:
        """Views of ranges that are all in this process's memory, else None.

        Never waits.
        """
        known, pieces = self._shared().infos.get(path), self.cached_pieces(path, version=version)
        if known is None or not all(0 <= start <= stop <= known.size for start, stop in ranges):
            return None  # `read_many` raises the error
        try:
            return [pieces.cut(start, stop) for start, stop in ranges]
        except MissingPieceError:
            return None

    def cached_pieces(self, path: str, *, version: str) -> Pieces:
        """The pieces of an object in this process's memory.

        None of the pieces if another version is known.
        """
        known = self._shared().infos.get(path)
        if known is None or known.version != version:
            return Pieces(lambda _: None, self.cache.piece_nbytes)
        return Pieces(self._object(path, version).mapped, self.cache.piece_nbytes)

    def fetch_range(self, path: str, start: int = 0, stop: int | None = None) -> int:
        """Fetch missing pieces of a range; return the range's size.

        Keeps no data in memory.
        """
        stop = self._look_up_info(path, None).size if stop is None else stop
        self._object(path, None).fetch_missing(self.pieces(path, [(start, stop)]))
        return max(0, stop - start)

    def has_info(self, path: str) -> bool:
        """True if the size of an object is known without a request."""
        return self._shared().infos.get(path) is not None

    def pieces(self, path: str, ranges: Sequence[Range]) -> Sequence[int]:
        """The numbers of the pieces of these ranges, in ascending order."""
        object_ = self._object(path, None)
        check_within(ranges, object_.info.size, object_.address)
        return _pieces_of(ranges, self.cache.piece_nbytes)

    def piece_nbytes(self, path: str, number: int) -> int:
        """The size of one piece in bytes; the last may be smaller."""
        start, stop = self._object(path, None).span(number)
        return stop - start

    def has(self, path: str, number: int) -> bool:
        """True if a piece has a file, without opening it."""
        return self._object(path, None).has(number)

    def runs(self, numbers: Sequence[int]) -> Sequence[Sequence[int]]:
        """Group pieces of an object by the requests that fetch them."""
        return list(_runs(numbers, self.cache.piece_nbytes))

    def fetch_pieces(self, path: str, numbers: Sequence[int]) -> None:
        """Fetch missing pieces of an object, and keep none in memory."""
        self._object(path, None).fetch_missing(numbers)

    def file(self, info: ObjectInfo) -> str:
        """The path of a local file that begins with the object's bytes.

        It is fetched if it is missing. For libraries that only open files. A few bytes of the cache follow the object's
        bytes. The file may be evicted at any moment; a process that has it open keeps its data. StoreError if it cannot
        be kept.
        """
        self.record_info(info)
        return self._object(info.path, info.version).file()

    def _object(self, path: str, version: str | None) -> _Object:
        info = self._look_up_info(path, version)
        # Without versions, pieces of another process may have other content, so each process has its own key.
        version_key = info.version if info.is_versioned else f"{info.version} {self._own}"
        return _Object(self.store, self._shared(), info, version_key, self.cache)

    def _look_up_info(self, path: str, version: str | None) -> ObjectInfo:
        known = self._shared().infos.get(path)
        if known is None or version not in (None, known.version):
            known = self.info(path)
        check_version(version, known.version, join(self.url, path))
        return known


def cache_of(store: Store | None) -> CachedStore | None:
    """The cache through which a store is read; None without one."""
    return store if isinstance(store, CachedStore) else None


def without_cache(store: Store) -> Store:
    """The store behind a cache, or the store itself.

    For small reads whose results are kept in another form: a cache would fetch a far larger piece.
    """
    cache = cache_of(store)
    return store if cache is None else cache.store


class _Shared:
    """State that the objects of one store share in this process."""

    def __init__(self, cache: Cache) -> None:
        self.folder = Folder(cache)
        self.infos: LRUCache[str, ObjectInfo] = LRUCache(_KNOWN)
        self.fetchers = DaemonPool(_FETCHERS, "feedline-cache")


class _Object:
    """One version of one object, piece by piece."""

    def __init__(self, store: Store, shared: _Shared, info: ObjectInfo, version_key: str, cache: Cache) -> None:
        self._store = store
        self._folder = shared.folder
        self._infos = shared.infos
        self._fetchers = shared.fetchers
        self.info = info
        self._version_key = version_key
        self._piece_nbytes = cache.piece_nbytes
        self.address = join(store.url, info.path)

    def pieces(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        """These pieces, in order; missing ones are fetched concurrently.

        One process of the machine fetches a piece for all.
        """
        for group in self._groups(numbers):
            data_by_number = self._look_up(group)
            count(cache_hits=len(data_by_number), cache_misses=len(group) - len(data_by_number))
            fetched = self._fetch_exclusively([number for number in group if number not in data_by_number])
            data_by_number |= {number: self._reopen(number, data) for number, data in fetched.items()}
            yield from (data_by_number[number] for number in group)

    def mapped(self, number: int) -> memoryview | None:
        """A piece, if this process has it mapped."""
        data = self._folder.in_memory(self._key(number))
        if data is None or data.nbytes != self._nbytes(number):
            return None
        count(cache_hits=1)
        return data

    def fetch_missing(self, numbers: Sequence[int]) -> None:
        """Fetch the missing pieces among these."""
        for group in self._groups([number for number in numbers if not self.has(number)]):
            count(cache_misses=len(group))
            self._fetch_exclusively(group)

    def has(self, number: int) -> bool:
        return self._folder.has(self._key(number))

    def span(self, number: int) -> tuple[int, int]:
        return number * self._piece_nbytes, min((number + 1) * self._piece_nbytes, self.info.size)

    def _nbytes(self, number: int) -> int:
        # Some servers give two contents of an object one version, such as the second in which both were written.
        start, stop = self.span(number)
        return stop - start

    def _groups(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        at_once = max(1, _GROUP_NBYTES // self._piece_nbytes)
        return (numbers[first : first + at_once] for first in range(0, len(numbers), at_once))

    def _reopen(self, number: int, data: memoryview) -> memoryview:
        """The piece, mapped from its file: the kernel can reclaim that memory."""
        mapped = self._folder.get(self._key(number), self._nbytes(number))
        return data if mapped is None else mapped

    def file(self) -> str:
        """The object as one file."""
        key = PieceKey(self.address, self._version_key, 0, 0)  # not a piece, which has at least one byte
        return self._folder.find_or_make(key, partial(self._folder.file, key), partial(self._fetch_file, key))

    def _fetch_file(self, key: PieceKey) -> str:
        count(cache_misses=1)
        parts = range(0, self.info.size, _PART_NBYTES)

        def fill(write_at: Callable[[int, memoryview], None]) -> None:
            def copy(start: int) -> None:
                ranges = [(start, min(start + _PART_NBYTES, self.info.size))]
                write_at(start, self._store.read_many(self.info.path, ranges, version=self.info.version)[0])

            for _ in self._fetchers.map(copy, parts):
                pass  # raises the first failure

        try:
            return self._folder.put_file(key, self.info.size, fill)
        except StoreError:
            raise
        except OSError as error:
            reason = error.strerror or "its limit is lower; raise limit= of the cache"
            what = f"{self.address} ({self.info.size:,} bytes) is needed as a file"
            raise StoreError(f"{what}, and the cache cannot keep it: {reason}") from error

    def _fetch_exclusively(self, missing: Sequence[int]) -> dict[int, memoryview]:
        if not missing:
            return {}
        with self._folder.fetch_locks() as fetch_locks:
            # Locked one by one without waiting: pieces that other processes fetch are read from their files afterwards.
            mine = [number for number in missing if fetch_locks.take(self._key(number).name())]
            data_by_number = self._look_up(mine)  # another process may have fetched them since the first check
            data_by_number |= self._fetch_all([number for number in mine if number not in data_by_number])
        # All locks are released before waiting: two readers with locks could wait for each other forever.
        for number in set(missing).difference(data_by_number):
            fetch_locks.wait(self._key(number).name(), WAIT_S)
            count(cache_shared=1)
            data_by_number |= self._look_up([number]) or self._fetch([number])
        return data_by_number

    def _key(self, number: int) -> PieceKey:
        return PieceKey(self.address, self._version_key, self._piece_nbytes, number)

    def _look_up(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        pieces = ((number, self._folder.get(self._key(number), self._nbytes(number))) for number in numbers)
        return {number: data for number, data in pieces if data is not None}

    def _fetch_all(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        runs = list(_runs(numbers, self._piece_nbytes))
        if len(runs) == 1:
            return self._fetch(runs[0])
        futures = [self._fetchers.submit(self._fetch, run) for run in runs]
        try:
            return {number: data for future in futures for number, data in future.result().items()}
        finally:
            for future in futures:
                future.cancel()

    def _fetch(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        ranges = [self.span(number) for number in numbers]
        try:
            fetched = self._store.read_many(self.info.path, ranges, version=self.info.version)
        except ObjectChangedError:
            # The version is dropped, so that the next reader looks it up and reads the new version under its own keys.
            self._infos.drop(self.info.path)
            raise
        data_by_number = dict(zip(numbers, fetched, strict=True))
        for number, data in data_by_number.items():
            self._folder.put(self._key(number), data)
        return data_by_number


def _runs(numbers: Sequence[int], piece_nbytes: int) -> Iterator[list[int]]:
    """Group consecutive numbers that one request fetches."""
    longest = max(1, _RUN_NBYTES // piece_nbytes)
    run: list[int] = []
    for number in numbers:
        if run and (number != run[-1] + 1 or len(run) == longest):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def _pieces_of(ranges: Sequence[Range], piece_nbytes: int) -> list[int]:
    """The numbers of the pieces of these ranges, in ascending order."""
    spans = ((start // piece_nbytes, -(-stop // piece_nbytes)) for start, stop in set(ranges) if start < stop)
    return sorted({number for first, last in spans for number in range(first, last)})
