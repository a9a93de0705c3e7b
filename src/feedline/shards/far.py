"""A tar in a store: its samples are fetched, then decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from feedline.shards.cells import Cell, changed, located, spans
from feedline.shards.index import Index
from feedline.stores.protocol import Range


class FarShard:
    """A tar in a store and its index; `number` is that among the blobs of its dataset. Thread-safe.

    What is to be decoded has to be fetched first: `holding` gives a shard that has it.
    """

    def __init__(self, index: Index, number: int, nbytes: int, held: Mapping[Range, memoryview] | None = None) -> None:
        self.index = index
        self.tar = index.tar
        self.number = number
        self._nbytes = nbytes
        self._held = held or {}

    def refuse_changed(self) -> None:
        """Nothing: what is read of another version is an ObjectChangedError."""

    def spans(self, rows: NDArray[np.int64], choices: Sequence[Sequence[str]] | None) -> set[Range]:
        """Where the bytes lie of the first field that each sample has of each choice; with None, of all that it has."""
        found = spans(self.index, rows, choices)
        if any(stop > self._nbytes for _, stop in found):
            raise changed(self.tar)
        return found

    def holding(self, held: Mapping[Range, memoryview]) -> FarShard:
        """The same shard with the bytes of these spans."""
        return FarShard(self.index, self.number, self._nbytes, held)

    def cells(self, rows: NDArray[np.int64], fields: Sequence[str]) -> list[Cell]:
        """Of each sample, the first of these fields that it has; SampleError names one that has none of them."""
        starts, stops, columns = located(self.index, rows, fields, self._nbytes)
        places = zip(starts.tolist(), stops.tolist(), rows.tolist(), columns.tolist(), strict=True)
        return [Cell(self._held[start, stop], start, row, column) for start, stop, row, column in places]

    def prefetch(self, cells: Sequence[Cell]) -> None:
        """Nothing: what there is was fetched."""
