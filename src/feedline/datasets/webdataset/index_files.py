"""Index files of tars: look-up, construction and storage.

The index of a local tar lies next to it, in `index_dir` or in the user's cache. `RemoteIndexes` manages indexes of
objects: they are kept on this machine, copied from next to the objects, or built by reading them.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feedline.core.paths import user_cache
from feedline.core.threads import DaemonPool
from feedline.datasets import array_container
from feedline.datasets.webdataset import build_index as table
from feedline.datasets.webdataset.build_index import Measure
from feedline.datasets.webdataset.index import Head, TarIndex, unfit
from feedline.datasets.webdataset.sources import (
    FileSource,
    ObjectSource,
    TarSource,
    version_of,
)
from feedline.errors import SampleError
from feedline.stores import AccessDeniedError, ObjectNotFoundError, StoreError
from feedline.stores.base import FileVersion
from feedline.stores.cache import without_cache
from feedline.stores.files import FileSet, RemoteBlob
from feedline.stores.urls import check_path, is_local

_log = logging.getLogger("feedline")


Pathlike = str | os.PathLike[str]


def build_index(
    tar: Pathlike, *, allow_truncated: bool = False, grids: table.Grids | None = None, checksum: bool = False
) -> TarIndex:
    """Build the index of a tar in memory; arguments as of `write_index`."""
    with FileSource(_absolute(tar)) as source:
        return TarIndex(
            source.name, *table.compute_index(source, allow_truncated=allow_truncated, grids=grids, checksum=checksum)
        )


def write_index(
    tar: Pathlike,
    index: Pathlike | None = None,
    *,
    allow_truncated: bool = False,
    grids: Mapping[str, NDArray[np.uint16]] | None = None,
    measure: Measure | None = None,
    checksum: bool = False,
) -> Path:
    """Build the index of a tar and write it atomically.

    `index` is the file to write, by default `NAME.tar.index` next to the tar. `grids` are restart interval lengths of
    JPEGs by member name; `measure` computes them from the images. `checksum` adds a checksum of the whole tar, for
    `TarIndex.verify`. ShardError names a member that cannot be in a tar of samples. With `allow_truncated`, samples
    before a truncated member are indexed.
    """
    path = _absolute(tar)
    with FileSource(path) as source:
        metadata, arrays = table.compute_index(
            source, allow_truncated=allow_truncated, grids=grids, measure=measure, checksum=checksum
        )
    place = adjacent(path) if index is None else os.fspath(index)
    array_container.write(place, array_container.pack(metadata, arrays))
    return Path(place)


def open_index(
    tar: Pathlike, index: Pathlike | None = None, *, index_dir: Pathlike | None = None, allow_truncated: bool = False
) -> TarIndex:
    """Open the index of a tar; ShardError if `index` does not match.

    Without `index` it is read from `index_dir`, if given, else from `NAME.tar.index` next to the tar or from the
    user's cache. If none of these matches (see `TarIndex.fits`), it is built, and stored in the first of them that is
    writable.
    """
    path = _absolute(tar)
    source = FileSource(path)
    if index is not None:
        return whole(_open_explicit(source, os.fspath(index)), allow_truncated)
    where = places(path, index_dir)
    for place in where:
        matching = fitting(source, place)
        if matching is not None:
            return whole(matching, allow_truncated)
    with source:
        metadata, arrays = table.compute_index(source, allow_truncated=allow_truncated)
    return kept(TarIndex(path, metadata, arrays), source.version, where)


def glance(tar: str, *, index_dir: Pathlike | None = None, allow_truncated: bool = False) -> Head | None:
    """Head of a valid index, with one small read; None if unknown."""
    head = head_at(places(tar, index_dir)[0], version_of(tar))
    return head if head is not None and (head.cut is None or allow_truncated) else None


def head_at(place: str, version: FileVersion) -> Head | None:
    """Head of the index at `place`; None for another version."""
    try:
        head = Head.of(array_container.read_table(place).metadata, place)
    except (OSError, SampleError):
        return None
    return head if head.version.matches(version) else None


def places(tar: str, index_dir: Pathlike | None) -> tuple[str, ...]:
    """Possible index files of a tar on this machine, in order.

    `tar` is an absolute path or an address.
    """
    if index_dir is not None:
        return (str(Path(index_dir, mirrored(tar)).absolute()),)
    return (adjacent(tar), cached(tar)) if is_local(tar) else (cached(tar),)


def adjacent(tar: str) -> str:
    """The index file next to a tar."""
    return f"{tar}.index"


def cached(tar: str) -> str:
    """The index file of a tar in the user's cache."""
    address = hashlib.blake2b(tar.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return user_cache("shards", f"{address}-{tar.rpartition('/')[2]}.index")


def mirrored(tar: str) -> str:
    """Relative path of a tar's index in an index folder.

    For `s3://bucket/train/0.tar` it is `bucket/train/0.tar.index`.
    """
    path = os.path.abspath(tar) if is_local(tar) else tar.partition("://")[2]  # noqa: PTH100 - links stay
    return adjacent(check_path(path.lstrip("/")))


def fitting(
    source: TarSource, place: str, opening: Callable[[str], array_container.NamedArrays] = array_container.open_mapped
) -> TarIndex | None:
    """Open the index at `place` with `opening`; None without a match.

    An index that exists but does not match is logged.
    """
    try:
        stored = opening(place)
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
        return "grids" in array_container.read_table(place).arrays
    return False


def whole(index: TarIndex, allow_truncated: bool) -> TarIndex:
    """Return the index; ShardError for an unwanted truncated tar."""
    if index.head.cut is not None and not allow_truncated:
        raise index.head.cut.error(index.tar)
    return index


def kept(index: TarIndex, version: FileVersion, where: Sequence[str]) -> TarIndex:
    """Write the index to the first writable place and map it.

    Without a writable place it stays in memory.
    """
    pieces = index.serialize(version)
    for place in where:
        try:
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            array_container.write(place, pieces)
        except OSError:  # read-only or full: try the next place
            continue
        stored = array_container.open_mapped(place)
        return TarIndex(index.tar, stored.metadata, stored.arrays, place)
    _log.warning(
        "feedline: the index of %s stays in memory, and is built again in each process: %s cannot be written to; "
        "give index_dir=, a writable folder",
        index.tar,
        " and ".join(str(Path(place).parent) for place in where),
    )
    index.path = None
    return index


def _absolute(tar: Pathlike) -> str:
    return str(Path(tar).absolute())


def _open_explicit(source: TarSource, place: str) -> TarIndex:
    stored = array_container.open_mapped(place)
    index = TarIndex(source.name, stored.metadata, stored.arrays, place)
    if not index.fits(source):
        raise unfit(source, place)
    return index


_BUILT_AT_ONCE = 8
"""Each holds a few parts of its tar in memory."""


class RemoteIndexes:
    """Indexes of remote tars, kept in `index_dir` or in the user's cache."""

    def __init__(self, blobs: FileSet, index_dir: Pathlike | None, *, allow_truncated: bool) -> None:
        self._blobs = blobs
        self._index_dir = index_dir
        self._allow_truncated = allow_truncated

    def known(self, number: int) -> Head | None:
        """Head of a kept index of the current version, or None."""
        info = self._blobs.info(number)
        return head_at(self._place(number), info.state)

    def found(self, numbers: Sequence[int]) -> list[TarIndex]:
        """The index of each tar; missing ones are fetched or built concurrently."""
        with DaemonPool(thread_name_prefix="feedline-index") as pool:
            indexes = dict(zip(numbers, pool.map(self._look_up_and_keep, numbers), strict=True))
        missing = [number for number in numbers if indexes[number] is None]
        if missing:
            self._log_indexing(missing)
            with DaemonPool(_BUILT_AT_ONCE, "feedline-index") as pool:
                indexes |= zip(missing, pool.map(self._build, missing), strict=True)
        return [index for index in indexes.values() if index is not None]

    def one(self, number: int) -> TarIndex:
        """The index of one tar."""
        return self._look_up_and_keep(number) or self.found([number])[0]

    def _look_up_and_keep(self, number: int) -> TarIndex | None:
        blob, place = self._blob(number), self._place(number)
        index, version = looked_up(blob, place), ObjectSource(blob).version
        if index is None or (index.path == place and index.head.version == version):
            return index
        return kept(index, version, [place])

    def _build(self, number: int) -> TarIndex:
        blob = self._blob(number)
        index = made(blob, allow_truncated=self._allow_truncated)
        return kept(index, index.head.version, [self._place(number)])

    def _blob(self, number: int) -> RemoteBlob:
        blob = self._blobs[number]
        assert isinstance(blob, RemoteBlob)
        return blob

    def _place(self, number: int) -> str:
        return places(self._blobs.name(number), self._index_dir)[0]

    def _log_indexing(self, missing: Sequence[int]) -> None:
        nbytes = sum(self._blobs.info(number).size for number in missing)
        first = self._blobs.name(missing[0])
        _log.warning(
            "feedline: all %s bytes of %d tars (%s, ...) are read once to index them. To share the indexes with "
            "other machines: feedline index %s --into FOLDER, then put NAME.tar.index next to each NAME.tar",
            *(f"{nbytes:,}", len(missing), first, first),
        )


def looked_up(blob: RemoteBlob, place: str) -> TarIndex | None:
    """The matching index at `place`, or next to the object."""
    source = ObjectSource(blob)
    return fitting(source, place) or fitting(source, adjacent(blob.name), partial(_adjacent, blob))


def made(
    blob: RemoteBlob, *, allow_truncated: bool = False, measure: Measure | None = None, checksum: bool = False
) -> TarIndex:
    """Build the index of an object by reading all of it.

    Arguments are those of `write_index`.
    """
    with ObjectSource(blob) as source:
        metadata, arrays = table.compute_index(
            source, allow_truncated=allow_truncated, measure=measure, checksum=checksum
        )
    return TarIndex(blob.name, metadata, arrays)


def _adjacent(blob: RemoteBlob, name: str) -> array_container.NamedArrays:
    try:  # past the cache: the index is stored as a file of its own
        return array_container.parse(bytes(without_cache(blob.store).read(adjacent(blob.path))), name)
    except AccessDeniedError:  # without the right to list, stores deny access to missing objects
        raise ObjectNotFoundError(f"{name} does not exist, or access is denied") from None
