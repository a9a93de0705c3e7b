"""`ArrayFile` and `Arrays`: rows of array files, and of arrays in memory.

Arrays are aligned: sample i consists of row i of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.dataset import TransformFunction
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike
from feedline.core.tensors import Allocator, numpy_view
from feedline.datasets.arrays.aligned import AlignedArrays, Named, Structure, check_aligned, parse_structure
from feedline.datasets.arrays.npy_files import ArrayFiles
from feedline.datasets.arrays.npy_layout import Raw
from feedline.datasets.arrays.npz import LoadedArrays, NpzArchive, is_npz
from feedline.datasets.arrays.records import ArrayColumn, BatchedRows, memory_of
from feedline.datasets.arrays.rows import MemoryArrays, RowSource
from feedline.datasets.formats import FORMATS, ShardSummary
from feedline.datasets.paths import find
from feedline.datasets.shard_summaries import divided, total_nbytes, unsharded
from feedline.errors import ArgumentError
from feedline.stores import Cache, CachedStore, ObjectRange

TOGETHER_NBYTES = 4 << 20
"""Bytes of a range that one request reads about as quickly as a single row."""


class _RowArrays(AlignedArrays):
    """Aligned arrays whose rows are of one shape and dtype each."""

    def __init__(
        self,
        structure: Structure,
        source: RowSource,
        columns: Sequence[ArrayColumn],
        length: int,
        transform: TransformFunction | None,
        *,
        has_ranges: bool,
    ) -> None:
        dtypes = [column.delivered for column in columns]
        super().__init__(structure, dtypes, length, transform, has_ranges=has_ranges)
        self._source, self._columns = source, columns
        self._are_native = all(column.dtype is not None and column.stored.isnative for column in columns)

    def _one(self, at: int) -> Sequence[Any]:
        return [column.one(row) for column, row in zip(self._columns, self._source.row(at), strict=True)]

    def _take(self, indices: NDArray[np.int64], allocate: Allocator) -> list[BatchedRows]:
        outs = [column.empty(len(indices), allocate) for column in self._columns]
        self._source.fill(indices, [memory_of(out) for out in outs])
        if self._are_native:
            return cast("list[BatchedRows]", outs)
        return [column.part(out, allocate) for column, out in zip(self._columns, outs, strict=True)]


class ArrayFile(_RowArrays):
    """Rows of memory-mapped array files as samples.

    `paths` is the path of a `.npy` file or a `Raw`, a sequence of these, or a dict of them. One file gives tensors, a
    sequence gives tuples of tensors, a dict gives dicts. Pickles by path; each process maps the files on first use, so
    the data are in memory once per machine. Numbers in the other byte order are swapped during the copy. The
    constructor raises for damaged files and unequal lengths.

    A `.npz` archive is given alone. `columns` is one name, a sequence, or names by key of its arrays; None takes all,
    as a dict. Uncompressed members are mapped. The constructor decompresses all others into memory that forked workers
    share.

    `transform(sample)` or `transform(sample, rng)` is applied to each sample. From files in a store, rows are read in
    ranges and kept in the folder `cache` if one is given; `options` are passed to `open_store`.
    """

    def __init__(
        self,
        paths: Pathlike | Raw | Sequence[Pathlike | Raw] | Mapping[str, Pathlike | Raw],
        columns: str | Sequence[str] | Mapping[str, str] | None = None,
        *,
        transform: TransformFunction | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        files: ArrayFiles | LoadedArrays
        if is_npz(paths):
            archive = NpzArchive(cast("Pathlike", paths), cache=cache, options=options)
            names = {name: name for name in archive.names} if columns is None else columns
            structure, labels = parse_structure(names, (str,))
            if archive.is_stored(labels):
                files = ArrayFiles(archive.members(labels), cache=cache, options=options)
            else:
                files = LoadedArrays(archive, labels)
            check_aligned(files.lengths, labels, f" in {archive.path}; name those to read with columns=")
        elif columns is not None:
            raise ArgumentError("columns= names the arrays of one .npz archive; pass other files by name, as a dict")
        else:
            structure, sources = parse_structure(paths, (str, Raw))
            files = ArrayFiles(sources, cache=cache, options=options)
            check_aligned(files.lengths, files.paths)
        self._files = files
        listed = [ArrayColumn.of(layout.dtype, layout.shape[1:]) for layout in files.layouts]
        super().__init__(structure, files, listed, files.lengths[0], transform, has_ranges=not files.is_local)

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Rows of each run that is read as a whole, int64.

        For `samplers.ShardShuffled`. Local files are one run, because any row costs the same.
        """
        if self._files.is_local:
            return np.array([len(self)])
        widest = max(layout.row_nbytes for layout in self._files.layouts)
        rows = max(1, TOGETHER_NBYTES // max(1, widest))
        return np.diff(np.append(np.arange(0, len(self), rows, dtype=np.int64), len(self)))

    @property
    def listing_fingerprint(self) -> str:
        """Digest of file names and lengths, checked by saved loader states."""
        return digest_of(self._files.paths, self._files.lengths)

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into a cache for these samples."""
        return self._files.row_ranges(indices)


class Arrays(_RowArrays):
    """Rows of arrays or CPU tensors in memory as samples.

    `source` is one array, a sequence of arrays, or a dict of them. The arrays are used in place; samples and batches
    are copies. Pickles the arrays, out of band where the pickler can, so that worker processes share one copy.
    `transform(sample)` or `transform(sample, rng)` is applied to each sample.
    """

    def __init__(
        self,
        source: NDArray[Any] | torch.Tensor | Sequence[Any] | Mapping[str, Any],
        transform: TransformFunction | None = None,
    ) -> None:
        structure, sources = parse_structure(source, (np.ndarray, torch.Tensor))
        labels = structure.names if isinstance(structure, Named) else [f"array {i}" for i in range(len(sources))]
        arrays, columns = zip(*map(_column, sources, labels), strict=True)
        check_aligned(list(map(len, arrays)), labels)
        super().__init__(structure, MemoryArrays(arrays), columns, len(arrays[0]), transform, has_ranges=False)


def _column(array: Any, label: str) -> tuple[NDArray[Any], ArrayColumn]:
    """An array in memory, and the form of its delivered rows."""
    if isinstance(array, torch.Tensor):
        if array.ndim == 0 or array.device.type != "cpu" or array.layout is not torch.strided or array.requires_grad:
            raise ArgumentError(
                f"{label} must be a strided CPU tensor with at least one dimension and requires_grad=False"
            )
        rows = numpy_view(array)
        return rows, ArrayColumn(rows.shape[1:], rows.dtype, rows.dtype, array.dtype)
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(f"{label} is a masked array, whose mask no tensor has; pass array.filled(value)")
    try:
        if isinstance(array, np.ndarray) and array.ndim:
            return np.asarray(array), ArrayColumn.of(array.dtype, array.shape[1:])
        what = f"{array.ndim}-D {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
    except TypeError as error:
        what = f"{array.ndim}-D {error}"
    raise ArgumentError(
        f"{label} must be an array with at least one dimension and a dtype that torch supports; got {what}"
    )


def summarize_rows(paths: Sequence[str]) -> ShardSummary:
    """Rows of `.npy` files: unsharded if local, else in runs."""
    files = find(paths, FORMATS["npy"].pattern)
    sizes = [ArrayFile(name).shard_sizes.tolist() for name in files.names]
    if files.is_local:
        return unsharded(sum(map(sum, sizes)), total_nbytes(files))
    nbytes = [divided(files.info(number).size, own) for number, own in enumerate(sizes)]
    return ShardSummary("run of rows", [*chain(*sizes)], [*chain(*nbytes)])
