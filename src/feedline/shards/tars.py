"""Tars by number, of this machine and of stores, and their indexes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from feedline.shards.far import FarShard
from feedline.shards.far_indexes import FarIndexes
from feedline.shards.index import Head, Index
from feedline.shards.near import OpenShard
from feedline.shards.sidecar import Pathlike, glance, open_index, whole
from feedline.stores.addresses import scheme_of
from feedline.stores.blobs import Blobs
from feedline.stores.whereabouts import expanded

Shard = OpenShard | FarShard


class Tars:
    """The tars of these names: files where `blobs` is None, else what `blobs` has under the same numbers.

    Indexes lie in `folder`; by default those of files beside them, those of objects in the user's cache. Pickles by
    name; indexes that could not be kept are made again for files, and go along for objects.
    """

    def __init__(
        self,
        names: Sequence[str],
        blobs: Blobs | None = None,
        *,
        folder: Pathlike | None = None,
        allow_truncated: bool = False,
    ) -> None:
        folder = None if folder is None else Path(expanded(folder)).absolute()
        self.names = names
        self._blobs = blobs
        self._far = None if blobs is None else FarIndexes(blobs, folder, allow_truncated=allow_truncated)
        self._folder = folder
        self._allow_truncated = allow_truncated
        self._unkept: dict[int, Index] = {}

    def is_far(self, number: int) -> bool:
        """Whether this one is an object."""
        return self._blobs is not None and scheme_of(self.names[number]) != "file"

    def heads(self) -> list[Head]:
        """What the index of each tells; indexes that are not there yet are made, those of objects several at once."""
        heads = {number: self._head(number) for number in range(len(self.names))}
        missing = [number for number, head in heads.items() if head is None]
        if self._far is not None and missing:
            for number, index in zip(missing, self._far.found(missing), strict=True):
                heads[number] = self._kept(number, index).head
        return [head for head in heads.values() if head is not None]

    def index(self, number: int) -> Index:
        """The index of one of them."""
        index = self._unkept.get(number)
        if index is not None:
            return index
        if self._far is not None and self.is_far(number):
            return self._kept(number, self._far.one(number))
        name = self.names[number]
        return self._kept(number, open_index(name, folder=self._folder, allow_truncated=self._allow_truncated))

    def shard(self, number: int, index: Index) -> Shard:
        """One of them, opened."""
        if self._blobs is not None and self.is_far(number):
            return FarShard(index, number, self._blobs.info(number).size)
        return OpenShard(index)

    def _kept(self, number: int, index: Index) -> Index:
        if index.path is None:
            self._unkept[number] = index
        return whole(index, self._allow_truncated)

    def _head(self, number: int) -> Head | None:
        """None for an object of which no index is known."""
        if self._far is not None and self.is_far(number):
            head = self._far.known(number)
            return head if head is None or head.cut is None or self._allow_truncated else self.index(number).head
        head = glance(self.names[number], folder=self._folder, allow_truncated=self._allow_truncated)
        return self.index(number).head if head is None else head

    def __getstate__(self) -> dict[str, object]:
        unkept = {number: index for number, index in self._unkept.items() if self.is_far(number)}
        return {**self.__dict__, "_unkept": unkept}
