"""What is asked of h5py: a file, its datasets, where and how their rows lie in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline import extras
from feedline.datasets.chunked_rows import Lies, ReadRows, Shape
from feedline.errors import ArgumentError, SampleError
from feedline.rows import torch_dtype
from feedline.stores import StoreError
from feedline.stores.protocol import Range

_ROWS_AT_ONCE = 1024
"""How many rows of a dataset without chunks count as one where they are read through the library."""


def library() -> Any:
    """h5py."""
    return extras.load("h5py", "hdf5", "datasets.HDF5")


def opened(file: Any, path: str) -> Any:
    """The file at a path, or of a file object, open for reading; several programs may read one file at once."""
    h5py = library()
    try:
        return h5py.File(file, "r", locking="best-effort")
    except StoreError:
        raise
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    except OSError as error:
        raise SampleError(f"{path} cannot be opened as an HDF5 file ({error}); was it written to its end?") from error


def everything(file: Any) -> dict[str, str]:
    """The names of the datasets at the top."""
    h5py = library()
    return {name: name for name, item in file.items() if isinstance(item, h5py.Dataset)}


def dataset_in(file: Any, name: str, path: str) -> Any:
    """A dataset; ArgumentError tells which there are."""
    h5py = library()
    found = file.get(name)
    if not isinstance(found, h5py.Dataset):
        there: list[str] = []
        file.visititems(lambda each, item: there.append(each) if isinstance(item, h5py.Dataset) else None)
        raise ArgumentError(f"{path} has no dataset {name!r}; it has {', '.join(there) or 'none'}")
    return found


def shape_of(dataset: Any, name: str, path: str) -> Shape:
    """What a dataset holds."""
    if not dataset.shape:
        raise ArgumentError(f"{name!r} in {path} is a single value; the first axis of a dataset counts its samples")
    return Shape(name, dataset.shape[0], dataset.shape[1:], _numbers(dataset, name, path), _chunk(dataset))


def _numbers(dataset: Any, name: str, path: str) -> np.dtype[Any] | None:
    """The dtype of rows of numbers, in the machine's byte order; None for strings and rows of variable length."""
    h5py = library()
    native: np.dtype[Any] = dataset.dtype.newbyteorder("=")
    if torch_dtype(native) is not None:
        return native
    ragged = h5py.check_vlen_dtype(dataset.dtype)
    if h5py.check_string_dtype(dataset.dtype) or (ragged is not None and torch_dtype(ragged) is not None):
        return None
    raise ArgumentError(f"{name!r} in {path} holds {dataset.dtype}, which no tensor can hold; name other datasets")


def _chunk(dataset: Any) -> int:
    if is_plain(dataset):
        return 1
    return int(dataset.chunks[0]) if dataset.chunks else _ROWS_AT_ONCE


def is_plain(dataset: Any) -> bool:
    """Whether the rows lie in the file as they would in memory, all of them, in one piece."""
    return _is_in_one_piece(dataset) and torch_dtype(dataset.dtype) is not None


def _is_in_one_piece(dataset: Any) -> bool:
    return (
        dataset.chunks is None
        and not dataset.is_virtual
        and not dataset.external
        and dataset.id.get_offset() is not None
        and dataset.nbytes > 0
        and dataset.id.get_storage_size() == dataset.nbytes  # nothing is allocated before something is written
    )


def refuse_elsewhere(dataset: Any, path: str) -> None:
    """ArgumentError if the data of a dataset lie in other files, which are not looked for where `path` lies."""
    others = [source.file_name for source in dataset.virtual_sources()] if dataset.is_virtual else []
    others = [name for name in others if name != "."] + [name for name, _, _ in dataset.external or ()]
    if others:
        raise ArgumentError(
            f"the data of {dataset.name} in {path} lie in other files, such as {others[0]}, and only files of this"
            " machine are read so: read a copy of all of them, or write them as one file (h5repack)"
        )


def refuse_truncated(dataset: Any, path: str, found: int) -> None:
    """SampleError if a plain dataset reaches beyond the `found` bytes of its file."""
    end = dataset.id.get_offset() + dataset.nbytes
    if found < end:
        raise SampleError(f"{path} is truncated: {dataset.name} ends at byte {end} of {found}")


def mapped(dataset: Any, path: str) -> NDArray[Any]:
    """The rows of a plain dataset in a file of this machine."""
    refuse_truncated(dataset, path, Path(path).stat().st_size)
    offset = dataset.id.get_offset()
    array: NDArray[Any] = np.memmap(path, dataset.dtype, "r", offset, dataset.shape).view(np.ndarray)
    return array


def reader(dataset: Any) -> ReadRows:
    """What reads and decodes rows."""
    strings = library().check_string_dtype(dataset.dtype)
    readable = dataset.asstr() if strings is not None else dataset

    def read(spans: Sequence[Range]) -> Iterator[NDArray[Any]]:
        for start, stop in spans:
            yield readable[start:stop]

    return read


class InOnePiece(NamedTuple):
    """Rows one after the other, from `offset` on."""

    offset: int
    row_nbytes: int

    def spans(self, start: int, stop: int) -> list[Range]:
        return [(self.offset + start * self.row_nbytes, self.offset + stop * self.row_nbytes)]


class InChunks(NamedTuple):
    """Chunks that hold `rows` rows each, or a part of them: number i lies in those from `bounds[i]` on."""

    rows: int
    bounds: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def spans(self, start: int, stop: int) -> list[Range]:
        first, last = self.bounds[start // self.rows], self.bounds[-(-stop // self.rows)]
        offsets, sizes = self.offsets[first:last], self.sizes[first:last]
        return list(zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True))


def lies(dataset: Any) -> Lies | None:
    """Where in the file a dataset lies; None where nothing is stored, or elsewhere. Reads the index of its chunks."""
    if _is_in_one_piece(dataset):
        return InOnePiece(dataset.id.get_offset(), dataset.nbytes // dataset.shape[0])
    if not dataset.chunks or dataset.is_virtual:
        return None
    found: list[tuple[int, int, int]] = []
    dataset.id.chunk_iter(lambda chunk: found.append((chunk.chunk_offset[0], chunk.byte_offset, chunk.size)))
    starts, offsets, sizes = np.array(sorted(found), np.int64).reshape(-1, 3).T.copy()
    rows = int(dataset.chunks[0])
    bounds = np.searchsorted(starts, np.arange(0, dataset.shape[0] + rows, rows))
    return InChunks(rows, bounds, offsets, sizes)
