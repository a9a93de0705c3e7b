"""Open tar shards with their indexes.

`Tars` numbers the tars of a dataset, and `ShardCache` keeps a bounded number of them open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import LRUCache, PerProcess
from feedline.core.paths import Pathlike, folder_path
from feedline.core.threads import INDEX_THREADS, IO_THREADS, DaemonPool
from feedline.datasets.webdataset.index import Head, TarIndex
from feedline.datasets.webdataset.index_files import build_and_keep, check_not_truncated, find_index, read_head
from feedline.datasets.webdataset.sources import TarSource
from feedline.datasets.webdataset.tar import BLOCK, ShardError
from feedline.errors import SampleError
from feedline.stores.base import changed_error
from feedline.stores.files import FileBytes, FileSet
from feedline.stores.urls import is_local

_log = logging.getLogger("feedline")


class MemberSpan(NamedTuple):
    """One field of one sample: bytes, offset in the tar, and cell."""

    data: memoryview
    start: int
    row: int
    column: int


class Located(NamedTuple):
    """Byte range and column of one member for each of several samples."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    columns: NDArray[Any]


def locate(index: TarIndex, rows: NDArray[np.int64], fields: Sequence[str], nbytes: int) -> Located:
    """Locate the first of `fields` that each sample has.

    `nbytes` is the size of the tar; ShardError if the index points beyond it. SampleError names a sample without any
    of the fields.
    """
    columns = [column for column in map(index.column, fields) if column is not None]
    if not columns:
        raise _missing_field_error(index, int(rows[0]), fields)
    blocks = index.blocks[rows][:, columns].astype(np.int64)
    chosen = (blocks > 0).argmax(axis=1)
    starts = blocks[np.arange(len(rows)), chosen] * BLOCK
    if not starts.all():
        raise _missing_field_error(index, int(rows[starts == 0][0]), fields)
    taken = np.asarray(columns)[chosen]
    stops = starts + index.sizes[rows, taken].astype(np.int64)
    if stops.max(initial=0) > nbytes:
        raise _replaced_error(index.tar)
    return Located(starts, stops, taken)


