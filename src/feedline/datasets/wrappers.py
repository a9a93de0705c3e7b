"""Datasets over other datasets: `Zip`, `Map` and `Filter`.

`Filter` records the indices that its predicate accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import StackDataset

from feedline.collate.batch_reads import READERS, stack_reader, subset_reader
from feedline.core.dataset import Ranges, Traits, TransformFunction, traits_of
from feedline.core.dataset_fingerprint import listing_fingerprint_of, selection_digest
from feedline.core.kernels import Int64s
from feedline.core.paths import Pathlike, folder_path
from feedline.core.rng import SampleRng, derive, sample_rng
from feedline.core.sample_transform import SampleTransform
from feedline.core.tensors import as_indices, normalize_index, normalize_indices
from feedline.core.torch_wrappers import batch_getter, ranges_of
from feedline.datasets.fingerprints import fingerprint
from feedline.datasets.indexes import BuiltIndex
from feedline.errors import ArgumentError, note


class Zip(StackDataset[Any]):
    """Aligned datasets: a sample combines the samples of all parts.

    It is a tuple, or a dict for datasets given by keyword. It equals torch's StackDataset, except that the error for
    different lengths names them.
    """

    def __init__(self, *datasets: Any, **named: Any) -> None:
        if bool(datasets) == bool(named):
            raise ArgumentError("give at least one dataset; either all by position or all by keyword")
        parts = named or {f"argument {place}": part for place, part in enumerate(datasets)}
        lengths = [len(part) for part in parts.values()]
        if len(set(lengths)) > 1:
            names = [f"{type(part).__name__} ({name})" for name, part in parts.items()]
            each = ", ".join(f"{name} has {length}" for name, length in zip(names, lengths, strict=True))
            raise ArgumentError(f"aligned datasets must have the same length, but {each}")
        super().__init__(*datasets, **named)

    @property
    def traits(self) -> Traits:
        """Traits of a combination: thread-safe if all parts are thread-safe."""
        parts = self.datasets.values() if isinstance(self.datasets, dict) else self.datasets
        return Traits(thread_safe=all(traits_of(part).thread_safe for part in parts))


class WrappedDataset(torch.utils.data.Dataset[Any]):
    """A dataset whose sample `i` derives from sample `i` of `dataset`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def traits(self) -> Traits:
        """Traits of the wrapped dataset; the function is assumed to be thread-safe."""
        has_ranges = ranges_of(self.dataset) is not None
        return Traits(thread_safe=traits_of(self.dataset).thread_safe, has_ranges=has_ranges)

    @property
    def listing_fingerprint(self) -> str | None:
        """The fingerprint of the wrapped dataset."""
        return listing_fingerprint_of(self.dataset)

    def ranges(self, indices: Int64s) -> Ranges:
        """Ranges that the wrapped dataset reads for these samples."""
        ranges = ranges_of(self.dataset)
        return [] if ranges is None else ranges(indices)

    def __len__(self) -> int:
        return len(self.dataset)


