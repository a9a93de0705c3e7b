"""From a batch request to a batch: fetch, transform, collate, as one picklable value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic_ns
from typing import Any

import numpy as np
from torch.utils.data import StackDataset, Subset

from feedline import collate
from feedline.collate.batch_reads import BatchReader, reader_of
from feedline.core.batch import EMPTY_BATCH, BatchResult, SkippedSample
from feedline.core.dataset import BatchRead, Keys, adapted, traits_of
from feedline.core.rng import Address, addressed, derive, derive_each
from feedline.core.rng_globals import seed_globals
from feedline.core.schedule import BatchRequest
from feedline.core.telemetry import recording, spent
from feedline.core.tensors import Allocator, allocate_tensor
from feedline.errors import SampleIndexError, note

NEIGHBORS = 8
"""How many following indices `on_error="replace"` tries before it skips the sample instead."""


def collated(collate_fn: Callable[[Any], Any], samples: Any, allocate: Allocator) -> Any:
    """`collate_fn(samples)`; one of feedline's own writes into memory from `allocate`."""
    if isinstance(collate_fn, collate.Collator):
        return collate_fn(samples, empty=None if allocate is allocate_tensor else allocate)
    return collate_fn(samples)


class _Keys(Sequence[int]):
    """The random key of each row, made when asked for: most samples draw nothing."""

    __slots__ = ("_epoch", "_positions", "_seed")

    def __init__(self, request: BatchRequest) -> None:
        self._seed, self._epoch, self._positions = request.seed, request.epoch, request.positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, row: Any) -> Any:
        return derive(self._seed or 0, self._epoch, int(self._positions[row]))


def _keys(request: BatchRequest) -> Keys | None:
    """The same keys, all at once."""
    if request.seed is None:
        return None
    return derive_each((request.seed, request.epoch), np.asarray(request.positions))


