"""Token files: flat binaries of token ids, as windows or documents.

The files are on this machine or in a store, and form one stream of tokens.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike, NDArray

from feedline.core import kernels
from feedline.core.dataset import READS_BATCHES, Batch, BatchRead
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.stage_parts import READ_FILES
from feedline.core.tensors import allocate_tensor, as_indices, normalize_index, normalize_indices, torch_dtype
from feedline.datasets.arrays.npy import TOGETHER_NBYTES
from feedline.datasets.arrays.npy_files import ArrayFiles
from feedline.datasets.arrays.npy_layout import Raw, path_of
from feedline.datasets.arrays.rows import RowSpan
from feedline.datasets.signatures import SIGNATURES, Signature, begin_of
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache, CachedStore, ObjectRange

TokenSource = Pathlike | Raw | Sequence[Pathlike | Raw]


class TokenStream(torch.utils.data.Dataset[Any]):
    """Token ids of one or more files as one stream.

    `_dtype` is the dtype of the returned tensors.
    """

    def __init__(
        self,
        paths: TokenSource,
        dtype: DTypeLike | None,
        out_dtype: torch.dtype | DTypeLike | None,
        cache: Cache | Pathlike | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        several = [paths] if isinstance(paths, (str, os.PathLike, Raw)) else list(paths)
        self._files = ArrayFiles(several, cache=cache, options=options, typed=partial(_typed, dtype=dtype))
        self.traits = replace(READS_BATCHES, has_ranges=not self._files.is_local)
        stored = _check_dtypes(self._files, dtype)
        if stored.itemsize > 1 and not any(isinstance(source, Raw) for source in several):
            _check_bare(self._files)
        self._dtype = _output_dtype(stored, out_dtype)
        self._offsets = ShardOffsets(self._files.lengths)

    @property
    def listing_fingerprint(self) -> str:
        """Digest of file names and lengths, checked by saved loader states."""
        return digest_of(self._files.paths, self._files.lengths)

    def _read(self, spans: Iterable[tuple[int, int]]) -> Iterator[NDArray[Any]]:
        """Read token ranges of the stream, which may cross file boundaries.

        All ranges are requested at once.
        """
        pieces = [list(self._pieces(start, stop)) for start, stop in spans]
        read = iter(self._files.read([piece for several in pieces for piece in several]))
        for several in pieces:
            parts = [next(read) for _ in several]
            yield parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self._files.dtypes[0]), *parts])

    def _one(self, start: int, stop: int) -> NDArray[Any]:
        """Read one token range; a view within one mapped file."""
        if start < stop:
            file, first = self._offsets.one(start)
            mapped = self._files.arrays[file]
            if mapped is not None and first + stop - start <= len(mapped):
                return mapped[first : first + stop - start]
        return next(self._read([(start, stop)]))

    def _copy(self, tokens: NDArray[Any]) -> torch.Tensor:
        out = torch.empty(len(tokens), dtype=self._dtype, device="cpu")
        out.numpy()[...] = tokens
        return out

    def _pieces(self, start: int, stop: int) -> Iterator[RowSpan]:
        """Split a token range of the stream into ranges of files."""
        while start < stop:
            file, first = self._offsets.one(start)
            last = min(first + stop - start, int(self._offsets.sizes[file]))
            yield RowSpan(file, first, last)
            start += last - first

    def _ranges_of(self, spans: Iterable[tuple[int, int]]) -> list[tuple[CachedStore, ObjectRange]]:
        return self._files.ranges(piece for span in spans for piece in self._pieces(*span))


def whole_number(value: Any, name: str) -> int:
    """Check a number of tokens: an integer of at least 1."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}={value!r} must be an integer") from None
    if number < 1:
        raise ArgumentError(f"{name}={number} must be at least 1")
    return number


