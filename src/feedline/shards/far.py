"""A tar in a store: its samples are fetched, then decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.shards.cells import Cell, changed, located, spans
from feedline.shards.index import Index
from feedline.stores.protocol import Range


class Held(Protocol):
    """Bytes of a tar that were fetched."""

    def cut(self, start: int, stop: int) -> memoryview:
        """Those from `start` up to `stop`, which are the ones of a whole member."""
        ...


class Fetched:
    """Members, each by where it begins and ends."""

    def __init__(self, members: Mapping[Range, memoryview]) -> None:
        self._members = members

    def cut(self, start: int, stop: int) -> memoryview:
        return self._members[start, stop]


class FarShard:
    """A tar in a store and its index; `number` is that among the blobs of its dataset. Thread-safe.

    What is to be decoded has to be fetched first: `holding` gives a shard that has it.
    """

    def __init__(self, index: Index, number: int, nbytes: int, held: Held | None = None) -> None:
        self.index = index
        self.tar = index.tar
        self.number = number
        self._nbytes = nbytes
        self._held: Held = held or Fetched({})

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

    def holding(self, held: Held) -> FarShard:
        """The same shard with what was fetched of it."""
        return FarShard(self.index, self.number, self._nbytes, held)

    def cells(self, rows: NDArray[np.int64], fields: Sequence[str]) -> list[Cell]:
        """Of each sample, the first of these fields that it has; SampleError names one that has none of them."""
        starts, stops, columns = located(self.index, rows, fields, self._nbytes)
        places = zip(starts.tolist(), stops.tolist(), rows.tolist(), columns.tolist(), strict=True)
        return [Cell(self._held.cut(start, stop), start, row, column) for start, stop, row, column in places]

    def prefetch(self, cells: Sequence[Cell]) -> None:
        """Nothing: what there is was fetched."""
