"""Many arrays seen as one, so that rows of all of them are gathered in a single pass."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import _kernels
from feedline.datasets.chunks import Items
from feedline.rows import Empty, numpy_view, torch_dtype

Int64s = NDArray[np.int64]


class _Memory:
    """The memory from one address on, for numpy; whoever looks at it keeps alive what lies there."""

    def __init__(self, address: int, length: int, dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (address, True), "shape": (length,), "typestr": dtype.str,
        }  # fmt: skip


class Span:
    """Items of several chunks behind one array: item i of chunk c is `view[starts[c] + i]`.

    The view reaches from the first chunk's memory to the last one's. What lies between them may not be memory at all,
    so only items of chunks may be touched; that is what makes one gather out of thousands of small ones.
    """

    __slots__ = ("_chunks", "dtype", "starts", "view")

    def __init__(self, chunks: Sequence[Items], dtype: np.dtype[Any]) -> None:
        assert all(chunk.array.dtype == dtype for chunk in chunks)
        self._chunks = _aligned(chunks, dtype)  # keeps the memory alive
        self.dtype = dtype
        if len(chunks) == 1:
            self.view, self.starts = self._chunks[0].array, np.zeros(1, np.int64)
            return
        filled = [chunk for chunk in self._chunks if len(chunk.array)]
        base = min((chunk.address for chunk in filled), default=0)
        end = max((chunk.address + chunk.array.nbytes for chunk in filled), default=0)
        self.view = np.asarray(_Memory(base, (end - base) // dtype.itemsize, dtype)) if filled else np.empty(0, dtype)
        addresses = np.array([chunk.address if len(chunk.array) else base for chunk in self._chunks], np.int64)
        self.starts = (addresses - base) // dtype.itemsize

    def at(self, which: Int64s, places: Int64s) -> NDArray[Any]:
        """The items at `places` of the chunks `which`, which must be there."""
        return _kernels.gather_rows(self.view, self.starts[which] + places)

    def windows(self, which: Int64s, places: Int64s, shape: tuple[int, ...], empty: Empty) -> torch.Tensor:
        """For each place, the items from there on as a row of `shape`, in memory from `empty`."""
        dtype = torch_dtype(self.dtype)
        assert dtype is not None
        out = empty((len(places), *shape), dtype)
        width = prod(shape)
        if not out.numel():
            return out
        begin = self.starts[which] + places
        if width == 1:
            _kernels.gather_rows(self.view, begin, out=numpy_view(out).reshape(-1))
        else:
            _kernels.gather_windows(self.view, begin, numpy_view(out).reshape(-1, width))
        return out

    def runs(self, which: Int64s, starts: Int64s, stops: Int64s) -> tuple[torch.Tensor, list[int]]:
        """The items `[start, stop)` of each row end to end, and the length of each."""
        lengths = (stops - starts).tolist()
        out = np.empty(sum(lengths), self.dtype)
        begin, filled = (self.starts[which] + starts).tolist(), 0
        for first, length in zip(begin, lengths, strict=True):
            out[filled : filled + length] = self.view[first : first + length]
            filled += length
        return torch.from_numpy(out), lengths


def _aligned(chunks: Sequence[Items], dtype: np.dtype[Any]) -> list[Items]:
    """The chunks, those copied whose items do not lie on whole multiples of the item's size."""
    copied = []
    for chunk in chunks:
        if chunk.address % dtype.itemsize:
            array = chunk.array.copy()
            copied.append(Items(array, array.__array_interface__["data"][0]))
        else:
            copied.append(chunk)
    return copied
