"""Token files: flat binaries of token ids, read as fixed windows or as documents."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike, NDArray

from feedline import _kernels
from feedline.datasets.files import MappedFiles, Pathlike, Raw, opened, path_of
from feedline.errors import ArgumentError
from feedline.rows import Empty, as_indices, one_within, torch_dtype, torch_empty, within

TokenSource = Pathlike | Raw | Sequence[Pathlike | Raw]


class _TokenDataset(torch.utils.data.Dataset[Any]):
    """Token ids of one or more files as one stream, and the dtype in which they come out."""

    thread_safe = True

    def __init__(self, source: TokenSource, dtype: DTypeLike | None, out_dtype: torch.dtype | None) -> None:
        self._files = MappedFiles([_typed(each, dtype) for each in _listed(source)])
        stored = _refuse_other_kinds(self._files, dtype)
        self._dtype = _output_dtype(stored, out_dtype)
        self._bounds = [0, *accumulate(map(len, self._files.arrays))]

    def _tokens(self, start: int, count: int) -> torch.Tensor:
        tokens = torch.empty(count, dtype=self._dtype)
        self._copy(start, tokens.numpy())
        return tokens

    def _copy(self, start: int, row: NDArray[Any]) -> None:
        """Fill `row` with the tokens from `start` on, over the borders of files."""
        at = bisect_right(self._bounds, start) - 1
        start -= self._bounds[at]
        filled = 0
        while filled < len(row):
            piece = self._files.arrays[at][start : start + len(row) - filled]
            row[filled : filled + len(piece)] = piece
            filled, at, start = filled + len(piece), at + 1, 0


class TokenFile(_TokenDataset):
    """Windows of `window` tokens that begin every `stride` tokens (None: one after the other).

    `source` is a path, a glob pattern, a `Raw`, or a list of paths. A `.npy` file says its dtype; any other is bare
    numbers of `dtype` (uint16 by default). With `targets`, samples are `(x, y)` where y is x one token later. Windows
    never cross from one file into the next, and the rest of a file that is shorter than a window is left out, unless
    `cross_files` makes one stream of all. Tokens keep the stored dtype, or become `out_dtype` in the same pass.
    """

    def __init__(
        self,
        source: TokenSource,
        window: int,
        *,
        stride: int | None = None,
        targets: bool = False,
        dtype: DTypeLike | None = None,
        out_dtype: torch.dtype | None = None,
        cross_files: bool = False,
    ) -> None:
        if window < 1 or (stride is not None and stride < 1):
            raise ArgumentError(f"window={window} and stride={stride} must be at least 1")
        super().__init__(source, dtype, out_dtype)
        self.window, self.stride, self.targets = window, stride or window, targets
        bounds = np.array([0, self._bounds[-1]] if cross_files else self._bounds)
        self._starts, lengths = bounds[:-1], np.diff(bounds)
        counts = np.maximum(0, (lengths - window - targets) // self.stride + 1)
        self._counted = np.cumsum([0, *counts])  # windows before each file
        self._views: list[NDArray[Any]] | None = None
        if not len(self):
            raise ArgumentError(
                f"no file holds {window + targets} tokens, as a window{' with targets' * targets} needs"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": None}

    def __len__(self) -> int:
        return int(self._counted[-1])

    def __getitem__(self, index: int) -> Any:
        """Window `index`, in memory of its own; negative indices count from the end."""
        start = int(self._token_starts(one_within(index, len(self), "TokenFile")))
        x = self._tokens(start, self.window)
        return (x, self._tokens(start + 1, self.window)) if self.targets else x

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The windows of these indices; they share memory with each other only."""
        batch = self.gather(as_indices(indices), torch_empty)
        return list(zip(*(part.unbind() for part in batch), strict=True)) if self.targets else list(batch.unbind())

    def gather(self, indices: NDArray[np.int64], empty: Empty) -> Any:
        """The collated batch of these windows, (B, window), in memory from `empty`; `[x, y]` with targets."""
        if not self.targets:
            return self._shifted(indices, 0, empty)
        return [self._shifted(indices, shift, empty) for shift in (0, 1)]

    def _shifted(self, indices: NDArray[np.int64], shift: int, empty: Empty) -> torch.Tensor:
        """The windows of these indices, `shift` tokens later."""
        out = empty((len(indices), self.window), self._dtype)
        rows = out.numpy()
        if self._views is None:
            self._views = self._windows()
        if self._views:
            _kernels.gather_rows(self._views[shift], indices, rows)
        else:
            self._fill(rows, self._token_starts(within(indices, len(self), "TokenFile")) + shift)
        return out

    def _windows(self) -> list[NDArray[Any]]:
        """The file with a window in each row, for inputs and targets; none of several files, or for another dtype."""
        tokens = self._files.arrays[0]
        if len(self._files.arrays) > 1 or torch_dtype(tokens.dtype) != self._dtype:
            return []
        shape, strides = (len(self), self.window), (self.stride * tokens.itemsize, tokens.itemsize)
        return [as_strided(tokens[shift:], shape, strides, writeable=False) for shift in range(1 + self.targets)]

    def _fill(self, rows: NDArray[Any], starts: NDArray[np.int64]) -> None:
        if len(self._files.arrays) == 1:
            _kernels.gather_windows(self._files.arrays[0], starts, rows)
        else:
            for row, start in enumerate(starts.tolist()):
                self._copy(start, rows[row])

    def _token_starts(self, indices: Any) -> Any:
        """Where in the stream the windows of checked indices begin, or the window of one index."""
        if len(self._starts) == 1:
            return indices * self.stride
        file = np.searchsorted(self._counted, indices, side="right") - 1
        return self._starts[file] + (indices - self._counted[file]) * self.stride


