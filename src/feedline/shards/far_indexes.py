"""The indexes of tars in stores: kept on this machine, taken over from beside the objects, or made by reading them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from feedline.cancelling import DaemonPool
from feedline.shards import arrays, table
from feedline.shards.index import Head, Index
from feedline.shards.looks import Measure
from feedline.shards.reading import ObjectSource, version_of_object
from feedline.shards.sidecar import Pathlike, beside, fitting, head_at, kept, places
from feedline.stores import AccessDeniedError, CachedStore, ObjectNotFoundError
from feedline.stores.blobs import Blobs, RemoteBlob

_log = logging.getLogger("feedline")

_ASKED_AT_ONCE = 32
_MADE_AT_ONCE = 8
"""Of each of these, some parts are in memory."""


class FarIndexes:
    """The indexes of those of some blobs that are objects, kept in `folder`, or in the user's cache."""

    def __init__(self, blobs: Blobs, folder: Pathlike | None, *, allow_truncated: bool) -> None:
        self._blobs = blobs
        self._folder = folder
        self._allow_truncated = allow_truncated

    def known(self, number: int) -> Head | None:
        """The head of the index that is kept here, with one small read; None where there is none of this version."""
        info = self._blobs.info(number)
        return head_at(self._place(number), version_of_object(info.size, info.version))

    def found(self, numbers: Sequence[int]) -> list[Index]:
        """The index of each; those that are not here yet are fetched, or else made, several at once."""
        with DaemonPool(_ASKED_AT_ONCE, "feedline-index") as pool:
            indexes = dict(zip(numbers, pool.map(self._there, numbers), strict=True))
        missing = [number for number in numbers if indexes[number] is None]
        if missing:
            self._tell(missing)
            with DaemonPool(_MADE_AT_ONCE, "feedline-index") as pool:
                indexes |= zip(missing, pool.map(self._made, missing), strict=True)
        return [index for index in indexes.values() if index is not None]

    def one(self, number: int) -> Index:
        """That of one, which usually is here."""
        return self._there(number) or self.found([number])[0]

    def _there(self, number: int) -> Index | None:
        blob, place = self._blob(number), self._place(number)
        index, version = looked_up(blob, place), ObjectSource(blob).version
        if index is None or (index.path == place and index.head.version == version):
            return index
        return kept(index, version, [place])

    def _made(self, number: int) -> Index:
        blob = self._blob(number)
        index = made(blob, allow_truncated=self._allow_truncated)
        return kept(index, index.head.version, [self._place(number)])

    def _blob(self, number: int) -> RemoteBlob:
        blob = self._blobs[number]
        assert isinstance(blob, RemoteBlob)
        return blob

    def _place(self, number: int) -> str:
        return places(self._blobs.name(number), self._folder)[0]

    def _tell(self, missing: Sequence[int]) -> None:
        nbytes = sum(self._blobs.info(number).size for number in missing)
        first = self._blobs.name(missing[0])
        _log.warning(
            "feedline: all %s bytes of %d tars (%s, ...) are read once to index them. To have the indexes on other "
            "machines: feedline index %s --into FOLDER, then put NAME.tar.index beside each NAME.tar",
            *(f"{nbytes:,}", len(missing), first, first),
        )


def looked_up(blob: RemoteBlob, place: str) -> Index | None:
    """The index at `place`, or else that which lies beside the object, if it fits."""
    source = ObjectSource(blob)
    return fitting(source, place) or fitting(source, beside(blob.name), partial(_beside, blob))


def made(
    blob: RemoteBlob, *, allow_truncated: bool = False, measure: Measure | None = None, checksum: bool = False
) -> Index:
    """The index of an object in memory, made by reading all of it; for arguments see `sidecar.write_index`."""
    with ObjectSource(blob) as source:
        told, held = table.built(source, allow_truncated=allow_truncated, measure=measure, checksum=checksum)
    return Index(blob.name, told, held)


def _beside(blob: RemoteBlob, name: str) -> arrays.Arrays:
    store = blob.store.store if isinstance(blob.store, CachedStore) else blob.store  # the index is a file of its own
    try:
        return arrays.held(bytes(store.read(beside(blob.path))), name)
    except AccessDeniedError:  # who may not list a bucket is told so of what is not there
        raise ObjectNotFoundError(f"{name} is not there, or may not be read") from None
