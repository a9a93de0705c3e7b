"""Tars of a set, mapped when they are first read from, and a bounded number of them at a time."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.errors import SampleError
from feedline.shards.fingerprints import version_of
from feedline.shards.index import Index
from feedline.shards.sidecar import open_index
from feedline.shards.tar import BLOCK, ShardError

_WORTH_ASKING = 4 * mmap.PAGESIZE


class Cell(NamedTuple):
    """One field of one sample: its bytes, a view of the tar's mapping, where they begin, its place in the index."""

    data: memoryview
    start: int
    row: int
    column: int


class OpenShard:
    """A tar and its index, mapped; views of its members stay valid as long as they live. Thread-safe."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.tar = index.tar
        with open(self.tar, "rb", buffering=0) as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._memory = memoryview(self._map)
        self._version = version_of(self.tar)
        if not index.fits(self._version):
            raise self._changed()

    def refuse_changed(self) -> None:
        """ShardError if the tar is not as it was when it was opened: what is mapped may be gone from under it."""
        if version_of(self.tar) != self._version:
            raise self._changed()

    def cells(self, rows: NDArray[np.int64], fields: Sequence[str]) -> list[Cell]:
        """Of each sample, the first of these fields that it has; SampleError names one that has none of them."""
        columns = [column for column in map(self.index.column, fields) if column is not None]
        if not columns:
            raise self._lacking(int(rows[0]), fields)
        blocks = self.index.blocks[rows][:, columns].astype(np.int64)
        chosen = (blocks > 0).argmax(axis=1)
        starts = blocks[np.arange(len(rows)), chosen] * BLOCK
        if not starts.all():
            raise self._lacking(int(rows[starts == 0][0]), fields)
        taken = np.asarray(columns)[chosen]
        stops = starts + self.index.sizes[rows, taken].astype(np.int64)
        if stops.max(initial=0) > len(self._memory):
            raise self._changed()
        spans = zip(starts.tolist(), stops.tolist(), rows.tolist(), taken.tolist(), strict=True)
        return [Cell(self._memory[start:stop], start, row, column) for start, stop, row, column in spans]

    def prefetch(self, cells: Sequence[Cell]) -> None:
        """Ask the kernel to read these members while others are decoded: they lie far apart, so it cannot guess."""
        for cell in cells:
            if len(cell.data) >= _WORTH_ASKING:
                first = cell.start - cell.start % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, first, cell.start + len(cell.data) - first)

    def _changed(self) -> ShardError:
        return ShardError(
            f"the index of {self.tar} does not fit it: the tar was changed or replaced while it was in use. Put the "
            f"tar back, or make the dataset anew"
        )

    def _lacking(self, row: int, fields: Sequence[str]) -> SampleError:
        return SampleError(
            f"{self.tar}: sample {self.index.key(row)!r} has no {' or '.join(fields)}; it has "
            f"{', '.join(self.index.present(row))}. Pack it again with all its parts, or pass on_error='skip' to the "
            f"loader"
        )


class OpenShards:
    """`shards[number]`: the tar of that number, opened on first use; beyond `most`, the one not used for longest goes.

    Pickles as paths. Each process opens the tars anew, and refuses one that is not the tar that was indexed:
    `fingerprints` are those of the indexes by number.
    """

    def __init__(
        self, tars: Sequence[str], fingerprints: Sequence[str], most: int, allow_truncated: bool = False
    ) -> None:
        self._tars, self._fingerprints = tars, fingerprints
        self._most, self._allow_truncated = most, allow_truncated
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._unkept: dict[int, Index] = {}  # indexes that would have to be built again

    def __len__(self) -> int:
        return len(self._tars)

    @property
    def open_count(self) -> int:
        """How many are held open now."""
        return len(self._open)

    def __getitem__(self, number: int) -> OpenShard:
        if self._process != os.getpid():  # a fork may have happened while another thread held the lock
            self._begin()
        with self._lock:
            shard = self._open.get(number)
            if shard is not None:
                self._open.move_to_end(number)
        if shard is not None:
            shard.refuse_changed()
            return shard
        return self._keep(number, self._opened(number))

    def _opened(self, number: int) -> OpenShard:
        index = self._unkept.get(number)
        if index is None:
            index = open_index(self._tars[number], allow_truncated=self._allow_truncated)
        if index.path is None:
            self._unkept[number] = index
        if index.head.fingerprint != self._fingerprints[number]:
            raise ShardError(
                f"{index.tar} is not the tar that was indexed when this dataset was made. Put that one back, or make "
                f"the dataset anew"
            )
        return OpenShard(index)

    def _keep(self, number: int, shard: OpenShard) -> OpenShard:
        with self._lock:
            self._open[number] = shard
            while len(self._open) > self._most:
                self._open.popitem(last=False)  # its views keep the mapping alive for as long as they are in use
        return shard

    def __getstate__(self) -> tuple[Sequence[str], Sequence[str], int, bool]:
        return self._tars, self._fingerprints, self._most, self._allow_truncated

    def __setstate__(self, state: tuple[Sequence[str], Sequence[str], int, bool]) -> None:
        self._tars, self._fingerprints, self._most, self._allow_truncated = state
        self._begin()
