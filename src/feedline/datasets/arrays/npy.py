"""`ArrayFile` and `Arrays`: rows of array files, and of arrays in memory.

Arrays are aligned: sample i consists of row i of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import kernels
from feedline.core.dataset import (
    READS_BATCHES,
    READS_SAMPLES,
    Batch,
    BatchRead,
    Traits,
    Transform,
    check_reads_batches,
    digest_of,
)
from feedline.core.paths import Pathlike
from feedline.core.rng import sample_rng, takes_rng
from feedline.core.tensors import (
    Allocator,
    allocate_tensor,
    as_indices,
    numpy_view,
    one_within,
    torch_dtype,
    within,
)
from feedline.datasets.arrays.npy_files import ArrayFiles
from feedline.datasets.arrays.npy_layout import NpyLayout, Raw, RowSpan
from feedline.datasets.arrays.npz import LoadedArrays, NpzArchive, is_npz
from feedline.datasets.arrays.records import (
    Part,
    RecordColumn,
    delivered_dtype,
    is_all_numbers,
    part_of,
    samples_of,
)
from feedline.datasets.formats import FORMATS, ShardSummary
from feedline.datasets.paths import find
from feedline.datasets.shard_summaries import divided, total_nbytes, unsharded
from feedline.errors import ArgumentError
from feedline.stores import Cache, CachedStore, ObjectRange

TOGETHER_NBYTES = 4 << 20
"""Size of a range that one request reads about as quickly as a single row."""


class ArrayColumn(NamedTuple):
    """Array whose first dimension counts samples, and its torch dtype.

    For an array in the other byte order, `array` is a view that takes its items for native ones, `swapped` is True, and
    copies of rows are byte-swapped.
    """

    array: NDArray[Any]
    dtype: torch.dtype
    swapped: bool = False

    def row(self, index: int) -> torch.Tensor:
        """Copy one row; the index must be valid."""
        out = torch.empty(self.array.shape[1:], dtype=self.dtype)
        numpy_view(out)[...] = self.array[index]
        return self._native(out)

    def take(self, indices: NDArray[np.int64], allocate: Allocator) -> torch.Tensor:
        """Rows of `indices`, in memory from `allocate`; IndexError names an invalid index."""
        out = allocate((len(indices), *self.array.shape[1:]), self.dtype)
        kernels.gather_rows(self.array, indices, out=numpy_view(out))
        return self._native(out)

    def _native(self, out: torch.Tensor) -> torch.Tensor:
        if self.swapped:
            numpy_view(out).byteswap(inplace=True)
        return out


class _Columns(Protocol):
    """Aligned arrays, in memory or remote."""

    def __len__(self) -> int: ...
    def row(self, at: int) -> list[Any]: ...
    def take(self, indices: NDArray[np.int64], allocate: Allocator) -> list[Part]: ...


class MemoryColumns:
    """Aligned arrays in memory, or memory-mapped."""

    def __init__(self, columns: Sequence[ArrayColumn | RecordColumn]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0].array)

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """Stored dtype of each array."""
        return [column.array.dtype for column in self._columns]

    def row(self, at: int) -> list[Any]:
        """Copy row `at` of each array; the index must be valid."""
        return [column.row(at) for column in self._columns]

    def take(self, indices: NDArray[np.int64], allocate: Allocator) -> list[Part]:
        """Rows of `indices` of each array, in memory from `allocate`.

        IndexError names an invalid index.
        """
        return [column.take(indices, allocate) for column in self._columns]


class RangeColumns:
    """Aligned array files of which at least one is in a store."""

    def __init__(self, files: ArrayFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return self._files.lengths[0]

    @property
    def run_sizes(self) -> NDArray[np.int64]:
        """Runs of rows that one request reads."""
        widest = max(layout.row_nbytes for layout in self._files.layouts)
        rows = max(1, TOGETHER_NBYTES // max(1, widest))
        return np.diff(np.append(np.arange(0, len(self), rows, dtype=np.int64), len(self)))

    def row(self, at: int) -> list[Any]:
        """Copy row `at` of each file."""
        return [next(iter(samples_of(part))) for part in self.take(np.array([at]), allocate_tensor)]

    def take(self, indices: NDArray[np.int64], allocate: Allocator) -> list[Part]:
        """Rows of `indices` of each file, fetched concurrently, in memory from `allocate`.

        IndexError names an invalid index.
        """
        spans = self._spans(indices)
        read = iter(self._files.read(spans))
        return [
            self._part(layout, islice(read, len(indices)), len(indices), allocate) for layout in self._files.layouts
        ]

    def _part(self, layout: NpyLayout, rows: Iterator[NDArray[Any]], count: int, allocate: Allocator) -> Part:
        delivered = delivered_dtype(layout.dtype)
        shape = (count, *layout.shape[1:])
        dtype = torch_dtype(delivered)
        tensor = None if dtype is None else allocate(shape, dtype)
        out = np.empty(shape, delivered) if tensor is None else numpy_view(tensor)
        for place, row in enumerate(rows):
            out[place] = row.astype(delivered, copy=False)[0]
        return part_of(out, allocate) if tensor is None else tensor

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into the cache for `take`."""
        return self._files.ranges(self._spans(indices))

    def _spans(self, indices: NDArray[np.int64]) -> list[RowSpan]:
        places = within(indices, len(self), "ArrayFile").tolist()
        return [RowSpan(file, at, at + 1) for file in range(len(self._files.layouts)) for at in places]


