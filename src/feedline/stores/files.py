"""Files and objects by number, read in the same way.

The module also has lazily opened parts of a dataset, and limits the number of open ones.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from feedline.core.caches import LRUCache, PerProcess
from feedline.core.stage_parts import READ_FILES, Part, read_part
from feedline.core.threads import CancelScope, DaemonPool
from feedline.errors import AccessDeniedError, ArgumentError, ObjectNotFoundError
from feedline.stores.base import FileVersion, ObjectInfo, Range, Store, Views
from feedline.stores.cache import CachedStore, ObjectRange, cache_of, without_cache
from feedline.stores.local import RecheckTimer, map_whole, will_need
from feedline.stores.urls import join

if sys.platform != "win32":
    import resource


class Extent(NamedTuple):
    """The bytes from `start` up to `stop` of one file by number."""

    file: int
    start: int
    stop: int


class FileBytes(Protocol):
    """Bytes of a file or object that are in memory."""

    def cut(self, start: int, stop: int) -> memoryview:
        """The bytes `[start, stop)`; MissingPieceError if they are not in memory."""
        ...


class File(Protocol):
    """A file or object whose version is checked."""

    name: str
    """Its path or address in messages."""
    nbytes: int
    version: str
    """A text that differs if the content differs."""

    @property
    def data(self) -> memoryview | None:
        """The whole content, mapped; None for an object."""
        ...

    @property
    def local_path(self) -> str | None:
        """The path of a file of this machine; None for other content."""
        ...

    def check_unchanged(self, *, at_once: bool = False) -> None:
        """Raise StateError soon after an in-place change of a file.

        With `at_once`, checks now, else when the next check is due. A read of another version of an object raises
        ObjectChangedError without this check.
        """
        ...

    def read(self, spans: Sequence[Range]) -> Views:
        """One read-only view per `(start, stop)`, valid while it is referenced."""
        ...

    def read_uncached(self, spans: Sequence[Range]) -> Views:
        """Views as from `read`, without any cache.

        For a few bytes that are kept in another form: a cache would fetch a far larger piece.
        """
        ...

    def in_memory(self, spans: Sequence[Range]) -> Views | None:
        """Read all spans if they are in memory already; else None."""
        ...

    def get_loaded(self) -> FileBytes | None:
        """The bytes that take no request, for one thread; None without any."""
        ...

    def will_need(self, spans: Sequence[Range]) -> None:
        """Ask the kernel to read ranges of a mapped file ahead."""
        ...

    def read_adjacent(self, name: str) -> memoryview:
        """Read the object `name` of the same folder; ObjectNotFoundError without one.

        The same error for a file, whose neighbors are opened by path. Bypasses any cache.
        """
        ...


_MIN_AHEAD_NBYTES = 4 * mmap.PAGESIZE
"""For a few pages, the system call takes longer than the read that it saves."""


class LocalFile:
    """A memory-mapped file: views are the file itself."""

    local_path: str | None

    def __init__(self, name: str, nbytes: int, version: str) -> None:
        self.name, self.nbytes, self.version = name, nbytes, version
        self.local_path = name
        self.data = map_whole(name, lambda now: FileVersion(nbytes, version).check(FileVersion.of(now), name))
        self._recheck = RecheckTimer()

    def check_unchanged(self, *, at_once: bool = False) -> None:
        """See `File`."""
        # Pages beyond the end of a shrunken file are no longer mapped: an access would crash the process.
        if at_once or self._recheck.is_due():
            with suppress(FileNotFoundError):  # a removed file stays mapped
                FileVersion(self.nbytes, self.version).check(local_info(self.name).state, self.name)
            self._recheck.done()

    def read(self, spans: Sequence[Range]) -> Views:
        """Views of the mapping; no page is read yet."""
        return [self.data[start:stop] for start, stop in spans]

    in_memory = read_uncached = read

    def cut(self, start: int, stop: int) -> memoryview:
        """A view of one range."""
        return self.data[start:stop]

    def get_loaded(self) -> LocalFile:
        """The bytes that take no request: all of them."""
        return self

    def will_need(self, spans: Sequence[Range]) -> None:
        """Ask the kernel to read distant ranges ahead.

        Its own read-ahead does not help there.
        """
        will_need(self.data, spans, _MIN_AHEAD_NBYTES)

    def read_adjacent(self, name: str) -> memoryview:
        """See `File`."""
        raise ObjectNotFoundError(f"{name} next to {self.name} is not an object of a store")


class GeneratedFile(LocalFile):
    """Generated content of a file, mapped; it never changes."""

    local_path = None

    def __init__(self, name: str, data: memoryview, version: str) -> None:
        self.name, self.nbytes, self.version, self.data = name, len(data), version, data

    def check_unchanged(self, *, at_once: bool = False) -> None:
        """Do nothing: the content never changes."""


class RemoteFile:
    """An object of a store, read through its cache if any.

    ObjectChangedError once it is another version.
    """

    data = local_path = None

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self.name, self.nbytes, self.version = join(store.url, info.path), info.size, info.version
        self.store, self.path = store, info.path
        self._cache = cache_of(store)
        if self._cache is not None:
            self._cache.record_info(info)

    def check_unchanged(self, *, at_once: bool = False) -> None:
        """Do nothing: reading another version raises ObjectChangedError."""

    def read(self, spans: Sequence[Range]) -> Views:
        """Read all spans at once, with concurrent requests."""
        return self.store.read_many(self.path, spans, version=self.version)

    def read_uncached(self, spans: Sequence[Range]) -> Views:
        """Read all spans past the cache."""
        return without_cache(self.store).read_many(self.path, spans, version=self.version)

    def in_memory(self, spans: Sequence[Range]) -> Views | None:
        """Read all spans if they are in memory already; else None."""
        return None if self._cache is None else self._cache.in_memory(self.path, spans, version=self.version)

    def get_loaded(self) -> FileBytes | None:
        """The bytes in the memory of a cache, for one thread."""
        return None if self._cache is None else self._cache.cached_pieces(self.path, version=self.version)

    def will_need(self, spans: Sequence[Range]) -> None:
        """Do nothing: an object has no mapping."""

    def read_adjacent(self, name: str) -> memoryview:
        """See `File`."""
        path = f"{self.path.rpartition('/')[0]}/{name}".lstrip("/")
        try:
            return without_cache(self.store).read(path)
        except AccessDeniedError:  # without the right to list, stores deny access to missing objects
            raise ObjectNotFoundError(f"{join(self.store.url, path)} does not exist, or access is denied") from None


class FileSet:
    """Files and objects by number, opened on first use in each process.

    In memory they take only the space of their names. At most `most` stay open, by default `most_open_files()`. Safe to
    use from several threads. Pickles with names, sizes and versions, and with the information to reopen the stores.
    """

    def __init__(self, objects: Sequence[tuple[Store | None, ObjectInfo]], most: int | None = None) -> None:
        stores: dict[int, Store] = {id(store): store for store, _ in objects if store is not None}
        numbers = {each: number for number, each in enumerate(stores)}
        self._stores = list(stores.values())
        self._store_numbers = [-1 if store is None else numbers[id(store)] for store, _ in objects]
        self._infos = [info for _, info in objects]
        # A forked process opens its own files: it has no threads of its parent's clients, and a copied lock may never
        # be released.
        self._opened: PerProcess[_OpenFiles[File]] = PerProcess(partial(_new_cache, len(objects), most))
        self._readers = PerProcess(_readers)

    def __len__(self) -> int:
        return len(self._infos)

    @property
    def is_local(self) -> bool:
        """True if all are files of this machine."""
        return not self._stores

    def info(self, number: int) -> ObjectInfo:
        """Size and version of a file when it was found.

        `path` is relative to its store.
        """
        return self._infos[number]

    def name(self, number: int) -> str:
        """The path or address of a file in messages."""
        store = self.store(number)
        path = self._infos[number].path
        return path if store is None else join(store.url, path)

    @property
    def names(self) -> list[str]:
        """The paths or addresses of all files."""
        return [self.name(number) for number in range(len(self))]

    def is_missing(self, number: int) -> bool:  # noqa: ARG002 - for subclasses
        """True if a file's content must be produced before reads."""
        return False

    def __iter__(self) -> Iterator[File]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> File:
        """The opened file; StateError if it has changed."""
        opened = self._opened()
        file = opened.get(number)
        if file is None:
            return opened.put(number, self.open(number))
        file.check_unchanged()
        return file

    def read(self, extents: Sequence[Extent]) -> Views:
        """One view per extent, from many files at once.

        The first failure is raised.
        """
        if self.is_local:
            with READ_FILES as part:
                local: Views = [self[file].data[start:stop] for file, start, stop in extents]  # type: ignore[index]
                if part.timed:
                    part.count(sum(map(len, local)))
            return local
        wanted: dict[int, list[Range]] = {}
        for file, start, stop in extents:
            wanted.setdefault(file, []).append((start, stop))
        views = {file: iter(each) for file, each in self._read(wanted).items()}
        return [next(views[file]) for file, _, _ in extents]

    def _read(self, wanted: Mapping[int, list[Range]]) -> dict[int, Views]:
        """Views by file.

        Stores are read at the same time. The time of a store is the wait for it that remains after the waits for
        earlier stores.
        """
        stores: dict[int, list[int]] = {}
        for file in wanted:
            stores.setdefault(self._store_numbers[file], []).append(file)
        views: dict[int, Views] = {}
        for number, files in stores.items():
            with self._part(number) as part:
                found = {file: self[file].in_memory(wanted[file]) for file in files}
                views |= (kept := {file: each for file, each in found.items() if each is not None})
                _count(part, kept)
        missing = {file: wanted[file] for file in wanted if file not in views}
        if not missing:
            return views
        with CancelScope():
            reads = self._start_reads(missing)
            for number, files in stores.items():
                with self._part(number) as part:
                    views |= (fetched := {file: reads[file]() for file in files if file in reads})
                    _count(part, fetched)
        return views

    def _start_reads(self, wanted: Mapping[int, list[Range]]) -> dict[int, Callable[[], Views]]:
        """Functions that return the views of each file.

        Threads begin to read at once if there are several files.
        """
        if len(wanted) == 1:
            return {file: partial(self[file].read, spans) for file, spans in wanted.items()}
        readers = self._readers()
        return {file: readers.submit(self[file].read, spans).result for file, spans in wanted.items()}

    def _part(self, number: int) -> Part:
        """The part of a stage that times reads of this file's store."""
        return READ_FILES if number < 0 else read_part(self._stores[number].url)

    def local_path(self, number: int) -> str:
        """The path of a local file with the whole content.

        It is the file itself, or the object's copy in the cache, fetched on demand. For libraries that only open files.
        A copy may be evicted; a process that has it open keeps its data.
        """
        store, info = self.store(number), self._infos[number]
        if store is None:
            return info.path
        if (cache := cache_of(store)) is None:
            raise ArgumentError(
                f"{self.name(number)} is read by a library that only opens files: give cache=, a folder of this "
                "machine to keep it in"
            )
        return cache.file(info)

    def ranges(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, ObjectRange]]:
        """The object ranges that a prefetch for `read(extents)` must fetch."""
        caches: dict[int, tuple[CachedStore, str]] = {}
        for file in {extent.file for extent in extents}:
            cache, info = cache_of(self.store(file)), self._infos[file]
            if cache is not None:
                cache.record_info(info)
                caches[file] = cache, info.path
        places = ((*caches[file], start, stop) for file, start, stop in extents if file in caches)
        return [(store, ObjectRange(path, start, stop)) for store, path, start, stop in places]

    def store(self, number: int) -> Store | None:
        """The store of an object; None for a file."""
        which = self._store_numbers[number]
        return None if which < 0 else self._stores[which]

    def open(self, number: int) -> File:
        """Open a file outside of the set; StateError if it has changed."""
        store, info = self.store(number), self._infos[number]
        if store is None:
            return LocalFile(info.path, info.size, info.version)
        return RemoteFile(store, info)


