"""`BatchBuilder`: fetches, transforms and collates the batch of a request."""

from __future__ import annotations

import operator
import pickle
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from feedline import collate
from feedline.collate.batch_reads import BatchReader, reader_of
from feedline.collate.default import is_standard
from feedline.collate.rows import RowBuffer
from feedline.core.batch import EMPTY_BATCH, BatchResult, SkippedSample, new_result
from feedline.core.dataset import BatchRead, Keys, traits_of
from feedline.core.definitions import module_of_code
from feedline.core.devices import for_device, is_for_device
from feedline.core.recognition import SampleReader
from feedline.core.rng import Address, RowKeys, addressed, derive, derive_each, is_addressed
from feedline.core.rng_globals import global_states, restore_globals, restoring_globals, seed_globals
from feedline.core.schedule import BatchRequest
from feedline.core.telemetry import Recorder, SpanTuple, is_worker_thread, recorder_of_thread
from feedline.core.tensors import Allocator, allocate_tensor, as_container, as_yielded
from feedline.core.torch_wrappers import batch_getter, inner_objects, stack_getter
from feedline.errors import SampleIndexError, note
from feedline.loader.building.captures import is_stateful, split_capture, traveling_schemes
from feedline.loader.building.foreign import adapt, may_be_recognized, plain_samples, recognize
from feedline.loader.monitoring.padding import PaddingCounter

NEIGHBORS = 8
"""Number of following indices that `on_error="replace"` tries before it skips the sample."""


def run_collate(collate_fn: Callable[[Any], Any], samples: Any, allocate: Allocator) -> Any:
    """`collate_fn(samples)`; feedline's own collators allocate by `allocate`."""
    if isinstance(collate_fn, collate.Collator):
        return collate_fn(samples, allocate=None if allocate is allocate_tensor else allocate)
    return collate_fn(samples)


Source = Any
"""`source[index]` returns a sample. A call of a function would take as long as half of a small `__getitem__`."""


@dataclass(slots=True)
class _ReadSamples:
    """Samples of a recognized dataset."""

    reader: SampleReader
    rows: RowBuffer | None

    def __getitem__(self, index: Any) -> Any:
        return self.reader.read(index, self.rows)


def _row_keys(request: BatchRequest) -> RowKeys | None:
    """The random keys of the rows; None without a seed."""
    return None if request.seed is None else RowKeys(request.seed, request.epoch, numbers=request.positions)


def _keys(request: BatchRequest) -> Keys | None:
    """The keys of `_row_keys` as one array."""
    if request.seed is None:
        return None
    return derive_each((request.seed, request.epoch), np.asarray(request.positions))


