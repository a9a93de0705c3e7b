"""Datasets and samplers of torch: which are unchanged.

Also the dataset protocol through its wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset

from feedline.core.dataset import (
    Ranges,
    RangesOf,
    declared,
    has_traits,
    overrides_samples,
    own_attributes,
    traits_of,
)
from feedline.core.huggingface import is_table
from feedline.core.kernels import Int64s
from feedline.core.shard_offsets import ShardOffsets

Kind = TypeVar("Kind")


def is_torchs(thing: Any, *kinds: type[Kind]) -> TypeGuard[Kind]:
    """True for an unchanged object of just one of these classes.

    Subclasses may override anything, and tests and tools replace members of classes and objects.
    """
    kind = type(thing)
    if kind not in kinds or "__getitems__" in own_attributes(thing):
        return False
    return all(is_member_of_torch(kind, name) for name in _MEMBERS)


def is_member_of_torch(kind: type, name: str) -> bool:
    """True if a member of a class is torch's, or missing."""
    member = getattr(kind, name, None)
    return member is None or str(getattr(member, "__module__", "")).startswith("torch.")


_MEMBERS = "__iter__", "__len__", "__getitem__", "__getitems__"


def parts_of(dataset: Any) -> Sequence[Any]:
    """The datasets that a ConcatDataset or StackDataset holds."""
    parts = dataset.datasets
    return list(parts.values()) if isinstance(parts, dict) else list(parts)


def inner_objects(dataset: Any) -> list[Any]:
    """Objects that decide, besides the type, how a dataset is read.

    For torch's wrappers the datasets inside, at any depth; for a Hugging Face table the parts of its format, which it
    replaces as a whole. Empty for other datasets.
    """
    kind = type(dataset)
    if kind is Subset:
        return [dataset.dataset, *inner_objects(dataset.dataset)]
    if kind is ConcatDataset or kind is StackDataset:
        return [each for part in parts_of(dataset) for each in (part, *inner_objects(part))]
    return [getattr(dataset, name, None) for name in _FORMAT] if is_table(dataset) else []


_FORMAT = "_format_type", "_format_kwargs", "_format_columns", "_output_all_columns"


def ranges_of(dataset: Any) -> RangesOf | None:
    """The method `ranges` of a dataset, or None.

    torch's Subset, ConcatDataset and StackDataset have the ranges of the datasets they wrap.
    """
    own: RangesOf | None = declared(dataset, "ranges") if has_traits(dataset) else None
    if own is not None:
        return own if traits_of(dataset).has_ranges else None
    if isinstance(dataset, Subset):
        return _ranges_of_subset(dataset)
    if isinstance(dataset, ConcatDataset):
        return _ranges_of_concat(dataset)
    return _join_ranges(list(map(ranges_of, parts_of(dataset)))) if isinstance(dataset, StackDataset) else None


def _join_ranges(parts: Sequence[RangesOf | None]) -> RangesOf | None:
    """The ranges of several datasets for the same indices."""
    present = [part for part in parts if part is not None]
    return (lambda indices: [each for part in present for each in part(indices)]) if present else None


def _ranges_of_subset(subset: Subset[Any]) -> RangesOf | None:
    inner = ranges_of(subset.dataset)
    if inner is None:
        return None
    return lambda indices: inner(np.array([subset.indices[index] for index in indices.tolist()], np.int64))


def _ranges_of_concat(whole: ConcatDataset[Any]) -> RangesOf | None:
    parts = [ranges_of(part) for part in whole.datasets]
    if not any(parts):
        return None
    offsets = ShardOffsets(np.diff(whole.cumulative_sizes, prepend=0))

    def ranges(indices: Int64s) -> Ranges:
        wanted: Ranges = []
        for number, _, rows in offsets.by_shard(np.where(indices < 0, indices + len(offsets), indices)):
            part = parts[number]
            if part is not None:
                wanted += part(rows)
        return wanted

    return ranges


def batch_getter(dataset: Any) -> Callable[..., Any] | None:
    """The dataset's `__getitems__`, or None if it only calls `__getitem__`.

    torch's Subset and StackDataset always have the method, so their inner datasets are examined.
    """
    return getattr(dataset, "__getitems__", None) if _has_batch_getter(dataset) else None


def _is_forwarding(kind: Any, wrapper: Any) -> bool:
    return kind.__getitems__ is wrapper.__getitems__ and is_member_of_torch(wrapper, "__getitems__")


def _has_batch_getter(dataset: Any) -> bool:
    if isinstance(dataset, Subset) and _is_forwarding(type(dataset), Subset):
        return _has_batch_getter(dataset.dataset)
    if isinstance(dataset, StackDataset) and _is_forwarding(type(dataset), StackDataset):
        parts = dataset.datasets
        return all(map(_has_batch_getter, parts.values() if isinstance(parts, dict) else parts))
    return hasattr(dataset, "__getitems__") and not overrides_samples(dataset, "__getitems__")


def stack_getter(dataset: Any) -> Callable[..., Any] | None:
    """`__getitems__` of a StackDataset, also through Subset; None for others.

    It reads all samples of a batch from one part after another, and random numbers are drawn in that order.
    """
    inner = dataset
    while isinstance(inner, Subset) and type(inner).__getitems__ is Subset.__getitems__:
        inner = inner.dataset
    return dataset.__getitems__ if isinstance(inner, StackDataset) else None
