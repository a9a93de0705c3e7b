"""The parts of h5py that feedline uses.

Opening files, describing datasets, and finding the bytes of their rows, so that rows can be mapped or fetched in
ranges.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape, glob
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.paths import missing_error
from feedline.core.tensors import torch_dtype
from feedline.datasets.arrays.chunked import ByteLayout, ReadRows, Shape
from feedline.datasets.arrays.h5py_checks import chunk_check
from feedline.datasets.arrays.records import decode_texts, delivered_dtype, is_record
from feedline.datasets.arrays.rows import ArrayLayout
from feedline.datasets.signatures import BEGIN_NBYTES, check_format
from feedline.errors import ArgumentError, FeedlineError, MissingExtraError, SampleError
from feedline.stores import StoreError
from feedline.stores.base import Range

_ITSELF = "."
"""File name by which a virtual dataset refers to its own file."""


_ROWS_AT_ONCE = 1024
"""Rows read per call of a dataset that has no chunks and cannot be mapped."""


def library() -> Any:
    """The h5py module; MissingExtraError without it."""
    return optional.load("h5py", "hdf5", "datasets.HDF5")


def open_file(file: Any, path: str) -> Any:
    """Open a path or file object for reading.

    Files are locked only where that is possible, so that several programs may read one file at once.
    """
    h5py = library()
    try:
        return h5py.File(file, "r", locking="best-effort")
    except StoreError:
        raise
    except FileNotFoundError:
        raise missing_error(path) from None
    except OSError as error:
        check_format(path, "HDF5", _begin(file))
        raise SampleError(f"{path} cannot be opened as an HDF5 file ({error}); was it written completely?") from error


def _begin(file: Any) -> bytes:
    """First bytes of a path or file object; empty for a folder."""
    if not isinstance(file, str):
        file.seek(0)
        return bytes(file.read(BEGIN_NBYTES))
    if not Path(file).is_file():
        return b""
    with open(file, "rb", buffering=0) as opened:
        return opened.read(BEGIN_NBYTES)


@contextmanager
def naming_damage(path: str) -> Iterator[None]:
    """Turn h5py's exceptions for damaged metadata into a SampleError."""
    try:
        yield
    except FeedlineError:
        raise
    except (RuntimeError, OSError, KeyError, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk or the store, not of the data
            raise
        raise SampleError(
            f"{path} cannot be read: it is damaged ({type(error).__name__}: {error}); copy it again"
        ) from error


def dataset_names(file: Any) -> dict[str, str]:
    """Names of the datasets at the top level.

    Bytes that are not UTF-8 are surrogates in them, as in names of files. Broken links to other files are included, so
    that opening them raises an error.
    """
    h5py = library()
    return {
        _text(name): _text(name)
        for name, item in file.items()
        if isinstance(item, h5py.Dataset) or (item is None and _external_link(file, name) is not None)
    }


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode(errors="surrogateescape")


def _stored(name: str) -> str | bytes:
    """Name by which h5py finds a dataset: bytes unless it is UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return name.encode(errors="surrogateescape")
    return name


def _shown(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode(errors="backslashreplace")


def _external_link(file: Any, name: str | bytes) -> Any:
    """The external link of a name, or None."""
    try:
        link = file.get(name, getlink=True)
    except UnicodeDecodeError:  # h5py reads a link only if its name is UTF-8
        return None
    return link if isinstance(link, library().ExternalLink) else None


def open_own(file: Any, name: str | bytes) -> None:
    """Open an object, unless it is missing or in another file."""
    stored = _stored(_text(name))
    if _external_link(file, stored) is None:
        file.get(stored)


def dataset_in(file: Any, name: str, path: str) -> Any:
    """Dataset `name`; ArgumentError lists the existing ones."""
    h5py = library()
    item = file.get(_stored(name))
    if not isinstance(item, h5py.Dataset):
        link = _external_link(file, _stored(name)) if item is None else None
        if link is not None:
            raise ArgumentError(
                f"{name!r} in {path} is a link to {link.path} in {link.filename}, which cannot be opened:"
                " restore that file, or name other datasets"
            )
        there: list[str] = []
        file.visititems(lambda each, item: there.append(_shown(each)) if isinstance(item, h5py.Dataset) else None)
        raise ArgumentError(f"{path} has no dataset {name!r}; it has {', '.join(there) or 'none'}")
    try:
        item.dtype  # noqa: B018 - h5py translates the type on access
    except TypeError as error:
        raise ArgumentError(
            f"{name!r} in {path} has a type that h5py does not read ({error}): write it with another (numbers of"
            " float64 instead of PyTables' Time64Col), or name other datasets"
        ) from error
    return item


def shape_of(dataset: Any, name: str, path: str) -> Shape:
    """Metadata of a dataset; ArgumentError for a single value."""
    if not dataset.shape:
        raise ArgumentError(f"{name!r} in {path} is a single value; the first axis of a dataset counts its samples")
    dtype = _number_dtype(dataset, name, path)
    return Shape(name, dataset.shape[0], row_shape(dataset), None if dtype is None else dtype.base, _chunk(dataset))


def row_shape(dataset: Any) -> tuple[int, ...]:
    """Shape of a row, including that of an array type."""
    shape: tuple[int, ...] = dataset.shape[1:] + dataset.dtype.shape
    return shape


def _number_dtype(dataset: Any, name: str, path: str) -> np.dtype[Any] | None:
    """Delivered dtype of the values; None for strings and ragged rows."""
    h5py = library()
    ragged = h5py.check_vlen_dtype(dataset.dtype)
    if h5py.check_string_dtype(dataset.dtype) or (ragged is not None and torch_dtype(ragged) is not None):
        return None
    try:
        delivered = delivered_dtype(dataset.dtype).base
        if not is_record(delivered) and torch_dtype(delivered) is None:
            raise TypeError(f"{dataset.dtype}")
    except TypeError as error:
        raise ArgumentError(
            f"{name!r} in {path} holds {error}, which no tensor can hold; name other datasets"
        ) from None
    return delivered


def _chunk(dataset: Any) -> int:
    if is_mappable(dataset):
        return 1
    return int(dataset.chunks[0]) if dataset.chunks else _ROWS_AT_ONCE


def is_mappable(dataset: Any) -> bool:
    """True if all rows are stored contiguously, exactly as in memory."""
    return _is_contiguous(dataset) and torch_dtype(dataset.dtype) is not None and _is_plain(dataset)


def _is_plain(dataset: Any) -> bool:
    """True if values are stored as NumPy's dtype has them.

    HDF5 has integers that use a part of their bits, which h5py converts.
    """
    return bool(dataset.id.get_type() == library().h5t.py_create(dataset.dtype, logical=True))


def _is_contiguous(dataset: Any) -> bool:
    return (
        dataset.chunks is None
        and not dataset.is_virtual
        and not dataset.external
        and dataset.id.get_offset() is not None
        and dataset.nbytes > 0
        and dataset.id.get_storage_size() == dataset.nbytes  # HDF5 allocates space on the first write only
    )


_NAMED_FILTERS = {
    32000: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32026: "blosc2",
}


def check_filters(dataset: Any, path: str) -> None:
    """Raise MissingExtraError if stored chunks need a filter that HDF5 lacks.

    If filters of hdf5plugin are needed, they are registered here, by an import of the package: a worker that is not
    forked from the training process lacks the imports of the script.
    """
    lacked = _lacked_filters(dataset)
    if lacked and find_spec("hdf5plugin") is not None:
        import_module("hdf5plugin")
        lacked = _lacked_filters(dataset)
    if lacked:
        raise MissingExtraError(
            f"{dataset.name} in {path} is compressed by {' and '.join(lacked)}, which is not installed: pip install"
            " hdf5plugin (for a filter that it lacks, import the package that registers it, or set HDF5_PLUGIN_PATH)"
        )


def is_filtered(dataset: Any) -> bool:
    """True if stored chunks go through filters, such as compression."""
    return bool(dataset.id.get_create_plist().get_nfilters())


def _lacked_filters(dataset: Any) -> list[str]:
    """Names of filters that stored chunks need and HDF5 lacks."""
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(place) for place in range(plist.get_nfilters())]
    lacked = {place: each for place, each in enumerate(filters) if not library().h5z.filter_avail(each[0])}
    if not lacked:
        return []
    # A writer without an optional filter stored the chunks without it, and set the bit of the filter.
    unused = (1 << len(filters)) - 1
    for number in range(dataset.id.get_num_chunks()):
        unused &= dataset.id.get_chunk_info(number).filter_mask
    return [_filter_name(*each) for place, each in lacked.items() if not unused >> place & 1]


def _filter_name(code: int, _flags: int, _values: tuple[int, ...], name: bytes) -> str:
    return f"the filter {_NAMED_FILTERS.get(code) or name.decode(errors='replace') or 'without a name'} ({code})"


def check_in_one_file(dataset: Any, path: str) -> None:
    """Raise ArgumentError if other files have some data of a dataset.

    Such files are not looked up in a store.
    """
    others = [source.file_name for source in dataset.virtual_sources()] if dataset.is_virtual else []
    others = [name for name in others if name != _ITSELF] + [name for name, _, _ in dataset.external or ()]
    if others:
        raise ArgumentError(
            f"the data of {dataset.name} in {path} are in other files, such as {others[0]}, which is supported for"
            " local files only: copy all of them to this machine, or write them as one file (h5repack)"
        )


def check_sources(dataset: Any, path: str) -> set[str]:
    """Paths of all files with data of a dataset.

    Raises unless all data can be opened and decoded. HDF5 itself substitutes the fill value for a missing source of a
    virtual dataset.
    """
    looked_at = set[tuple[str, str]]()  # virtual datasets may refer to each other
    files = set[str]()
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        files.add(each.file.filename)  # that of a link, if the dataset is linked
        check_filters(each, path)
        files |= {_first_existing(_raw_places(name, each), dataset, path) for name, _, _ in each.external or ()}
        for source in each.virtual_sources() if each.is_virtual else ():
            if "%b" in source.file_name + source.dset_name:  # a printf pattern: it may match any number of files
                files |= _matching(source.file_name, each)
                continue
            file = each.file.filename
            if source.file_name != _ITSELF:
                file = _first_existing(_source_places(source.file_name, each), dataset, path)
            if (file, source.dset_name) not in looked_at:
                looked_at.add((file, source.dset_name))
                waiting.append(_open_source(file, source.dset_name, dataset, path))
    return files


def _matching(pattern: str, dataset: Any) -> set[str]:
    """Files for a printf pattern of a virtual dataset."""
    if pattern == _ITSELF:
        return set()
    places = _source_places(pattern, dataset)
    return {found for place in places for found in glob("*".join(map(escape, str(place).split("%b"))))}  # noqa: PTH207


def _open_source(file: str, name: str, dataset: Any, path: str) -> Any:
    source = open_file(file, file).get(name)
    if not isinstance(source, library().Dataset):
        raise SampleError(
            f"{dataset.name} in {path} is a virtual dataset whose source {name} in {file} does not exist: restore it,"
            " or re-create the virtual dataset without it"
        )
    return source


def _first_existing(tried: Sequence[Path], dataset: Any, path: str) -> str:
    """First existing path; FileNotFoundError if there is none."""
    for place in tried:
        if place.exists():
            return str(place)
    raise missing_error(tried[0], f"data of {dataset.name} in {path} are in a file that does not exist")


def _source_places(name: str, dataset: Any) -> list[Path]:
    """Paths for a source of a virtual dataset, in HDF5's order."""
    own, plain = Path(dataset.file.filename), Path(name.replace("%%", "%"))
    prefixes = [each for each in _expand_prefix(os.environ.get("HDF5_VDS_PREFIX", ""), own).split(":") if each]
    folders = [*map(Path, prefixes), own.parent, Path(), own.resolve().parent]
    if not plain.is_absolute():
        return [folder / plain for folder in folders]
    return [plain, *(folder / plain.name for folder in folders)]  # both folders may have been moved together


def _raw_places(name: str, dataset: Any) -> list[Path]:
    """Path at which HDF5 looks for an external raw file."""
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX") or os.fsdecode(dataset.id.get_access_plist().get_efile_prefix())
    return [Path(_expand_prefix(prefix, Path(dataset.file.filename)), name)]


def _expand_prefix(prefix: str, file: Path) -> str:
    origin = "${ORIGIN}"  # expanded only at the start of a prefix, as in HDF5
    return f"{file.parent}{prefix.removeprefix(origin)}" if prefix.startswith(origin) else prefix


def has_heaps(dataset: Any, path: str) -> bool:
    """True if a dataset has values in this file's global heaps."""
    return bool(dataset.dtype.hasobject) and not dataset.is_virtual and dataset.file.filename == path


def size_nbytes(file: Any) -> int:
    """Bytes of a length in the metadata of a file."""
    return int(file.id.get_create_plist().get_sizes()[1])


def check_length(dataset: Any, path: str, nbytes: int) -> None:
    """Raise SampleError if a contiguous dataset ends beyond the file's `nbytes`."""
    end = dataset.id.get_offset() + dataset.nbytes
    if nbytes < end:
        raise SampleError(f"{path} is truncated: {dataset.name} ends at byte {end}, the file at byte {nbytes}")


def array_layout(dataset: Any) -> ArrayLayout:
    """Layout of a contiguous dataset in its file."""
    return ArrayLayout(dataset.dtype, dataset.shape, False, dataset.id.get_offset())


def row_reader(dataset: Any) -> ReadRows:
    """Function that checks, reads and decodes spans of rows."""
    check = chunk_check(dataset)
    strings = library().check_string_dtype(dataset.dtype)
    # Many writers declare all texts as ASCII, which is a part of UTF-8.
    readable = dataset.asstr("utf-8") if strings is not None else dataset

    def read(spans: Sequence[Range]) -> Iterator[NDArray[Any]]:
        for start, stop in spans:
            if check is not None:
                check(start, stop)
            yield decode_texts(readable[start:stop])

    return read


class ContiguousRows(NamedTuple):
    """Rows stored one after the other from byte `offset` on."""

    offset: int
    row_nbytes: int

    def spans(self, start: int, stop: int) -> list[Range]:
        return [(self.offset + start * self.row_nbytes, self.offset + stop * self.row_nbytes)]


class ChunkedBytes(NamedTuple):
    """Rows stored in chunks of `rows` rows.

    Row chunk i consists of the stored chunks `bounds[i]` to `bounds[i + 1]` (exclusive), as further axes may be
    chunked, too.
    """

    rows: int
    bounds: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def spans(self, start: int, stop: int) -> list[Range]:
        first, last = self.bounds[start // self.rows], self.bounds[-(-stop // self.rows)]
        offsets, sizes = self.offsets[first:last], self.sizes[first:last]
        return list(zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True))


def byte_layout(dataset: Any) -> ByteLayout | None:
    """Byte positions of a dataset's rows, read from its chunk index.

    None if no data are stored, or if the data are in other files.
    """
    if _is_contiguous(dataset):
        return ContiguousRows(dataset.id.get_offset(), dataset.nbytes // dataset.shape[0])
    if not dataset.chunks or dataset.is_virtual:
        return None
    chunks: list[tuple[int, int, int]] = []
    dataset.id.chunk_iter(lambda chunk: chunks.append((chunk.chunk_offset[0], chunk.byte_offset, chunk.size)))
    starts, offsets, sizes = np.array(sorted(chunks), np.int64).reshape(-1, 3).T.copy()
    rows = int(dataset.chunks[0])
    bounds = np.searchsorted(starts, np.arange(0, dataset.shape[0] + rows, rows))
    return ChunkedBytes(rows, bounds, offsets, sizes)