@dataclass(slots=True)
class BatchBuilder:
    """Builds batches of a map-style dataset; picklable.

    With a seed, `builder(request)` depends on the request only. `collate_fn=None` is feedline's default collate, with
    torch's results. `action` on a sample that raises is "raise", "skip" or "replace". With `reseeds`, a request with a
    seed sets `random`, `numpy.random` and torch's generator before each sample. This is only for workers that do not
    share their process. Up to `threads` native threads work on one batch if the dataset's `read_batch` supports it.
    With `accelerate`, known datasets of other libraries are read by feedline, with equal results, and worker processes
    defer Pillow's decoding. `for_device`: a stage delivers the batches to a device, so images may stay encoded until
    then.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any] | None = None
    batched: bool = True
    action: str = "raise"
    reseeds: bool = True
    accelerate: bool = True
    for_device: bool = False
    threads: int = field(default=1, compare=False)
    progress: Callable[[int], None] | None = field(default=None, compare=False)
    _dataset_state: Any = field(init=False, default=None, compare=False)
    _reader: BatchReader | None = field(init=False, default=None, compare=False)
    _many: Callable[..., Any] | None = field(init=False, default=None, compare=False)
    _columns: Callable[..., Any] | None = field(init=False, default=None, compare=False)
    _samples: SampleReader | None = field(init=False, default=None, compare=False)
    _inner: list[Any] = field(init=False, default_factory=list, compare=False)
    """Objects for which the readers were chosen."""
    _is_plain: bool = field(init=False, default=False, compare=False)
    _adopts: bool = field(init=False, default=True, compare=False)
    is_stateful: bool = field(init=False, default=False, compare=False)
    """True if the dataset has a state, saved for each worker."""
    _padding: PaddingCounter = field(init=False, default_factory=PaddingCounter, compare=False)

    def __post_init__(self) -> None:
        self._choose_readers()

    def _choose_readers(self) -> None:
        self._inner = inner_objects(self.dataset)
        self._reader = self._many = self._columns = self._samples = None
        if self.batched and self.collate_fn is None:
            self._reader = reader_of(adapt(self.dataset) if self.accelerate else self.dataset)
        if self.batched and self.action == "raise":
            table = plain_samples(self.dataset) if self.accelerate and self._reader is None else None
            self._many = batch_getter(self.dataset) if table is None else lambda indices: table(list(indices))
            self._columns = stack_getter(self.dataset)
        if self.accelerate and self._reader is None and self._many is None and may_be_recognized(self.dataset):
            self._samples = recognize(self.dataset).reader
        reads_each = self._reader is None and self._samples is None and self._many is None and self._columns is None
        self._is_plain = self.batched and self.action == "raise" and reads_each
        self.is_stateful = is_stateful(self.dataset)

    def __getstate__(self) -> tuple[Any, ...]:
        schemes = traveling_schemes()
        arguments = self.dataset, self.collate_fn, self.batched, self.action, self.reseeds, self.accelerate
        return schemes, *arguments, self.for_device

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, *arguments = state
        self.__init__(*arguments)  # type: ignore[misc]

    @property
    def draws(self) -> bool:
        """True if the dataset or the collate function may draw random numbers."""
        return traits_of(self.dataset).is_random or not _is_builtin(self.collate_fn)

    @property
    def vectorized(self) -> bool:
        """True if whole batches are read without a Python call per sample."""
        return self._reader is not None

    @property
    def has_no_reader(self) -> bool:
        """True if the dataset's own methods read all samples."""
        return self._reader is None and self._samples is None and self._columns is None

    def follow(self) -> None:
        """Choose the readers again, if they depend on the dataset's content."""
        # A `__getitems__` may be that of an inner dataset, which the user has replaced.
        if not self.has_no_reader or self._many is not None or batch_getter(self.dataset) is not None:
            self._choose_readers()

    @property
    def accelerated(self) -> bool:
        """True if samples of a known dataset are read by feedline."""
        return self._samples is not None

    @property
    def supports_threads(self) -> bool:
        """True if several native threads can work on one batch."""
        return self._reader is not None and self._reader.supports_threads

    def capture(self) -> bytes:
        """Random generators and dataset state after the latest batch."""
        states = global_states()
        return pickle.dumps((states, self._dataset_state), 5) if self.is_stateful else states

    def restore(self, captured: bytes) -> None:
        """Restore the result of `capture()`, from this process or another one."""
        states, dataset_state = split_capture(captured)
        if dataset_state is not None and self.is_stateful:
            self.dataset.load_state_dict(dataset_state)
            self._dataset_state = dataset_state
        if states:
            restore_globals(states)

    def __call__(self, request: BatchRequest, allocate: Allocator = allocate_tensor) -> BatchResult:
        """The batch of `request`; feedline's collators allocate by `allocate`."""
        # Threads share the generators and the dataset with the training process: there is nothing to restore.
        if request.initial_states is not None and request.initial_states.latest is not None and not is_worker_thread():
            self.restore(request.initial_states.latest)
        # Not a `with` block: it would cost most of a microsecond, as much as all that is recorded.
        recorder = recorder_of_thread()
        outer = recorder.begin()
        try:
            result = self._padding.add_to(self._build(request, allocate, recorder, outer))
        except BaseException:
            recorder.spans = outer
            raise
        if self.is_stateful:
            self._dataset_state = self.dataset.state_dict()
        return result

    def _build(
        self, request: BatchRequest, allocate: Allocator, recorder: Recorder, outer: list[SpanTuple] | None
    ) -> BatchResult:
        if self._inner:
            self._follow_changes()
        # An empty batch is an error of collate, as in torch.
        if self._reader is not None and isinstance(request.indices, np.ndarray) and len(request.indices):
            batch = self._read(self._reader, request, allocate)
            if batch is not EMPTY_BATCH:
                return new_result(batch, recorder.finish("fetch", outer))
        if self._is_plain and request.seed is None and not is_addressed():
            samples, rows = self._fetch_early(request, allocate)
            recorder.end("fetch")
            batch = self._collate(samples, request, rows or allocate)
            return new_result(batch, recorder.finish("collate", outer))
        skipped: list[SkippedSample] = []
        rows = self._rows(request, allocate)
        with addressed(_row_keys(request)) as address:
            samples = self._fetch(request, skipped, address, rows)
            recorder.end("fetch")
            batch = self._collate_good(samples, request, skipped, rows or allocate)
        return BatchResult(batch, recorder.finish("collate", outer), tuple(skipped))

    def _follow_changes(self) -> None:
        """Choose the readers again after an inner dataset or format changed.

        The loop does this, or `worker_init_fn`.
        """
        if is_worker_thread():  # torch's workers keep what they began with
            return
        inner = inner_objects(self.dataset)
        if len(inner) != len(self._inner) or not all(map(operator.is_, inner, self._inner)):
            self._choose_readers()

    def part(self, request: BatchRequest, rows: Sequence[int]) -> BatchRequest:
        """The request with only these rows, to bisect a worker's death."""
        return request.part(rows)

    def without(self, request: BatchRequest, rows: Sequence[int]) -> BatchRequest:
        """The request without these rows."""
        return request.without(frozenset(rows))

    def _read(self, reader: BatchReader, request: BatchRequest, allocate: Allocator) -> Any:
        """The whole batch at once; EMPTY_BATCH to fetch samples one by one.

        Single samples are needed after an error if `action` leaves out failed ones.
        """
        try:
            keys = _keys(request) if reader.uses_keys else None
            read = BatchRead(request.indices, allocate, keys, self.threads)
            if is_for_device() is self.for_device:  # nearly always; the block takes a microsecond
                return reader.read(read)
            with for_device(self.for_device):
                return reader.read(read)
        except Exception as error:
            if self.action != "raise":
                return EMPTY_BATCH
            with addressed(_row_keys(request)) as address:
                self._add_note(error, request, self._failing_row(error, request, address), "fetch")
            raise

    def _rows(self, request: BatchRequest, allocate: Allocator) -> RowBuffer | None:
        """Memory of the batch, into which recognized samples are written directly."""
        if self._samples is None:
            return None
        self._samples.refresh()
        is_plain = self.batched and self.collate_fn is None and self.action == "raise" and is_standard()
        return RowBuffer(len(request.indices), allocate, self._samples.is_repeatable) if is_plain else None

    def _fetch(
        self, request: BatchRequest, skipped: list[SkippedSample], address: Address, rows: RowBuffer | None
    ) -> Any:
        indices, reader = request.indices, self._samples
        source: Source = self.dataset if reader is None else _ReadSamples(reader, rows)
        if not self.batched:
            samples = self._fetch_each(request, [indices], skipped, address, source)
            return samples[0] if samples else EMPTY_BATCH
        indices = as_yielded(indices)
        # With a seed, random values belong to the row, whatever the order of the parts.
        many = self._many or (self._columns if request.seed is None else None)
        if many is not None:
            address.row = None
            return self._fetch_many(many, request, address)
        if request.seed is None and self.action == "raise":
            if rows is None:
                return self._fetch_plain(request, indices, source)
            return self._fetch_rows(request, rows, rows.read_all, list(map(_plain, request.indices)), source)
        return self._fetch_each(request, indices, skipped, address, source)

    def _fetch_early(self, request: BatchRequest, allocate: Allocator) -> tuple[list[Any], RowBuffer | None]:
        """Samples, each copied into the batch at once if possible."""
        indices = as_yielded(request.indices)
        if not self._adopts or self.collate_fn is not None or not is_standard():
            return self._fetch_plain(request, indices, self.dataset), None
        rows = RowBuffer(len(indices), allocate)
        samples = self._fetch_rows(request, rows, rows.adopt_all, indices, self.dataset)
        self._adopts = rows.taken == len(samples)
        return samples, rows if rows.taken else None

    def _fetch_plain(self, request: BatchRequest, indices: Sequence[Any], source: Source) -> list[Any]:
        samples: list[Any] = []
        append = samples.append
        progress = self.progress
        try:
            if progress is None:
                for index in indices:
                    append(source[index])
                return samples
            for index in indices:
                progress(len(samples))
                append(source[index])
        except Exception as error:
            self._add_note(error, request, len(samples), "fetch")
            raise
        return samples

    def _fetch_rows(
        self,
        request: BatchRequest,
        rows: RowBuffer,
        read: Callable[..., list[Any]],
        indices: Sequence[Any],
        source: Source,
    ) -> list[Any]:
        try:
            return read(indices, source, self.progress or _no_progress)
        except Exception as error:
            self._add_note(error, request, rows.reading, "fetch")
            raise

    def _fetch_many(self, many: Callable[..., Any], request: BatchRequest, address: Address) -> Any:
        self._reseed(request, 0)
        try:
            return many(as_container(request.indices))
        except Exception as error:
            self._add_note(error, request, self._failing_row(error, request, address), "fetch")
            raise

    def _failing_row(self, error: Exception, request: BatchRequest, address: Address) -> int | None:
        """The first row that fails alone; None if its error differs.

        None also for a dataset that another read would change. The loop may go on after the error, and must then draw
        the numbers that it draws with torch.
        """
        if self.is_stateful or _owns_generator(self.dataset):
            return None
        # Worker threads share the generators: restoring them would change the draws of others.
        with nullcontext() if is_worker_thread() else restoring_globals():
            return self._find_row(error, request, address)

    def _find_row(self, error: Exception, request: BatchRequest, address: Address) -> int | None:
        for row, index in enumerate(as_yielded(request.indices)):
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
        self,
        request: BatchRequest,
        indices: Sequence[Any],
        skipped: list[SkippedSample],
        address: Address,
        source: Source,
    ) -> list[Any]:
        samples: list[Any] = []
        for row, index in enumerate(indices):
            address.row = row
            if self.progress is not None:
                self.progress(row)
            self._reseed(request, row)
            try:
                samples.append(source[index])
            except Exception as error:
                self._add_note(error, request, row, "fetch")
                if self.action == "raise" or isinstance(error, ImportError):  # a missing package is not a bad sample
                    raise
                samples += self._replace_failed(request, row, _plain(index), error, skipped)
        return samples

    def _replace_failed(
        self, request: BatchRequest, row: int, index: Any, error: Exception, skipped: list[SkippedSample]
    ) -> list[Any]:
        """Record a failed sample; return its replacement, or nothing.

        The replacement is the sample at the next index that can be read, so it is the same in every run.
        """
        text = f"{type(error).__name__}: {error}"
        replacement: list[Any] = []
        neighbor = None
        if self.action == "replace" and isinstance(index, int):
            for step in range(1, NEIGHBORS + 1):
                try:
                    neighbor = (index + step) % len(self.dataset)
                    replacement = [self.dataset[neighbor]]
                    if self.collate_fn is None and self.batched:
                        collate.default(replacement)
                    break
                except Exception as another:  # noqa: BLE001 - its own turn reports the error
                    replacement = []
                    text += f"; neighbor {neighbor}: {type(another).__name__}"
        position = int(request.positions[row])
        skipped.append(SkippedSample(request.epoch, position, index, text, neighbor if replacement else None))
        return replacement

    def _collate_good(
        self, samples: Any, request: BatchRequest, skipped: list[SkippedSample], allocate: Allocator | RowBuffer
    ) -> Any:
        """Collate the batch; samples that default collate rejects count as failed."""
        if skipped and _all_left_out(request, skipped):
            return EMPTY_BATCH
        try:
            return self._collate(samples, request, allocate)
        except Exception:
            if self.action == "raise" or self.collate_fn is not None or not self.batched:
                raise
            good: list[Any] = []
            for row, sample in zip(_rows_left(request, skipped), list(samples), strict=True):
                error = _collate_error([sample])
                index = _plain(request.indices[row])
                good += [sample] if error is None else self._replace_failed(request, row, index, error, skipped)
            if len(good) == len(samples) and all(map(operator.is_, good, samples)):
                raise  # each sample is good alone; they only do not fit together
        return self._collate(good, request, allocate) if good else EMPTY_BATCH

    def _collate(self, samples: Any, request: BatchRequest, allocate: Allocator | RowBuffer) -> Any:
        try:
            if isinstance(allocate, RowBuffer):
                return allocate.collate(samples)
            if self.collate_fn is not None:
                self._reseed(request, "collate")
                return run_collate(self.collate_fn, samples, allocate)
            if not self.batched:
                return collate.convert(samples)  # type: ignore[no-untyped-call]
            return collate.default(samples, allocate=None if allocate is allocate_tensor else allocate)
        except Exception as error:
            alone = self.collate_fn is None and self.action == "raise" and self.batched
            self._add_note(error, request, _uncollatable_row(samples) if alone else None, "collate")
            raise

    def _reseed(self, request: BatchRequest, row: int | str) -> None:
        if request.seed is None or not self.reseeds:
            return
        if isinstance(row, str) or not len(request.positions):
            first = next(iter(request.positions), request.start)  # of this rank; all ranks have one start
            key = derive(request.seed, request.epoch, int(first), row)
        else:
            key = derive(request.seed, request.epoch, int(request.positions[row]), "global")
        seed_globals(key)

    def _add_note(self, error: Exception, request: BatchRequest, row: int | None, stage: str) -> None:
        """Add a note to the error with sample, dataset, epoch and position."""
        name = type(self.dataset).__name__
        if row is None:
            note(error, f"feedline: while the {stage} stage worked on {request} of {name}")
            return
        index = _plain(request.indices if not self.batched else request.indices[row])
        where = f"sample {index!r} of {name} (epoch {request.epoch}, position {request.positions[row]}, stage {stage})"
        note(error, f"feedline: {where}{self._locate(index)}; {self._remedy(error, index)}")

    def _locate(self, index: Any) -> str:
        """File and position of a sample, if the dataset has `address`."""
        with suppress(Exception):
            file, place = self.dataset.address(index)
            return f", {place} of {file}"
        return ""

    def _remedy(self, error: Exception, index: Any) -> str:
        if isinstance(error, (IndexError, SampleIndexError)) and isinstance(index, (int, np.integer)):
            try:
                length = len(self.dataset)
            except Exception:  # noqa: BLE001 - the error of the sample is raised
                length = None
            if length is not None and not -length <= index < length:
                return f"the index from the sampler is out of range: the dataset has {length} samples"
        return "on_error='skip' counts and leaves out such samples"