class TokenDocuments(_TokenDataset):
    """Documents of different lengths in token files: document i is the tokens `[offsets[i], offsets[i + 1])`.

    `offsets` are n + 1 rising token positions in the stream that the files make together: an array, or a `.npy` or
    `Raw` file of them. `lengths` suits `LengthBuckets`; `collate.pad` and `collate.token_budget` make batches.
    """

    def __init__(
        self,
        source: TokenSource,
        offsets: NDArray[Any] | Pathlike | Raw,
        *,
        dtype: DTypeLike | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(source, dtype, out_dtype)
        held = offsets if isinstance(offsets, np.ndarray) else opened(offsets)
        self._offsets = np.array(held, np.int64)
        _refuse_disorder(self._offsets, self._bounds[-1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each document."""
        return np.diff(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        """Document `index`, in memory of its own; negative indices count from the end."""
        at = one_within(index, len(self), "TokenDocuments")
        start, stop = self._offsets[at : at + 2].tolist()
        return self._tokens(start, stop - start)

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The documents of these indices."""
        return [self[index] for index in indices]


def _listed(source: TokenSource) -> list[Pathlike | Raw]:
    if isinstance(source, Raw):
        return [source]
    if not isinstance(source, (str, os.PathLike)):
        found: list[Pathlike | Raw] = list(source)
    elif Path(source).exists() or not glob.has_magic(os.fspath(source)):
        found = [source]
    else:
        found = [*sorted(glob.glob(os.fspath(source), recursive=True))]  # noqa: PTH207 - Path.glob: no absolute ones
    if not found:
        raise FileNotFoundError(f"no token files: {source!r} names none")
    return found


def _typed(source: Pathlike | Raw, dtype: DTypeLike | None) -> Pathlike | Raw:
    """A source that knows its dtype."""
    if isinstance(source, Raw):
        return source
    if not path_of(source).endswith(".npy"):
        return Raw(source, np.uint16 if dtype is None else dtype)
    return source


def _refuse_other_kinds(files: MappedFiles, dtype: DTypeLike | None) -> np.dtype[Any]:
    stored = files.arrays[0].dtype if dtype is None else np.dtype(dtype)
    for path, tokens in zip(files.paths, files.arrays, strict=True):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ArgumentError(f"{path} holds {tokens.dtype} of {tokens.ndim} dimensions; tokens are 1-D integers")
        if tokens.dtype != stored:
            whose = f"{files.paths[0]} holds" if dtype is None else "the argument dtype says"
            raise ArgumentError(f"{path} holds {tokens.dtype}, but {whose} {stored}")
    return stored


def _output_dtype(stored: np.dtype[Any], out_dtype: torch.dtype | None) -> torch.dtype:
    kept = torch_dtype(stored)
    assert kept is not None
    if out_dtype is None:
        return kept
    if not np.can_cast(stored, torch.empty(0, dtype=out_dtype).numpy().dtype, "safe"):
        raise ArgumentError(f"out_dtype={out_dtype} cannot hold every {stored} that is stored")
    return out_dtype


def _refuse_disorder(offsets: NDArray[np.int64], tokens: int) -> None:
    if offsets.ndim != 1 or not len(offsets):
        raise ArgumentError(f"offsets are n + 1 positions in one dimension, not of shape {offsets.shape}")
    if offsets[0] < 0 or offsets[-1] > tokens or (np.diff(offsets) < 0).any():
        raise ArgumentError(
            f"offsets must rise from 0 or more to at most the {tokens} tokens of the files; "
            f"they go from {offsets[0]} to {offsets[-1]}"
        )
