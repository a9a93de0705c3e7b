"""`LitDataTokens`: windows of tokens from LitData chunks.

The chunks are those that `litdata.optimize` writes with a `TokensLoader`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import kernels
from feedline.core.dataset import READS_BATCHES, BatchRead
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.tensors import allocate_tensor, as_indices, normalize_index, normalize_indices, numpy_view
from feedline.datasets.shards.files import ShardFiles
from feedline.datasets.shards.folder import IndexedFolder
from feedline.datasets.shards.litdata import Chunk, read_index
from feedline.datasets.shards.litdata_types import token_dtype
from feedline.datasets.tokens import whole_number
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache, CachedStore, ObjectRange
from feedline.stores.files import Extent, LazyList


class LitDataTokens(torch.utils.data.Dataset[torch.Tensor]):
    """Consecutive windows of `window` tokens of each chunk, in the stored dtype.

    As in litdata, a window never crosses into the next chunk; the remainder of a chunk is dropped. `path`, `cache` and
    `options` are those of `LitData`.
    """

    traits = READS_BATCHES

    def __init__(
        self,
        path: Pathlike,
        window: int,
        *,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        folder = IndexedFolder(path, cache=cache, options=options)
        self.path, self.window = folder.name, whole_number(window, "window")
        index = read_index(folder)
        if not index.tokens:
            raise ArgumentError(f"{self.path} holds samples, not tokens: read it with datasets.LitData(path)")
        self._dtype = _token_dtype(index.formats, self.path)
        sizes = [(chunk.dim or 0) // self.window for chunk in index.chunks]
        self._offsets = ShardOffsets(sizes)
        if not len(self):
            raise ArgumentError(f"no chunk of {self.path} holds the {window} tokens of a window; pass a smaller window")
        shards = [(folder, shard) for shard in index.shards()]
        self._files = ShardFiles(shards, None, "litdata", cache, sizes=sizes)
        # The offsets of samples come first; the tokens of all samples are contiguous.
        self._begins = np.array([4 * (chunk.items + 2) for chunk in index.chunks], np.int64)
        self._tokens = LazyList(partial(_open_tokens, self._files, index.chunks, self._dtype), len(index.chunks))

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Number of windows per chunk, int64, for `samplers.ShardShuffled`."""
        return self._offsets.sizes

    @property
    def listing_fingerprint(self) -> str:
        """Digest of chunk names and sizes, checked by saved loader states."""
        return digest_of(self._files.names, self.shard_sizes)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Window `index`, in its own memory; negative indices count from the end."""
        at = normalize_index(index, len(self), "LitDataTokens")
        return self.read_batch(BatchRead(np.array([at]), allocate_tensor))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Windows of these indices; they share memory only with each other."""
        return list(self.read_batch(BatchRead(as_indices(indices), allocate_tensor)).unbind())

    def read_batch(self, request: BatchRead) -> torch.Tensor:
        """Windows as one tensor of shape (B, window)."""
        places = normalize_indices(request.indices, len(self), "LitDataTokens")
        out = request.allocate((len(places), self.window), self._dtype)
        # Copied as bytes: tokens are stored after the offsets, and may be unaligned for their dtype.
        rows = numpy_view(out).view(np.uint8)
        numbers, starts = self._locate(places)
        apart: list[int] = []
        for number in np.unique(numbers).tolist():
            self._files.file(number)  # raises if the file has changed
            mine, chunk = np.flatnonzero(numbers == number), self._tokens[number]
            if chunk is None:
                apart += mine.tolist()
            elif len(mine) == len(rows):
                kernels.gather_windows(chunk, starts, rows)
            else:
                rows[mine] = _windows(chunk, starts[mine], rows.shape[1])
        read = self._files.read(self._extents(numbers[apart], starts[apart])) if apart else []
        for row, data in zip(apart, read, strict=True):
            rows[row] = np.frombuffer(data, np.uint8)
        return out

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into a cache for these windows."""
        numbers, starts = self._locate(normalize_indices(indices, len(self), "LitDataTokens"))
        return self._files.ranges(self._extents(numbers, starts))

    def _locate(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Number of each window's chunk, and the window's first byte in it."""
        numbers, rows = self._offsets.locate(places)
        return numbers, self._begins[numbers] + rows * self.window * self._dtype.itemsize

    def _extents(self, numbers: NDArray[np.int64], starts: NDArray[np.int64]) -> list[Extent]:
        nbytes = self.window * self._dtype.itemsize
        pairs = zip(numbers.tolist(), starts.tolist(), strict=True)
        return [Extent(number, start, start + nbytes) for number, start in pairs]


def _token_dtype(formats: Sequence[str], path: str) -> torch.dtype:
    try:
        return token_dtype(", ".join(formats))
    except ArgumentError as error:
        raise ArgumentError(f"{path} holds {error}") from None


def _windows(data: NDArray[np.uint8], starts: NDArray[np.int64], nbytes: int) -> NDArray[np.uint8]:
    return kernels.gather_windows(data, starts, np.empty((len(starts), nbytes), np.uint8))


def _open_tokens(
    files: ShardFiles, chunks: Sequence[Chunk], dtype: torch.dtype, number: int
) -> NDArray[np.uint8] | None:
    """Bytes of a chunk, offsets included; None if read in ranges."""
    shard, chunk = files.shards[number], chunks[number]
    nbytes, expected = shard.nbytes - 4 * (chunk.items + 2), chunk.dim or 0
    if nbytes != expected * dtype.itemsize:
        raise SampleError(
            f"{files.where(number)} holds {nbytes} bytes of tokens, its index says {expected} tokens of {dtype};"
            " copy it again"
        )
    data = files.data(number)
    return None if data is None else np.frombuffer(data, np.uint8)
