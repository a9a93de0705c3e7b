"""Stores: bytes by path, from this machine, from object storage, from anywhere; with one patience and one cache."""

from feedline.store_counts import Statistics, statistics
from feedline.stores.addresses import Location, join, split
from feedline.stores.cache import Cache, CachedStore, Prefetch, Want
from feedline.stores.coalescing import Requests
from feedline.stores.opening import expand, open_store
from feedline.stores.options import FromEnv
from feedline.stores.problems import (
    AccessDeniedError,
    CacheWarning,
    ObjectChangedError,
    ObjectNotFoundError,
    RangeError,
    StoreError,
    StoreUnavailableError,
)
from feedline.stores.protocol import ObjectInfo, Span, Store
from feedline.stores.retry import Retry

__all__ = [
    "AccessDeniedError",
    "Cache",
    "CacheWarning",
    "CachedStore",
    "FromEnv",
    "Location",
    "ObjectChangedError",
    "ObjectInfo",
    "ObjectNotFoundError",
    "Prefetch",
    "RangeError",
    "Requests",
    "Retry",
    "Span",
    "Statistics",
    "Store",
    "StoreError",
    "StoreUnavailableError",
    "Want",
    "expand",
    "join",
    "open_store",
    "split",
    "statistics",
]
