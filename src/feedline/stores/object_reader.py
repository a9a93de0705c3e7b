"""Whole objects of one store, many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Lock

import numpy as np

from feedline.core.caches import PerProcess
from feedline.core.stage_parts import read_part
from feedline.core.threads import CancelScope, DaemonPool
from feedline.errors import ObjectChangedError
from feedline.stores.base import ObjectInfo, Store, VersionedReader, changed_error
from feedline.stores.cache import CachedStore, ObjectRange, cache_of
from feedline.stores.links import unsigned
from feedline.stores.urls import join

KnownObject = str | ObjectInfo
"""The path of an object, or its listed size and version, which the object must still have."""


_SLOTS = 1 << 20


class SeenVersions:
    """The versions under which objects were first read, in bounded memory.

    A table with one slot for each hash of a path: of two objects that share a slot, the later one is kept.
    """

    def __init__(self) -> None:
        self._table = np.zeros((_SLOTS, 2), np.int64)  # the system assigns memory only to written slots
        self._lock = Lock()

    def check(self, path: str, version: str, url: str) -> None:
        """Record a version; ObjectChangedError if another one was recorded before.

        `url` is the address of the store.
        """
        name, tag = hash(path), hash(version)
        slot = self._table[name % _SLOTS]
        with self._lock:  # a path paired with the version of another path would count as a change
            changed = slot[0] == name and slot[1] != tag
            if not changed:
                slot[0], slot[1] = name, tag
        if changed:
            now = f"it is version {version} now"
            raise changed_error(ObjectChangedError, join(url, path), now, since="this dataset first read it")


Fetched = str | Future[memoryview]
"""The path of a file, or a future of the content of an object."""


class ObjectReader:
    """Whole objects by path.

    ObjectChangedError once an object is another version than in an earlier read, if the store reports versions with the
    data. Without a store, paths are paths of files, which their decoders read. Safe to use from several threads, and
    after a fork; pickles as its store.
    """

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self._cache = cache_of(store)
        self._readers = PerProcess(_object_readers)
        self._seen = PerProcess(SeenVersions)

    def read(self, store: Store, known: KnownObject) -> memoryview:
        """The content of one object."""
        if isinstance(known, str):
            return self._read_checked(store, known)
        if self._cache is not None:
            self._cache.record_info(known)
        return store.read(known.path, 0, known.size, version=known.version)

    def _read_checked(self, store: Store, path: str) -> memoryview:
        if not isinstance(store, VersionedReader):
            return store.read(path)
        data, version = store.read_versioned(path)
        self._seen().check(unsigned(path), version, store.url)
        return data

    def result(self, store: Store, fetched: Future[memoryview]) -> memoryview:
        """The content of an object that `fetching` fetches."""
        with read_part(store.url) as part:
            data = fetched.result()
            part.count(len(data))
        return data

    @contextmanager
    def fetching(self, several: Sequence[KnownObject]) -> Iterator[Sequence[Fetched]]:
        """Read these objects concurrently; gives one future each, in order.

        Reads that are unfinished when the block ends are canceled. Paths of files are returned unchanged.
        """
        if self.store is None:
            yield [known if isinstance(known, str) else known.path for known in several]
            return
        scope = CancelScope()
        try:
            with scope.enter():
                futures = [self._readers().submit(self.read, self.store, known) for known in several]
            yield futures
        finally:
            scope.cancel()

    def ranges(self, several: Sequence[KnownObject]) -> list[tuple[CachedStore, ObjectRange]]:
        """The object ranges that a prefetch for `read` must fetch."""
        cache = self._cache
        if cache is None:
            return []
        for known in several:
            if isinstance(known, ObjectInfo):
                cache.record_info(known)
        return [
            (cache, ObjectRange(known) if isinstance(known, str) else ObjectRange(known.path, 0, known.size))
            for known in several
        ]


def _object_readers() -> DaemonPool:
    return DaemonPool(thread_name_prefix="feedline-objects")
