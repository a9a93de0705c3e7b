"""The index of a tar: found beside it or in the cache, else built and kept there."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.errors import SampleError
from feedline.shards import arrays, table
from feedline.shards.fingerprints import Version, version_of
from feedline.shards.index import Head, Index, unfit

_log = logging.getLogger("feedline")

Pathlike = str | os.PathLike[str]


def build_index(
    tar: Pathlike, *, allow_truncated: bool = False, grids: table.Grids | None = None, checksum: bool = False
) -> Index:
    """The index of a tar, made from its headers, in memory; see `write_index`."""
    path = _absolute(tar)
    return Index(path, *table.built(path, allow_truncated=allow_truncated, grids=grids, checksum=checksum))


def write_index(
    tar: Pathlike,
    index: Pathlike | None = None,
    *,
    allow_truncated: bool = False,
    grids: Mapping[str, NDArray[np.uint16]] | None = None,
    checksum: bool = False,
) -> Path:
    """Make the index of a tar anew and write it to `index` (None: `NAME.tar.index` beside it), whole or not at all.

    `grids` are the lengths of the restart intervals of JPEGs by member name; `checksum` adds that of the whole tar,
    for `Index.verify`. ShardError names a member that cannot be in a tar of samples; with `allow_truncated`, the
    samples before the member at which the tar ends are kept.
    """
    path = _absolute(tar)
    told, held = table.built(path, allow_truncated=allow_truncated, grids=grids, checksum=checksum)
    place = beside(path) if index is None else os.fspath(index)
    arrays.write(place, arrays.packed(told, held))
    return Path(place)


def open_index(tar: Pathlike, index: Pathlike | None = None, *, allow_truncated: bool = False) -> Index:
    """The index of a tar, mapped from `index`; ShardError if it does not fit the tar (see `Index.fits`).

    With None: from `NAME.tar.index` beside the tar, or from the cache folder; built, and kept in the first of the two
    that can be written to, where there is none that fits.
    """
    path = _absolute(tar)
    if index is not None:
        return _whole(_given(path, os.fspath(index)), allow_truncated)
    version = version_of(path)
    for place in (beside, cached):
        found = _fitting(path, place(path), version)
        if found is not None:
            return _whole(found, allow_truncated)
    return _made(path, allow_truncated)


def glance(tar: str, *, allow_truncated: bool = False) -> Head | None:
    """The head of the index beside a tar, with one small read; None where `open_index` has to look closer."""
    version = version_of(tar)
    try:
        place = beside(tar)
        head = Head.of(arrays.table_of(place).told, place)
    except (OSError, SampleError):
        return None
    return head if head.version == version and (head.cut is None or allow_truncated) else None


def beside(tar: str) -> str:
    """Where the index of a tar is looked for first."""
    return f"{tar}.index"


def cached(tar: str) -> str:
    """Where it is kept when the tar's own folder cannot be written to."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    address = hashlib.blake2b(tar.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return str(Path(cache, "feedline", "shards", f"{address}-{Path(tar).name}.index"))


def _absolute(tar: Pathlike) -> str:
    return str(Path(tar).absolute())


def _given(tar: str, place: str) -> Index:
    held = arrays.opened(place)
    index = Index(tar, held.told, held.arrays, place)
    if not index.fits(version_of(tar)):
        raise unfit(tar, place)
    return index


def _fitting(tar: str, place: str, version: Version) -> Index | None:
    """The index at `place` if there is one that fits; one that does not is made anew, which a line of the log says."""
    try:
        held = arrays.opened(place)
        index = Index(tar, held.told, held.arrays, place)
        if index.fits(version):
            return index
        reason = "the tar has changed"
    except FileNotFoundError:
        return None
    except (OSError, SampleError) as error:
        reason, held = str(error), arrays.Arrays({}, {})
    remedy = f": restore them with feedline index --rebuild {tar}"
    lost = f", without the offsets that decode parts of pictures{remedy}" if "grids" in held.arrays else ""
    _log.warning("feedline: the index %s is made anew%s (%s)", place, lost, reason)
    return None


def _whole(index: Index, allow_truncated: bool) -> Index:
    if index.head.cut is not None and not allow_truncated:
        raise index.head.cut.error(index.tar)
    return index


def _made(tar: str, allow_truncated: bool) -> Index:
    """The index, built and kept where that can be."""
    told, held = table.built(tar, allow_truncated=allow_truncated)
    pieces = arrays.packed(told, held)
    for place in (beside(tar), cached(tar)):
        kept = _kept(tar, place, pieces)
        if kept is not None:
            return kept
    _log.warning(
        "feedline: the index of %s is held in memory, and built again in each process: neither its folder nor %s can "
        "be written to",
        tar,
        Path(cached(tar)).parent,
    )
    return Index(tar, told, held)


def _kept(tar: str, place: str, pieces: list[Any]) -> Index | None:
    try:
        if place != beside(tar):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
        arrays.write(place, pieces)
    except OSError:  # a read-only folder, a full disk: there is another place
        return None
    held = arrays.opened(place)
    return Index(tar, held.told, held.arrays, place)
