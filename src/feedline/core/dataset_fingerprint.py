"""Parts of the fingerprint by which a state recognizes its dataset.

These are digests of files in their order, and the shares of images that workers decode for a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, StackDataset, Subset

from feedline.core.dataset import declared, has_traits, is_ours
from feedline.core.torch_wrappers import parts_of

_HASHED_NAMES = 4096
"""Number of entries of a longer list that are hashed. They are evenly spread: a changed order moves most of them."""


def digest_of(names: Sequence[str], counts: Sequence[int] | NDArray[np.int64] = ()) -> str:
    """A digest of files in their order, 16 hexadecimal digits.

    Only the last part of a name counts, so a copy in another folder has the same digest. `counts` are the numbers of
    samples of each file, or of each of its parts.
    """
    last_names = [names[place].rstrip("/").rpartition("/")[2] for place in _spread(len(names))]
    numbers = [int(counts[place]) for place in _spread(len(counts))]
    return _digest(len(names), last_names, numbers)


def listing_fingerprint_of(dataset: Any) -> str | None:
    """`listing_fingerprint` of a dataset or of the datasets it wraps.

    Knows torch's wrappers. None without a fingerprint.
    """
    own = declared(dataset, "listing_fingerprint") if has_traits(dataset) else None
    if isinstance(own, str):
        return own
    if isinstance(dataset, Subset):
        whole = listing_fingerprint_of(dataset.dataset)
        return None if whole is None else selection_digest(whole, dataset.indices)
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        digests = list(map(listing_fingerprint_of, parts_of(dataset)))
        return _digest(digests) if any(digests) else None
    return None


def selection_digest(whole: str | None, indices: Sequence[int] | NDArray[Any]) -> str:
    """A digest of chosen samples in their order.

    `whole` is the fingerprint of their dataset.
    """
    chosen = [indices[place] for place in _spread(len(indices))]
    return _digest(whole, len(indices), [int(each) if hasattr(each, "__index__") else each for each in chosen])


def _spread(length: int) -> range:
    return range(0, length, max(1, length // _HASHED_NAMES))


def _digest(*values: Any) -> str:
    return hashlib.blake2b(repr(values).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


_LONG = 64
"""Longer lists hold files or samples, not transforms."""


def decode_share_of(dataset: Any) -> str | None:
    """The `cpu_share` of each `DecodeOnDevice` in a dataset, or None."""
    shares = sorted(set(_shares_in(dataset)))
    return ", ".join(f"{share:g}" for share in shares) or None


def _shares_in(dataset: Any) -> Iterator[float]:
    pending, seen = [dataset], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple)):
            pending += value if len(value) <= _LONG else ()
        elif isinstance(value, dict):
            pending += value.values() if len(value) <= _LONG else ()
        elif isinstance(value, (Subset, ConcatDataset, StackDataset)) or any(map(is_ours, type(value).__mro__)):
            if isinstance(share := getattr(value, "cpu_share", None), float):
                yield share
            pending += getattr(value, "__dict__", {}).values()
            pending += (getattr(value, name, None) for cls in type(value).__mro__ for name in _slots(cls))


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