class _Single:
    """Single array: samples and batches are tensors."""

    def sample(self, parts: Sequence[Any]) -> Any:
        return parts[0]

    batch = sample


class _Unnamed:
    """Sequence of arrays: samples are tuples, batches are lists."""

    def sample(self, parts: Sequence[Any]) -> Any:
        return tuple(parts)

    def batch(self, parts: Sequence[Any]) -> Any:
        return list(parts)


@dataclass(frozen=True, slots=True)
class _Named:
    """Arrays by name: samples and batches are dicts."""

    names: tuple[str, ...]

    def sample(self, parts: Sequence[Any]) -> Any:
        return dict(zip(self.names, parts, strict=True))

    batch = sample


_Structure = _Single | _Unnamed | _Named


class AlignedArrays(torch.utils.data.Dataset[Any]):
    """Dataset of aligned arrays; samples have the structure of the sources.

    Each sample is in its own memory.
    """

    def __init__(self, structure: _Structure, transform: Transform | None) -> None:
        self._structure = structure
        self.transform = transform
        self._wants_rng = transform is not None and takes_rng(transform)

    def _open_columns(self) -> _Columns:
        raise NotImplementedError

    @property
    def _dtypes(self) -> Sequence[np.dtype[Any]]:
        """Stored dtype of each array."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._open_columns())

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, in its own memory; negative indices count from the end."""
        at = one_within(index, len(self), type(self).__name__)
        return self._apply_transform(self._structure.sample(self._open_columns().row(at)), None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples of `indices`, read in one pass over the arrays.

        They share memory with each other only.
        """
        parts = self._open_columns().take(as_indices(indices), allocate_tensor)
        samples = map(self._structure.sample, zip(*map(samples_of, parts), strict=True))
        return [self._apply_transform(sample, row) for row, sample in enumerate(samples)]

    @property
    def traits(self) -> Traits:
        numbers = all(map(is_all_numbers, map(delivered_dtype, self._dtypes)))
        return READS_BATCHES if numbers and self.transform is None else READS_SAMPLES

    def read_batch(self, request: BatchRead) -> Batch:
        """Collated batch, read in one pass; TypeError with a transform."""
        check_reads_batches(self)
        return self._structure.batch(self._open_columns().take(request.indices, request.allocate))

    def _apply_transform(self, sample: Any, row: int | None) -> Any:
        if self.transform is None:
            return sample
        return self.transform(sample, sample_rng(row)) if self._wants_rng else self.transform(sample)


class ArrayFile(AlignedArrays):
    """Rows of memory-mapped array files as samples.

    `paths` is the path of a `.npy` file or a `Raw`, a sequence of these, or a dict of them. One file gives tensors, a
    sequence gives tuples of tensors, a dict gives dicts. Pickles by path; each process maps the files on first use, so
    the data are in memory once per machine. Numbers in the other byte order are swapped as they are copied. The
    constructor raises for damaged files and unequal lengths.

    A `.npz` archive is given alone. `columns` is one name, a sequence, or names by key of its arrays; None takes all,
    as a dict. Members that are stored are mapped. Compressed ones are decompressed by the constructor, into as much
    memory as the arrays have, which forked workers share.

    `transform(sample)` or `transform(sample, rng)` is applied to each sample. From files in a store, rows are read in
    ranges and kept in the folder `cache` if one is given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Pathlike | Raw | Sequence[Pathlike | Raw] | Mapping[str, Pathlike | Raw],
        transform: Transform | None = None,
        *,
        columns: str | Sequence[str] | Mapping[str, str] | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._files: ArrayFiles | LoadedArrays
        if is_npz(paths):
            archive = NpzArchive(cast("Pathlike", paths), cache=cache, options=options)
            names = {name: name for name in archive.names} if columns is None else columns
            structure, labels = parse_structure(names, (str,))
            if archive.is_stored(labels):
                self._files = ArrayFiles(archive.members(labels), cache=cache, options=options)
            else:
                self._files = LoadedArrays(archive, labels)
            _check_aligned(self._files.lengths, labels, f" in {archive.path}; name those to read with columns=")
        elif columns is not None:
            raise ArgumentError("columns= names the arrays of one .npz archive; pass other files by name, as a dict")
        else:
            structure, sources = parse_structure(paths, (str, Raw))
            self._files = ArrayFiles(sources, cache=cache, options=options)
            _check_aligned(self._files.lengths, self._files.paths)
        super().__init__(structure, transform)
        self._opened: MemoryColumns | None = None

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Runs of rows that are read together, for `ShardShuffled`.

        Local files are one run, because any row costs the same.
        """
        remote = self._remote
        return np.array([len(self)]) if remote is None else remote.run_sizes

    @property
    def listing_fingerprint(self) -> str:
        """Digest of file names and lengths, checked by saved loader states."""
        return digest_of(self._files.paths, self._files.lengths)

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into a cache for these samples."""
        remote = self._remote
        return [] if remote is None else remote.ranges(indices)

    def __len__(self) -> int:
        return self._files.lengths[0]

    @property
    def _remote(self) -> RangeColumns | None:
        """Rows in a store; None if all arrays are local."""
        files = self._files
        return RangeColumns(files) if isinstance(files, ArrayFiles) and not files.is_local else None

    @property
    def _dtypes(self) -> Sequence[np.dtype[Any]]:
        return self._files.dtypes

    def _open_columns(self) -> _Columns:
        remote = self._remote
        if remote is not None:
            return remote
        maps, opened = self._files.maps, self._opened
        if opened is None:  # two threads may both get here; either result is valid
            opened = self._opened = MemoryColumns(list(map(column_of, maps)))
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


class Arrays(AlignedArrays):
    """Rows of arrays or CPU tensors in memory as samples.

    `source` is one array, a sequence of arrays, or a dict of them. The arrays are used in place; samples and batches
    are copies. Pickles the arrays, out of band where the pickler can, so that worker processes share one copy.
    """

    def __init__(
        self,
        source: NDArray[Any] | torch.Tensor | Sequence[Any] | Mapping[str, Any],
        transform: Transform | None = None,
    ) -> None:
        structure, sources = parse_structure(source, (np.ndarray, torch.Tensor))
        super().__init__(structure, transform)
        labels = structure.names if isinstance(structure, _Named) else [f"array {i}" for i in range(len(sources))]
        columns = [_column(array, label) for array, label in zip(sources, labels, strict=True)]
        _check_aligned([len(column.array) for column in columns], labels)
        self._columns = MemoryColumns(columns)

    @property
    def _dtypes(self) -> Sequence[np.dtype[Any]]:
        return self._columns.dtypes

    def _open_columns(self) -> _Columns:
        return self._columns


def parse_structure(source: Any, single: tuple[type, ...]) -> tuple[_Structure, list[Any]]:
    if isinstance(source, single) or not isinstance(source, (Mapping, Sequence)):
        return _Single(), [source]
    if not source:
        raise ArgumentError("at least one array is needed")
    if isinstance(source, Mapping):
        return _Named(tuple(source)), list(source.values())
    return _Unnamed(), list(source)


def _check_aligned(lengths: Sequence[int], labels: Sequence[str], remedy: str = "") -> None:
    if len(set(lengths)) > 1:
        each = ", ".join(f"{label} has {length}" for label, length in zip(labels, lengths, strict=True))
        raise ArgumentError(f"aligned arrays must have one length, but {each}{remedy}")


def column_of(array: NDArray[Any]) -> ArrayColumn | RecordColumn:
    """Column over an array in either byte order.

    TypeError names what no sample can hold.
    """
    native = delivered_dtype(array.dtype)
    if native.names is not None:
        return RecordColumn(array)
    dtype = torch_dtype(native)
    if dtype is None:
        raise TypeError(f"{array.dtype}")
    return ArrayColumn(array.view(native), dtype, swapped=not array.dtype.isnative)


def _column(array: Any, label: str) -> ArrayColumn | RecordColumn:
    if isinstance(array, torch.Tensor):
        if array.ndim == 0 or array.device.type != "cpu" or array.layout is not torch.strided or array.requires_grad:
            raise ArgumentError(
                f"{label} must be a strided CPU tensor with at least one dimension and requires_grad=False"
            )
        return ArrayColumn(numpy_view(array), array.dtype)
    try:
        if isinstance(array, np.ndarray) and array.ndim:
            return column_of(np.asarray(array))
        what = f"{array.ndim}-D {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
    except TypeError as error:
        what = f"{array.ndim}-D {error}"
    raise ArgumentError(
        f"{label} must be an array with at least one dimension and a dtype that torch supports; got {what}"
    )


def summarize_rows(paths: Sequence[str]) -> ShardSummary:
    """Rows of `.npy` files: unsharded if local, else in runs fetched together."""
    files = find(paths, FORMATS["npy"].pattern)
    sizes = [ArrayFile(name).shard_sizes.tolist() for name in files.names]
    if files.is_local:
        return unsharded(sum(map(sum, sizes)), total_nbytes(files))
    nbytes = [divided(files.info(number).size, own) for number, own in enumerate(sizes)]
    return ShardSummary("run of rows", [*chain(*sizes)], [*chain(*nbytes)])
