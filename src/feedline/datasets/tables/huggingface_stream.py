"""`HuggingFaceStream`: a `datasets.IterableDataset` in partitions, resumed exactly, its shuffle buffer included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker

from feedline.core.dataset import counts, forgets
from feedline.core.rng import derive, permuted
from feedline.errors import ArgumentError


class HuggingFaceStream(torch.utils.data.IterableDataset[Any]):
    """The examples of a `datasets.IterableDataset`; each of its shards is a partition, whatever the workers and ranks.

    `shuffle_buffer` mixes the examples of each partition within blocks of that many, anew in each epoch; to resume, one
    block at most is read again. A dataset that was shuffled by `datasets` itself resumes exactly, too, but reads its
    shards from their beginning, because its state does not hold what was in its buffer. With `take`, `skip`,
    indices, batches dropped for being short, or sources that are interleaved with or until the first is exhausted, a
    stream has one partition: each shard by itself would give other examples.

    In torch's own DataLoader each worker reads its own partitions. There, each pass of a process is the next epoch,
    counted from the one given to `set_epoch`: call it where workers are not persistent, as for `datasets`.
    """

    def __init__(self, dataset: Any, shuffle_buffer: int | None = None, seed: int = 0) -> None:
        if not (hasattr(dataset, "_ex_iterable") and hasattr(dataset, "num_shards")):
            raise ArgumentError(f"HuggingFaceStream reads datasets.IterableDataset, not {type(dataset).__name__}")
        if shuffle_buffer is not None and shuffle_buffer < 1:
            raise ArgumentError(f"shuffle_buffer={shuffle_buffer} must be at least 1")
        self.dataset = dataset
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        self.num_partitions = 1 if counts(dataset) else dataset.num_shards
        self._told, self._passes = dataset.epoch, 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass of torch's DataLoader be epoch `epoch`; feedline's tells each partition its epoch."""
        self.dataset.set_epoch(epoch)
        self._told, self._passes = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        """All partitions, one after the other; in a worker of torch's DataLoader, those that are the worker's."""
        partitions, epoch = range(self.num_partitions), self._next_epoch()
        info = torch.utils.data.get_worker_info()
        if info is not None:
            partitions = partitions[info.id :: info.num_workers]
        return chain.from_iterable(self.partition(partition, epoch) for partition in partitions)

    def _next_epoch(self) -> int:
        told = self.dataset.epoch  # in memory that persistent workers share with the process that sets it
        if told != self._told:
            self._told, self._passes = told, 0
        self._passes += 1
        return int(told) + self._passes - 1

    def partition(self, partition: int, epoch: int) -> Iterator[Any]:
        """The examples of one partition; the iterator has a state where that of the dataset is exact."""
        source = self.dataset.shard(num_shards=self.num_partitions, index=partition)
        source.set_epoch(epoch)
        if self.shuffle_buffer is None:
            return _examples(source) if forgets(source) else _Stateful(source)
        key = derive(self.seed, epoch, partition, "shuffle buffer")
        return _Shuffled(source, self.shuffle_buffer, key, stateful=not forgets(source))

    def __getstate__(self) -> dict[str, Any]:
        # a process that is being spawned gets the memory itself, and so hears of epochs that are set later
        portable = self.dataset if get_spawning_popen() is not None else _portable(self.dataset)
        return {**self.__dict__, "dataset": portable}


class _Stateful:
    """The examples of a dataset, and its state."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._examples = _examples(source)

    def __iter__(self) -> _Stateful:
        return self

    def __next__(self) -> Any:
        return next(self._examples)

    def state_dict(self) -> Any:
        """Where `datasets` is."""
        return self._source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on there."""
        self._source.load_state_dict(state)


class _Shuffled:
    """Blocks of examples, each in an order of its own; the state is where a block began and how much of it was given.

    Two methods of a stateful iterator are set only where the dataset's own state is exact.
    """

    def __init__(self, source: Any, size: int, key: int, *, stateful: bool) -> None:
        self._source, self._size, self._key = source, size, key
        self._examples = _examples(source)
        self._began: Any = None
        self._number, self._given = 0, 0
        self._block: list[Any] = []
        if stateful:
            self.state_dict, self.load_state_dict = self._state, self._load

    def __iter__(self) -> _Shuffled:
        return self

    def __next__(self) -> Any:
        if self._given == len(self._block):
            self._number, self._given = self._number + bool(self._block), 0
            self._fill()
        if not self._block:
            raise StopIteration
        self._given += 1
        return self._block[self._given - 1]

    def _fill(self) -> None:
        self._began = self._source.state_dict()
        read = list(islice(self._examples, self._size))
        order = permuted(derive(self._key, self._number), len(read), 0, len(read)).tolist() if read else []
        self._block = [read[place] for place in order]

    def _state(self) -> dict[str, Any]:
        return {"began": self._began, "block": self._number, "given": self._given}

    def _load(self, state: dict[str, Any]) -> None:
        self._number, given = state["block"], state["given"]
        if state["began"] is not None:
            self._source.load_state_dict(state["began"])
            self._fill()
            self._began, self._given = state["began"], given  # `datasets` tells a loaded state only once it has read on


def _examples(source: Any) -> Iterator[Any]:
    """The examples; `datasets` must not see that this is a worker: it would divide the partition among the workers."""
    examples = iter(source)
    with _alone():
        try:
            first = next(examples)
        except StopIteration:
            return
    yield first
    yield from examples


@contextmanager
def _alone() -> Iterator[None]:
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _portable(dataset: Any) -> Any:
    """The dataset with its epoch as a number: `datasets` holds it in memory that only torch's own pickles can share."""
    portable = object.__new__(type(dataset))
    portable.__dict__ = {**dataset.__dict__, "_epoch": dataset.epoch}
    return portable
