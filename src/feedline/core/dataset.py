"""The dataset protocol: members, traits and defaults.

Objects of Hugging Face's `datasets` are recognized here by name, without importing that package.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, StackDataset, Subset

from feedline.core.shard_offsets import ShardOffsets
from feedline.core.tensors import Allocator

Int64s = NDArray[np.int64]


Keys = NDArray[np.uint64]
"""One random key for each row of a batch."""


Batch = Any
"""Tensors in dicts, lists and tuples, as torch's default collate makes them."""


Ranges = list[tuple[Any, Any]]
"""Pairs of a `stores.CachedStore` and a `stores.ObjectRange`."""


RangesOf = Callable[[Int64s], Ranges]


Transform = Callable[..., Any]
"""A function of a sample or of one of its fields; it may take an `rng` as its second argument."""


@dataclass(frozen=True, slots=True)
class BatchRead:
    """A request for one collated batch.

    `indices` are int64 (B,). Tensors of the batch are allocated by `allocate(shape, dtype)`. `keys`, uint64 (B,), has
    the random key of each row; without them, torch's global generator decides. Up to `threads` native threads may work
    on the batch.
    """

    indices: Int64s
    allocate: Allocator
    keys: Keys | None = None
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties that decide how the loader reads a dataset; cheap to read.

    - `thread_safe`: several threads may call its methods at once.
    - `is_random`: a sample may depend on more than its index. False spares the seeding of global generators.
    - `reads_batches`: `read_batch`, if there is one, may be used.
    - `uses_keys`: `read_batch` draws from `BatchRead.keys`; False spares their computation.
    - `supports_threads`: `read_batch` makes use of `BatchRead.threads`.
    - `has_ranges`: `ranges`, if there is one, may be used.
    """

    thread_safe: bool = False
    is_random: bool = True
    reads_batches: bool = True
    uses_keys: bool = True
    supports_threads: bool = False
    has_ranges: bool = True


_NO_TRAITS = Traits()


READS_BATCHES = Traits(thread_safe=True, uses_keys=False)
"""Traits of a dataset that copies rows, without a transform."""


READS_SAMPLES = Traits(thread_safe=True, reads_batches=False)
"""Traits of the same dataset with a transform."""


class Dataset(Protocol):
    """Members of a map-style dataset. All but the first two are optional.

    `read_batch`, `ranges`, `listing_fingerprint` and `shard_sizes` are read only from a dataset with `traits`: other
    libraries use such names for other things.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices. Default: one `__getitem__` after the other."""
        ...

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch. Default: the samples, collated. TypeError where `traits.reads_batches` is false."""
        ...

    def ranges(self, indices: Int64s) -> Ranges:
        """Ranges of objects to fetch ahead of these samples. Default: none."""
        ...

    def address(self, index: int) -> tuple[str, str]:
        """The file of a sample and its position there, for error messages."""
        ...

    @property
    def traits(self) -> Traits:
        """Properties by which the loader chooses how to read. Default: `Traits()`."""
        ...

    @property
    def listing_fingerprint(self) -> str | None:
        """A digest of the names of the files, in order.

        Part of the loader's state: a state with another fingerprint is refused. May take milliseconds.
        """
        ...

    @property
    def content_fingerprint(self) -> str:
        """A digest of data outside the pickle; may be slow.

        Results cached on disk are recomputed when it changes.
        """
        ...

    @property
    def shard_sizes(self) -> Int64s:
        """The number of samples in each shard, in order of index."""
        ...


def traits_of(dataset: Any) -> Traits:
    """The traits of a dataset; the defaults for one that has none."""
    traits = getattr(dataset, "traits", None)
    if not isinstance(traits, Traits):
        return _NO_TRAITS
    # The class of the user may draw in its method, and reads nothing but single samples.
    return replace(traits, is_random=True, reads_batches=False) if _overrides_samples(dataset, "read_batch") else traits


