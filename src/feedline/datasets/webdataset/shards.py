"""Tars by number, of this machine and of stores, and their indexes.

Tars of a set, opened when they are first read from, and a bounded number of them at a time.

A tar of this machine, mapped, and its index.

A tar in a store: its samples are fetched, then decoded.

Where the fields of samples lie in their tar.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import LRUCache, PerProcess
from feedline.core.paths import expand_user
from feedline.datasets.webdataset.index import Head, TarIndex
from feedline.datasets.webdataset.index_files import FarIndexes, Pathlike, glance, open_index, whole
from feedline.datasets.webdataset.sources import FileSource, version_of
from feedline.datasets.webdataset.tar import BLOCK, ShardError
from feedline.errors import SampleError
from feedline.stores.files import FileSet
from feedline.stores.requests import FetchedRanges
from feedline.stores.urls import is_local


class MemberSpan(NamedTuple):
    """One field of one sample: its bytes, where in the tar they begin, its place in the index."""

    data: memoryview
    start: int
    row: int
    column: int


class Located(NamedTuple):
    """One member for each of some samples: where its bytes begin and end, and its column in the index."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    columns: NDArray[Any]


def located(index: TarIndex, rows: NDArray[np.int64], fields: Sequence[str], nbytes: int) -> Located:
    """Of each sample, the first of these fields that it has; SampleError names one that has none of them.

    `nbytes` is the size of the tar; ShardError if the index leads beyond it.
    """
    columns = [column for column in map(index.column, fields) if column is not None]
    if not columns:
        raise _lacking(index, int(rows[0]), fields)
    blocks = index.blocks[rows][:, columns].astype(np.int64)
    chosen = (blocks > 0).argmax(axis=1)
    starts = blocks[np.arange(len(rows)), chosen] * BLOCK
    if not starts.all():
        raise _lacking(index, int(rows[starts == 0][0]), fields)
    taken = np.asarray(columns)[chosen]
    stops = starts + index.sizes[rows, taken].astype(np.int64)
    if stops.max(initial=0) > nbytes:
        raise changed(index.tar)
    return Located(starts, stops, taken)