def _count(part: Part, views: Mapping[int, Views]) -> None:
    if part.timed:
        part.count(sum(len(view) for each in views.values() for view in each))


def local_info(path: str) -> ObjectInfo:
    """The path, current size and current version of a file."""
    status = os.stat(path)  # noqa: PTH116 - thousands of them
    return ObjectInfo(path, *FileVersion.of(status))


def most_open_files() -> int:
    """The number of files to keep open, from the descriptor limit.

    A mapped file holds one descriptor, a part up to two.
    """
    if sys.platform == "win32":
        return 256
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if limit == resource.RLIM_INFINITY else min(max(limit // 8, 16), 4096)


def _readers() -> DaemonPool:
    return DaemonPool(thread_name_prefix="feedline-files")


T = TypeVar("T")


class LazyList(Generic[T]):
    """A sequence whose parts `making(number)` creates on access.

    The parts used last are kept, as many as files may be open. Each process has its own. Two threads may both create a
    part at the same time. Pickles as `making` alone.
    """

    def __init__(self, making: Callable[[int], T], count: int) -> None:
        self._making, self._count = making, count
        self._parts: PerProcess[_OpenFiles[T]] = PerProcess(partial(_new_cache, count, None))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> T:
        parts = self._parts()
        part = parts.get(number)
        return parts.put(number, self._making(number)) if part is None else part

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyList, (self._making, self._count)


class _UnlimitedCache(dict[int, T]):
    """An unlimited `LRUCache`, at a fraction of its cost."""

    def put(self, key: int, value: T) -> T:
        self[key] = value
        return value


_OpenFiles = LRUCache[int, T] | _UnlimitedCache[T]


def _new_cache(count: int, most: int | None) -> _OpenFiles[Any]:
    limit = most_open_files() if most is None else most
    return _UnlimitedCache() if count <= limit else LRUCache(limit)
