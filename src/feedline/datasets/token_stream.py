"""Token files as one stream of token ids, on this machine or in a store."""

from __future__ import annotations

import glob
import operator
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from feedline.datasets.files import MappedFiles, Pathlike, Raw, RowSpan, opened, path_of
from feedline.datasets.remote_arrays import RemoteArrays, is_remote
from feedline.errors import ArgumentError
from feedline.listings import digest_of
from feedline.rows import torch_dtype
from feedline.stores import Cache, CachedStore, Want
from feedline.stores.addresses import local_path

TokenSource = Pathlike | Raw | Sequence[Pathlike | Raw]


class TokenStream(torch.utils.data.Dataset[Any]):
    """Token ids of one or more files as one stream, and the dtype in which they come out."""

    thread_safe = True

    def __init__(
        self,
        source: TokenSource,
        dtype: DTypeLike | None,
        out_dtype: torch.dtype | DTypeLike | None,
        cache: Cache | Pathlike | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        self._files = _opened(source, dtype, cache, options)
        stored = _refuse_other_kinds(self._files, dtype)
        self._dtype = _output_dtype(stored, out_dtype)
        self._bounds = [0, *accumulate(self._files.lengths)]

    @property
    def listing_digest(self) -> str:
        """Of the names of the files in their order, and the tokens of each: what a loader's state must find again."""
        return digest_of(self._files.paths, self._files.lengths)

    def _read(self, spans: Iterable[tuple[int, int]]) -> Iterator[NDArray[Any]]:
        """The tokens from each start up to its stop in the stream, over the borders of files; read all at once."""
        pieces = [list(self._pieces(start, stop)) for start, stop in spans]
        read = iter(self._files.read([piece for several in pieces for piece in several]))
        for several in pieces:
            parts = [next(read) for _ in several]
            yield parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self._files.dtypes[0]), *parts])

    def _one(self, start: int, stop: int) -> NDArray[Any]:
        """As `_read`, for a single part, which in a mapped file is a view."""
        if isinstance(self._files, MappedFiles):
            file = bisect_right(self._bounds, start) - 1
            begin, end = self._bounds[file : file + 2]
            if stop <= end:
                return self._files.arrays[file][start - begin : stop - begin]
        return next(self._read([(start, stop)]))

    def _copied(self, tokens: NDArray[Any]) -> torch.Tensor:
        out = torch.empty(len(tokens), dtype=self._dtype)
        out.numpy()[...] = tokens
        return out

    def _pieces(self, start: int, stop: int) -> Iterator[RowSpan]:
        """Which tokens of which files a part of the stream is."""
        file = bisect_right(self._bounds, start) - 1
        while start < stop:
            begin, end = self._bounds[file : file + 2]
            if start < end:
                yield RowSpan(file, start - begin, min(stop, end) - begin)
            start, file = max(start, end), file + 1

    def _wanted(self, spans: Iterable[tuple[int, int]]) -> list[tuple[CachedStore, Want]]:
        if isinstance(self._files, MappedFiles):
            return []
        files = self._files
        return files.blobs.wants(files.extents(piece for span in spans for piece in self._pieces(*span)))


def _opened(
    source: TokenSource,
    dtype: DTypeLike | None,
    cache: Cache | Pathlike | None,
    options: Mapping[str, Any] | None,
) -> MappedFiles | RemoteArrays:
    sources = [source] if isinstance(source, (str, os.PathLike, Raw)) else list(source)
    if is_remote(sources):
        return RemoteArrays(sources, cache=cache, options=options, typed=partial(_typed, dtype=dtype))
    return MappedFiles([_typed(each, dtype) for each in _listed(source)])


def whole_number(value: Any, name: str) -> int:
    """The argument of this name, a number of tokens: at least 1."""
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
    """Positions as they are, or as a `.npy` or `Raw` file holds them."""
    if not isinstance(offsets, (str, os.PathLike, Raw)):
        return np.asarray(offsets)
    if is_remote([offsets]):
        files = RemoteArrays([offsets], cache=cache, options=options)
        return files.read([RowSpan(0, 0, len(files))])[0]
    return opened(offsets)


def _listed(source: TokenSource) -> list[Pathlike | Raw]:
    if isinstance(source, Raw):
        return [source]
    if not isinstance(source, (str, os.PathLike)):
        return _refuse_none(list(source), source)
    path = local_path(source)
    if Path(path).exists() or not glob.has_magic(path):
        return [path]
    found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - Path.glob: no absolute ones
    return _refuse_none([*found], str(Path(path).absolute()))


def _refuse_none(found: list[Pathlike | Raw], asked: Any) -> list[Pathlike | Raw]:
    if not found:
        raise FileNotFoundError(f"no token files: {asked!r} names none")
    return found


def _typed(source: Pathlike | Raw, dtype: DTypeLike | None) -> Pathlike | Raw:
    """A source that knows its dtype."""
    if isinstance(source, Raw):
        return source
    if not path_of(source).endswith(".npy"):
        return Raw(source, np.uint16 if dtype is None else dtype)
    return source


def _refuse_other_kinds(files: MappedFiles | RemoteArrays, dtype: DTypeLike | None) -> np.dtype[Any]:
    stored = files.dtypes[0] if dtype is None else np.dtype(dtype)
    for path, found, ndim in zip(files.paths, files.dtypes, files.ndims, strict=True):
        if ndim != 1 or found.kind not in "iu":
            raise ArgumentError(f"{path} holds {found} of {ndim} dimensions; tokens are 1-D integers")
        if found != stored:
            whose = f"{files.paths[0]} holds" if dtype is None else "the argument dtype says"
            raise ArgumentError(f"{path} holds {found}, but {whose} {stored}")
    return stored


def _output_dtype(stored: np.dtype[Any], out_dtype: torch.dtype | DTypeLike | None) -> torch.dtype:
    kept = torch_dtype(stored.newbyteorder("="))
    assert kept is not None
    if out_dtype is None:
        return kept
    wanted = out_dtype if isinstance(out_dtype, torch.dtype) else _named(out_dtype)
    if not _holds(wanted, stored):
        raise ArgumentError(f"out_dtype={out_dtype} cannot hold every {stored} that is stored")
    return wanted


def _named(out_dtype: DTypeLike) -> torch.dtype:
    try:
        found = torch_dtype(np.dtype(out_dtype))
    except (TypeError, ValueError):
        found = None
    if found is None:
        raise ArgumentError(f"out_dtype={out_dtype!r} is no dtype of tensors: give torch.int64, or its name")
    return found


def _holds(wanted: torch.dtype, stored: np.dtype[Any]) -> bool:
    try:
        return np.can_cast(stored, torch.empty(0, dtype=wanted).numpy().dtype, "safe")
    except TypeError:  # NumPy has no bfloat16
        return False
