"""Aligned arrays in one file or store with a library of its own: what `HDF5` and `Zarr` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.datasets.arrays import Gather, Transform, _structured
from feedline.datasets.chunked_rows import ChunkCache, ChunkedRows, Rows, Shape
from feedline.datasets.decoding import Step
from feedline.datasets.once import OnceCache
from feedline.errors import ArgumentError, StateError
from feedline.per_process import PerProcess
from feedline.rows import Empty, as_indices, numpy_view, one_within, torch_dtype, torch_empty, within
from feedline.stores import CachedStore, Want

Names = str | Sequence[str] | Mapping[str, str] | None

_READERS = 8


class Holder(Protocol):
    """The file or store that holds the arrays: opened when asked, pickled as what finds it again."""

    @property
    def name(self) -> str:
        """Its path or address."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether it is far away, so that arrays had better be read at the same time."""
        ...

    def everything(self) -> Names:
        """The names of all arrays at the top, by name."""
        ...

    def shapes(self, names: Sequence[str]) -> list[Shape]:
        """The shapes of these arrays; ArgumentError names one that is not there."""
        ...

    def rows(self, shapes: Sequence[Shape], cache: ChunkCache) -> list[Rows | ChunkedRows]:
        """What reads their rows in this process; StateError if they are not what they were."""
        ...


class StoredArrays(torch.utils.data.Dataset[Any]):
    """Row i of each array is sample i; one array gives tensors, a sequence gives tuples, a mapping gives dicts.

    `names=None` takes every array at the top, by its name.
    """

    thread_safe = True

    def __init__(self, holder: Holder, names: Names, transform: Transform | None, cache_nbytes: int) -> None:
        self.path = holder.name
        self._structure, listed = _structured(holder.everything() if names is None else names, (str,))
        self._step = Step(transform)
        self._shapes = holder.shapes(listed)
        _refuse_unaligned(self.path, self._shapes)
        self._rows = PerProcess(partial(_opened, holder, self._shapes, cache_nbytes))
        self._readers = PerProcess(_readers) if holder.is_remote and len(listed) > 1 else None

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

    def wants(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, Want]]:
        """What reading these samples will want from a cache."""
        places = within(indices, len(self), type(self).__name__)
        return [want for rows in self._rows() for want in rows.wants(places)]

    def _samples(self, places: NDArray[np.int64], rows: Sequence[int | None]) -> list[Any]:
        parts = self._read(places, torch_empty)
        columns = (part.unbind() if isinstance(part, torch.Tensor) else part for part in parts)
        samples = map(self._structure.sample, zip(*columns, strict=True))
        return [self._step(sample, row) for sample, row in zip(samples, rows, strict=True)]

    def _read(self, places: NDArray[np.int64], empty: Empty) -> list[Any]:
        """The rows of each array: numbers as one tensor in memory from `empty`, others as a list."""
        outs = [_out(shape, len(places), empty) for shape in self._shapes]
        arrays = self._rows()
        if self._readers is None:
            return [_filled(rows, places, out) for rows, out in zip(arrays, outs, strict=True)]
        return list(self._readers().map(_filled, arrays, repeat(places), outs))

    @property
    def gather(self) -> Gather:
        """`gather(indices, empty)`: the collated batch. Absent with a transform, and with rows that are not numbers."""
        if self._step.transform is not None or any(shape.dtype is None for shape in self._shapes):
            raise AttributeError("gather: samples have to be made one by one")
        return self._gathered

    def _gathered(self, indices: NDArray[np.int64], empty: Empty) -> Any:
        places = within(indices, len(self), type(self).__name__)
        return self._structure.batch(self._read(places, empty))


def _opened(holder: Holder, shapes: Sequence[Shape], cache_nbytes: int) -> list[Rows | ChunkedRows]:
    return holder.rows(shapes, OnceCache(cache_nbytes))


def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, "feedline-arrays")


def _out(shape: Shape, count: int, empty: Empty) -> torch.Tensor | None:
    if shape.dtype is None:
        return None
    dtype = torch_dtype(shape.dtype)
    assert dtype is not None
    return empty((count, *shape.row_shape), dtype)


def _filled(rows: Rows | ChunkedRows, places: NDArray[np.int64], out: torch.Tensor | None) -> Any:
    if out is None:
        assert isinstance(rows, ChunkedRows)
        return rows.each(places)
    rows.fill(places, numpy_view(out))
    return out


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
