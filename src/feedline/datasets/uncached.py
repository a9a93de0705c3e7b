"""Ranges read past a cache, for what is read once and kept in another form: a piece of the cache is far larger."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from feedline.stores import CachedStore
from feedline.stores.blobs import LocalBlob, RemoteBlob
from feedline.stores.protocol import Range

Read = Callable[[Sequence[Range]], list[memoryview]]


def uncached(blob: LocalBlob | RemoteBlob) -> Read:
    """What reads ranges of a blob without its cache."""
    if isinstance(blob, LocalBlob) or not isinstance(blob.store, CachedStore):
        return blob.read
    store = blob.store.store
    return lambda spans: store.read_many(blob.path, spans, version=blob.version)