def spans(
    index: TarIndex, rows: NDArray[np.int64], choices: Sequence[Sequence[str]] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the bytes begin and end of the first field that a sample has of each choice; with None, of all it has.

    Where a sample has none of a choice there is nothing: this is said when it is read.
    """
    blocks = index.blocks[rows]
    wanted = blocks > 0
    if choices is not None:
        present, wanted = wanted, np.zeros_like(wanted)
        for choice in choices:
            columns = [column for column in map(index.column, choice) if column is not None]
            first = present[:, columns]
            wanted[:, columns] |= first if len(columns) == 1 else first & (np.cumsum(first, axis=1) == 1)
    starts = blocks[wanted].astype(np.int64) * BLOCK
    return starts, starts + index.sizes[rows][wanted].astype(np.int64)


def changed(tar: str) -> ShardError:
    """What to raise when a tar is no longer the one that its index is of."""
    return ShardError(
        f"the index of {tar} does not fit it: the tar was changed or replaced while it was in use. Put the "
        f"tar back, or make the dataset anew"
    )


def _lacking(index: TarIndex, row: int, fields: Sequence[str]) -> SampleError:
    return SampleError(
        f"{index.tar}: sample {index.key(row)!r} has no {' or '.join(fields)}; it has "
        f"{', '.join(index.present(row))}. Pack it again with all its parts, or pass on_error='skip' to the "
        f"loader"
    )


_WORTH_ASKING = 4 * mmap.PAGESIZE


class LocalShard:
    """A tar and its index, mapped; views of its members stay valid as long as they live. Thread-safe."""

    def __init__(self, index: TarIndex) -> None:
        self.index = index
        self.tar = index.tar
        with open(self.tar, "rb", buffering=0) as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._memory = memoryview(self._map)
        self._version = version_of(self.tar)
        if not index.fits(FileSource(self.tar)):
            raise changed(self.tar)

    def refuse_changed(self) -> None:
        """ShardError if the tar is not as it was when it was opened: what is mapped may be gone from under it."""
        if version_of(self.tar) != self._version:
            raise changed(self.tar)

    def cells(self, rows: NDArray[np.int64], fields: Sequence[str]) -> list[MemberSpan]:
        """Of each sample, the first of these fields that it has; SampleError names one that has none of them."""
        starts, stops, columns = located(self.index, rows, fields, len(self._memory))
        spans = zip(starts.tolist(), stops.tolist(), rows.tolist(), columns.tolist(), strict=True)
        return [MemberSpan(self._memory[start:stop], start, row, column) for start, stop, row, column in spans]

    def prefetch(self, cells: Sequence[MemberSpan]) -> None:
        """Ask the kernel to read these members while others are decoded: they lie far apart, so it cannot guess."""
        for cell in cells:
            if len(cell.data) >= _WORTH_ASKING:
                first = cell.start - cell.start % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, first, cell.start + len(cell.data) - first)


class Held(Protocol):
    """Bytes of a tar that were fetched."""

    def cut(self, start: int, stop: int) -> memoryview:
        """Those from `start` up to `stop`, which are the ones of a whole member."""
        ...


class RemoteShard:
    """A tar in a store and its index; `number` is that among the blobs of its dataset. Thread-safe.

    What is to be decoded has to be fetched first: `holding` gives a shard that has it.
    """

    def __init__(self, index: TarIndex, number: int, nbytes: int, held: Held | None = None) -> None:
        self.index = index
        self.tar = index.tar
        self.number = number
        self._nbytes = nbytes
        self._held: Held = held or FetchedRanges()

    def refuse_changed(self) -> None:
        """Nothing: what is read of another version is an ObjectChangedError."""

    def spans(
        self, rows: NDArray[np.int64], choices: Sequence[Sequence[str]] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the first field that each sample has of each choice begins and ends; with None, all that it has."""
        starts, stops = spans(self.index, rows, choices)
        if stops.max(initial=0) > self._nbytes:
            raise changed(self.tar)
        return starts, stops

    def holding(self, held: Held) -> RemoteShard:
        """The same shard with what was fetched of it."""
        return RemoteShard(self.index, self.number, self._nbytes, held)

    def cells(self, rows: NDArray[np.int64], fields: Sequence[str]) -> list[MemberSpan]:
        """Of each sample, the first of these fields that it has; SampleError names one that has none of them."""
        starts, stops, columns = located(self.index, rows, fields, self._nbytes)
        places = zip(starts.tolist(), stops.tolist(), rows.tolist(), columns.tolist(), strict=True)
        return [MemberSpan(self._held.cut(start, stop), start, row, column) for start, stop, row, column in places]

    def prefetch(self, cells: Sequence[MemberSpan]) -> None:
        """Nothing: what there is was fetched."""


Shard = LocalShard | RemoteShard


class Tars:
    """The tars of these names: files where `blobs` is None, else what `blobs` has under the same numbers.

    Indexes lie in `index_dir`; by default those of files beside them, those of objects in the user's cache. Pickles by
    name; indexes that could not be kept are made again for files, and go along for objects.
    """

    def __init__(
        self,
        names: Sequence[str],
        blobs: FileSet | None = None,
        *,
        index_dir: Pathlike | None = None,
        allow_truncated: bool = False,
    ) -> None:
        index_dir = None if index_dir is None else Path(expand_user(index_dir)).absolute()
        self.names = names
        self._blobs = blobs
        self._far = None if blobs is None else FarIndexes(blobs, index_dir, allow_truncated=allow_truncated)
        self._index_dir = index_dir
        self._allow_truncated = allow_truncated
        self._unkept: dict[int, TarIndex] = {}

    def is_far(self, number: int) -> bool:
        """Whether this one is an object."""
        return self._blobs is not None and not is_local(self.names[number])

    def heads(self) -> list[Head]:
        """What the index of each tells; indexes that are not there yet are made, those of objects several at once."""
        heads = {number: self._head(number) for number in range(len(self.names))}
        missing = [number for number, head in heads.items() if head is None]
        if self._far is not None and missing:
            for number, index in zip(missing, self._far.found(missing), strict=True):
                heads[number] = self._kept(number, index).head
        return [head for head in heads.values() if head is not None]

    def index(self, number: int) -> TarIndex:
        """The index of one of them."""
        index = self._unkept.get(number)
        if index is not None:
            return index
        if self._far is not None and self.is_far(number):
            return self._kept(number, self._far.one(number))
        name = self.names[number]
        return self._kept(number, open_index(name, index_dir=self._index_dir, allow_truncated=self._allow_truncated))

    def shard(self, number: int, index: TarIndex) -> Shard:
        """One of them, opened."""
        if self._blobs is not None and self.is_far(number):
            return RemoteShard(index, number, self._blobs.info(number).size)
        return LocalShard(index)

    def _kept(self, number: int, index: TarIndex) -> TarIndex:
        if index.path is None:
            self._unkept[number] = index
        return whole(index, self._allow_truncated)

    def _head(self, number: int) -> Head | None:
        """None for an object of which no index is known."""
        if self._far is not None and self.is_far(number):
            head = self._far.known(number)
            return head if head is None or head.cut is None or self._allow_truncated else self.index(number).head
        head = glance(self.names[number], index_dir=self._index_dir, allow_truncated=self._allow_truncated)
        return self.index(number).head if head is None else head

    def __getstate__(self) -> dict[str, object]:
        unkept = {number: index for number, index in self._unkept.items() if self.is_far(number)}
        return {**self.__dict__, "_unkept": unkept}


class ShardCache:
    """`shards[number]`: the tar of that number, opened on first use; beyond `most`, the one not used for longest goes.

    Pickles without them. Each process opens the tars anew, and refuses one that is not the tar that was indexed:
    `fingerprints` are those of the indexes by number.
    """

    def __init__(self, tars: Tars, fingerprints: Sequence[str], most: int) -> None:
        self._tars, self._fingerprints = tars, fingerprints
        # A shard that is forgotten stays mapped for as long as its views are in use.
        self._open: PerProcess[LRUCache[int, Shard]] = PerProcess(partial(LRUCache, most))

    def __len__(self) -> int:
        return len(self._tars.names)

    @property
    def open_count(self) -> int:
        """How many are held open now."""
        return len(self._open())

    def __getitem__(self, number: int) -> Shard:
        shards = self._open()
        shard = shards.get(number)
        if shard is not None:
            shard.refuse_changed()
            return shard
        return shards.put(number, self._opened(number))

    def _opened(self, number: int) -> Shard:
        index = self._tars.index(number)
        if index.head.fingerprint != self._fingerprints[number]:
            raise ShardError(
                f"{index.tar} is not the tar that was indexed when this dataset was made. Put that one back, or make "
                f"the dataset anew"
            )
        return self._tars.shard(number, index)
