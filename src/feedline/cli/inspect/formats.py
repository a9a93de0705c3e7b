"""Which format lies at paths and addresses: told by names, and by what an `index.json` names."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

from feedline.datasets.webdataset import is_image
from feedline.errors import ArgumentError
from feedline.stores import open_store
from feedline.stores.urls import is_local, local_path, scheme_row

_LOOKED_AT = 1000
"""So many names of a folder tell what it is."""


class InspectedFormat(enum.StrEnum):
    """What `feedline inspect` reads, as people are told."""

    FILES = "pictures"
    TAR = "tar shards"
    PARQUET = "Parquet"
    ARROW = "Arrow"
    TFRECORD = "TFRecord"
    JSONL = "JSONL"
    CSV = "CSV"
    LINES = "lines of text"
    MDS = "MDS"
    LITDATA = "LitData"
    HDF5 = "HDF5"
    ZARR = "Zarr"
    NPY = "NumPy arrays"
    TOKENS = "bare numbers"
    LMDB = "LMDB"


_SUFFIXES = {
    ".tar": InspectedFormat.TAR,
    ".parquet": InspectedFormat.PARQUET,
    ".arrow": InspectedFormat.ARROW,
    ".feather": InspectedFormat.ARROW,
    ".tfrecord": InspectedFormat.TFRECORD,
    ".jsonl": InspectedFormat.JSONL,
    ".csv": InspectedFormat.CSV,
    ".h5": InspectedFormat.HDF5,
    ".hdf5": InspectedFormat.HDF5,
    ".zarr": InspectedFormat.ZARR,
    ".npy": InspectedFormat.NPY,
    ".lmdb": InspectedFormat.LMDB,
    ".mdb": InspectedFormat.LMDB,
}


_NAMED_SUFFIXES = {**_SUFFIXES, ".txt": InspectedFormat.LINES, ".bin": InspectedFormat.TOKENS}
"""Also what a file is only if it is given itself: beside others it may be a caption, or anything."""


_MARKS = {
    "zarr.json": InspectedFormat.ZARR,
    ".zgroup": InspectedFormat.ZARR,
    ".zarray": InspectedFormat.ZARR,
    "data.mdb": InspectedFormat.LMDB,
}


_FOLDERS = (InspectedFormat.ZARR, InspectedFormat.LMDB)
"""A folder may be one of these by its name; of what else is in folders, the files tell."""


_KNOWN = (
    "pictures in folders, .tar, .parquet, .arrow, .tfrecord, .jsonl, .csv, .txt, .h5, .zarr, .npy and .lmdb files, and"
    " folders of MDS and LitData"
)


def format_of(sources: Sequence[str]) -> InspectedFormat:
    """The one format of all sources; ArgumentError where it is not known, or not one."""
    found = {source: _format_of(source) for source in sources}
    if len(set(found.values())) > 1:
        each = ", ".join(f"{source} holds {format_}" for source, format_ in found.items())
        raise ArgumentError(f"{each}: take one format after the other")
    return next(iter(found.values()))


def _format_of(source: str) -> InspectedFormat:
    named, path = _by_name(source, _NAMED_SUFFIXES), Path(local_path(source))
    if named is not None and (named in _FOLDERS or not path.is_dir()):
        return named
    if is_local(source) and not path.exists():
        raise ArgumentError(f"{source} does not exist")
    if path.is_file():
        raise ArgumentError(f"{source} is nothing that this reads: {_KNOWN}")
    names = [*islice(_names(source), _LOOKED_AT)]
    found = _marked(source, names) or _of_files(names)
    if found is None:
        raise ArgumentError(f"{source} holds nothing that this reads: {_KNOWN}")
    return found


def _by_name(name: str, suffixes: dict[str, InspectedFormat]) -> InspectedFormat | None:
    """By the suffix, which numbers may follow: `train.tfrecord-00000-of-00016`."""
    last = PurePosixPath(name).name.lower()
    if ".tfrecord" in last:
        return InspectedFormat.TFRECORD
    return InspectedFormat.ZARR if last.endswith(".zarr.zip") else suffixes.get(PurePosixPath(last).suffix)


def _marked(source: str, names: Sequence[str]) -> InspectedFormat | None:
    """By a file that only one format has."""
    if "index.json" in names:
        return _indexed(source)
    return next((_MARKS[name] for name in names if name in _MARKS), None)


def _of_files(names: Sequence[str]) -> InspectedFormat | None:
    """By the first file that tells; pictures may have a list beside them."""
    if any(is_image(PurePosixPath(name).suffix[1:].lower()) for name in names):
        tars = any(_by_name(name, _SUFFIXES) is InspectedFormat.TAR for name in names if "/" not in name)
        return InspectedFormat.TAR if tars else InspectedFormat.FILES
    found = ((_by_name(name, _SUFFIXES), name) for name in names)
    return next((each for each, name in found if each and (each is not InspectedFormat.TAR or "/" not in name)), None)


def _indexed(source: str) -> InspectedFormat:
    if is_local(source):
        data = Path(local_path(source), "index.json").read_bytes()
    else:
        data = bytes(open_store(source.rstrip("/")).read("index.json"))
    try:
        return InspectedFormat.LITDATA if "chunks" in json.loads(data) else InspectedFormat.MDS
    except (ValueError, TypeError, RecursionError):
        return InspectedFormat.MDS  # whose reader says what is wrong with it


def _names(source: str) -> Iterator[str]:
    """The files of a folder, by their paths within it; those of its top come first, as far as a store can tell."""
    if is_local(source):
        yield from _files(local_path(source))
        return
    store = open_store(source.rstrip("/"))
    if not scheme_row(source).lists:
        store.info("index.json")
        yield "index.json"
        return
    yield from (info.path for info in store.list())


def _files(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        inner = PurePosixPath(Path(place).relative_to(folder).as_posix())
        yield from (str(inner / name) for name in sorted(names) if not name.startswith(".") or name in _MARKS)