def positions_in(
    offsets: Sequence[int] | NDArray[Any] | Pathlike | Raw,
    cache: Cache | Pathlike | None,
    options: Mapping[str, Any] | None,
) -> NDArray[Any]:
    """Positions from an array, a list, or a `.npy` or `Raw` file."""
    if not isinstance(offsets, (str, os.PathLike, Raw)):
        return np.asarray(offsets)
    files = ArrayFiles([offsets], cache=cache, options=options)
    return files.read([RowSpan(0, 0, files.lengths[0])])[0]


def _typed(source: Pathlike | Raw, dtype: DTypeLike | None) -> Pathlike | Raw:
    """Add the dtype to a source of bare numbers."""
    if isinstance(source, Raw):
        return source
    if not path_of(source).endswith(".npy"):
        return Raw(source, np.uint16 if dtype is None else dtype)
    return source


def _check_dtypes(files: ArrayFiles, dtype: DTypeLike | None) -> np.dtype[Any]:
    stored = files.dtypes[0] if dtype is None else np.dtype(dtype)
    for path, found, ndim in zip(files.paths, files.dtypes, files.ndims, strict=True):
        if ndim != 1 or found.kind not in "iu":
            raise ArgumentError(f"{path} holds {found} of {ndim} dimensions; tokens must be 1-D integers")
        if found != stored:
            whose = f"{files.paths[0]} holds" if dtype is None else "the argument dtype says"
            raise ArgumentError(f"{path} holds {found}, but {whose} {stored}")
    return stored


_SKIP = "skip its header: Raw(path, '{}', offset=1024)"


_FOREIGN = (
    Signature((20240520).to_bytes(4, "little"), "a token file of llm.c", _SKIP.format("uint16")),
    Signature((20240801).to_bytes(4, "little"), "a token file of llm.c", _SKIP.format("uint32")),
    Signature(b"MMIDIDX\0\0", "an index of Megatron", "leave it out, and read the .bin file"),
    *(each for each in SIGNATURES if len(each.magic) >= 4),  # bare numbers may begin like shorter ones
)


def _check_bare(files: ArrayFiles) -> None:
    """Raise SampleError for a file of another format.

    Its header would be read as tokens. Of remote files, only the first is read.
    """
    for number, path in enumerate(files.paths):
        if path.endswith(".npy") or (number and files.files.store(number) is not None):
            continue
        begin = begin_of(files.files[number])
        found = next((each for each in _FOREIGN if each.fits(begin)), None)
        if found is not None:
            raise SampleError(
                f"{path} is {found.what}, not bare numbers; {found.remedy}. To read it as it is, pass Raw(path, dtype)"
            )


def _output_dtype(stored: np.dtype[Any], out_dtype: torch.dtype | DTypeLike | None) -> torch.dtype:
    kept = torch_dtype(stored.newbyteorder("="))
    assert kept is not None
    if out_dtype is None:
        return kept
    wanted = out_dtype if isinstance(out_dtype, torch.dtype) else _parse_dtype(out_dtype)
    if not _holds(wanted, stored):
        raise ArgumentError(f"out_dtype={out_dtype} cannot represent all values of the stored {stored}")
    return wanted


def _parse_dtype(out_dtype: DTypeLike) -> torch.dtype:
    try:
        found = torch_dtype(np.dtype(out_dtype))
    except (TypeError, ValueError):
        found = None
    if found is None:
        raise ArgumentError(f"out_dtype={out_dtype!r} is not a torch dtype: give torch.int64, or its name")
    return found


def _holds(wanted: torch.dtype, stored: np.dtype[Any]) -> bool:
    try:
        dtype = torch.empty(0, dtype=wanted, device="cpu").numpy().dtype
    except TypeError:  # NumPy has no bfloat16
        return False
    if dtype.kind in "fc" and np.iinfo(stored).max > 2 ** (np.finfo(dtype).nmant + 1):
        return False  # NumPy takes float64 to be safe for int64
    return np.can_cast(stored, dtype, "safe")


