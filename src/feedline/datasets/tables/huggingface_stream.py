"""Hugging Face `datasets.IterableDataset` in partitions, with exact resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker

from feedline.core.huggingface import counts_across_shards, loses_shuffle_buffer
from feedline.core.rng import derive, permuted
from feedline.errors import ArgumentError


class HuggingFaceStream(torch.utils.data.IterableDataset[Any]):
    """Examples of a `datasets.IterableDataset`, with its shards as partitions.

    Partitions do not depend on the number of workers and ranks. `shuffle_buffer` shuffles the examples of each
    partition in blocks of that many, in an order fixed by `seed` and the epoch. Resuming reads at most one block again.
    A dataset shuffled by `datasets` itself also resumes exactly, but reads its shards again from their start, because
    its state does not include its buffer.

    The stream has a single partition if separate shards would give other examples: with `take`, `skip`, indices,
    dropped short batches, or sources that are interleaved with or until the first is exhausted.

    In torch's DataLoader each worker reads its share of the partitions. There, each pass of a process is the next
    epoch, counted from the epoch of `set_epoch`. Without persistent workers, call `set_epoch` before each epoch, as for
    `datasets`.
    """

    def __init__(self, dataset: Any, shuffle_buffer: int | None = None, seed: int = 0) -> None:
        if not (hasattr(dataset, "_ex_iterable") and hasattr(dataset, "num_shards")):
            raise ArgumentError(f"HuggingFaceStream reads datasets.IterableDataset, not {type(dataset).__name__}")
        if shuffle_buffer is not None and shuffle_buffer < 1:
            raise ArgumentError(f"shuffle_buffer={shuffle_buffer} must be at least 1")
        self.dataset = dataset
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        self.num_partitions = 1 if counts_across_shards(dataset) else dataset.num_shards
        self._base_epoch, self._passes = dataset.epoch, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass in torch's DataLoader.

        `fl.DataLoader` passes the epoch to `partition` instead.
        """
        self.dataset.set_epoch(epoch)
        self._base_epoch, self._passes = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all partitions, one after the other.

        In a worker of torch's DataLoader, only every `num_workers`-th partition.
        """
        partitions, epoch = range(self.num_partitions), self._next_epoch()
        info = torch.utils.data.get_worker_info()
        if info is not None:
            partitions = partitions[info.id :: info.num_workers]
        return chain.from_iterable(self.partition(partition, epoch) for partition in partitions)

    def _next_epoch(self) -> int:
        epoch = self.dataset.epoch  # in shared memory: persistent workers see set_epoch of the main process
        if epoch != self._base_epoch:
            self._base_epoch, self._passes = epoch, 0
        self._passes += 1
        return int(epoch) + self._passes - 1

    def partition(self, partition: int, epoch: int) -> Iterator[Any]:
        """Iterate over one partition.

        The iterator has `state_dict` and `load_state_dict` if the dataset's state is exact.
        """
        source = self.dataset.shard(num_shards=self.num_partitions, index=partition)
        source.set_epoch(epoch)
        if self.shuffle_buffer is None:
            return _examples(source) if loses_shuffle_buffer(source) else _Stateful(source)
        key = derive(self.seed, epoch, partition, "shuffle buffer")
        return _ShuffledBlocks(source, self.shuffle_buffer, key, stateful=not loses_shuffle_buffer(source))

    def __getstate__(self) -> dict[str, Any]:
        # Shared memory can be pickled only while a process is spawned. That process then sees epochs that are set
        # later.
        portable = self.dataset if get_spawning_popen() is not None else _portable(self.dataset)
        return {**self.__dict__, "dataset": portable}


class _Stateful:
    """Iterator over a dataset that can save and restore its state."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._examples = _examples(source)

    def __iter__(self) -> _Stateful:
        return self

    def __next__(self) -> Any:
        return next(self._examples)

    def state_dict(self) -> Any:
        return self._source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._source.load_state_dict(state)


class _ShuffledBlocks:
    """Iterator that shuffles examples in blocks.

    The state consists of the state of the source at the start of the block, the number of the block, and the number of
    its returned examples. `state_dict` and `load_state_dict` exist only if the state of the source is exact.
    """

    def __init__(self, source: Any, size: int, key: int, *, stateful: bool) -> None:
        self._source, self._size, self._key = source, size, key
        self._examples = _examples(source)
        self._block_start: Any = None
        self._number, self._position = 0, 0
        self._block: list[Any] = []
        if stateful:
            self.state_dict, self.load_state_dict = self._state, self._load

    def __iter__(self) -> _ShuffledBlocks:
        return self

    def __next__(self) -> Any:
        if self._position == len(self._block):
            self._number, self._position = self._number + bool(self._block), 0
            self._fill()
        if not self._block:
            raise StopIteration
        self._position += 1
        return self._block[self._position - 1]

    def _fill(self) -> None:
        self._block_start = self._source.state_dict()
        examples = list(islice(self._examples, self._size))
        order = permuted(derive(self._key, self._number), len(examples), 0, len(examples)).tolist() if examples else []
        self._block = [examples[place] for place in order]

    def _state(self) -> dict[str, Any]:
        return {"began": self._block_start, "block": self._number, "given": self._position}

    def _load(self, state: dict[str, Any]) -> None:
        self._number, position = state["block"], state["given"]
        if state["began"] is not None:
            self._source.load_state_dict(state["began"])
            self._fill()
            # _fill() read the state directly after loading it, when `datasets` does not return it yet.
            self._block_start, self._position = state["began"], position


def _examples(source: Any) -> Iterator[Any]:
    """Iterate over a dataset as if outside of a worker."""
    examples = iter(source)
    # In a worker, `datasets` would divide the partition among all workers, from the first example on.
    with _hide_worker():
        try:
            first = next(examples)
        except StopIteration:
            return
    yield first
    yield from examples


@contextmanager
def _hide_worker() -> Iterator[None]:
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _portable(dataset: Any) -> Any:
    """A copy of the dataset with its epoch as a plain number.

    `datasets` has it in shared memory, which can be pickled only while a process is spawned.
    """
    portable = object.__new__(type(dataset))
    portable.__dict__ = {**dataset.__dict__, "_epoch": dataset.epoch}
    return portable
