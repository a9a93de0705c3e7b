"""Stores: objects by path, local or remote, with retries and a cache."""

from feedline.core.store_metrics import StoreStatistics, statistics
from feedline.errors import (
    AccessDeniedError,
    CacheWarning,
    ObjectChangedError,
    ObjectNotFoundError,
    RangeError,
    RegionError,
    StoreError,
    StoreUnavailableError,
)
from feedline.stores.base import ByteRange, ObjectInfo, Store
from feedline.stores.cache import Cache, CachedStore, ObjectRange, Prefetch
from feedline.stores.open import expand, open_store
from feedline.stores.options import FromEnv
from feedline.stores.requests import Requests
from feedline.stores.retry import Retry
from feedline.stores.schemes import SCHEMES, Scheme, StorePolicy, register_scheme, unregister_scheme
from feedline.stores.urls import Location, join, split

__all__ = [
    "SCHEMES",
    "AccessDeniedError",
    "ByteRange",
    "Cache",
    "CacheWarning",
    "CachedStore",
    "FromEnv",
    "Location",
    "ObjectChangedError",
    "ObjectInfo",
    "ObjectNotFoundError",
    "ObjectRange",
    "Prefetch",
    "RangeError",
    "RegionError",
    "Requests",
    "Retry",
    "Scheme",
    "Store",
    "StoreError",
    "StorePolicy",
    "StoreStatistics",
    "StoreUnavailableError",
    "expand",
    "join",
    "open_store",
    "register_scheme",
    "split",
    "statistics",
    "unregister_scheme",
]
