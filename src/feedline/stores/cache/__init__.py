"""A cache on the local disk: bounded, shared by all processes and jobs of a machine, safe against death at any moment.

`entries` is one file, `ledger` the room, `claims` who fetches what, `folder` all three together, `cached` a store that
reads through them, `orders` what reads ahead, and `prefetch` that as a block.
"""

from feedline.stores.cache.entries import MissingPieceError, Pieces
from feedline.stores.cache.prefetch import ObjectRange, Prefetch
from feedline.stores.cache.settings import Cache
from feedline.stores.cache.store import CachedStore, without_cache

__all__ = ["Cache", "CachedStore", "MissingPieceError", "ObjectRange", "Pieces", "Prefetch", "without_cache"]