class TokenFile(TokenStream):
    """Windows of `window` tokens, one every `stride` tokens (by default `window`).

    `paths` is a path, a glob pattern, a `Raw`, or a list of paths. A `.npy` file has its own dtype; any other file is
    bare numbers of `dtype` (uint16 by default). With `targets`, samples are `(x, y)` where y is x one token later.
    Windows do not cross file boundaries, and tokens at the end of a file that do not fill a window are left out; with
    `cross_files`, all files form one stream. Tokens keep the stored dtype, or are converted to `out_dtype` in the same
    pass.

    Windows of remote files are read by range, and kept in the folder `cache`, if one is given; `options` are passed to
    `open_store`.

    SampleError names a file whose size is not a whole number of tokens.
    """

    def __init__(
        self,
        paths: TokenSource,
        window: int,
        *,
        stride: int | None = None,
        targets: bool = False,
        dtype: DTypeLike | None = None,
        out_dtype: torch.dtype | DTypeLike | None = None,
        cross_files: bool = False,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        window = whole_number(window, "window")
        stride = window if stride is None else whole_number(stride, "stride")
        super().__init__(paths, dtype, out_dtype, cache, options)
        self.window, self.stride, self.targets = window, stride, targets
        lengths = np.array([len(self._offsets)]) if cross_files else self._offsets.sizes
        self._starts = np.cumsum(lengths) - lengths
        self._windows = ShardOffsets(np.maximum(0, (lengths - window - targets) // self.stride + 1).tolist())
        self._views: list[NDArray[Any]] | None = None
        if not len(self):
            raise ArgumentError(
                f"no file has {window + targets} tokens, the length of a window{' with targets' * targets}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": None}

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Any:
        """Window `index` in its own memory; negative indices count from the end."""
        start = int(self._token_starts(normalize_index(index, len(self), "TokenFile")))
        tokens = self._one(start, start + self.window + self.targets)
        x = self._copy(tokens[: self.window])
        return (x, self._copy(tokens[1:])) if self.targets else x

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The windows of these indices, as views of one batch."""
        batch = self.read_batch(BatchRead(as_indices(indices), allocate_tensor))
        return list(zip(*(part.unbind() for part in batch), strict=True)) if self.targets else list(batch.unbind())

    def read_batch(self, request: BatchRead) -> Batch:
        """The windows as one tensor (B, window); `[x, y]` with targets."""
        indices = request.indices
        parts = [request.allocate((len(indices), self.window), self._dtype) for _ in range(1 + self.targets)]
        mapped = self._only_mapped()
        if mapped is None:
            self._fill_by_span([part.numpy() for part in parts], indices)
        else:
            self._fill_from(mapped, [part.numpy() for part in parts], indices)
        return parts if self.targets else parts[0]

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Cache and byte range of every read for these samples."""
        return self._ranges_of(self._spans(indices))

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Windows of each group of adjacent ones, int64.

        For `samplers.ShardShuffled`. Local files are a single group, because every window costs the same there.
        """
        if self._files.is_local:
            return np.array([len(self)])
        windows = max(1, TOGETHER_NBYTES // (self.stride * self._files.dtypes[0].itemsize))
        groups = [[windows] * (count // windows) + [count % windows] for count in self._windows.sizes.tolist()]
        return np.array([size for group in groups for size in group if size])

    def _spans(self, indices: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Token ranges of these windows in the stream, targets included."""
        starts = self._token_starts(normalize_indices(indices, len(self), "TokenFile")).tolist()
        return [(start, start + self.window + self.targets) for start in starts]

    def _only_mapped(self) -> NDArray[Any] | None:
        """All tokens, if they are in a single mapped file; else None."""
        return self._files.arrays[0] if len(self._files.layouts) == 1 else None

    def _fill_by_span(self, parts: Sequence[NDArray[Any]], indices: NDArray[np.int64]) -> None:
        """Write the windows into `parts`, each part shifted by one token."""
        for row, tokens in enumerate(self._read(self._spans(indices))):
            for shift, rows in enumerate(parts):
                rows[row] = tokens[shift : shift + self.window]

    def _fill_from(self, tokens: NDArray[Any], parts: Sequence[NDArray[Any]], indices: NDArray[np.int64]) -> None:
        """Write windows into `parts`, from a mapped file with all tokens."""
        if tokens.dtype != parts[0].dtype:
            starts = self._token_starts(normalize_indices(indices, len(self), "TokenFile"))
            for shift, rows in enumerate(parts):
                kernels.gather_windows(tokens, starts + shift, rows, part=READ_FILES)
            return
        views = self._views
        if views is None:
            views = self._views = self._window_views(tokens)
        for view, rows in zip(views, parts, strict=True):
            kernels.gather_rows(view, indices, rows, part=READ_FILES)

    def _window_views(self, tokens: NDArray[Any]) -> list[NDArray[Any]]:
        """Strided views of a file, (windows, window), for inputs and targets.

        Copies of their rows are faster than copies of windows at any offset.
        """
        shape, strides = (len(self), self.window), (self.stride * tokens.itemsize, tokens.itemsize)
        return [as_strided(tokens[shift:], shape, strides, writeable=False) for shift in range(1 + self.targets)]

    def _token_starts(self, indices: Any) -> Any:
        """First token of each window, for one index or an array."""
        if len(self._starts) == 1:
            return indices * self.stride
        file, number = self._windows.locate(indices)
        return self._starts[file] + number * self.stride


class TokenDocuments(TokenStream):
    """Documents of varying length in token files.

    Document i is the tokens `[offsets[i], offsets[i + 1])`. `offsets` are n + 1 ascending positions in the stream of
    all files: an array, a list, or a `.npy` or `Raw` file. `lengths` is for `LengthBuckets`; `collate.pad` and
    `collate.token_budget` build batches. `paths`, `dtype`, `out_dtype`, `cache` and `options` are those of `TokenFile`.
    """

    def __init__(
        self,
        paths: TokenSource,
        offsets: Sequence[int] | NDArray[Any] | Pathlike | Raw,
        *,
        dtype: DTypeLike | None = None,
        out_dtype: torch.dtype | DTypeLike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(paths, dtype, out_dtype, cache, options)
        self._bounds = _check_offsets(positions_in(offsets, cache, options), len(self._offsets))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each document, int64."""
        return np.diff(self._bounds)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        """Document `index` in its own memory; negative indices count from the end."""
        at = normalize_index(index, len(self), "TokenDocuments")
        return self._copy(self._one(*self._bounds[at : at + 2].tolist()))

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The documents of these indices."""
        return [self._copy(tokens) for tokens in self._read(self._spans(as_indices(indices)))]

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Cache and byte range of every read for these samples."""
        return self._ranges_of(self._spans(indices))

    def _spans(self, indices: NDArray[np.int64]) -> list[tuple[int, int]]:
        places = normalize_indices(indices, len(self), "TokenDocuments")
        return list(zip(self._bounds[places].tolist(), self._bounds[places + 1].tolist(), strict=True))


def _check_offsets(positions: NDArray[Any], tokens: int) -> NDArray[np.int64]:
    """Check and copy the positions."""
    if positions.ndim != 1 or not len(positions):
        raise ArgumentError(f"offsets must be n + 1 positions in one dimension, not of shape {positions.shape}")
    if positions.dtype.kind not in "iu":
        raise ArgumentError(f"offsets must be integer token positions, not {positions.dtype}")
    offsets = np.array(positions, np.int64)
    if offsets[0] < 0 or offsets[-1] > tokens or (np.diff(offsets) < 0).any():
        raise ArgumentError(
            f"offsets must ascend from at least 0 to at most the {tokens} tokens of the files; "
            f"they range from {positions[0]} to {positions[-1]}"
        )
    return offsets