@dataclass(slots=True)
class BatchBuilder:
    """`builder(request)` fetches, transforms and collates one batch of a map-style dataset; pure in the request.

    `collate_fn=None` is feedline's own default collate (torch's results). `action` is what happens to a sample that
    raises: "raise", "skip" or "replace". `reseeds` says that the workers own their process, so that `random`,
    `numpy.random` and torch may be seeded per sample when the request has a seed. `threads` may work on one batch,
    where the dataset's `read_batch` supports it.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any] | None = None
    batched: bool = True
    action: str = "raise"
    reseeds: bool = True
    threads: int = field(default=1, compare=False)
    progress: Callable[[int], None] | None = field(default=None, compare=False)
    resumed_generators: bytes | None = field(default=None, compare=False)
    _reader: BatchReader | None = field(init=False, default=None, compare=False)
    _many: Callable[..., Any] | None = field(init=False, default=None, compare=False)
    _size: int | None = field(init=False, default=None, compare=False)

    def __post_init__(self) -> None:
        if self.batched and self.collate_fn is None:
            self._reader = reader_of(adapted(self.dataset))
        if self.batched and self.action == "raise":
            self._many = many_at_once(self.dataset)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.dataset, self.collate_fn, self.batched, self.action, self.reseeds

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def draws(self) -> bool:
        """Whether anything may draw from a generator: the dataset, by its traits, or a user's collate."""
        return traits_of(self.dataset).is_random or not _is_builtin(self.collate_fn)

    @property
    def vectorized(self) -> bool:
        """Whether whole batches are read without a Python call per sample."""
        return self._reader is not None

    @property
    def supports_threads(self) -> bool:
        """Whether several native threads can work on one batch."""
        return self._reader is not None and self._reader.supports_threads

    def __call__(self, request: BatchRequest, allocate: Allocator = allocate_tensor) -> BatchResult:
        """The batch of `request`, its tensors from `allocate` where collate is ours."""
        with recording() as spans:
            begun_ns = monotonic_ns()
            if self._reader is not None and isinstance(request.indices, np.ndarray):
                batch = self._read(self._reader, request, allocate)
                if batch is not EMPTY_BATCH:
                    spans.append(spent("fetch", begun_ns, monotonic_ns()))
                    return BatchResult(batch, spans)
            skipped: list[SkippedSample] = []
            with addressed(None if request.seed is None else _Keys(request)) as address:
                samples = self._fetch(request, skipped, address)
                fetched_ns = monotonic_ns()
                batch = self._collate_good(samples, request, skipped, allocate)
            spans.append(spent("fetch", begun_ns, fetched_ns))
            spans.append(spent("collate", fetched_ns, monotonic_ns()))
            return BatchResult(batch, spans, tuple(skipped))

    def part(self, request: BatchRequest, rows: Sequence[int]) -> BatchRequest:
        """The request with these rows only: for narrowing down which sample kills a worker."""
        return request.part(rows)

    def without(self, request: BatchRequest, rows: Sequence[int]) -> BatchRequest:
        """The request with these rows left out."""
        return request.without(frozenset(rows))

    def _read(self, reader: BatchReader, request: BatchRequest, allocate: Allocator) -> Any:
        """The whole batch at once; EMPTY_BATCH if samples must be fetched one by one, to leave out the bad ones."""
        try:
            keys = _keys(request) if reader.uses_keys else None
            return reader.read(BatchRead(request.indices, allocate, keys, self.threads))
        except Exception as error:
            if self.action != "raise":
                return EMPTY_BATCH
            with addressed(None if request.seed is None else _Keys(request)) as address:
                self._address(error, request, self._culprit(error, request, address), "fetch")
            raise

    def _fetch(self, request: BatchRequest, skipped: list[SkippedSample], address: Address) -> Any:
        indices = request.indices
        if not self.batched:
            found = self._fetch_each(request, [indices], skipped, address)
            return found[0] if found else EMPTY_BATCH
        if isinstance(indices, np.ndarray):
            indices = indices.tolist()
        if self._many is not None:
            address.row = None
            return self._fetch_many(request, indices, address)
        if request.seed is None and self.action == "raise":
            return self._fetch_plain(request, indices)
        return self._fetch_each(request, indices, skipped, address)

    def _fetch_plain(self, request: BatchRequest, indices: Sequence[Any]) -> list[Any]:
        samples: list[Any] = []
        dataset, append = self.dataset, samples.append
        progress = self.progress
        try:
            for index in indices:
                if progress is not None:
                    progress(len(samples))
                append(dataset[index])
        except Exception as error:
            self._address(error, request, len(samples), "fetch")
            raise
        return samples

    def _fetch_many(self, request: BatchRequest, indices: Sequence[Any], address: Address) -> Any:
        assert self._many is not None
        self._reseed(request, 0)
        try:
            return self._many(indices)
        except Exception as error:
            self._address(error, request, self._culprit(error, request, address), "fetch")
            raise

    def _culprit(self, error: Exception, request: BatchRequest, address: Address) -> int | None:
        """The first row that fails when it is fetched by itself, if it fails as the whole batch did."""
        for row, index in enumerate(map(_plain, request.indices)):
            address.row = row
            if self.progress is not None:
                self.progress(row)
            self._reseed(request, row)
            try:
                self.dataset[index]
            except Exception as alone:  # noqa: BLE001 - the batch's own error is raised
                return row if type(alone) is type(error) else None
        return None

    def _fetch_each(
        self, request: BatchRequest, indices: Sequence[Any], skipped: list[SkippedSample], address: Address
    ) -> list[Any]:
        samples: list[Any] = []
        for row, index in enumerate(indices):
            address.row = row
            if self.progress is not None:
                self.progress(row)
            self._reseed(request, row)
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                self._address(error, request, row, "fetch")
                if self.action == "raise" or isinstance(error, ImportError):  # which is no fault of the sample
                    raise
                samples += self._instead(request, row, index, error, skipped)
        return samples

    def _instead(
        self, request: BatchRequest, row: int, index: Any, error: Exception, skipped: list[SkippedSample]
    ) -> list[Any]:
        """The deterministic stand-in for a failed sample: the next index that works, or nothing."""
        text = f"{type(error).__name__}: {error}"
        found: list[Any] = []
        neighbor = None
        if self.action == "replace" and isinstance(index, int):
            for step in range(1, NEIGHBORS + 1):
                neighbor = (index + step) % len(self.dataset)
                try:
                    found = [self.dataset[neighbor]]
                    if self.collate_fn is None and self.batched:
                        collate.default(found)
                    break
                except Exception as another:  # noqa: BLE001 - the neighbor is just as bad: its own turn will report it
                    found = []
                    text += f"; neighbor {neighbor}: {type(another).__name__}"
        position = int(request.positions[row])
        skipped.append(SkippedSample(request.epoch, position, index, text, neighbor if found else None))
        return found

    def _collate_good(
        self, samples: Any, request: BatchRequest, skipped: list[SkippedSample], allocate: Allocator
    ) -> Any:
        """The batch; samples of which default collation can make nothing are bad as those that cannot be fetched."""
        if skipped and _all_left_out(request, skipped):
            return EMPTY_BATCH
        try:
            return self._collate(samples, request, allocate)
        except Exception:
            if self.action == "raise" or self.collate_fn is not None or not self.batched:
                raise
            good: list[Any] = []
            for row, sample in zip(_rows_left(request, skipped), list(samples), strict=True):
                error = _uncollated([sample])
                index = _plain(request.indices[row])
                good += [sample] if error is None else self._instead(request, row, index, error, skipped)
            if len(good) == len(samples) and all(map(operator.is_, good, samples)):
                raise  # each is good by itself
        return self._collate(good, request, allocate) if good else EMPTY_BATCH

    def _collate(self, samples: Any, request: BatchRequest, allocate: Allocator) -> Any:
        try:
            if self.collate_fn is not None:
                self._reseed(request, "collate")
                return collated(self.collate_fn, samples, allocate)
            if not self.batched:
                return collate.convert(samples)  # type: ignore[no-untyped-call]
            return collate.default(samples, empty=None if allocate is allocate_tensor else allocate)
        except Exception as error:
            alone = self.collate_fn is None and self.action == "raise" and self.batched
            self._address(error, request, _odd(samples) if alone else None, "collate")
            raise

    def _reseed(self, request: BatchRequest, row: int | str) -> None:
        if request.seed is None or not self.reseeds:
            return
        if isinstance(row, str) or not len(request.positions):
            key = derive(request.seed, request.epoch, request.start, row)
        else:
            key = derive(request.seed, request.epoch, int(request.positions[row]), "global")
        seed_globals(key)

    def _address(self, error: Exception, request: BatchRequest, row: int | None, stage: str) -> None:
        """Say on the error which sample of which batch it comes from."""
        name = type(self.dataset).__name__
        if row is None:
            note(error, f"feedline: while the {stage} stage worked on {request} of {name}")
            return
        index = _plain(request.indices if not self.batched else request.indices[row])
        where = f"sample {index!r} of {name} (epoch {request.epoch}, position {request.positions[row]}, stage {stage})"
        note(error, f"feedline: {where}{self._place(index)}; {self._remedy(error, index)}")

    def _place(self, index: Any) -> str:
        """Where a sample lies, if the dataset tells."""
        with suppress(Exception):
            file, place = self.dataset.address(index)
            return f", {place} of {file}"
        return ""

    def _remedy(self, error: Exception, index: Any) -> str:
        if isinstance(error, (IndexError, SampleIndexError)) and isinstance(index, (int, np.integer)):
            try:
                length = len(self.dataset)
            except TypeError:
                length = None
            if length is not None and not -length <= index < length:
                return f"the sampler gave an index out of range: the dataset has {length} samples"
        return "on_error='skip' counts and leaves out such samples"


