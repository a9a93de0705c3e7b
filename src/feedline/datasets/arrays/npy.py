"""Aligned arrays, in files or in memory: row i of each is sample i."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import kernels
from feedline.core.dataset import READS_BATCHES, READS_SAMPLES, Batch, BatchRead, Traits, check_reads_batches
from feedline.core.rng import sample_rng, takes_rng
from feedline.core.tensors import Allocator, allocate_tensor, as_indices, numpy_view, one_within, torch_dtype
from feedline.datasets.arrays.npy_layout import MappedFiles, Pathlike, Raw
from feedline.datasets.arrays.npy_remote import RemoteArrays, is_remote
from feedline.datasets.formats import FORMATS, ShardSummary
from feedline.datasets.paths import find
from feedline.datasets.shard_summaries import divided, total_nbytes, unsharded
from feedline.errors import ArgumentError
from feedline.stores import Cache, CachedStore, ObjectRange

Transform = Callable[..., Any]


class ArrayColumn(NamedTuple):
    """An array whose first dimension counts samples, and the torch dtype of its items.

    Where they are stored in the other byte order, `array` takes them for native ones, and they are `swapped` as copied.
    """

    array: NDArray[Any]
    dtype: torch.dtype
    swapped: bool = False

    def row(self, index: int) -> torch.Tensor:
        """A copy of one row; the index has been checked."""
        out = torch.empty(self.array.shape[1:], dtype=self.dtype)
        numpy_view(out)[...] = self.array[index]
        return self._native(out)

    def take(self, indices: NDArray[np.int64], empty: Allocator) -> torch.Tensor:
        """The rows of these indices, in memory from `empty`; IndexError names one that is out of range."""
        out = empty((len(indices), *self.array.shape[1:]), self.dtype)
        kernels.gather_rows(self.array, indices, out=numpy_view(out))
        return self._native(out)

    def _native(self, out: torch.Tensor) -> torch.Tensor:
        if self.swapped:
            numpy_view(out).byteswap(inplace=True)
        return out


class _ColumnHolder(Protocol):
    """Aligned arrays, wherever they lie."""

    def __len__(self) -> int: ...
    def row(self, at: int) -> list[torch.Tensor]: ...
    def take(self, indices: NDArray[np.int64], empty: Allocator) -> list[torch.Tensor]: ...


class MemoryColumns:
    """Aligned arrays in memory, or mapped."""

    def __init__(self, columns: Sequence[ArrayColumn]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0].array)

    def row(self, at: int) -> list[torch.Tensor]:
        """A copy of row `at` of each; the index has been checked."""
        return [column.row(at) for column in self._columns]

    def take(self, indices: NDArray[np.int64], empty: Allocator) -> list[torch.Tensor]:
        """The rows of these indices of each, in memory from `empty`; IndexError names one that is out of range."""
        return [column.take(indices, empty) for column in self._columns]


class _Single:
    """One array: samples and batches are bare tensors."""

    def sample(self, parts: Sequence[torch.Tensor]) -> Any:
        return parts[0]

    batch = sample


class _Unnamed:
    """A sequence of arrays: samples are tuples, which collate to lists."""

    def sample(self, parts: Sequence[torch.Tensor]) -> Any:
        return tuple(parts)

    def batch(self, parts: Sequence[torch.Tensor]) -> Any:
        return list(parts)


@dataclass(frozen=True, slots=True)
class _Named:
    """Arrays by name: samples and batches are dicts."""

    names: tuple[str, ...]

    def sample(self, parts: Sequence[torch.Tensor]) -> Any:
        return dict(zip(self.names, parts, strict=True))

    batch = sample


_Structure = _Single | _Unnamed | _Named


class AlignedArrays(torch.utils.data.Dataset[Any]):
    """What `ArrayFile` and `Arrays` share: samples are tensors of their own, in the structure the sources came in."""

    def __init__(self, structure: _Structure, transform: Transform | None) -> None:
        self._structure = structure
        self.transform = transform
        self._wants_rng = transform is not None and takes_rng(transform)

    def _held(self) -> _ColumnHolder:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._held())

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, in memory of its own; negative indices count from the end."""
        at = one_within(index, len(self), type(self).__name__)
        return self._transformed(self._structure.sample(self._held().row(at)), None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, in one pass over the arrays; they share memory with each other only."""
        parts = [part.unbind() for part in self._held().take(as_indices(indices), allocate_tensor)]
        samples = map(self._structure.sample, zip(*parts, strict=True))
        return [self._transformed(sample, row) for row, sample in enumerate(samples)]

    @property
    def traits(self) -> Traits:
        return READS_BATCHES if self.transform is None else READS_SAMPLES

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch in one pass; TypeError with a transform, which has to see each sample."""
        check_reads_batches(self)
        return self._structure.batch(self._held().take(request.indices, request.allocate))

    def _transformed(self, sample: Any, row: int | None) -> Any:
        if self.transform is None:
            return sample
        return self.transform(sample, sample_rng(row)) if self._wants_rng else self.transform(sample)


class ArrayFile(AlignedArrays):
    """Rows of memory-mapped array files as samples: a `.npy` path or a `Raw`, a sequence of them, or a dict by name.

    One source gives tensors, a sequence gives tuples of tensors, a dict gives dicts. Pickles by path and opens the
    files where it arrives, so the data exist once per machine. Numbers in the other byte order are swapped as they are
    copied. Damaged files and unequal lengths raise here.
    `transform(sample)` or `transform(sample, rng)` is applied to each sample. Of files in a store, rows are read in
    ranges, and kept in the folder `cache`, if one is given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Pathlike | Raw | Sequence[Pathlike | Raw] | Mapping[str, Pathlike | Raw],
        transform: Transform | None = None,
        *,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        structure, sources = _structured(paths, (str, Raw))
        super().__init__(structure, transform)
        self._files: MappedFiles | RemoteArrays = (
            RemoteArrays(sources, cache=cache, options=options) if is_remote(sources) else MappedFiles(sources)
        )
        self._opened: _ColumnHolder | None = None
        _refuse_unaligned(self._files.lengths, self._files.paths)

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Rows that lie together, for `ShardShuffled`: of files of this machine all, because any row costs the same."""
        return self._files.shard_sizes if isinstance(self._files, RemoteArrays) else np.array([len(self)])

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """What reading these samples will want from a cache."""
        return self._files.ranges(indices) if isinstance(self._files, RemoteArrays) else []

    def _held(self) -> _ColumnHolder:
        opened = self._opened
        if opened is None:
            files = self._files
            opened = (
                files if isinstance(files, RemoteArrays) else MemoryColumns([column_of(each) for each in files.arrays])
            )
            self._opened = opened  # two threads may both have opened them: either result serves
        if isinstance(self._files, MappedFiles):
            self._files.refuse_cut()
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


class Arrays(AlignedArrays):
    """Rows of arrays or CPU tensors in memory as samples: one, a sequence of them, or a dict by name.

    The arrays are used as they are, not copied; samples and batches are copies. Pickles as arrays, out of band where
    the pickler can, so that worker processes share one copy.
    """

    def __init__(
        self,
        source: NDArray[Any] | torch.Tensor | Sequence[Any] | Mapping[str, Any],
        transform: Transform | None = None,
    ) -> None:
        structure, sources = _structured(source, (np.ndarray, torch.Tensor))
        super().__init__(structure, transform)
        labels = structure.names if isinstance(structure, _Named) else [f"array {i}" for i in range(len(sources))]
        columns = [_column(array, label) for array, label in zip(sources, labels, strict=True)]
        _refuse_unaligned([len(column.array) for column in columns], labels)
        self._columns = MemoryColumns(columns)

    def _held(self) -> _ColumnHolder:
        return self._columns


def _structured(source: Any, single: tuple[type, ...]) -> tuple[_Structure, list[Any]]:
    if isinstance(source, single) or not isinstance(source, (Mapping, Sequence)):
        return _Single(), [source]
    if not source:
        raise ArgumentError("at least one array is needed")
    if isinstance(source, Mapping):
        return _Named(tuple(source)), list(source.values())
    return _Unnamed(), list(source)


def _refuse_unaligned(lengths: Sequence[int], labels: Sequence[str]) -> None:
    if len(set(lengths)) > 1:
        each = ", ".join(f"{label} has {length}" for label, length in zip(labels, lengths, strict=True))
        raise ArgumentError(f"aligned arrays have one length, but {each}")


def column_of(array: NDArray[Any]) -> ArrayColumn:
    """The column of an array whose dtype tensors have, in whichever byte order."""
    native = array.dtype.newbyteorder("=")
    dtype = torch_dtype(native)
    assert dtype is not None
    return ArrayColumn(array, dtype) if array.dtype.isnative else ArrayColumn(array.view(native), dtype, swapped=True)


def _column(array: Any, label: str) -> ArrayColumn:
    if isinstance(array, torch.Tensor):
        if array.ndim == 0 or array.device.type != "cpu" or array.layout is not torch.strided or array.requires_grad:
            raise ArgumentError(f"{label} must be a plain CPU tensor of at least one dimension, without a gradient")
        return ArrayColumn(numpy_view(array), array.dtype)
    if not isinstance(array, np.ndarray) or array.ndim == 0 or torch_dtype(array.dtype.newbyteorder("=")) is None:
        what = f"{array.ndim}-D {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ArgumentError(
            f"{label} must be an array with at least one dimension, of a dtype that tensors have; got {what}"
        )
    return column_of(np.asarray(array))


def summarize_rows(paths: Sequence[str]) -> ShardSummary:
    """The rows of `.npy` files: unsharded where they are mapped, else in runs that are fetched together."""
    files = find(paths, FORMATS["npy"].pattern)
    sizes = [ArrayFile(name).shard_sizes.tolist() for name in files.names]
    if files.is_local:
        return unsharded(sum(map(sum, sizes)), total_nbytes(files))
    nbytes = [divided(files.info(number).size, own) for number, own in enumerate(sizes)]
    return ShardSummary("run of rows", [*chain(*sizes)], [*chain(*nbytes)])
