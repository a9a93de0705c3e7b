"""A bounded cache on the local disk, shared by processes.

Safe against the death of any process at any moment. `entries` is one file, `locks` the size account and the fetch
locks, `folder` the whole cache, `store` a store that reads through it, and `prefetch` reads ahead.
"""

from feedline.stores.cache.entries import MissingPieceError, Pieces
from feedline.stores.cache.prefetch import ObjectRange, Prefetch
from feedline.stores.cache.settings import Cache
from feedline.stores.cache.store import CachedStore, cache_of, without_cache

__all__ = [
    "Cache",
    "CachedStore",
    "MissingPieceError",
    "ObjectRange",
    "Pieces",
    "Prefetch",
    "cache_of",
    "without_cache",
]
