"""What is asked of h5py: a file, its datasets, where and how their rows lie in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.paths import missing
from feedline.core.tensors import torch_dtype
from feedline.datasets.arrays.chunked import Lies, ReadRows, Shape
from feedline.errors import ArgumentError, SampleError
from feedline.stores import StoreError
from feedline.stores.base import Range

_ITSELF = "."
"""What a virtual dataset calls the file in which it lies."""


_ROWS_AT_ONCE = 1024
"""How many rows of a dataset without chunks count as one where they are read through the library."""


def library() -> Any:
    """h5py."""
    return optional.load("h5py", "hdf5", "datasets.HDF5")


def opened(file: Any, path: str) -> Any:
    """The file at a path, or of a file object, open for reading; several programs may read one file at once."""
    h5py = library()
    try:
        return h5py.File(file, "r", locking="best-effort")
    except StoreError:
        raise
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise SampleError(f"{path} cannot be opened as an HDF5 file ({error}); was it written to its end?") from error


def everything(file: Any) -> dict[str, str]:
    """The names of the datasets at the top, and of links to other files that lead nowhere, to be refused."""
    h5py = library()
    return {
        name: name
        for name, item in file.items()
        if isinstance(item, h5py.Dataset) or (item is None and _linked(file, name) is not None)
    }


def _linked(file: Any, name: str) -> Any:
    """The link to another file that a name is, or None."""
    link = file.get(name, getlink=True)
    return link if isinstance(link, library().ExternalLink) else None


def dataset_in(file: Any, name: str, path: str) -> Any:
    """A dataset; ArgumentError tells which there are."""
    h5py = library()
    found = file.get(name)
    if not isinstance(found, h5py.Dataset):
        link = _linked(file, name) if found is None else None
        if link is not None:
            raise ArgumentError(
                f"{name!r} in {path} is a link to {link.path} in {link.filename}, which cannot be opened from there:"
                " put that file where it was, or name other datasets"
            )
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
    others = [name for name in others if name != _ITSELF] + [name for name, _, _ in dataset.external or ()]
    if others:
        raise ArgumentError(
            f"the data of {dataset.name} in {path} lie in other files, such as {others[0]}, and only files of this"
            " machine are read so: read a copy of all of them, or write them as one file (h5repack)"
        )


def refuse_gone(dataset: Any, path: str) -> None:
    """Raise if other files in which the data of a dataset lie are not there, or cannot be opened.

    HDF5 takes the fill value for what a virtual dataset does not find.
    """
    looked_at = set[tuple[str, str]]()
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        for name, _, _ in each.external or ():
            _there(_raw_places(name, each), dataset, path)
        for source in each.virtual_sources() if each.is_virtual else ():
            if "%b" in source.file_name + source.dset_name:  # as many as there are, by definition
                continue
            file = each.file.filename
            if source.file_name != _ITSELF:
                file = _there(_source_places(source.file_name, each), dataset, path)
            if (file, source.dset_name) not in looked_at:
                looked_at.add((file, source.dset_name))
                waiting.append(_source(file, source.dset_name, dataset, path))


def _source(file: str, name: str, dataset: Any, path: str) -> Any:
    found = opened(file, file).get(name)
    if not isinstance(found, library().Dataset):
        raise SampleError(
            f"{dataset.name} in {path} is made of other datasets, and {name} in {file} is not there: put it back, or"
            " make the virtual dataset anew without it"
        )
    return found


def _there(tried: Sequence[Path], dataset: Any, path: str) -> str:
    """The first of these places where there is a file; FileNotFoundError."""
    for place in tried:
        if place.exists():
            return str(place)
    raise missing(tried[0], f"data of {dataset.name} in {path} lie in a file that is not there")


def _source_places(name: str, dataset: Any) -> list[Path]:
    """Where the library looks for a source of a virtual dataset, in this order."""
    own, plain = Path(dataset.file.filename), Path(name.replace("%%", "%"))
    prefixes = [each for each in _expanded(os.environ.get("HDF5_VDS_PREFIX", ""), own).split(":") if each]
    folders = [*map(Path, prefixes), own.parent, Path(), own.resolve().parent]
    if not plain.is_absolute():
        return [folder / plain for folder in folders]
    return [plain, *(folder / plain.name for folder in folders)]  # the folders may have been moved together


def _raw_places(name: str, dataset: Any) -> list[Path]:
    """Where it looks for a file without a format."""
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX") or os.fsdecode(dataset.id.get_access_plist().get_efile_prefix())
    return [Path(_expanded(prefix, Path(dataset.file.filename)), name)]


def _expanded(prefix: str, file: Path) -> str:
    origin = "${ORIGIN}"  # means itself anywhere else
    return f"{file.parent}{prefix.removeprefix(origin)}" if prefix.startswith(origin) else prefix


def refuse_truncated(dataset: Any, path: str, found: int) -> None:
    """SampleError if a plain dataset reaches beyond the `found` bytes of its file."""
    end = dataset.id.get_offset() + dataset.nbytes
    if found < end:
        raise SampleError(f"{path} is truncated: {dataset.name} ends at byte {end} of {found}")


def mapped(dataset: Any) -> NDArray[Any]:
    """The rows of a plain dataset in a file of this machine, which is another one where a link leads to it."""
    path = dataset.file.filename
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