def _plain(index: Any) -> Any:
    return int(index) if isinstance(index, np.integer) else index


def _is_builtin(collate_fn: Callable[[Any], Any] | None) -> bool:
    """Whether it is our own, or a type or function of Python's, such as `list`: these draw nothing."""
    return collate_fn is None or getattr(collate_fn, "__module__", None) == "builtins"


def many_at_once(dataset: Any) -> Callable[..., Any] | None:
    """The dataset's `__getitems__`, if it does more than call one by one: torch's Subset and StackDataset have one."""
    return getattr(dataset, "__getitems__", None) if _fetches_many(dataset) else None


def _fetches_many(dataset: Any) -> bool:
    if isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        return _fetches_many(dataset.dataset)
    if isinstance(dataset, StackDataset) and type(dataset).__getitems__ is StackDataset.__getitems__:
        parts = dataset.datasets
        return all(map(_fetches_many, parts.values() if isinstance(parts, dict) else parts))
    return hasattr(dataset, "__getitems__")


def _uncollated(samples: Sequence[Any]) -> Exception | None:
    """What keeps default collation from making a batch of these."""
    try:
        collate.default(samples)
    except Exception as error:  # noqa: BLE001 - it is what was asked for
        return error
    return None


def _odd(samples: Sequence[Any]) -> int | None:
    """The first sample that makes no batch by itself, or else together with the first one."""
    alone = (row for row, sample in enumerate(samples) if _uncollated([sample]))
    paired = (row for row, sample in enumerate(samples) if _uncollated([samples[0], sample]))
    return next(chain(alone, paired), None)


def _rows_left(request: BatchRequest, skipped: list[SkippedSample]) -> list[int]:
    gone = {skip.position for skip in skipped if skip.replaced_by is None}
    return [row for row, position in enumerate(request.positions) if int(position) not in gone]


def _all_left_out(request: BatchRequest, skipped: list[SkippedSample]) -> bool:
    return sum(skip.replaced_by is None for skip in skipped) == len(request.positions)
