"""Batches of iterable datasets, read as partitions.

A partition is a forward-only stream of samples. It can be opened at any batch from a `PartitionOffset`.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import monotonic_ns
from typing import Any, Protocol, runtime_checkable

import torch.utils.data._utils.worker as torch_worker

from feedline import collate
from feedline.core import telemetry
from feedline.core.batch import EMPTY_BATCH, BatchResult
from feedline.core.cursor import PartitionOffset
from feedline.core.dataset import forgets, is_stream
from feedline.core.rng import Address, addressed, derive
from feedline.core.rng_globals import global_states, restore_globals, seed_globals
from feedline.core.schedule import Opening, PartitionRequest
from feedline.core.telemetry import SpanTuple, add_run_delay, recording, span, spent_cpu, start_cpu
from feedline.core.tensors import Allocator, allocate_tensor
from feedline.errors import note
from feedline.loader.builder import is_stateful, run_collate, traveling_schemes

_DIGEST_BATCHES = 2


@runtime_checkable
class PartitionedDataset(Protocol):
    """An iterable dataset with a fixed number of partitions.

    The number does not depend on workers and ranks: rank r of w reads the partitions r, r + w, ..., and a saved state
    fits any number of workers and ranks. A partition must give the same samples each time it is opened for an epoch.
    If its iterator has `state_dict()` and `load_state_dict(state)` (JSON values), a resume does not read the samples
    before the saved position.
    """

    num_partitions: int

    def partition(self, partition: int, epoch: int) -> Iterator[Any]:
        """The samples of one partition, 0 <= partition < num_partitions, in `epoch`."""


class StreamSource:
    """A stream's dataset and iterator, which may have states."""

    __slots__ = ("_dataset", "_iterator")

    def __init__(self, dataset: Any, iterator: Any) -> None:
        self._iterator = iterator if _is_stateful(iterator) else None
        self._dataset = dataset if dataset is not iterator and _is_stateful(dataset) else None

    @property
    def is_stateful(self) -> bool:
        """True if the position is in the state."""
        return self._dataset is not None or self._iterator is not None

    def state_dict(self) -> Any:
        """The states of dataset and iterator, or None if neither has one."""
        if not self.is_stateful:
            return None
        return tuple(None if part is None else part.state_dict() for part in (self._dataset, self._iterator))

    def load_iterator(self, state: Any) -> None:
        """Restore the iterator."""
        if state is not None and self._iterator is not None and state[1] is not None:
            self._iterator.load_state_dict(state[1])


def _twin(stream: Any) -> Any:
    """A `datasets.IterableDataset` for one epoch.

    It keeps a loaded state, and later epochs would begin there, too.
    """
    twin = object.__new__(type(stream))
    twin.__dict__ = dict(vars(stream))  # copy.copy would share the attributes
    return twin


def load_dataset(dataset: Any, state: Any) -> None:
    """Restore the dataset, before `iter(dataset)`."""
    if state is not None and state[0] is not None and _is_stateful(dataset):
        dataset.load_state_dict(state[0])


@dataclass(slots=True)
class _OpenPartition:
    samples: Iterator[Any]
    source: StreamSource
    mark: PartitionOffset


