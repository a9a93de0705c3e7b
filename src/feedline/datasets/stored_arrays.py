"""Aligned arrays in one file or store with a library of its own: what `HDF5` and `Zarr` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.datasets.arrays import Gather, Transform, _structured
from feedline.datasets.chunked_rows import ChunkCache, Rows, Shape
from feedline.datasets.decoding import Step
from feedline.datasets.files import Pathlike
from feedline.datasets.once import OnceCache
from feedline.errors import ArgumentError, StateError
from feedline.per_process import PerProcess
from feedline.rows import Empty, as_indices, one_within, within

Names = str | Sequence[str] | Mapping[str, str] | None


class StoredArrays(torch.utils.data.Dataset[Any]):
    """Row i of each array is sample i; one array gives tensors, a sequence gives tuples, a mapping gives dicts.

    `names=None` takes every array at the top, by its name. A subclass opens the file and tells the shapes.
    """

    thread_safe = True

    def __init__(self, path: Pathlike, names: Names, transform: Transform | None, cache_nbytes: int) -> None:
        self.path = str(Path(path).resolve())
        if names is None:
            names = self._everything(self.path)
        self._structure, listed = _structured(names, (str,))
        self._step = Step(transform)
        self._shapes = self._described(self.path, listed)
        _refuse_unaligned(self.path, self._shapes)
        self._rows: PerProcess[list[Rows]] = PerProcess(
            partial(_opened, self._open_rows, self.path, self._shapes, cache_nbytes)
        )

    @staticmethod
    def _everything(path: str) -> Names:
        """The names of all arrays at the top of the file, by name."""
        raise NotImplementedError

    @staticmethod
    def _described(path: str, names: Sequence[str]) -> list[Shape]:
        """The shapes of these arrays; ArgumentError names one that is not there."""
        raise NotImplementedError

    @staticmethod
    def _open_rows(path: str, shapes: Sequence[Shape], cache: ChunkCache) -> list[Rows]:
        """What reads their rows in this process."""
        raise NotImplementedError

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """The rows of each chunk, for `ShardShuffled`; one shard of all where any row costs the same."""
        length, chunk = len(self), max(shape.chunk for shape in self._shapes)
        if chunk == 1:
            return np.array([length])
        return np.diff(np.append(np.arange(0, length, chunk, dtype=np.int64), length))

    def __len__(self) -> int:
        return self._shapes[0].length

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, in memory of its own; negative indices count from the end."""
        at = one_within(index, len(self), type(self).__name__)
        return self._samples(np.array([at]), [None])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, chunk by chunk; they share memory with each other only."""
        places = within(as_indices(indices), len(self), type(self).__name__)
        return self._samples(places, range(len(places)))

    def _samples(self, places: NDArray[np.int64], rows: Sequence[int | None]) -> list[Any]:
        parts = [array.each(places) for array in self._rows()]
        samples = map(self._structure.sample, zip(*parts, strict=True))
        return [self._step(sample, row) for sample, row in zip(samples, rows, strict=True)]

    @property
    def gather(self) -> Gather:
        """`gather(indices, empty)`: the collated batch. Absent with a transform, and with rows that are not numbers."""
        if self._step.transform is not None or any(shape.dtype is None for shape in self._shapes):
            raise AttributeError("gather: samples have to be made one by one")
        return self._gathered

    def _gathered(self, indices: NDArray[np.int64], empty: Empty) -> Any:
        places = within(indices, len(self), type(self).__name__)
        return self._structure.batch([array.take(places, empty) for array in self._rows()])


def _opened(
    open_rows: Callable[[str, Sequence[Shape], ChunkCache], list[Rows]],
    path: str,
    shapes: Sequence[Shape],
    cache_nbytes: int,
) -> list[Rows]:
    return open_rows(path, shapes, OnceCache(cache_nbytes))


def _refuse_unaligned(path: str, shapes: Sequence[Shape]) -> None:
    if len({shape.length for shape in shapes}) > 1:
        each = ", ".join(f"{shape.name!r} has {shape.length}" for shape in shapes)
        raise ArgumentError(f"aligned arrays have one length, but in {path} {each}")


def refuse_changed(path: str, was: Shape, length: int, row_shape: tuple[int, ...]) -> None:
    """StateError if the array is not the one that the dataset was made from."""
    if (length, row_shape) != (was.length, was.row_shape):
        raise StateError(
            f"{was.name!r} in {path} had {was.length} rows of {was.row_shape} when this dataset was made,"
            f" and has {length} of {row_shape} now; make the dataset anew"
        )
