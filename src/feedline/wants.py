"""What samples will want from which cache, of datasets that can tell: so that it can be there before they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, StackDataset, Subset

Wants = Callable[[NDArray[np.int64]], list[tuple[Any, Any]]]
"""From indices to pairs of a `stores.CachedStore` and a `stores.Want`."""


def wants_of(dataset: Any) -> Wants | None:
    """`dataset.wants`, or one that asks the datasets in torch's Subset, ConcatDataset and StackDataset; else None."""
    found: Wants | None = getattr(dataset, "wants", None)
    if found is not None:
        return found
    if isinstance(dataset, Subset):
        return _of_subset(dataset)
    if isinstance(dataset, ConcatDataset):
        return _of_concatenated(dataset)
    if isinstance(dataset, StackDataset):
        parts = dataset.datasets
        return together([wants_of(part) for part in (parts.values() if isinstance(parts, dict) else parts)])
    return None


def together(parts: Sequence[Wants | None]) -> Wants | None:
    """What all of these want of the same indices."""
    asked = [part for part in parts if part is not None]
    return (lambda indices: [want for part in asked for want in part(indices)]) if asked else None


def _of_subset(subset: Subset[Any]) -> Wants | None:
    inner = wants_of(subset.dataset)
    if inner is None:
        return None
    return lambda indices: inner(np.array([subset.indices[index] for index in indices.tolist()], np.int64))


def _of_concatenated(whole: ConcatDataset[Any]) -> Wants | None:
    parts = [wants_of(part) for part in whole.datasets]
    if not any(parts):
        return None
    stops = np.asarray(whole.cumulative_sizes, np.int64)

    def wants(indices: NDArray[np.int64]) -> list[tuple[Any, Any]]:
        inside = np.where(indices < 0, indices + stops[-1], indices)
        which = stops.searchsorted(inside, side="right")
        found: list[tuple[Any, Any]] = []
        for number in np.unique(which).tolist():
            part = parts[number]
            if part is not None:
                found += part(inside[which == number] - (stops[number - 1] if number else 0))
        return found

    return wants