@dataclass(slots=True)
class PartitionBuilder:
    """Builds the next batch of a partition, opened where needed.

    As in torch, `batch_size=None` gives single samples, and `drop_last` drops the incomplete last batch of a
    partition. Open partitions exist in the worker only; a pickled builder has none. With `accelerate`, worker processes
    defer Pillow's decoding.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any] | None = None
    batch_size: int | None = None
    drop_last: bool = False
    reseeds: bool = True
    accelerate: bool = True
    progress: Callable[[int], None] | None = field(default=None, compare=False)
    resumed_generators: bytes | None = field(default=None, compare=False)
    """Generator states after the last batch of the dead worker that this one replaces."""
    _at_first: bytes | None = field(init=False, default=None, compare=False)
    _redraws: bool = field(init=False, default=False, compare=False)
    _hosts: bool = field(init=False, default=False, compare=False)
    _open: dict[tuple[int, int], _OpenPartition] = field(init=False, default_factory=dict, compare=False)

    vectorized = False
    is_stateful = False
    draws = True

    def __getstate__(self) -> tuple[Any, ...]:
        schemes = traveling_schemes()
        return schemes, self.dataset, self.collate_fn, self.batch_size, self.drop_last, self.reseeds, self.accelerate

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, *arguments = state
        self.__init__(*arguments)  # type: ignore[misc]

    def capture(self) -> bytes:
        """The states of this worker's random generators.

        The dataset's state travels with the marks.
        """
        return global_states()

    def restore(self, captured: bytes) -> None:
        """Restore what `capture()` returned, here or in another process."""
        restore_globals(captured)

    def __call__(self, request: PartitionRequest, allocate: Allocator = allocate_tensor) -> BatchResult:
        """The batch of `request` with its mark; EMPTY_BATCH at the end."""
        self._hosts = _is_hosted(request) and not isinstance(self.dataset, PartitionedDataset)
        with recording() as spans, addressed(None) as address, self._as_partition(request):
            try:
                return self._build(request, allocate, spans, address)
            except Exception as error:
                note(error, f"feedline: while working on {request} of {type(self.dataset).__name__}")
                raise

    def _build(
        self, request: PartitionRequest, allocate: Allocator, spans: list[SpanTuple], address: Address
    ) -> BatchResult:
        start_ns = monotonic_ns()
        cpu_ns = start_cpu(start_ns)
        with span("fetch"):
            partition = self._partition(request, address)
            samples = self._draw(partition, request, address, self.batch_size or 1)
        if cpu_ns is not None:
            fetch_cpu, cpu_ns = spent_cpu("fetch", cpu_ns)
            spans.append(fetch_cpu)
        add_run_delay(spans, start_ns)
        if samples is EMPTY_BATCH:
            partition.samples = iter(())  # stays open: requests past its end may be in flight
            return BatchResult(EMPTY_BATCH, spans, mark=replace(partition.mark, ended=True))
        if self.batch_size is None:
            samples = samples[0]
        with span("collate"):
            batch = self._collate(samples, allocate)
        if cpu_ns is not None:
            spans.append(spent_cpu("collate", cpu_ns)[0])
        return BatchResult(batch, spans, mark=partition.mark, digest=self._digest(request, samples))

    def _partition(self, request: PartitionRequest, address: Address) -> _OpenPartition:
        """The open partition, positioned before batch `request.number`."""
        key = request.epoch, request.partition
        partition = self._open.get(key)
        if partition is None or partition.mark.batches > request.number:
            for old in [other for other in list(self._open) if other[1] == request.partition]:
                del self._open[old]
            with self._opening(request.opening):
                partition = self._open[key] = self._open_at_mark(request, address)
        # A replaced worker had built the batches between the mark and the request; skip them.
        while partition.mark.batches < request.number:
            if self._replay(partition, request, address, self.batch_size or 1) is EMPTY_BATCH:
                break
        if self.resumed_generators is not None:
            restore_globals(self.resumed_generators)
            self.resumed_generators = None
        return partition

    @contextmanager
    def _opening(self, opening: Opening | None) -> Iterator[None]:
        """Let a resumed partition draw again up to its mark."""
        if opening is None or telemetry.is_thread():  # threads share the generators with the training process
            yield
            return
        before = global_states()
        self._at_first = self._at_first or before
        restore_globals(opening.start or self._at_first)
        self._redraws = True
        try:
            yield
        finally:
            self._redraws = False
            restore_globals(opening.latest or before)

    def _open_at_mark(self, request: PartitionRequest, address: Address) -> _OpenPartition:
        """Open the partition of a request at its mark.

        A stateful dataset or iterator is restored; any other is read again from its beginning.
        """
        self._reseed(request, 0)
        state = request.mark.state
        if isinstance(self.dataset, PartitionedDataset):
            samples: Any = iter(self.dataset.partition(request.partition, request.epoch))
            source = StreamSource(None, samples)
            source.load_iterator(state)
        else:
            dataset = self._dataset_of_partition(state)
            load_dataset(dataset, state)
            samples = iter(dataset)
            source = StreamSource(dataset, samples)
            source.load_iterator(state)
        if state is not None and source.is_stateful:
            return _OpenPartition(iter(()) if request.mark.ended else samples, source, request.mark)
        partition = _OpenPartition(samples, source, PartitionOffset())
        while (left := request.mark.samples - partition.mark.samples) > 0:
            with suppress(Exception):  # the first run raised it as well
                if self._replay(partition, request, address, min(left, self.batch_size or 1)) is EMPTY_BATCH:
                    break
        partition.mark = replace(partition.mark, batches=request.mark.batches)
        return partition

    def _dataset_of_partition(self, state: Any) -> Any:
        if self._hosts:  # the dataset holds the state, so each partition in a shared worker needs its own copy
            return copy.deepcopy(self.dataset)
        return _twin(self.dataset) if state is not None and is_stream(self.dataset) else self.dataset

    def _draw(self, partition: _OpenPartition, request: PartitionRequest, address: Address, size: int) -> Any:
        """The next samples, or EMPTY_BATCH at the end; advances the mark."""
        number = partition.mark.batches
        address.keys = None if request.seed is None else _PartitionKeys(request, number)
        self._reseed(request, number)
        drawn: list[Any] = []
        for address.row in range(size):
            if self.progress is not None:
                self.progress(address.row)
            try:
                drawn.append(next(partition.samples))
            except StopIteration:
                break
            except Exception:
                # The loop gets the error in place of this batch; the next batch begins after the failed sample.
                partition.mark = PartitionOffset(
                    number + 1, partition.mark.samples + len(drawn) + 1, self._state(partition)
                )
                raise
        if not drawn or (self.drop_last and len(drawn) < size):
            return EMPTY_BATCH
        # A short batch means the end. The mark says so, because the dataset may have reset its state there.
        partition.mark = PartitionOffset(
            number + 1, partition.mark.samples + len(drawn), self._state(partition), ended=len(drawn) < size
        )
        return drawn

    def _replay(self, partition: _OpenPartition, request: PartitionRequest, address: Address, size: int) -> Any:
        """Draw samples again, to advance the iterator and the random generators.

        They are collated too if a collate function may draw from the same generators.
        """
        samples = self._draw(partition, request, address, size)
        draws_again = self._redraws or self.resumed_generators is not None
        if samples is not EMPTY_BATCH and draws_again and self.collate_fn is not None:
            with suppress(Exception):  # the first run raised it as well
                self._collate(samples if self.batch_size is not None else samples[0], allocate_tensor)
        return samples

    @staticmethod
    def _state(partition: _OpenPartition) -> Any:
        return partition.source.state_dict()

    def _collate(self, samples: Any, allocate: Allocator) -> Any:
        if self.collate_fn is not None:
            return run_collate(self.collate_fn, samples, allocate)
        if self.batch_size is None:
            return collate.convert(samples)  # type: ignore[no-untyped-call]
        return collate.default(samples, allocate=None if allocate is allocate_tensor else allocate)

    def _reseed(self, request: PartitionRequest, number: int) -> None:
        if request.seed is not None and self.reseeds:
            seed_globals(derive(request.seed, request.epoch, request.partition, number, "partition"))

    @contextmanager
    def _as_partition(self, request: PartitionRequest) -> Iterator[None]:
        """Let torch's `get_worker_info()` describe a hosted partition instead of the worker."""
        if not self._hosts:
            yield
            return
        info = torch_worker._worker_info
        seed = 0 if info is None else info.seed
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=request.partition, num_workers=request.partitions, seed=seed, dataset=self.dataset
        )
        try:
            yield
        finally:
            torch_worker._worker_info = info

    def _digest(self, request: PartitionRequest, samples: Any) -> str | None:
        """Digests of a first batch's samples, to detect duplicate partitions; or None."""
        if request.partitions == 1 or request.number >= _DIGEST_BATCHES or isinstance(self.dataset, PartitionedDataset):
            return None
        parts = samples if self.batch_size is not None else [samples]
        try:
            prints = [hashlib.blake2b(pickle.dumps(part), digest_size=8).hexdigest() for part in parts]
        except Exception:  # noqa: BLE001 - samples that cannot be pickled are not compared
            return None
        return "".join(prints)


class _PartitionKeys(Sequence[int]):
    """Random keys of the samples of a partition, by row.

    A key is fixed by (seed, epoch, partition, batch number, row).
    """

    __slots__ = ("_number", "_request")

    def __init__(self, request: PartitionRequest, number: int) -> None:
        self._request, self._number = request, number

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, row: Any) -> Any:
        request = self._request
        return derive(request.seed or 0, request.epoch, request.partition, self._number, row)


def _is_stateful(thing: Any) -> bool:
    """True if its state restores its position without losing samples."""
    return is_stateful(thing) and not forgets(thing)


def _is_hosted(request: PartitionRequest) -> bool:
    """True if the partitions are not the workers.

    A resumed run keeps its partitions, whatever its number of workers.
    """
    info = torch_worker._worker_info
    workers = 1 if info is None else info.num_workers
    return request.partitions != workers