def spans(
    index: TarIndex, rows: NDArray[np.int64], choices: Sequence[Sequence[str]] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte ranges of the first present field of each choice.

    With None, byte ranges of all fields. If a sample has no field of a choice, the choice is skipped; the read of the
    sample raises the error.
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


def _replaced_error(tar: str) -> ShardError:
    """The error for a tar that no longer matches its index."""
    remedy = "restore that tar, or create the dataset again"
    return changed_error(ShardError, tar, "it is not the tar that was indexed", remedy=remedy)


def _missing_field_error(index: TarIndex, row: int, fields: Sequence[str]) -> SampleError:
    return SampleError(
        f"{index.tar}: sample {index.key(row)!r} has no {' or '.join(fields)}; it has "
        f"{', '.join(index.present(row))}. Repack the sample with all fields, or pass on_error='skip' to the "
        f"loader"
    )


class Shard:
    """An open tar of a file set, and its index.

    Views of the members of a file keep its mapping. Thread-safe.
    """

    def __init__(self, index: TarIndex, files: FileSet, number: int) -> None:
        self.index = index
        self.tar = files.name(number)
        """The path or address of the tar, as given."""
        self.number = number
        """The number of the tar in its file set."""
        # Not `files[number]`, which stays open: the dataset limits the number of open tars.
        self._file = files.open(number)

    def check_unchanged(self) -> None:
        """Raise StateError soon after a change of the file."""
        self._file.check_unchanged()

    @property
    def is_mapped(self) -> bool:
        """True for a file of this machine."""
        return self._file.data is not None

    def get_loaded(self) -> FileBytes | None:
        """The members that take no request, for one thread; None without any."""
        return self._file.get_loaded()

    def spans(
        self, rows: NDArray[np.int64], choices: Sequence[Sequence[str]] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Byte ranges from `spans`; ShardError if they exceed the tar."""
        starts, stops = spans(self.index, rows, choices)
        if stops.max(initial=0) > self._file.nbytes:
            raise _replaced_error(self.tar)
        return starts, stops

    def cells(self, rows: NDArray[np.int64], fields: Sequence[str], loaded: FileBytes) -> list[MemberSpan]:
        """The first of `fields` that each sample has; SampleError without any.

        Their bytes come from `loaded`. The bytes of a file are read ahead.
        """
        starts, stops, columns = locate(self.index, rows, fields, self._file.nbytes)
        places = list(zip(starts.tolist(), stops.tolist(), strict=True))
        self._file.will_need(places)
        cells = zip(places, rows.tolist(), columns.tolist(), strict=True)
        return [MemberSpan(loaded.cut(start, stop), start, row, column) for (start, stop), row, column in cells]


class Tars:
    """The tars of a dataset, by number, and their indexes.

    Indexes are in `index_dir`; by default, indexes of files are next to the files, and indexes of objects in the user's
    cache. Pickles by name. Indexes that could not be stored are built again for files, and are pickled for objects, of
    which all bytes would have to be read again.
    """

    def __init__(self, files: FileSet, *, index_dir: Pathlike | None = None, allow_truncated: bool = False) -> None:
        self.files = files
        self._index_dir = None if index_dir is None else folder_path(index_dir, "index_dir")
        self._allow_truncated = allow_truncated
        self._unsaved: dict[int, TarIndex] = {}

    def __len__(self) -> int:
        return len(self.files)

    def heads(self) -> list[Head]:
        """The head of each index; missing indexes are fetched or built concurrently."""
        heads = {number: self._read_head(number) for number in range(len(self))}
        heads |= _each(self._find, _missing(heads), IO_THREADS)
        self._log_indexing(_missing(heads))
        heads |= _each(self._build, _missing(heads), INDEX_THREADS)
        return [head for head in heads.values() if head is not None]

    def index(self, number: int) -> TarIndex:
        """The index of one tar."""
        index = self._unsaved.get(number)
        if index is None:
            index = self._find(number)
        if index is None:
            self._log_indexing([number])
            index = self._build(number)
        return index

    def shard(self, number: int, index: TarIndex) -> Shard:
        """Open one tar; StateError if it has changed."""
        return Shard(index, self.files, number)

    def _read_head(self, number: int) -> Head | None:
        name, version = self.files.name(number), self.files.info(number).state
        return read_head(name, version, index_dir=self._index_dir, allow_truncated=self._allow_truncated)

    def _find(self, number: int) -> TarIndex | None:
        index = find_index(self._source(number), self._index_dir)
        return None if index is None else self._remember(number, index)

    def _build(self, number: int) -> TarIndex:
        index = build_and_keep(self._source(number), self._index_dir, allow_truncated=self._allow_truncated)
        return self._remember(number, index)

    def _source(self, number: int) -> TarSource:
        return TarSource(self.files, number)

    def _remember(self, number: int, index: TarIndex) -> TarIndex:
        if index.path is None:
            self._unsaved[number] = index
        return check_not_truncated(index, self._allow_truncated)

    def _log_indexing(self, missing: Sequence[int]) -> None:
        # For the index of a file, little more than its headers is read.
        remote = [number for number in missing if not is_local(self.files.name(number))]
        if remote:
            nbytes = sum(self.files.info(number).size for number in remote)
            first = self.files.name(remote[0])
            _log.warning(
                "feedline: all %s bytes of %d tars (%s, ...) are read once to index them. To share the indexes with "
                "other machines: feedline index %s --into FOLDER, then put NAME.tar.index next to each NAME.tar",
                *(f"{nbytes:,}", len(remote), first, first),
            )

    def __getstate__(self) -> dict[str, object]:
        unsaved = {number: index for number, index in self._unsaved.items() if not is_local(index.tar)}
        return {**self.__dict__, "_unsaved": unsaved}


def _missing(heads: Mapping[int, Head | None]) -> list[int]:
    return [number for number, head in heads.items() if head is None]


def _each(index_of: Callable[[int], TarIndex | None], numbers: Sequence[int], at_once: int) -> dict[int, Head | None]:
    """The heads of the indexes of these tars."""

    def head(number: int) -> Head | None:
        index = index_of(number)
        return None if index is None else index.head  # not the index itself, which is an open file

    if not numbers:
        return {}
    with DaemonPool(at_once, "feedline-index") as pool:
        return dict(zip(numbers, pool.map(head, numbers), strict=True))


class ShardCache:
    """Open shards by number, at most `most`, with least-recently-used eviction.

    Pickles without open shards. Each process opens the tars itself, and refuses one whose index has another
    fingerprint than `fingerprints`.
    """

    def __init__(self, tars: Tars, fingerprints: Sequence[str], most: int) -> None:
        self._tars, self._fingerprints = tars, fingerprints
        # A dropped shard stays mapped as long as its views are in use.
        self._open: PerProcess[LRUCache[int, Shard]] = PerProcess(partial(LRUCache, most))

    def __len__(self) -> int:
        return len(self._tars)

    @property
    def open_count(self) -> int:
        """Number of open shards."""
        return len(self._open())

    def __getitem__(self, number: int) -> Shard:
        shards = self._open()
        shard = shards.get(number)
        if shard is not None:
            shard.check_unchanged()
            return shard
        return shards.put(number, self._open_shard(number))

    def _open_shard(self, number: int) -> Shard:
        index = self._tars.index(number)
        if index.head.fingerprint != self._fingerprints[number]:
            raise _replaced_error(index.tar)
        return self._tars.shard(number, index)
