"""`HDF5`: rows of the datasets in an HDF5 file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline import extras
from feedline.datasets.arrays import Transform
from feedline.datasets.chunked_rows import ChunkCache, ChunkedRows, MappedRows, ReadRows, Rows, Shape
from feedline.datasets.files import Pathlike
from feedline.datasets.stored_arrays import Names, StoredArrays, refuse_changed
from feedline.errors import ArgumentError, SampleError
from feedline.rows import torch_dtype

_ROWS_AT_ONCE = 1024
"""How many rows of a dataset without chunks count as one where they cannot be mapped."""


class HDF5(StoredArrays):
    """Rows along the first axis of datasets in an HDF5 file.

    `names` is one name, a sequence, or names by key; None is every dataset at the top. A dataset that lies in one
    piece, uncompressed, is read through a memory map; chunks are decoded whole, and the last `cache_nbytes` of them
    kept. Each process opens the file for itself, on first use. Numbers become tensors, strings texts, and rows of
    variable length tensors of their own length.
    """

    def __init__(
        self, path: Pathlike, names: Names = None, *, transform: Transform | None = None, cache_nbytes: int = 1 << 26
    ) -> None:
        super().__init__(path, names, transform, cache_nbytes)

    @staticmethod
    def _everything(path: str) -> Names:
        h5py = _library()
        with closing(_file(path)) as file:
            return {name: name for name, item in file.items() if isinstance(item, h5py.Dataset)}

    @staticmethod
    def _described(path: str, names: Sequence[str]) -> list[Shape]:
        with closing(_file(path)) as file:
            return [_shape(_dataset(file, name, path), name, path) for name in names]

    @staticmethod
    def _open_rows(path: str, shapes: Sequence[Shape], cache: ChunkCache) -> list[Rows]:
        file = _file(path)
        rows: list[Rows] = []
        for shape in shapes:
            dataset = _dataset(file, shape.name, path)
            refuse_changed(path, shape, dataset.shape[0], dataset.shape[1:])
            mapped = _mapped(dataset, path)
            rows.append(ChunkedRows(path, shape, _reader(dataset), cache) if mapped is None else MappedRows(mapped))
        return rows


def _library() -> Any:
    return extras.load("h5py", "hdf5", "datasets.HDF5")


def _file(path: str) -> Any:
    """The file, open for reading; several programs may read one file at once."""
    h5py = _library()
    try:
        return h5py.File(path, "r", locking="best-effort")
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    except OSError as error:
        raise SampleError(f"{path} cannot be opened as an HDF5 file ({error}); was it written to its end?") from error


def _dataset(file: Any, name: str, path: str) -> Any:
    h5py = _library()
    found = file.get(name)
    if not isinstance(found, h5py.Dataset):
        there: list[str] = []
        file.visititems(lambda each, item: there.append(each) if isinstance(item, h5py.Dataset) else None)
        raise ArgumentError(f"{path} has no dataset {name!r}; it has {', '.join(there) or 'none'}")
    return found


def _shape(dataset: Any, name: str, path: str) -> Shape:
    if not dataset.shape:
        raise ArgumentError(f"{name!r} in {path} is a single value; the first axis of a dataset counts its samples")
    return Shape(name, dataset.shape[0], dataset.shape[1:], _numbers(dataset, name, path), _chunk(dataset))


def _numbers(dataset: Any, name: str, path: str) -> np.dtype[Any] | None:
    """The dtype of rows of numbers, in the machine's byte order; None for strings and rows of variable length."""
    h5py = _library()
    native: np.dtype[Any] = dataset.dtype.newbyteorder("=")
    if torch_dtype(native) is not None:
        return native
    ragged = h5py.check_vlen_dtype(dataset.dtype)
    if h5py.check_string_dtype(dataset.dtype) or (ragged is not None and torch_dtype(ragged) is not None):
        return None
    raise ArgumentError(f"{name!r} in {path} holds {dataset.dtype}, which no tensor can hold; name other datasets")


def _chunk(dataset: Any) -> int:
    if _is_mappable(dataset):
        return 1
    return int(dataset.chunks[0]) if dataset.chunks else _ROWS_AT_ONCE


def _is_mappable(dataset: Any) -> bool:
    """Whether the rows lie in the file as they would in memory, all of them, in one piece."""
    return (
        dataset.chunks is None
        and not dataset.is_virtual
        and not dataset.external
        and dataset.id.get_offset() is not None
        and dataset.nbytes > 0
        and dataset.id.get_storage_size() == dataset.nbytes  # nothing is allocated before something is written
        and torch_dtype(dataset.dtype) is not None
    )


def _mapped(dataset: Any, path: str) -> NDArray[Any] | None:
    if not _is_mappable(dataset):
        return None
    offset = dataset.id.get_offset()
    found = Path(path).stat().st_size
    if found < offset + dataset.nbytes:
        raise SampleError(f"{path} is truncated: {dataset.name} ends at byte {offset + dataset.nbytes} of {found}")
    array: NDArray[Any] = np.memmap(path, dataset.dtype, "r", offset, dataset.shape).view(np.ndarray)
    return array


def _reader(dataset: Any) -> ReadRows:
    strings = _library().check_string_dtype(dataset.dtype)
    readable = dataset.asstr() if strings is not None else dataset

    def read(start: int, stop: int) -> NDArray[Any]:
        rows: NDArray[Any] = readable[start:stop]
        return rows

    return read
