"""What a dataset lists, in short: a state is not to be taken up over the same number of samples in another order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, StackDataset, Subset

_LOOKED = 4096
"""Of longer lists so many entries are looked at, evenly spread: any other order moves most of them."""


def digest_of(names: Sequence[str], counts: Sequence[int] | NDArray[np.int64] = ()) -> str:
    """16 hexadecimal digits for files in their order: by their last names, so that a copy elsewhere has the same.

    `counts` are the samples of each, or of each of their parts.
    """
    looked = [names[place].rstrip("/").rpartition("/")[2] for place in _spread(len(names))]
    numbers = [int(counts[place]) for place in _spread(len(counts))]
    return _digest(len(names), looked, numbers)


def listing_of(dataset: Any) -> str | None:
    """What a dataset tells by `listing_digest`, also through torch's wrappers; None for one that tells nothing."""
    told = getattr(dataset, "listing_digest", None)
    if isinstance(told, str):
        return told
    if isinstance(dataset, Subset):
        return listing_of(dataset.dataset)
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        parts = dataset.datasets
        digests = [listing_of(part) for part in (parts.values() if isinstance(parts, dict) else parts)]
        return _digest(digests) if any(digests) else None
    return None


def _spread(length: int) -> range:
    return range(0, length, max(1, length // _LOOKED))


def _digest(*told: Any) -> str:
    return hashlib.blake2b(repr(told).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