def _overrides_samples(dataset: Any, method: str) -> bool:
    """True if a user's subclass overrides `__getitem__`, but not `method`."""
    for cls in type(dataset).__mro__:
        if method in vars(cls) or _is_ours(cls):
            return False
        if "__getitem__" in vars(cls):
            return any(map(_is_ours, type(dataset).__mro__))
    return False


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("feedline.datasets.")


def has_traits(dataset: Any) -> bool:
    return isinstance(getattr(dataset, "traits", None), Traits)


def has_read_batch(dataset: Any) -> bool:
    """True if the dataset's own `read_batch` may be called."""
    return has_traits(dataset) and traits_of(dataset).reads_batches and hasattr(dataset, "read_batch")


def check_reads_batches(dataset: Any) -> None:
    """Raise TypeError if samples have to be read one by one."""
    if not dataset.traits.reads_batches:
        raise TypeError(
            f"this {type(dataset).__name__} reads its samples one by one: call __getitems__ and collate them"
        )


def ranges_of(dataset: Any) -> RangesOf | None:
    """The method `ranges` of a dataset, or None.

    torch's Subset, ConcatDataset and StackDataset have the ranges of the datasets they wrap.
    """
    own: RangesOf | None = getattr(dataset, "ranges", None)
    if own is not None and has_traits(dataset):
        return own if traits_of(dataset).has_ranges else None
    if isinstance(dataset, Subset):
        return _ranges_of_subset(dataset)
    if isinstance(dataset, ConcatDataset):
        return _ranges_of_concat(dataset)
    return _join_ranges(list(map(ranges_of, _parts(dataset)))) if isinstance(dataset, StackDataset) else None


def _parts(dataset: Any) -> Sequence[Any]:
    parts = dataset.datasets
    return list(parts.values()) if isinstance(parts, dict) else list(parts)


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


_SAMPLED = 4096
"""Entries of a longer list that are hashed, evenly spread: a changed order moves most of them."""


def digest_of(names: Sequence[str], counts: Sequence[int] | NDArray[np.int64] = ()) -> str:
    """A digest of files in their order, 16 hexadecimal digits.

    Only the last part of a name counts, so a copy in another folder has the same digest. `counts` are the numbers of
    samples of each file, or of each of its parts.
    """
    last_names = [names[place].rstrip("/").rpartition("/")[2] for place in _spread(len(names))]
    numbers = [int(counts[place]) for place in _spread(len(counts))]
    return _digest(len(names), last_names, numbers)


def listing_fingerprint_of(dataset: Any) -> str | None:
    """`listing_fingerprint` of a dataset, or of those in torch's wrappers, or None."""
    own = getattr(dataset, "listing_fingerprint", None)
    if isinstance(own, str) and has_traits(dataset):
        return own
    if isinstance(dataset, Subset):
        return listing_fingerprint_of(dataset.dataset)
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        digests = list(map(listing_fingerprint_of, _parts(dataset)))
        return _digest(digests) if any(digests) else None
    return None


