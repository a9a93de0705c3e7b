"""Iterable datasets as partitions, and the states of their streams.

A partition is a forward-only stream of samples. It can be opened at any batch from a `PartitionOffset`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, Protocol, Self, TypeGuard, runtime_checkable

from feedline.core.cursor import Cursor, PartitionCursor
from feedline.core.huggingface import is_stream, loses_shuffle_buffer
from feedline.core.rng import Address
from feedline.loader.building.captures import is_stateful


@runtime_checkable
class PartitionedDataset(Protocol):
    """An iterable dataset with a fixed number of partitions.

    The class has a method `partition` that requires exactly two arguments. The number does not depend on workers and
    ranks: rank r of w reads the partitions r, r + w, ..., and a saved state fits any number of workers and ranks. A
    partition must yield the same samples each time it is opened for an epoch. If its iterator has `state_dict()` and
    `load_state_dict(state)` (JSON values), a resume skips the samples before the saved position without reading them.
    """

    num_partitions: int

    def partition(self, partition: int, epoch: int) -> Iterator[Any]:
        """The samples of one partition, 0 <= partition < num_partitions, in `epoch`."""


def is_partitioned(dataset: Any) -> TypeGuard[PartitionedDataset]:
    """True for a dataset with `num_partitions` and a method `partition(partition, epoch)`.

    A method of this name with other parameters is the user's own, such as one that splits the data for training.
    """
    cls: Any = type(dataset)
    return _has_partition(cls) and inspect.getattr_static(dataset, "num_partitions", None) is not None


@lru_cache(maxsize=256)
def _has_partition(cls: Any) -> bool:
    method: Any = inspect.getattr_static(cls, "partition", None)
    try:
        parameters = inspect.signature(getattr(method, "__func__", method)).parameters.values()
    except (TypeError, ValueError):  # no method, or a built-in one
        return False
    required = [each for each in parameters if each.default is each.empty and each.kind in _POSITIONAL]
    return len(required) == (2 if isinstance(method, staticmethod) else 3)


_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def partitioned(dataset: Any, world_size: int) -> Any:
    """The dataset; for several ranks, a Hugging Face stream with partitions.

    The partitions are the shards of the stream. With fewer shards than ranks it stays unchanged.
    """
    if world_size > 1 and is_stream(dataset) and not is_partitioned(dataset):
        stream = _huggingface_stream()(dataset)
        if stream.num_partitions >= world_size:
            return stream
    return dataset


@cache
def _huggingface_stream() -> Any:
    # By name: most loaders do without the datasets.
    return import_module("feedline.datasets.tables.huggingface_stream").HuggingFaceStream


class StridedSamples:
    """Every `world_size`-th sample of an iterator, from the sample `rank` on.

    Rounds of `world_size` samples are read whole, so the state is the same on all ranks. The last round is filled with
    its own samples, so that all ranks get the same number. The first sample is read within `watch`.
    """

    def __init__(
        self, samples: Iterator[Any], rank: int, world_size: int, address: Address, watch: AbstractContextManager[None]
    ) -> None:
        self._samples, self._rank, self._world_size, self._address = samples, rank, world_size, address
        self._watch = watch
        self._read: Callable[[Iterator[Any]], Any] = self._read_first
        self.count = 0
        """Samples that were read, in all rounds."""
        self.number = 0
        """Number of the latest sample of this rank."""
        self.is_over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        taken: list[Any] = []
        address, row, first = self._address, self._address.row, self.count
        try:
            for number in range(first, first + self._world_size):
                address.row = number
                taken.append(self._read(self._samples))
        except StopIteration:
            self.is_over = True
            if not taken:
                raise
        except Exception:
            self.count += len(taken) + 1  # the iterator goes on after the sample that it could not read
            raise
        finally:
            address.row = row
        self.count += self._world_size
        place = self._rank % len(taken)
        self.number = first + place
        return taken[place]

    def skip(self, count: int) -> None:
        """Read and drop the first `count` samples, delivered before a resume."""
        for number in range(count):
            self._address.row = number
            try:
                self._read(self._samples)
            except StopIteration:
                break
            except Exception:  # noqa: BLE001, S112 - the first run raised it as well, and went on
                continue
        self.count = count

    def _read_first(self, samples: Iterator[Any]) -> Any:
        with self._watch:
            sample = next(samples)
        self._read = next
        return sample


class StreamSource:
    """A stream's dataset and iterator, which may have states."""

    __slots__ = ("_dataset", "_is_itself", "_iterator")

    def __init__(self, dataset: Any, iterator: Any) -> None:
        self._is_itself = dataset is iterator
        self._iterator = iterator if restores_position(iterator) else None
        self._dataset = dataset if dataset is not iterator and restores_position(dataset) else None

    @property
    def is_stateful(self) -> bool:
        """True if the state restores the position."""
        return self._dataset is not None or self._iterator is not None

    def state_dict(self) -> Any:
        """The states of dataset and iterator, or None if neither has one.

        If the dataset is its own iterator, True follows them.
        """
        if not self.is_stateful:
            return None
        states = tuple(None if part is None else part.state_dict() for part in (self._dataset, self._iterator))
        return (*states, True) if self._is_itself else states

    def load_iterator(self, state: Any) -> None:
        """Restore the iterator from `state`, the result of `state_dict()`."""
        if state is not None and self._iterator is not None and state[1] is not None:
            self._iterator.load_state_dict(state[1])

    def follow(self, iterator: Any) -> None:
        """Replace the iterator by another one of the same dataset."""
        self._iterator = iterator if restores_position(iterator) else None


