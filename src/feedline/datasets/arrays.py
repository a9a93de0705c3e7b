"""Aligned arrays, in files or in memory: row i of each is sample i."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import _kernels
from feedline.datasets.files import MappedFiles, Pathlike, Raw
from feedline.errors import ArgumentError
from feedline.rng import sample_rng, takes_rng
from feedline.rows import Empty, as_indices, numpy_view, one_within, torch_dtype, torch_empty

Gather = Callable[[NDArray[np.int64], Empty], Any]
Transform = Callable[..., Any]


class Column(NamedTuple):
    """An array whose first dimension counts samples, and the torch dtype of its items."""

    array: NDArray[Any]
    dtype: torch.dtype

    def row(self, index: int) -> torch.Tensor:
        """A copy of one row; the index has been checked."""
        out = torch.empty(self.array.shape[1:], dtype=self.dtype)
        numpy_view(out)[...] = self.array[index]
        return out

    def take(self, indices: NDArray[np.int64], empty: Empty) -> torch.Tensor:
        """The rows of these indices, in memory from `empty`; IndexError names one that is out of range."""
        out = empty((len(indices), *self.array.shape[1:]), self.dtype)
        _kernels.gather_rows(self.array, indices, out=numpy_view(out))
        return out


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

    thread_safe = True

    def __init__(self, structure: _Structure, transform: Transform | None) -> None:
        self._structure = structure
        self.transform = transform
        self._wants_rng = transform is not None and takes_rng(transform)

    def _columns(self) -> Sequence[Column]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._columns()[0].array)

    def __getitem__(self, index: int) -> Any:
        """Sample `index`, in memory of its own; negative indices count from the end."""
        at = one_within(index, len(self), type(self).__name__)
        return self._transformed(self._structure.sample([column.row(at) for column in self._columns()]), None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, in one pass over the arrays; they share memory with each other only."""
        parts = [part.unbind() for part in self._parts(as_indices(indices), torch_empty)]
        samples = map(self._structure.sample, zip(*parts, strict=True))
        return [self._transformed(sample, row) for row, sample in enumerate(samples)]

    @property
    def gather(self) -> Gather:
        """`gather(indices, empty)`: the collated batch in one pass. Absent with a transform, which must see samples."""
        if self.transform is not None:
            raise AttributeError("gather: a transform has to see each sample")
        return self._gathered

    def _gathered(self, indices: NDArray[np.int64], empty: Empty) -> Any:
        return self._structure.batch(self._parts(indices, empty))

    def _parts(self, indices: NDArray[np.int64], empty: Empty) -> list[torch.Tensor]:
        return [column.take(indices, empty) for column in self._columns()]

    def _transformed(self, sample: Any, row: int | None) -> Any:
        if self.transform is None:
            return sample
        return self.transform(sample, sample_rng(row)) if self._wants_rng else self.transform(sample)


class ArrayFile(AlignedArrays):
    """Rows of memory-mapped array files as samples: a `.npy` path or a `Raw`, a sequence of them, or a dict by name.

    One source gives tensors, a sequence gives tuples of tensors, a dict gives dicts. Pickles by path and opens the
    files where it arrives, so the data exist once per machine. Damaged files and unequal lengths raise here.
    `transform(sample)` or `transform(sample, rng)` is applied to each sample.
    """

    def __init__(
        self,
        source: Pathlike | Raw | Sequence[Pathlike | Raw] | Mapping[str, Pathlike | Raw],
        transform: Transform | None = None,
    ) -> None:
        structure, sources = _structured(source, (str, Raw))
        super().__init__(structure, transform)
        self._files = MappedFiles(sources)
        _refuse_unaligned(self._columns(), self._files.paths)

    def _columns(self) -> list[Column]:
        return [column_of(array) for array in self._files.arrays]


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
        self._held = [_column(array, label) for array, label in zip(sources, labels, strict=True)]
        _refuse_unaligned(self._held, labels)

    def _columns(self) -> list[Column]:
        return self._held


def _structured(source: Any, single: tuple[type, ...]) -> tuple[_Structure, list[Any]]:
    if isinstance(source, single) or not isinstance(source, (Mapping, Sequence)):
        return _Single(), [source]
    if not source:
        raise ArgumentError("at least one array is needed")
    if isinstance(source, Mapping):
        return _Named(tuple(source)), list(source.values())
    return _Unnamed(), list(source)


def _refuse_unaligned(columns: Sequence[Column], labels: Sequence[str]) -> None:
    lengths = [len(column.array) for column in columns]
    if len(set(lengths)) > 1:
        each = ", ".join(f"{label} has {length}" for label, length in zip(labels, lengths, strict=True))
        raise ArgumentError(f"aligned arrays have one length, but {each}")


def column_of(array: NDArray[Any]) -> Column:
    """The column of an array whose dtype tensors have."""
    dtype = torch_dtype(array.dtype)
    assert dtype is not None
    return Column(array, dtype)


def _column(array: Any, label: str) -> Column:
    if isinstance(array, torch.Tensor):
        if array.ndim == 0 or array.device.type != "cpu" or array.layout is not torch.strided or array.requires_grad:
            raise ArgumentError(f"{label} must be a plain CPU tensor of at least one dimension, without a gradient")
        return Column(numpy_view(array), array.dtype)
    if not isinstance(array, np.ndarray) or array.ndim == 0 or torch_dtype(array.dtype) is None:
        what = f"{array.ndim}-D {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ArgumentError(
            f"{label} must be an array with at least one dimension, of a dtype that tensors have; got {what}"
        )
    return column_of(np.asarray(array))
