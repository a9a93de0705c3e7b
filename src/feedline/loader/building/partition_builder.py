"""`PartitionBuilder`: the batches of iterable datasets, read as partitions."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch.utils.data._utils.worker as torch_worker

from feedline import collate
from feedline.core.batch import EMPTY_BATCH, BatchResult, SkippedSample, new_result
from feedline.core.cursor import PartitionOffset, state_of_dataset
from feedline.core.dataset import has_traits, traits_of
from feedline.core.huggingface import is_stream
from feedline.core.live import LiveSamples
from feedline.core.rng import Address, RowKeys, addressed, derive
from feedline.core.rng_globals import LoadedGenerators, global_states, restore_globals, seed_globals
from feedline.core.schedule import PartitionRequest, epoch_of
from feedline.core.telemetry import Recorder, is_worker_thread, recorder_of_thread
from feedline.core.tensors import Allocator, allocate_tensor
from feedline.errors import note
from feedline.loader.building.builder import run_collate
from feedline.loader.building.captures import traveling_schemes
from feedline.loader.monitoring.padding import PaddingCounter
from feedline.loader.partitions import (
    ReopenedSamples,
    StreamSource,
    StridedSamples,
    copy_for_epoch,
    is_partitioned,
    load_dataset,
)
from feedline.loader.ranks.own_shares import RankWatch
from feedline.workers.object_changes import restore_objects
from feedline.workers.process.worker_main import PartitionReplay

T = TypeVar("T")

_DIGEST_BATCHES = 2


@dataclass(slots=True)
class _OpenPartition:
    samples: Iterator[Any]
    source: StreamSource
    mark: PartitionOffset
    rows: Sequence[int] = ()
    """Numbers of the samples of the latest batch."""


@dataclass(slots=True)
class PartitionBuilder:
    """Builds the next batch of a partition; opens the partition if needed.

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
    skips_failed: bool = False
    """Leave out messages of a live stream that cannot be decoded."""
    reads_all: bool = False
    """See `RankPolicy`."""
    progress: Callable[[int], None] | None = field(default=None, compare=False)
    replay: PartitionReplay | None = field(default=None, compare=False)
    """States of the dead worker that this one replaces."""
    _at_first: bytes | None = field(init=False, default=None, compare=False)
    _redraws: bool = field(init=False, default=False, compare=False)
    _is_restored: bool = field(init=False, default=False, compare=False)
    _hosts: bool = field(init=False, default=False, compare=False)
    _open: dict[tuple[int, int, int], _OpenPartition] = field(init=False, default_factory=dict, compare=False)
    _padding: PaddingCounter = field(init=False, default_factory=PaddingCounter, compare=False)

    dataset_state: Any = field(init=False, default=None, compare=False)
    """The state of the dataset itself after the latest batch, if it keeps one from epoch to epoch."""

    vectorized = False
    is_stateful = False

    @property
    def draws(self) -> bool:
        """True if random values may be drawn for a batch."""
        known = self.collate_fn is None and has_traits(self.dataset)
        return not known or traits_of(self.dataset).is_random

    def __getstate__(self) -> tuple[Any, ...]:
        arguments = self.dataset, self.collate_fn, self.batch_size, self.drop_last, self.reseeds, self.accelerate
        return traveling_schemes(), *arguments, self.skips_failed, self.reads_all

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, *arguments = state
        self.__init__(*arguments)  # type: ignore[misc]

    def capture(self) -> bytes:
        """The states of this worker's random generators.

        The state of the dataset is sent with the marks.
        """
        return global_states()

    def restore(self, captured: bytes) -> None:
        """Restore the result of `capture()`, from this process or another one."""
        restore_globals(captured)

    def open(self, request: PartitionRequest) -> None:
        """Open the stream of the first request of an epoch.

        As torch, which calls `iter(dataset)` in `iter(loader)` if there are no workers: the method may draw, or read
        attributes that the user changes later. A resumed stream, a live one, and one with partitions wait for their
        first batch.
        """
        is_resumed = request.mark != PartitionOffset() or request.initial_states is not None
        if not (is_resumed or request.continues or is_partitioned(self.dataset)):
            self._work_on(request, self._partition)

    def opened_states(self, run: int, epoch: int) -> dict[int, Any]:
        """The states of partitions that an iteration has opened, but not read."""
        opened = {key[2]: each for key, each in self._open.items() if key[:2] == (run, epoch)}
        unread = {number: each for number, each in opened.items() if each.mark == PartitionOffset()}
        return {number: each.source.state_dict() for number, each in unread.items() if each.source.is_stateful}

    def close(self) -> None:
        """Drop the iterators of the open streams.

        torch does so at the end of an iteration: generators then run their `finally`. The states of unread streams
        stay, for `opened_states`.
        """
        for key, partition in list(self._open.items()):
            if partition.mark == PartitionOffset() and partition.source.is_stateful:
                partition.samples = iter(())
            else:
                del self._open[key]

    def __call__(self, request: PartitionRequest, allocate: Allocator = allocate_tensor) -> BatchResult:
        """The batch of `request` with its mark; EMPTY_BATCH at the end."""
        recorder = recorder_of_thread()
        outer = recorder.begin()
        try:
            return self._padding.add_to(self._work_on(request, self._build, allocate, recorder))
        finally:
            recorder.spans = outer

    def _work_on(self, request: PartitionRequest, act: Callable[..., T], *more: object) -> T:
        """Call `act`: `get_worker_info()` describes the partition, and errors name it."""
        self._hosts = _is_hosted(request) and not is_partitioned(self.dataset)
        try:
            with addressed(None) as address:
                if not self._hosts:
                    return act(request, address, *more)
                with self._as_partition(request):
                    return act(request, address, *more)
        except Exception as error:
            note(error, f"feedline: while working on {request} of {type(self.dataset).__name__}")
            raise

    def _build(
        self, request: PartitionRequest, address: Address, allocate: Allocator, recorder: Recorder
    ) -> BatchResult:
        partition = self._partition(request, address)
        failed: tuple[SkippedSample, ...] = ()
        if request.continues:
            samples, failed = self._draw_live(partition, request)
        else:
            samples = self._draw(partition, request, address, self.batch_size or 1)
        if samples is EMPTY_BATCH:  # it stays open: requests past its end may be in flight
            partition.samples = iter(())
            spans = recorder.finish("fetch", None)
            # The state again: a dataset may reset it when it ends.
            ended = replace(partition.mark, ended=True, state=self._state(partition))
            return BatchResult(EMPTY_BATCH, spans, mark=ended)
        if not samples:
            return BatchResult(EMPTY_BATCH, recorder.finish("fetch", None), failed, mark=partition.mark)
        recorder.end("fetch")
        if self.batch_size is None:
            samples = samples[0]
        if request.stride[1] > 1 and self.collate_fn is not None:
            self._reseed(request, *partition.rows[:1], "collate")  # all ranks have drawn the same until here
        try:
            batch = self._collate(samples, allocate)
        finally:
            # The state may hold generators that `collate_fn` has drawn from.
            if self.collate_fn is not None and (state := self._state(partition)) is not None:
                partition.mark = replace(partition.mark, state=state)
        spans = recorder.finish("collate", None)
        digest = self._digest(request, samples)
        return new_result(batch, spans, failed, partition.mark, digest, partition.rows)

    def _partition(self, request: PartitionRequest, address: Address) -> _OpenPartition:
        """The open partition, positioned before batch `request.number`."""
        key = request.run, request.epoch, request.partition
        if self.replay is not None and not self._open:
            self._begin_replay(self.replay, request)
        partition = self._open.get(key)
        if partition is None or partition.mark.batches > request.number:
            for run, epoch, number in list(self._open):
                if run != request.run or number == request.partition:
                    del self._open[run, epoch, number]
            with self._from_initial_states(request) as loaded:
                partition = self._open[key] = self._open_at_mark(request, address, loaded)
        if request.continues:  # an error left out a batch, but no message
            partition.mark = replace(partition.mark, batches=request.number)
        # A replaced worker had built the batches between the mark and the request; skip them.
        while partition.mark.batches < request.number:
            if not self._replay(partition, request, address, self.batch_size or 1):
                break
        if self.replay is not None:
            restore_globals(self.replay.generators)
            self.replay = None
        self._is_restored = False
        return partition

    def _begin_replay(self, replay: PartitionReplay, request: PartitionRequest) -> None:
        """Restore the dataset as it was when the partition was opened.

        If the request is of another epoch, nothing is replayed: the dataset and the generators get their latest states.
        """
        self._is_restored = True
        if epoch_of(request) == replay.epoch:
            restore_objects(self, replay.objects_at_start)
        else:  # the worker died between two epochs, or before the first answer of this one
            restore_objects(self, replay.objects)
            restore_globals(replay.generators)
            self.replay = None

    @contextmanager
    def _from_initial_states(self, request: PartitionRequest) -> Iterator[LoadedGenerators]:
        """Let a resumed partition draw again up to its mark.

        Within the block, the generators start from their states at the start of the epoch. After the block, they have
        their states at the mark. Without workers these are unknown: generators that the user's state has set keep that
        state, and the others continue as before.
        """
        states, loaded = request.initial_states, LoadedGenerators()
        if states is None or is_worker_thread():  # threads share the generators with the training process
            yield loaded
            return
        before = global_states()
        self._at_first = self._at_first or before
        if not request.mark.batches:  # nothing to draw again: opening may draw, and comes after the latest batch
            if states.latest is not None:
                restore_globals(states.latest)
            yield loaded
            return
        restore_globals(states.start or self._at_first)
        self._redraws = True
        try:
            yield loaded
        finally:
            self._redraws = False
            if states.latest is not None:
                restore_globals(states.latest)
            else:
                loaded.restore_others(before)

    def _open_at_mark(self, request: PartitionRequest, address: Address, loaded: LoadedGenerators) -> _OpenPartition:
        """Open the partition of a request at its mark.

        A stateful dataset or iterator is restored, within `loaded`; any other is read again from its beginning.
        """
        self._reseed(request, 0)
        state = request.mark.state
        watches = request.stride[1] > 1 and not self.reads_all
        watch = RankWatch(type(self.dataset).__name__) if watches else nullcontext()
        if is_partitioned(self.dataset):
            samples: Any = iter(self.dataset.partition(request.partition, request.epoch))
            source = StreamSource(None, samples)
        else:
            dataset = self._dataset_of_partition(state)
            with loaded.watching():
                load_dataset(dataset, state)
            with watch:
                samples = iter(dataset)
            source = StreamSource(dataset, samples)
            if self._has_ended(request.mark):
                samples = ReopenedSamples(samples, partial(_reopen, dataset, source))
        with loaded.watching():
            source.load_iterator(state)
        if request.stride[1] > 1:
            return self._strided(StridedSamples(samples, *request.stride, address, watch), source, request, address)
        if state is not None and source.is_stateful:
            return _OpenPartition(iter(()) if request.mark.ended else samples, source, request.mark)
        partition = _OpenPartition(samples, source, PartitionOffset())
        while (left := request.mark.samples - partition.mark.samples) > 0:
            if not self._replay(partition, request, address, min(left, self.batch_size or 1)):
                break
        partition.mark = replace(partition.mark, batches=request.mark.batches)
        return partition

    def _has_ended(self, mark: PartitionOffset) -> bool:
        """True if the dataset may have the state of an ended epoch."""
        is_start = mark == PartitionOffset(state=mark.state) and (not mark.state or mark.state[1] is None)
        return is_start and (self._is_restored or state_of_dataset(mark.state) is not None)

    def _strided(
        self, strided: StridedSamples, source: StreamSource, request: PartitionRequest, address: Address
    ) -> _OpenPartition:
        """Open a partition of which all ranks read every sample."""
        mark = request.mark
        address.keys = None if request.seed is None else _strided_keys(request)
        if mark.state is not None and source.is_stateful:
            strided.count = mark.samples
        else:
            strided.skip(mark.samples)
        return _OpenPartition(iter(()) if mark.ended else strided, source, mark)

    def _dataset_of_partition(self, state: Any) -> Any:
        if self._hosts:  # the dataset holds the state, so each partition in a shared worker needs its own copy
            return copy.deepcopy(self.dataset)
        return copy_for_epoch(self.dataset) if state is not None and is_stream(self.dataset) else self.dataset

    def _draw(self, partition: _OpenPartition, request: PartitionRequest, address: Address, size: int) -> Any:
        """The next samples, or EMPTY_BATCH at the end; advances the mark."""
        number, first = partition.mark.batches, partition.mark.samples
        strided = partition.samples if isinstance(partition.samples, StridedSamples) else None
        address.keys = None if request.seed is None else _keys_of(request, number)
        self._reseed(request, number)
        drawn: list[Any] = []
        numbers: list[int] = []
        try:
            if request.seed is None and strided is None and self.progress is None:
                samples = partition.samples
                for _ in range(size):  # `next` alone, as torch: `iter` may restart an iterator
                    drawn.append(next(samples))  # noqa: PERF401 - those before an error or the end count
            else:
                self._draw_each(partition, address, size, drawn, numbers)
        except StopIteration:
            pass
        except Exception:
            # The loop gets the error in place of this batch; the next batch begins after the failed sample.
            read = first + len(drawn) + 1 if strided is None else strided.count
            partition.mark = PartitionOffset(number + 1, read, self._state(partition))
            raise
        if len(drawn) < size:
            partition.samples = iter(())  # a further call might restart an iterator
        if not drawn or (self.drop_last and len(drawn) < size):
            return EMPTY_BATCH
        # A short batch means the end. The mark says so, because the dataset may have reset its state there.
        ended = len(drawn) < size or (strided is not None and strided.is_over)
        read = first + len(drawn) if strided is None else strided.count
        state = self._state(partition) if self.collate_fn is None else None  # taken after the call of `collate_fn`
        partition.mark = PartitionOffset(number + 1, read, state, ended=ended)
        partition.rows = range(first, read) if strided is None else numbers
        return drawn

    def _draw_each(
        self, partition: _OpenPartition, address: Address, size: int, drawn: list[Any], numbers: list[int]
    ) -> None:
        """Append `size` samples to `drawn`, with keys and progress.

        StopIteration at the end.
        """
        samples = partition.samples
        strided = samples if isinstance(samples, StridedSamples) else None
        for address.row in range(size):
            if self.progress is not None:
                self.progress(address.row)
            drawn.append(next(samples))
            if strided is not None:
                numbers.append(strided.number)

    def _draw_live(self, partition: _OpenPartition, request: PartitionRequest) -> tuple[Any, tuple[SkippedSample, ...]]:
        """The samples until the time is up, and the failures.

        EMPTY_BATCH at the end.
        """
        mark, flow = partition.mark, cast("LiveSamples", partition.samples)
        self._reseed(request, request.number)
        if not hasattr(flow, "draw"):  # a request past the end of the epoch
            return EMPTY_BATCH, ()
        try:
            drawn = flow.draw(self.batch_size or 1, skips=self.skips_failed, seed=request.seed)
        except StopIteration:
            return EMPTY_BATCH, ()
        count = mark.samples + len(drawn.samples) + len(drawn.failed)
        partition.mark = PartitionOffset(request.number + 1, count, self._state(partition))
        partition.rows = range(mark.samples, mark.samples + len(drawn.samples))
        failed = (
            SkippedSample(request.epoch, mark.samples + row, each.address, each.error, content=each.content)
            for row, each in enumerate(drawn.failed)
        )
        return drawn.samples, tuple(failed)

    def _replay(self, partition: _OpenPartition, request: PartitionRequest, address: Address, size: int) -> bool:
        """Draw samples again, to advance the iterator and the random generators.

        The samples are also collated if a collate function may draw from the same generators. False at the end.
        """
        mark = partition.mark
        try:
            samples = self._draw(partition, request, address, size)
        except Exception:
            if partition.mark is mark:
                raise
            return True  # the first run raised it as well, and went on after the failed sample
        draws_again = self._redraws or self.replay is not None
        if samples is not EMPTY_BATCH and draws_again and self.collate_fn is not None:
            with suppress(Exception):  # the first run raised it as well
                self._collate(samples if self.batch_size is not None else samples[0], allocate_tensor)
        return samples is not EMPTY_BATCH

    def _state(self, partition: _OpenPartition) -> Any:
        state = partition.source.state_dict()
        if state is not None and not self._hosts and not is_stream(self.dataset):
            self.dataset_state = state_of_dataset(state)
        return state

    def _collate(self, samples: Any, allocate: Allocator) -> Any:
        if self.collate_fn is not None:
            return run_collate(self.collate_fn, samples, allocate)
        if self.batch_size is None:
            return collate.convert(samples)  # type: ignore[no-untyped-call]
        return collate.default(samples, allocate=None if allocate is allocate_tensor else allocate)

    def _reseed(self, request: PartitionRequest, *place: int | str) -> None:
        if request.seed is not None and self.reseeds:
            seed_globals(derive(request.seed, request.epoch, request.partition, *place, "partition"))

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
        if request.partitions == 1 or request.number >= _DIGEST_BATCHES or is_partitioned(self.dataset):
            return None
        parts = samples if self.batch_size is not None else [samples]
        try:
            prints = [hashlib.blake2b(pickle.dumps(part), digest_size=8).hexdigest() for part in parts]
        except Exception:  # noqa: BLE001 - samples that cannot be pickled are not compared
            return None
        return "".join(prints)


def _reopen(dataset: Any, source: StreamSource) -> Iterator[Any]:
    samples: Iterator[Any] = iter(dataset)
    source.follow(samples)
    return samples


def _keys_of(request: PartitionRequest, number: int) -> RowKeys:
    """Random keys of the rows of batch `number` of a partition."""
    is_strided = request.stride[1] != 1
    return _strided_keys(request) if is_strided else RowKeys(*_key_parts(request), number)


def _strided_keys(request: PartitionRequest) -> RowKeys:
    """Random keys by the number of a sample in its partition."""
    return RowKeys(*_key_parts(request), "strided")


def _key_parts(request: PartitionRequest) -> tuple[int, int, int]:
    return request.seed or 0, request.epoch, request.partition


def _is_hosted(request: PartitionRequest) -> bool:
    """True if the number of partitions is not that of the workers.

    A resumed run keeps its partitions, whatever its number of workers.
    """
    info = torch_worker._worker_info
    workers = 1 if info is None else info.num_workers
    return request.partitions != workers
