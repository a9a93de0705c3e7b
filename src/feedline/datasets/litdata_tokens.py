"""`LitDataTokens`: windows of tokens out of the chunks of `litdata.optimize` with a `TokensLoader`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import _kernels
from feedline.datasets.files import Pathlike
from feedline.datasets.lazily import Lazily
from feedline.datasets.litdata import mapped
from feedline.datasets.litdata_index import Index, index_of
from feedline.datasets.litdata_leaves import token_dtype
from feedline.errors import ArgumentError, SampleError
from feedline.rows import Empty, as_indices, numpy_view, one_within, torch_empty, within


class LitDataTokens(torch.utils.data.Dataset[torch.Tensor]):
    """Windows of `window` tokens, one after the other in each chunk, as tensors of the dtype that was written.

    As litdata has it, a window never crosses into the next chunk; the rest of a chunk is left out.
    """

    thread_safe = True

    def __init__(self, path: Pathlike, window: int, *, cache: Pathlike | None = None) -> None:
        self.path, self.window = str(Path(path).resolve()), window
        if window < 1:
            raise ArgumentError(f"window={window} must be at least 1")
        index = index_of(Path(self.path))
        if not index.tokens:
            raise ArgumentError(f"{self.path} holds samples, not tokens: read it with datasets.LitData(path)")
        self._dtype = token_dtype(index.formats[0])
        self._sizes = np.array([(chunk.dim or 0) // window for chunk in index.chunks], np.int64)
        self._firsts = np.cumsum([0, *self._sizes])
        if not len(self):
            raise ArgumentError(f"no chunk of {self.path} holds {window} tokens, as a window needs")
        self._chunks = Lazily(partial(_opened, Path(self.path), index, self._dtype, cache), len(index.chunks))

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """The windows of each chunk, for `ShardShuffled`."""
        return self._sizes

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> torch.Tensor:
        """Window `index`, in memory of its own; negative indices count from the end."""
        return self.gather(np.array([one_within(index, len(self), "LitDataTokens")]), torch_empty)[0]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The windows of these indices; they share memory with each other only."""
        return list(self.gather(as_indices(indices), torch_empty).unbind())

    def gather(self, indices: NDArray[np.int64], empty: Empty) -> torch.Tensor:
        """The collated batch of these windows, (B, window), in memory from `empty`."""
        places = within(indices, len(self), "LitDataTokens")
        out = empty((len(places), self.window), self._dtype)
        # As bytes: the tokens of a chunk begin wherever its offsets end, which no wider dtype is aligned to.
        rows = numpy_view(out).view(np.uint8)
        numbers = np.searchsorted(self._firsts, places, side="right") - 1
        starts = (places - self._firsts[numbers]) * rows.shape[1]
        for number in np.unique(numbers).tolist():
            mine = np.flatnonzero(numbers == number)
            if len(mine) == len(rows):
                _kernels.gather_windows(self._chunks[number], starts, rows)
            else:
                rows[mine] = _windows(self._chunks[number], starts[mine], rows.shape[1])
        return out


def _windows(data: NDArray[np.uint8], starts: NDArray[np.int64], nbytes: int) -> NDArray[np.uint8]:
    return _kernels.gather_windows(data, starts, np.empty((len(starts), nbytes), np.uint8))


def _opened(folder: Path, index: Index, dtype: torch.dtype, cache: Pathlike | None, number: int) -> NDArray[Any]:
    """The tokens of a chunk, as bytes."""
    chunk = index.chunks[number]
    tokens = mapped(folder, chunk, index, cache)[4 * (chunk.items + 2) :]
    if len(tokens) != (chunk.dim or 0) * dtype.itemsize:
        raise SampleError(
            f"{folder / chunk.name} holds {len(tokens)} bytes of tokens, its index promises {chunk.dim} of {dtype};"
            " copy it again"
        )
    return tokens
