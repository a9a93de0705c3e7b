"""Files of this machine and objects of stores by number: found once, read alike.

Whole objects of one store, many at once: small ones, of which nobody needs to know beforehand how large they are.

A sequence of parts that are made when they are asked for, and not all kept: open files.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from feedline.core.caches import LRUCache, PerProcess
from feedline.core.threads import CancelScope, DaemonPool
from feedline.errors import ArgumentError
from feedline.stores.base import FileVersion, ObjectInfo, Range, Store, Views
from feedline.stores.cache import CachedStore, ObjectRange, Pieces, without_cache
from feedline.stores.local import RecheckTimer
from feedline.stores.urls import join

if sys.platform != "win32":
    import resource


class Extent(NamedTuple):
    """The bytes from `start` up to `stop` of the blob with this number."""

    blob: int
    start: int
    stop: int


class Blob(Protocol):
    """A file or an object whose content is known to be the one that was found."""

    name: str
    """Its path or address, as people are told."""
    nbytes: int
    version: str
    """A text that differs when the content does."""

    def read(self, spans: Sequence[Range]) -> Views:
        """One read-only view for each `(start, stop)`, valid for as long as it is held."""
        ...


class LocalFile:
    """A file, memory-mapped: what is read is the file itself."""

    def __init__(self, name: str, nbytes: int, version: str) -> None:
        self.name, self.nbytes, self.version = name, nbytes, version
        with open(name, "rb", buffering=0) as file:
            FileVersion(nbytes, version).check(FileVersion.of(os.fstat(file.fileno())), name)
            self.data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if nbytes else b"")
        self._looks = RecheckTimer()

    def refuse_changed(self) -> None:
        """StateError, within moments, if the file was changed in place: what is mapped may be gone from under it."""
        if self._looks.due():
            with suppress(FileNotFoundError):  # what was mapped stays when its name goes
                FileVersion(self.nbytes, self.version).check(local_info(self.name).state, self.name)
            self._looks.done()

    def read(self, spans: Sequence[Range]) -> Views:
        """Views of the mapping; nothing is touched yet."""
        return [self.data[start:stop] for start, stop in spans]

    at_hand = read_uncached = read


class RemoteBlob:
    """An object of a store, read through its cache if it has one; ObjectChangedError once it is another version."""

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self.name, self.nbytes, self.version = join(store.url, info.path), info.size, info.version
        self.store, self.path = store, info.path
        if isinstance(store, CachedStore):
            store.know(info)

    def read(self, spans: Sequence[Range]) -> Views:
        """All spans at once, many requests at a time."""
        return self.store.read_many(self.path, spans, version=self.version)

    def read_uncached(self, spans: Sequence[Range]) -> Views:
        """All spans past the cache: for a few bytes that are kept in another form, a piece of it is far too large."""
        return without_cache(self.store).read_many(self.path, spans, version=self.version)

    def at_hand(self, spans: Sequence[Range]) -> Views | None:
        """The same where it takes no waiting, because all of it is in memory already; else None."""
        if isinstance(self.store, CachedStore):
            return self.store.at_hand(self.path, spans, version=self.version)
        return None


class FileSet:
    """Blobs by number, in memory of their own only as far as their names go: each process opens them on first use.

    Safe to use from several threads. Pickles with names, sizes and versions, and with what opens the stores again.
    """

    def __init__(self, found: Sequence[tuple[Store | None, ObjectInfo]]) -> None:
        stores: dict[int, Store] = {id(store): store for store, _ in found if store is not None}
        numbers = {each: number for number, each in enumerate(stores)}
        self._stores = list(stores.values())
        self._store_numbers = [-1 if store is None else numbers[id(store)] for store, _ in found]
        self._infos = [info for _, info in found]
        self._opened: PerProcess[LRUCache[int, LocalFile | RemoteBlob]] = PerProcess(_recent)
        self._readers = PerProcess(_readers)

    def __len__(self) -> int:
        return len(self._infos)

    @property
    def is_local(self) -> bool:
        """Whether all of them are files of this machine."""
        return not self._stores

    def info(self, number: int) -> ObjectInfo:
        """Size and version of a blob when it was found; `path` is that in its store."""
        return self._infos[number]

    def name(self, number: int) -> str:
        """The path or address of a blob, as people are told."""
        store = self._store(number)
        path = self._infos[number].path
        return path if store is None else join(store.url, path)

    @property
    def names(self) -> list[str]:
        """Of all blobs."""
        return [self.name(number) for number in range(len(self))]

    def __iter__(self) -> Iterator[LocalFile | RemoteBlob]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> LocalFile | RemoteBlob:
        """A blob, opened; StateError if a file is no longer the one that was found."""
        opened = self._opened()
        blob = opened.get(number)
        if blob is None:
            return opened.put(number, self._open(number))
        if isinstance(blob, LocalFile):
            blob.refuse_changed()
        return blob

    def read(self, extents: Sequence[Extent]) -> Views:
        """One view for each, from many blobs at once; the first failure is raised."""
        if self.is_local:
            return [self[blob].data[start:stop] for blob, start, stop in extents]  # type: ignore[union-attr]
        wanted: dict[int, list[Range]] = {}
        for blob, start, stop in extents:
            wanted.setdefault(blob, []).append((start, stop))
        found = {blob: self[blob].at_hand(spans) for blob, spans in wanted.items()}
        missing = {blob: wanted[blob] for blob, views in found.items() if views is None}
        views = {blob: iter(each) for blob, each in (found | self._read(missing)).items() if each is not None}
        return [next(views[blob]) for blob, _, _ in extents]

    def held(self, number: int) -> Pieces | None:
        """What of an object lies in memory, by its cache; None if it has none."""
        store, info = self._store(number), self._infos[number]
        return store.held(info.path, version=info.version) if isinstance(store, CachedStore) else None

    def _read(self, wanted: dict[int, list[Range]]) -> dict[int, Views]:
        if len(wanted) <= 1:
            return {blob: self[blob].read(spans) for blob, spans in wanted.items()}
        with CancelScope():
            futures = {blob: self._readers().submit(self[blob].read, spans) for blob, spans in wanted.items()}
            return {blob: future.result() for blob, future in futures.items()}

    def file(self, number: int) -> str:
        """The path of a file with the whole content: the file itself, or the object's in the cache, fetched if need be.

        For libraries that open files only. What is in the cache may be evicted: whoever has it open keeps it.
        """
        store, info = self._store(number), self._infos[number]
        if store is None:
            return info.path
        if not isinstance(store, CachedStore):
            raise ArgumentError(
                f"{self.name(number)} is read by a library that opens files only: give cache=, a folder of this "
                "machine to keep it in"
            )
        return store.file(info)

    def wants(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, ObjectRange]]:
        """What a prefetch has to bring into which cache for `read(extents)` to find it there."""
        caches: dict[int, tuple[CachedStore, str]] = {}
        for blob in {extent.blob for extent in extents}:
            store, info = self._store(blob), self._infos[blob]
            if isinstance(store, CachedStore):
                store.know(info)
                caches[blob] = store, info.path
        places = ((*caches[blob], start, stop) for blob, start, stop in extents if blob in caches)
        return [(store, ObjectRange(path, start, stop)) for store, path, start, stop in places]

    def _store(self, number: int) -> Store | None:
        which = self._store_numbers[number]
        return None if which < 0 else self._stores[which]

    def _open(self, number: int) -> LocalFile | RemoteBlob:
        store, info = self._store(number), self._infos[number]
        if store is None:
            return LocalFile(info.path, info.size, info.version)
        return RemoteBlob(store, info)


def local_info(path: str) -> ObjectInfo:
    """A file as it is now."""
    status = os.stat(path)  # noqa: PTH116 - thousands of them
    return ObjectInfo(path, *FileVersion.of(status))


def open_at_once() -> int:
    """A share of the descriptors that the process may have: a mapped file holds one, a part up to two."""
    if sys.platform == "win32":
        return 256
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if limit == resource.RLIM_INFINITY else min(max(limit // 8, 16), 4096)


def _recent() -> LRUCache[int, LocalFile | RemoteBlob]:
    return LRUCache(open_at_once())


def _readers() -> DaemonPool:
    return DaemonPool(thread_name_prefix="feedline-blobs")


Known = str | ObjectInfo
"""The path of an object, or all that a listing told of it, which then must still be so."""


class ObjectReader:
    """The contents of objects by path. Safe to use from several threads, and after a fork; pickles as its store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._readers = PerProcess(_object_readers)

    def read(self, known: Known) -> memoryview:
        """All that an object holds."""
        if isinstance(known, str):
            return self.store.read(known)
        if isinstance(self.store, CachedStore):
            self.store.know(known)
        return self.store.read(known.path, 0, known.size, version=known.version)

    @contextmanager
    def reading(self, several: Sequence[Known]) -> Iterator[list[Future[memoryview]]]:
        """What these objects hold, in their order, as it comes; reads that the block ends before are given up."""
        scope = CancelScope()
        try:
            with scope.entered():
                futures = [self._readers().submit(self.read, known) for known in several]
            yield futures
        finally:
            scope.cancel()

    def wants(self, several: Sequence[Known]) -> list[tuple[CachedStore, ObjectRange]]:
        """What a prefetch has to bring into the cache, if there is one, for `read` to find it there."""
        store = self.store
        if not isinstance(store, CachedStore):
            return []
        for known in several:
            if isinstance(known, ObjectInfo):
                store.know(known)
        return [
            (store, ObjectRange(known) if isinstance(known, str) else ObjectRange(known.path, 0, known.size))
            for known in several
        ]


def _object_readers() -> DaemonPool:
    return DaemonPool(thread_name_prefix="feedline-objects")


T = TypeVar("T")


class LazyList(Generic[T]):
    """`parts[number]` is `making(number)`; the `most` that were used last are kept, by default all that may be open.

    Each process has its own. Two threads that come first may both make a part. Pickles as `making` alone.
    """

    def __init__(self, making: Callable[[int], T], count: int, most: int | None = None) -> None:
        self._making, self._count, self._most = making, count, most
        self._kept: PerProcess[LRUCache[int, T] | _All[T]] = PerProcess(partial(_kept, count, most))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> T:
        kept = self._kept()
        made = kept.get(number)
        return kept.put(number, self._making(number)) if made is None else made

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyList, (self._making, self._count, self._most)


class _All(dict[int, T]):
    """As `LRUCache`, without a limit, at a fraction of its price."""

    def put(self, key: int, value: T) -> T:
        self[key] = value
        return value


def _kept(count: int, most: int | None) -> LRUCache[int, Any] | _All[Any]:
    limit = open_at_once() if most is None else most
    return _All() if count <= limit else LRUCache(limit)
