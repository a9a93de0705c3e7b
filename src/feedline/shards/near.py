"""A tar of this machine, mapped, and its index."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from feedline.shards.cells import Cell, changed, located
from feedline.shards.index import Index
from feedline.shards.reading import FileSource, version_of

_WORTH_ASKING = 4 * mmap.PAGESIZE


class OpenShard:
    """A tar and its index, mapped; views of its members stay valid as long as they live. Thread-safe."""

    def __init__(self, index: Index) -> None:
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

    def cells(self, rows: NDArray[np.int64], fields: Sequence[str]) -> list[Cell]:
        """Of each sample, the first of these fields that it has; SampleError names one that has none of them."""
        starts, stops, columns = located(self.index, rows, fields, len(self._memory))
        spans = zip(starts.tolist(), stops.tolist(), rows.tolist(), columns.tolist(), strict=True)
        return [Cell(self._memory[start:stop], start, row, column) for start, stop, row, column in spans]

    def prefetch(self, cells: Sequence[Cell]) -> None:
        """Ask the kernel to read these members while others are decoded: they lie far apart, so it cannot guess."""
        for cell in cells:
            if len(cell.data) >= _WORTH_ASKING:
                first = cell.start - cell.start % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, first, cell.start + len(cell.data) - first)