_GENERATORS = random.Random, np.random.Generator, np.random.RandomState, torch.Generator


def _owns_generator(dataset: Any) -> bool:
    """True if an attribute of the dataset is a random generator."""
    return any(isinstance(value, _GENERATORS) for value in getattr(dataset, "__dict__", {}).values())


def _no_progress(row: int) -> None:
    """Ignore the row: nothing watches the samples."""


def _plain(index: Any) -> Any:
    return int(index) if isinstance(index, (np.integer, torch.Tensor)) and not index.shape else index


def _is_builtin(collate_fn: Callable[[Any], Any] | None) -> bool:
    """True for default collate and builtins such as `list`, which draw nothing."""
    return collate_fn is None or module_of_code(collate_fn) == "builtins"


def _collate_error(samples: Sequence[Any]) -> Exception | None:
    """The exception of default collate for these samples, or None."""
    try:
        collate.default(samples)
    except Exception as error:  # noqa: BLE001 - the exception is the result
        return error
    return None


def _uncollatable_row(samples: Sequence[Any]) -> int | None:
    """The first row that default collate rejects, alone or with the first."""
    alone = (row for row, sample in enumerate(samples) if _collate_error([sample]))
    paired = (row for row, sample in enumerate(samples) if _collate_error([samples[0], sample]))
    return next(chain(alone, paired), None)


def _rows_left(request: BatchRequest, skipped: list[SkippedSample]) -> list[int]:
    gone = {skip.position for skip in skipped if skip.replaced_by is None}
    return [row for row, position in enumerate(request.positions) if int(position) not in gone]


def _all_left_out(request: BatchRequest, skipped: list[SkippedSample]) -> bool:
    return sum(skip.replaced_by is None for skip in skipped) == len(request.positions)
