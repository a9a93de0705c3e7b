"""What samples will want from which cache, of datasets that can tell: so that it can be there before they are read.

What a dataset lists, in short: a state is not to be taken up over the same number of samples in another order.

What objects of Hugging Face's `datasets` are, told without importing it, nor what reads them here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
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


_LOOKED = 4096
"""Of longer lists so many entries are looked at, evenly spread: any other order moves most of them."""


def digest_of(names: Sequence[str], counts: Sequence[int] | NDArray[np.int64] = ()) -> str:
    """16 hexadecimal digits for files in their order: by their last names, so that a copy elsewhere has the same.

    `counts` are the samples of each, or of each of their parts.
    """
    looked = [names[place].rstrip("/").rpartition("/")[2] for place in _spread(len(names))]
    numbers = [int(counts[place]) for place in _spread(len(counts))]
    return _digest(len(names), looked, numbers)


def listing_fingerprint(dataset: Any) -> str | None:
    """What a dataset tells by `listing_digest`, also through torch's wrappers; None for one that tells nothing."""
    told = getattr(dataset, "listing_digest", None)
    if isinstance(told, str):
        return told
    if isinstance(dataset, Subset):
        return listing_fingerprint(dataset.dataset)
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        parts = dataset.datasets
        digests = [listing_fingerprint(part) for part in (parts.values() if isinstance(parts, dict) else parts)]
        return _digest(digests) if any(digests) else None
    return None


def _spread(length: int) -> range:
    return range(0, length, max(1, length // _LOOKED))


def _digest(*told: Any) -> str:
    return hashlib.blake2b(repr(told).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


_BUFFERED = "BufferShuffledExamplesIterable"


_COUNTING = {"TakeExamplesIterable", "SkipExamplesIterable"}


_WITHOUT_REPLACEMENT = "all_exhausted_without_replacement"


def is_table(dataset: Any) -> bool:
    """Whether this is a `datasets.Dataset`, asked without importing `datasets`."""
    return any(
        cls.__module__ == "datasets.arrow_dataset" and cls.__name__ == "Dataset" for cls in type(dataset).__mro__
    )


def is_stream(dataset: Any) -> bool:
    """Whether this is a `datasets.IterableDataset`, asked without importing `datasets`."""
    return any(
        cls.__module__ == "datasets.iterable_dataset" and cls.__name__ == "IterableDataset"
        for cls in type(dataset).__mro__
    )


def forgets(dataset: Any) -> bool:
    """Whether the state of a `datasets.IterableDataset` lacks what it holds: the contents of a shuffle buffer."""
    return any(type(step).__name__ == _BUFFERED for step in steps(dataset))


def counts(dataset: Any) -> bool:
    """Whether the shards of a `datasets.IterableDataset`, each by itself, would give other examples than all together.

    They do where something is counted over the shards.
    """
    return any(_counts(step) for step in steps(dataset))


def _counts(step: Any) -> bool:
    if type(step).__name__ in _COUNTING or getattr(step, "with_indices", False):
        return True
    # an incomplete batch would be dropped at the end of each shard, and sources cycled through until a shard has ended
    strategy = getattr(step, "stopping_strategy", _WITHOUT_REPLACEMENT)
    return getattr(step, "drop_last_batch", False) or strategy != _WITHOUT_REPLACEMENT


def steps(dataset: Any) -> Iterator[Any]:
    """What a `datasets.IterableDataset` does, from its end to its sources; of others, nothing."""
    todo = [dataset._ex_iterable] if hasattr(dataset, "_ex_iterable") else []
    while todo:
        step = todo.pop()
        yield step
        inner = getattr(step, "ex_iterable", None)
        todo += getattr(step, "ex_iterables", []) if inner is None else [inner]
