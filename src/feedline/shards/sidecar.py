"""The index of a tar: found beside it, in a folder for such things or in the cache, else built and kept there."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feedline.errors import SampleError
from feedline.shards import arrays, table
from feedline.shards.index import Head, Index, unfit
from feedline.shards.looks import Measure
from feedline.shards.reading import FileSource, Source, Version, version_of
from feedline.stores import StoreError
from feedline.stores.addresses import checked, scheme_of
from feedline.user_cache import user_cache

_log = logging.getLogger("feedline")

Pathlike = str | os.PathLike[str]


def build_index(
    tar: Pathlike, *, allow_truncated: bool = False, grids: table.Grids | None = None, checksum: bool = False
) -> Index:
    """The index of a tar, made from its headers, in memory; see `write_index`."""
    with FileSource(_absolute(tar)) as source:
        return Index(source.name, *table.built(source, allow_truncated=allow_truncated, grids=grids, checksum=checksum))


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
    arrays.write(place, arrays.packed(told, held))
    return Path(place)


def open_index(
    tar: Pathlike, index: Pathlike | None = None, *, folder: Pathlike | None = None, allow_truncated: bool = False
) -> Index:
    """The index of a tar, mapped from `index`; ShardError if it does not fit the tar (see `Index.fits`).

    With None: from `NAME.tar.index` beside the tar, or from the cache folder; built, and kept in the first of the two
    that can be written to, where there is none that fits. With `folder`: from there, and kept there.
    """
    path = _absolute(tar)
    source = FileSource(path)
    if index is not None:
        return whole(_given(source, os.fspath(index)), allow_truncated)
    where = places(path, folder)
    for place in where:
        found = fitting(source, place)
        if found is not None:
            return whole(found, allow_truncated)
    with source:
        told, held = table.built(source, allow_truncated=allow_truncated)
    return kept(Index(path, told, held), source.version, where)


def glance(tar: str, *, folder: Pathlike | None = None, allow_truncated: bool = False) -> Head | None:
    """The head of the index that is there already, with one small read; None where `open_index` has to look closer."""
    head = head_at(places(tar, folder)[0], version_of(tar))
    return head if head is not None and (head.cut is None or allow_truncated) else None


def head_at(place: str, version: Version) -> Head | None:
    """The head of the index at `place` if it is that of a tar of this version, with one small read."""
    try:
        head = Head.of(arrays.table_of(place).told, place)
    except (OSError, SampleError):
        return None
    return head if head.version.same(version) else None


def places(tar: str, folder: Pathlike | None) -> tuple[str, ...]:
    """Where the index of a tar, given by its absolute path or its address, is looked for on this machine, in order."""
    if folder is not None:
        return (str(Path(folder, mirrored(tar)).absolute()),)
    return (beside(tar), cached(tar)) if scheme_of(tar) == "file" else (cached(tar),)


def beside(tar: str) -> str:
    """Where the index of a tar is looked for first."""
    return f"{tar}.index"


def cached(tar: str) -> str:
    """Where it is kept for objects, and when the tar's own folder cannot be written to."""
    address = hashlib.blake2b(tar.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return user_cache("shards", f"{address}-{tar.rpartition('/')[2]}.index")


def mirrored(tar: str) -> str:
    """Its place in a folder for indexes: `bucket/train/0.tar.index` is that of `s3://bucket/train/0.tar`."""
    path = os.path.abspath(tar) if scheme_of(tar) == "file" else tar.partition("://")[2]  # noqa: PTH100 - links stay
    return beside(checked(path.lstrip("/")))


def fitting(source: Source, place: str, opening: Callable[[str], arrays.Arrays] = arrays.opened) -> Index | None:
    """The index that `opening` finds at `place`, if it fits; one that does not is told in a line of the log."""
    try:
        held = opening(place)
        index = Index(source.name, held.told, held.arrays, place)
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
        return "grids" in arrays.table_of(place).arrays
    return False


def whole(index: Index, allow_truncated: bool) -> Index:
    """The index; ShardError if it is that of a truncated tar and such are not wanted."""
    if index.head.cut is not None and not allow_truncated:
        raise index.head.cut.error(index.tar)
    return index


def kept(index: Index, version: Version, where: Sequence[str]) -> Index:
    """The index as mapped from the first of these places that it could be written to; else as it is, in memory."""
    pieces = index.written(version)
    for place in where:
        try:
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            arrays.write(place, pieces)
        except OSError:  # a read-only folder, a full disk: there may be another place
            continue
        held = arrays.opened(place)
        return Index(index.tar, held.told, held.arrays, place)
    _log.warning(
        "feedline: the index of %s is held in memory, and made again in each process: %s can not be written to; "
        "give index=, a folder that can be",
        index.tar,
        " and ".join(str(Path(place).parent) for place in where),
    )
    index.path = None
    return index


def _absolute(tar: Pathlike) -> str:
    return str(Path(tar).absolute())


def _given(source: Source, place: str) -> Index:
    held = arrays.opened(place)
    index = Index(source.name, held.told, held.arrays, place)
    if not index.fits(source):
        raise unfit(source, place)
    return index
