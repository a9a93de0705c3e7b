"""The dataset protocol: members, traits and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.core.kernels import Int64s
from feedline.core.tensors import Allocator

Keys = NDArray[np.uint64]
"""One random key for each row of a batch."""


Batch = Any
"""Tensors in dicts, lists and tuples, as torch's default collate makes them."""


Ranges = list[tuple[Any, Any]]
"""Pairs of a `stores.CachedStore` and a `stores.ObjectRange`."""


RangesOf = Callable[[Int64s], Ranges]


TransformFunction = Callable[..., Any]
"""A function of a sample or of one of its fields; it may take an `rng` as its second argument."""


@dataclass(slots=True)  # not frozen: that would double the time of each batch's
class BatchRead:
    """A request for one collated batch.

    `indices` are int64 (B,). Tensors of the batch are allocated by `allocate(shape, dtype)`. `keys`, uint64 (B,), has
    the random key of each row; without keys, random numbers are from torch's global generator. Up to `threads` native
    threads may work on the batch.
    """

    indices: Int64s
    allocate: Allocator
    keys: Keys | None = None
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties that decide how the loader reads a dataset; cheap to read.

    - `thread_safe`: several threads may call its methods at once.
    - `is_random`: a sample may depend on more than its index. False avoids the seeding of global generators.
    - `reads_batches`: `read_batch`, if there is one, may be used.
    - `uses_keys`: `read_batch` draws from `BatchRead.keys`; False avoids their computation.
    - `supports_threads`: `read_batch` uses `BatchRead.threads`.
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
        """The samples of these indices.

        Default: a call of `__getitem__` for each index.
        """
        ...

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch.

        Default: the samples, collated. Raises TypeError if `traits.reads_batches` is False.
        """
        ...

    def ranges(self, indices: Int64s) -> Ranges:
        """Ranges of objects to prefetch for these samples.

        Default: none.
        """
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

        It is part of the loader's state, and the loader refuses a state with another fingerprint. May take
        milliseconds.
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
        """The number of samples in each shard, int64, in order of index."""
        ...


def declared(thing: Any, name: str) -> Any:
    """An attribute that the object or its class declares, or None.

    `__getattr__` is not called: it may raise anything, wrappers answer for the object inside, and mocks and remote
    proxies have attributes of every name.
    """
    for cls in type(thing).__mro__:
        if name in cls.__dict__:
            return getattr(thing, name, None)
    return getattr(thing, name, None) if name in own_attributes(thing) else None


def own_attributes(thing: Any) -> Mapping[str, Any]:
    """Attributes of the object itself; calls no code of its class."""
    try:
        own: Mapping[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:  # of a class with slots
        return {}
    return own


def traits_of(dataset: Any) -> Traits:
    """The traits of a dataset; the defaults for a dataset without traits."""
    traits = declared(dataset, "traits")
    if not isinstance(traits, Traits):
        return _NO_TRAITS
    # The user's method may draw random numbers, and reads only single samples.
    return replace(traits, is_random=True, reads_batches=False) if overrides_samples(dataset, "read_batch") else traits


def overrides_samples(dataset: Any, method: str) -> bool:
    """True if a user's subclass overrides `__getitem__`, but not `method`."""
    for cls in type(dataset).__mro__:
        if method in vars(cls) or is_ours(cls):
            return False
        if "__getitem__" in vars(cls):
            return any(map(is_ours, type(dataset).__mro__))
    return False


def is_ours(cls: type) -> bool:
    """True for classes of this package."""
    return cls.__module__.partition(".")[0] == __package__.partition(".")[0]


def has_traits(dataset: Any) -> bool:
    return isinstance(declared(dataset, "traits"), Traits)


def has_read_batch(dataset: Any) -> bool:
    """True if the dataset's own `read_batch` may be called."""
    return has_traits(dataset) and traits_of(dataset).reads_batches and declared(dataset, "read_batch") is not None


def check_reads_batches(dataset: Any) -> None:
    """Raise TypeError if samples have to be read one by one."""
    if not dataset.traits.reads_batches:
        raise TypeError(
            f"this {type(dataset).__name__} reads its samples one by one: call __getitems__ and collate them"
        )