class ReopenedSamples:
    """Samples of a dataset whose state is of an epoch's end.

    Some datasets then begin the next epoch, and others continue the ended one, which has no samples: these are opened
    again. Draws nothing before the first sample is due.
    """

    def __init__(self, samples: Iterator[Any], reopen: Callable[[], Iterator[Any]]) -> None:
        self._samples = samples
        self._reopen: Callable[[], Iterator[Any]] | None = reopen

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        reopen, self._reopen = self._reopen, None
        try:
            return next(self._samples)
        except StopIteration:
            if reopen is None:
                raise
        self._samples = reopen()
        return next(self._samples)


def keep_dataset_states(
    start: Cursor | PartitionCursor, former: Cursor | PartitionCursor | None
) -> Cursor | PartitionCursor:
    """The start of an epoch, with the dataset states that workers keep.

    `former` is the cursor at which the loop left the previous epoch. If that epoch has ended, it is the start of this
    one, and has these states.
    """
    if not isinstance(start, PartitionCursor) or not isinstance(former, PartitionCursor):
        return start
    # After a `break`, the datasets are somewhere after the last delivered batch, and their states are unknown here.
    return replace(start, dataset_states=former.dataset_states) if former.epoch == start.epoch else start


def with_initial_states(loader: Any, cursor: Cursor | PartitionCursor, run: int) -> Cursor | PartitionCursor:
    """The cursor to be saved, with states of unread partitions.

    They are those of datasets that workers keep, and without workers, those of the stream that iteration `run` has
    opened. The workers of a resumed run have neither.
    """
    dataset = loader.dataset
    is_plain = not is_partitioned(dataset) and not is_stream(dataset)
    keeps = is_plain and (loader.persistent_workers or not loader.num_workers)
    if not keeps or not isinstance(cursor, PartitionCursor):
        return cursor
    return cursor.with_initial_states(loader._fl_pools.opened_states(run, cursor.epoch))


def copy_for_epoch(stream: Any) -> Any:
    """A copy of a `datasets.IterableDataset` for one epoch.

    A stream keeps the state that it has loaded, and its later epochs would also begin there.
    """
    twin = object.__new__(type(stream))
    twin.__dict__ = dict(vars(stream))  # copy.copy would share the attributes
    return twin


def load_dataset(dataset: Any, state: Any) -> None:
    """Restore the dataset from `StreamSource.state_dict()`; before `iter(dataset)`."""
    if state is not None and state[0] is not None and restores_position(dataset):
        dataset.load_state_dict(state[0])


def restores_position(thing: Any) -> bool:
    """True if the state of `thing` restores its position without losing samples."""
    return is_stateful(thing) and not loses_shuffle_buffer(thing)
