"""The index of a tar: found beside it, in a folder for such things or in the cache, else built and kept there.

The indexes of tars in stores: kept on this machine, taken over from beside the objects, or made by reading them.
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
    """The index of a tar, made from its headers, in memory; see `write_index`."""
    with FileSource(_absolute(tar)) as source:
        return TarIndex(
            source.name, *table.built(source, allow_truncated=allow_truncated, grids=grids, checksum=checksum)
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
    """Make the index of a tar anew and write it to `index` (None: `NAME.tar.index` beside it), whole or not at all.

    `grids` are the lengths of the restart intervals of JPEGs by member name, `measure` finds them in the pictures;
    `checksum` adds that of the whole tar, for `Index.verify`. ShardError names a member that cannot be in a tar of
    samples; with `allow_truncated`, the samples before the member at which the tar ends are kept.
    """
    path = _absolute(tar)
    with FileSource(path) as source:
        told, held = table.built(
            source, allow_truncated=allow_truncated, grids=grids, measure=measure, checksum=checksum
        )
    place = beside(path) if index is None else os.fspath(index)
    array_container.write(place, array_container.packed(told, held))
    return Path(place)


def open_index(
    tar: Pathlike, index: Pathlike | None = None, *, index_dir: Pathlike | None = None, allow_truncated: bool = False
) -> TarIndex:
    """The index of a tar, mapped from `index`; ShardError if it does not fit the tar (see `Index.fits`).

    With None: from `NAME.tar.index` beside the tar, or from the cache folder; built, and kept in the first of the two
    that can be written to, where there is none that fits. With `index_dir`: from there, and kept there.
    """
    path = _absolute(tar)
    source = FileSource(path)
    if index is not None:
        return whole(_given(source, os.fspath(index)), allow_truncated)
    where = places(path, index_dir)
    for place in where:
        found = fitting(source, place)
        if found is not None:
            return whole(found, allow_truncated)
    with source:
        told, held = table.built(source, allow_truncated=allow_truncated)
    return kept(TarIndex(path, told, held), source.version, where)


def glance(tar: str, *, index_dir: Pathlike | None = None, allow_truncated: bool = False) -> Head | None:
    """The head of the index that is there already, with one small read; None where `open_index` has to look closer."""
    head = head_at(places(tar, index_dir)[0], version_of(tar))
    return head if head is not None and (head.cut is None or allow_truncated) else None


def head_at(place: str, version: FileVersion) -> Head | None:
    """The head of the index at `place` if it is that of a tar of this version, with one small read."""
    try:
        head = Head.of(array_container.table_of(place).told, place)
    except (OSError, SampleError):
        return None
    return head if head.version.matches(version) else None


def places(tar: str, index_dir: Pathlike | None) -> tuple[str, ...]:
    """Where the index of a tar, given by its absolute path or its address, is looked for on this machine, in order."""
    if index_dir is not None:
        return (str(Path(index_dir, mirrored(tar)).absolute()),)
    return (beside(tar), cached(tar)) if is_local(tar) else (cached(tar),)


def beside(tar: str) -> str:
    """Where the index of a tar is looked for first."""
    return f"{tar}.index"


def cached(tar: str) -> str:
    """Where it is kept for objects, and when the tar's own folder cannot be written to."""
    address = hashlib.blake2b(tar.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return user_cache("shards", f"{address}-{tar.rpartition('/')[2]}.index")


def mirrored(tar: str) -> str:
    """Its place in a folder for indexes: `bucket/train/0.tar.index` is that of `s3://bucket/train/0.tar`."""
    path = os.path.abspath(tar) if is_local(tar) else tar.partition("://")[2]  # noqa: PTH100 - links stay
    return beside(check_path(path.lstrip("/")))


def fitting(
    source: TarSource, place: str, opening: Callable[[str], array_container.NamedArrays] = array_container.opened
) -> TarIndex | None:
    """The index that `opening` finds at `place`, if it fits; one that does not is told in a line of the log."""
    try:
        held = opening(place)
        index = TarIndex(source.name, held.told, held.arrays, place)
        if index.fits(source):
            return index
        reason, had_grids = "the tar has changed", "grids" in held.arrays
    except FileNotFoundError:
        return None
    except StoreError:
        raise
    except (OSError, SampleError) as error:
        reason, had_grids = str(error), _had_grids(place)
    remedy = f": restore them with feedline index --rebuild {source.name}"
    lost = f", without the offsets that decode parts of pictures{remedy}" if had_grids else ""
    _log.warning("feedline: the index %s is made anew%s (%s)", place, lost, reason)
    return None


def _had_grids(place: str) -> bool:
    """Whether a damaged index held the lengths of grids, as far as its head can still tell."""
    with suppress(OSError, SampleError):
        return "grids" in array_container.table_of(place).arrays
    return False


def whole(index: TarIndex, allow_truncated: bool) -> TarIndex:
    """The index; ShardError if it is that of a truncated tar and such are not wanted."""
    if index.head.cut is not None and not allow_truncated:
        raise index.head.cut.error(index.tar)
    return index


def kept(index: TarIndex, version: FileVersion, where: Sequence[str]) -> TarIndex:
    """The index as mapped from the first of these places that it could be written to; else as it is, in memory."""
    pieces = index.written(version)
    for place in where:
        try:
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            array_container.write(place, pieces)
        except OSError:  # a read-only folder, a full disk: there may be another place
            continue
        held = array_container.opened(place)
        return TarIndex(index.tar, held.told, held.arrays, place)
    _log.warning(
        "feedline: the index of %s is held in memory, and made again in each process: %s can not be written to; "
        "give index_dir=, a folder that can be",
        index.tar,
        " and ".join(str(Path(place).parent) for place in where),
    )
    index.path = None
    return index


def _absolute(tar: Pathlike) -> str:
    return str(Path(tar).absolute())


def _given(source: TarSource, place: str) -> TarIndex:
    held = array_container.opened(place)
    index = TarIndex(source.name, held.told, held.arrays, place)
    if not index.fits(source):
        raise unfit(source, place)
    return index


_MADE_AT_ONCE = 8
"""Of each of these, some parts are in memory."""


class FarIndexes:
    """The indexes of those of some blobs that are objects, kept in `index_dir`, or in the user's cache."""

    def __init__(self, blobs: FileSet, index_dir: Pathlike | None, *, allow_truncated: bool) -> None:
        self._blobs = blobs
        self._index_dir = index_dir
        self._allow_truncated = allow_truncated

    def known(self, number: int) -> Head | None:
        """The head of the index that is kept here, with one small read; None where there is none of this version."""
        info = self._blobs.info(number)
        return head_at(self._place(number), info.state)

    def found(self, numbers: Sequence[int]) -> list[TarIndex]:
        """The index of each; those that are not here yet are fetched, or else made, several at once."""
        with DaemonPool(thread_name_prefix="feedline-index") as pool:
            indexes = dict(zip(numbers, pool.map(self._there, numbers), strict=True))
        missing = [number for number in numbers if indexes[number] is None]
        if missing:
            self._tell(missing)
            with DaemonPool(_MADE_AT_ONCE, "feedline-index") as pool:
                indexes |= zip(missing, pool.map(self._made, missing), strict=True)
        return [index for index in indexes.values() if index is not None]

    def one(self, number: int) -> TarIndex:
        """That of one, which usually is here."""
        return self._there(number) or self.found([number])[0]

    def _there(self, number: int) -> TarIndex | None:
        blob, place = self._blob(number), self._place(number)
        index, version = looked_up(blob, place), ObjectSource(blob).version
        if index is None or (index.path == place and index.head.version == version):
            return index
        return kept(index, version, [place])

    def _made(self, number: int) -> TarIndex:
        blob = self._blob(number)
        index = made(blob, allow_truncated=self._allow_truncated)
        return kept(index, index.head.version, [self._place(number)])

    def _blob(self, number: int) -> RemoteBlob:
        blob = self._blobs[number]
        assert isinstance(blob, RemoteBlob)
        return blob

    def _place(self, number: int) -> str:
        return places(self._blobs.name(number), self._index_dir)[0]

    def _tell(self, missing: Sequence[int]) -> None:
        nbytes = sum(self._blobs.info(number).size for number in missing)
        first = self._blobs.name(missing[0])
        _log.warning(
            "feedline: all %s bytes of %d tars (%s, ...) are read once to index them. To have the indexes on other "
            "machines: feedline index %s --into FOLDER, then put NAME.tar.index beside each NAME.tar",
            *(f"{nbytes:,}", len(missing), first, first),
        )


def looked_up(blob: RemoteBlob, place: str) -> TarIndex | None:
    """The index at `place`, or else that which lies beside the object, if it fits."""
    source = ObjectSource(blob)
    return fitting(source, place) or fitting(source, beside(blob.name), partial(_beside, blob))


def made(
    blob: RemoteBlob, *, allow_truncated: bool = False, measure: Measure | None = None, checksum: bool = False
) -> TarIndex:
    """The index of an object in memory, made by reading all of it; for arguments see `sidecar.write_index`."""
    with ObjectSource(blob) as source:
        told, held = table.built(source, allow_truncated=allow_truncated, measure=measure, checksum=checksum)
    return TarIndex(blob.name, told, held)


def _beside(blob: RemoteBlob, name: str) -> array_container.NamedArrays:
    try:  # past the cache: the index is kept as a file of its own
        return array_container.held(bytes(without_cache(blob.store).read(beside(blob.path))), name)
    except AccessDeniedError:  # who may not list a bucket is told so of what is not there
        raise ObjectNotFoundError(f"{name} is not there, or may not be read") from None
