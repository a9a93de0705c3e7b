"""Index files of tars: look-up, construction and storage.

The index of a local tar is next to it, in `index_dir` or in the user's cache. Indexes of objects are kept on this
machine, copied from next to the objects, or built by reading them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feedline.core.paths import Pathlike, folder_path
from feedline.datasets.array_container import NamedArrays
from feedline.datasets.indexes import IndexFile, index_path, read_adjacent
from feedline.datasets.webdataset import build_index as table
from feedline.datasets.webdataset.index import Head, TarIndex, mismatch_error
from feedline.datasets.webdataset.sources import TarSource
from feedline.datasets.webdataset.tar import ShardError
from feedline.errors import SampleError, StateError
from feedline.stores import StoreError
from feedline.stores.base import FileVersion
from feedline.stores.files import FileSet, local_info
from feedline.stores.urls import check_path, is_local

_log = logging.getLogger("feedline")


Tar = Pathlike | TarSource
"""The path of a tar, or access to a file or object."""


def build_index(
    tar: Tar,
    *,
    allow_truncated: bool = False,
    grids: table.Grids | None = None,
    measure: table.MeasureGrid | None = None,
    checksum: bool = False,
) -> TarIndex:
    """Build the index of a tar in memory.

    Takes the arguments of `write_index`.

    An object is read completely.
    """
    source = _source(tar)
    try:
        with source:
            metadata, arrays = table.compute_index(
                source, allow_truncated=allow_truncated, grids=grids, measure=measure, checksum=checksum
            )
    except StateError as error:
        raise ShardError(f"{source.name} changed while it was indexed. Wait until its writer has finished") from error
    return TarIndex(source.name, metadata, arrays)


def write_index(
    tar: Pathlike,
    index: Pathlike | None = None,
    *,
    grids: Mapping[str, NDArray[np.uint16]] | None = None,
    measure: table.MeasureGrid | None = None,
    checksum: bool = False,
) -> Path:
    """Build the index of a tar and write it atomically.

    `index` is the file to write, by default `NAME.tar.index` next to the tar. `grids` are restart interval lengths of
    JPEGs by member name; `measure` computes them from the images. `checksum` adds a checksum of the whole tar, for
    `TarIndex.verify`. ShardError names a member that cannot be in a tar of samples.
    """
    built = build_index(tar, grids=grids, measure=measure, checksum=checksum)
    place = adjacent_index_path(built.tar) if index is None else os.fspath(index)
    built.write(place, built.head.version)
    return Path(place)


def open_index(
    tar: Tar, index: Pathlike | None = None, *, index_dir: Pathlike | None = None, allow_truncated: bool = False
) -> TarIndex:
    """Open the index of a tar; ShardError if `index` does not match.

    Without `index` it is read from `index_dir`, if given, else from `NAME.tar.index` next to the tar or from the user's
    cache. If none of these matches (see `TarIndex.fits`), the index is built, and stored in the first of these places
    that is writable.
    """
    source = _source(tar)
    if index is not None:
        return check_not_truncated(_open_explicit(source, os.fspath(index)), allow_truncated)
    found = find_index(source, index_dir)
    if found is None:
        return build_and_keep(source, index_dir, allow_truncated=allow_truncated)
    return check_not_truncated(found, allow_truncated)


def build_and_keep(source: TarSource, index_dir: Pathlike | None, *, allow_truncated: bool) -> TarIndex:
    """Build the index of a tar, and store it if possible."""
    built = build_index(source, allow_truncated=allow_truncated)
    return save_index(built, built.head.version, index_paths(source.name, index_dir))


def find_index(source: TarSource, index_dir: Pathlike | None) -> TarIndex | None:
    """The matching index of a tar, or None.

    An index next to an object is copied to this machine.
    """
    where = index_paths(source.name, index_dir)
    for place in where:
        index = open_matching(source, place)
        if index is not None:
            # The index of a file may be in a folder without write access, and then remains the index of a copy.
            is_current = is_local(source.name) or index.head.version == source.version
            return index if is_current else save_index(index, source.version, where)
    name, file = adjacent_index_path(source.name), source.file
    index = open_matching(source, name, lambda: read_adjacent(file, name.rpartition("/")[2]))
    return None if index is None else save_index(index, source.version, where)


def read_head(
    tar: str, version: FileVersion | None = None, *, index_dir: Pathlike | None = None, allow_truncated: bool = False
) -> Head | None:
    """Head of a valid index, by one small read; None if unknown.

    `version` is the version of the tar; without it, the version of a file is looked up.
    """
    place = index_paths(tar, index_dir)[0]
    try:
        head = Head.of(IndexFile(place).read_table().metadata, place)
    except (OSError, SampleError):
        return None
    if not head.version.matches(version or local_info(tar).state):
        return None
    return head if head.cut is None or allow_truncated else None


def index_paths(tar: str, index_dir: Pathlike | None) -> tuple[str, ...]:
    """Possible index files of a tar on this machine, in order.

    `tar` is an absolute path or an address.
    """
    if index_dir is not None:
        return (str(folder_path(index_dir, "index_dir") / relative_index_path(tar)),)
    cached = index_path(tar, f"{tar.rpartition('/')[2]}.index", None)
    return (adjacent_index_path(tar), cached) if is_local(tar) else (cached,)


def adjacent_index_path(tar: str) -> str:
    """The index file next to a tar."""
    return f"{tar}.index"


def without_indexes(files: FileSet) -> FileSet:
    """Leave out the indexes of the other files.

    Patterns such as `*.tar*` match them.
    """
    indexes = {adjacent_index_path(name) for name in files.names}
    kept = [number for number, name in enumerate(files.names) if name not in indexes]
    if len(kept) == len(files):
        return files
    return FileSet([(files.store(number), files.info(number)) for number in kept])


def relative_index_path(tar: str) -> str:
    """Relative path of a tar's index in an index folder.

    For `s3://bucket/train/0.tar` it is `bucket/train/0.tar.index`.
    """
    path = os.path.abspath(tar) if is_local(tar) else tar.partition("://")[2]  # noqa: PTH100 - links stay
    return adjacent_index_path(check_path(path.lstrip("/")))


def open_matching(source: TarSource, place: str, opening: Callable[[], NamedArrays] | None = None) -> TarIndex | None:
    """Open the index at `place`, or with `opening`; None without a match.

    An index that exists but does not match is logged.
    """
    try:
        stored = IndexFile(place).open() if opening is None else opening()
        index = TarIndex(source.name, stored.metadata, stored.arrays, place)
        if index.fits(source):
            return index
        reason, had_grids = "the tar has changed", "grids" in stored.arrays
    except FileNotFoundError:
        return None
    except StoreError:
        raise
    except (OSError, SampleError) as error:
        reason, had_grids = str(error), _had_grids(place)
    remedy = f": restore them with feedline index --rebuild {source.name}"
    lost = f", without the restart offsets for decoding parts of images{remedy}" if had_grids else ""
    _log.warning("feedline: the index %s is built again%s (%s)", place, lost, reason)
    return None


def _had_grids(place: str) -> bool:
    """True if the head of a damaged index still lists grid lengths."""
    with suppress(OSError, SampleError):
        return "grids" in IndexFile(place).read_table().arrays
    return False


def check_not_truncated(index: TarIndex, allow_truncated: bool) -> TarIndex:
    """Return the index; ShardError for an unwanted truncated tar."""
    if index.head.cut is not None and not allow_truncated:
        raise index.head.cut.error(index.tar)
    return index


def save_index(index: TarIndex, version: FileVersion, where: Sequence[str]) -> TarIndex:
    """Write the index to the first writable place and map it.

    Without a writable place, the index stays in memory.
    """
    # The folder of the data is often read-only, but the user's cache almost never.
    for place in where:
        try:
            index.write(place, version)
        except OSError:  # read-only or full: try the next place
            continue
        stored = IndexFile(place).open()
        return TarIndex(index.tar, stored.metadata, stored.arrays, place)
    _log.warning(
        "feedline: the index of %s stays in memory, and is built again in each process: %s cannot be written to; "
        "give index_dir=, a writable folder",
        index.tar,
        " and ".join(str(Path(place).parent) for place in where),
    )
    index.path = None
    return index


def _source(tar: Tar) -> TarSource:
    return TarSource.at(tar) if isinstance(tar, (str, os.PathLike)) else tar


def _open_explicit(source: TarSource, place: str) -> TarIndex:
    stored = IndexFile(place).open()
    index = TarIndex(source.name, stored.metadata, stored.arrays, place)
    if not index.fits(source):
        raise mismatch_error(source, place)
    return index