def _spread(length: int) -> range:
    return range(0, length, max(1, length // _SAMPLED))


def _digest(*values: Any) -> str:
    return hashlib.blake2b(repr(values).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


_ADAPTERS = {"datasets.arrow_dataset.Dataset": "feedline.datasets.tables.huggingface:HuggingFace"}
"""Foreign types, and the dataset class that reads whole batches of them."""


def adapt(dataset: Any) -> Any:
    """The dataset, with known foreign types replaced by readers of whole batches.

    Datasets inside torch's Subset and ConcatDataset are replaced as well.
    """
    if type(dataset) is Subset:
        inner = adapt(dataset.dataset)
        return dataset if inner is dataset.dataset else Subset(inner, dataset.indices)
    if type(dataset) is ConcatDataset:
        parts = list(map(adapt, dataset.datasets))
        return dataset if all(map(operator.is_, parts, dataset.datasets)) else ConcatDataset(parts)
    adapter = _ADAPTERS.get(f"{type(dataset).__module__}.{type(dataset).__qualname__}")
    if adapter is None:
        return dataset
    module, _, name = adapter.partition(":")
    return getattr(import_module(module), name)(dataset)  # imported late: pyarrow is slow to import


_BUFFERED = "BufferShuffledExamplesIterable"


_COUNTING = {"TakeExamplesIterable", "SkipExamplesIterable"}


_WITHOUT_REPLACEMENT = "all_exhausted_without_replacement"


def is_table(dataset: Any) -> bool:
    """True for a `datasets.Dataset`; does not import `datasets`."""
    return any(
        cls.__module__ == "datasets.arrow_dataset" and cls.__name__ == "Dataset" for cls in type(dataset).__mro__
    )


def is_stream(dataset: Any) -> bool:
    """True for a `datasets.IterableDataset`; does not import `datasets`."""
    return any(
        cls.__module__ == "datasets.iterable_dataset" and cls.__name__ == "IterableDataset"
        for cls in type(dataset).__mro__
    )


def loses_shuffle_buffer(dataset: Any) -> bool:
    """True if the state of a `datasets.IterableDataset` lacks a shuffle buffer's contents."""
    return any(type(step).__name__ == _BUFFERED for step in stream_steps(dataset))


def counts_across_shards(dataset: Any) -> bool:
    """True if reading the shards of a stream separately changes its examples.

    For a `datasets.IterableDataset`. It is so if a step counts examples across the shards.
    """
    return any(_counts_examples(step) for step in stream_steps(dataset))


def _counts_examples(step: Any) -> bool:
    if type(step).__name__ in _COUNTING or getattr(step, "with_indices", False):
        return True
    # Each shard would drop its own incomplete batch, and repeat sources until its own end.
    strategy = getattr(step, "stopping_strategy", _WITHOUT_REPLACEMENT)
    return getattr(step, "drop_last_batch", False) or strategy != _WITHOUT_REPLACEMENT


def stream_steps(dataset: Any) -> Iterator[Any]:
    """The steps of a `datasets.IterableDataset`, from the last to its sources.

    Nothing for other objects.
    """
    pending = [dataset._ex_iterable] if hasattr(dataset, "_ex_iterable") else []
    while pending:
        step = pending.pop()
        yield step
        inner = getattr(step, "ex_iterable", None)
        pending += getattr(step, "ex_iterables", []) if inner is None else [inner]


def batch_getter(dataset: Any) -> Callable[..., Any] | None:
    """The dataset's `__getitems__`, or None if it only calls `__getitem__`.

    torch's Subset and StackDataset always have the method; their inner datasets decide.
    """
    return getattr(dataset, "__getitems__", None) if _has_batch_getter(dataset) else None


def _has_batch_getter(dataset: Any) -> bool:
    if isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        return _has_batch_getter(dataset.dataset)
    if isinstance(dataset, StackDataset) and type(dataset).__getitems__ is StackDataset.__getitems__:
        parts = dataset.datasets
        return all(map(_has_batch_getter, parts.values() if isinstance(parts, dict) else parts))
    return hasattr(dataset, "__getitems__") and not _overrides_samples(dataset, "__getitems__")


def plain_samples(dataset: Any) -> Callable[..., Any] | None:
    """`__getitems__` of a table without a format, read by feedline.

    None for other datasets. Also through torch's Subset. Samples equal the dataset's own.
    """
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    if not is_table(inner):
        return None
    read = adapt(dataset)
    table = read
    while type(table) is Subset:
        table = table.dataset
    return read.__getitems__ if getattr(table, "has_plain_samples", False) else None


def stack_getter(dataset: Any) -> Callable[..., Any] | None:
    """`__getitems__` of a StackDataset, also through Subset; None for others.

    It asks one part after another for all samples of a batch, and random numbers are drawn in that order.
    """
    inner = dataset
    while isinstance(inner, Subset) and type(inner).__getitems__ is Subset.__getitems__:
        inner = inner.dataset
    return dataset.__getitems__ if isinstance(inner, StackDataset) else None