class Map(WrappedDataset):
    """`fn(sample)`, or `fn(sample, rng)`, of each sample on access.

    `rng` depends on (seed, epoch, position) only, and is independent of that of a transform or `Map` within, also one
    within other wrappers. Parts of a `Zip` draw equal numbers, so that an image and its mask get the same crop.
    """

    def __init__(self, dataset: Any, fn: TransformFunction) -> None:
        if not callable(fn):
            raise ArgumentError(f"fn must be callable, got {type(fn).__name__}")
        super().__init__(dataset)
        self.fn = fn
        self._step = SampleTransform(fn)
        self._depth: int = 1 + _maps_within(dataset)

    def __getitem__(self, index: int) -> Any:
        """The result for sample `index`."""
        return self._mapped(self.dataset[index], None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The results for these samples, fetched together if the dataset supports it."""
        return [self._mapped(sample, row) for row, sample in enumerate(samples_of(self.dataset, indices))]

    def _mapped(self, sample: Any, row: int | None) -> Any:
        # Each has its own key, so that nested ones draw different numbers.
        own = SampleRng(derive(sample_rng(row).key, "map", self._depth)) if self._step.takes_rng else None
        return self._step.apply(sample, own)


def _maps_within(dataset: Any) -> int:
    """The largest number of nested `Map`s, through any wrappers."""
    if isinstance(dataset, Map):
        return dataset._depth
    held = getattr(dataset, "__dict__", {})  # not the attributes, which other classes may compute
    several = held.get("datasets", ())
    several = several.values() if isinstance(several, dict) else several if isinstance(several, (list, tuple)) else ()
    one = [held["dataset"]] if "dataset" in held else []
    return max((_maps_within(part) for part in (*one, *several)), default=0)


def samples_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Samples of a dataset, fetched together if it supports that."""
    many = batch_getter(dataset)
    return [dataset[index] for index in indices] if many is None else list(many(indices))


_BATCH = 256


Predicate = Callable[[Any], Any]


class Filter(WrappedDataset):
    """The samples that satisfy `predicate(sample)`, in order.

    `indices` are their indices in the dataset. All samples are read once, in `num_workers` processes. With `index_dir`,
    the indices are stored in that folder under a fingerprint of the predicate and the dataset, memory-mapped by later
    runs, and computed again when one of the two changes. Objects of a store without versions then raise an
    ArgumentError.
    """

    def __init__(
        self, dataset: Any, predicate: Predicate, *, num_workers: int = 0, index_dir: Pathlike | None = None
    ) -> None:
        if not callable(predicate):
            raise ArgumentError(f"predicate must be callable, got {type(predicate).__name__}")
        super().__init__(dataset)
        find = partial(_find_indices, dataset, predicate, num_workers)
        self._kept: Int64s | BuiltIndex
        if index_dir is None:
            self._kept = find()
        else:
            folder = folder_path(index_dir, "index_dir")
            key = fingerprint("filter", predicate, dataset, len(dataset))
            path = folder / f"filter-{key}.index"
            self._kept = BuiltIndex(path, (len(dataset), key), lambda: {"indices": find()})

    @property
    def indices(self) -> Int64s:
        """The indices of these samples in the dataset, int64.

        StateError if the file of the indices was removed or replaced.
        """
        kept = self._kept
        return cast("Int64s", kept.arrays["indices"]) if isinstance(kept, BuiltIndex) else kept

    @property
    def listing_fingerprint(self) -> str:
        """Digest of the fingerprint of the wrapped dataset and of the indices."""
        return selection_digest(super().listing_fingerprint, self.indices)

    @property
    def shard_sizes(self) -> Int64s:
        """Remaining samples per shard, int64; absent without shards."""
        bounds = np.cumsum([0, *self.dataset.shard_sizes])
        return np.diff(np.searchsorted(self.indices, bounds))

    def ranges(self, indices: Int64s) -> Ranges:
        """Ranges that the wrapped dataset reads for these samples."""
        return super().ranges(self.indices[indices])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        """Sample `index` among the samples that satisfy the predicate."""
        return self.dataset[int(self.indices[normalize_index(index, len(self), "Filter")])]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, fetched together if the dataset supports it."""
        inside = normalize_indices(as_indices(indices), len(self), "Filter")
        return samples_of(self.dataset, self.indices[inside].tolist())


class _PredicateResults(torch.utils.data.Dataset[bool]):
    """Result of the predicate for each sample."""

    def __init__(self, dataset: Any, predicate: Predicate) -> None:
        self._dataset, self._predicate = dataset, predicate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> bool:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[bool]:
        samples = samples_of(self._dataset, indices)
        return [self._apply(sample, index) for sample, index in zip(samples, indices, strict=True)]

    def _apply(self, sample: Any, index: int) -> bool:
        try:
            return bool(self._predicate(sample))
        except Exception as error:
            note(error, f"feedline: in the predicate of a Filter, for sample {index}")
            raise


def _find_indices(dataset: Any, predicate: Predicate, num_workers: int) -> Int64s:
    if not len(dataset):
        return np.empty(0, np.int64)
    results = _PredicateResults(dataset, predicate)
    loader = torch.utils.data.DataLoader(
        results,
        _BATCH,
        num_workers=num_workers,
        collate_fn=np.array,
        generator=torch.Generator(),  # the global generator must not depend on whether the indices were stored
    )
    return np.flatnonzero(np.concatenate(list(loader)))


READERS[Zip] = stack_reader
READERS[Filter] = subset_reader
