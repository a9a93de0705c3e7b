"""Whole objects of one store, many at once: small ones, of which nobody needs to know beforehand how large they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from feedline.cancelling import CancelScope, DaemonPool
from feedline.per_process import PerProcess
from feedline.stores.cache import CachedStore, Want
from feedline.stores.protocol import ObjectInfo, Store

_READERS = 32

Known = str | ObjectInfo
"""The path of an object, or all that a listing told of it, which then must still be so."""


class Wholes:
    """The contents of objects by path. Safe to use from several threads, and after a fork; pickles as its store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._readers = PerProcess(_readers)

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

    def wants(self, several: Sequence[Known]) -> list[tuple[CachedStore, Want]]:
        """What a prefetch has to bring into the cache, if there is one, for `read` to find it there."""
        store = self.store
        if not isinstance(store, CachedStore):
            return []
        for known in several:
            if isinstance(known, ObjectInfo):
                store.know(known)
        return [
            (store, Want(known) if isinstance(known, str) else Want(known.path, 0, known.size)) for known in several
        ]


def _readers() -> DaemonPool:
    return DaemonPool(_READERS, "feedline-objects")
