"""Rows of Arrow objects whose record batches are too large to be kept: each is read by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from feedline.datasets.arrow_objects import ArrowObjects
from feedline.datasets.nulls import Nulls
from feedline.datasets.spans import Int64s
from feedline.datasets.tables import ChunkRows
from feedline.rows import Empty
from feedline.stores import CachedStore, Want


class ArrowRows:
    """Rows of `objects` that are read `by_rows`: those of a batch all at once, and none is kept."""

    def __init__(self, objects: ArrowObjects, nulls: Nulls) -> None:
        self._objects, self._nulls = objects, nulls

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        """A dict for each row; `which` says in which record batch it lies."""
        found, chunks, places = self._read(which, rows)
        return found.samples(chunks, places)

    def batch(self, which: Int64s, rows: Int64s, empty: Empty) -> Any:
        """What default-collating the samples gives, tensors in memory from `empty`."""
        found, chunks, places = self._read(which, rows)
        return found.batch(chunks, places, empty)

    def wants(self, which: Int64s, rows: Int64s) -> list[tuple[CachedStore, Want]]:
        """What reading these rows wants from caches."""
        return self._objects.wants_rows(*_by_chunk(which, rows)[:2])

    def _read(self, which: Int64s, rows: Int64s) -> tuple[ChunkRows, Int64s, Int64s]:
        """These rows, and for each of them its chunk and its place there."""
        numbers, parts, chunks, places = _by_chunk(which, rows)
        made = self._objects.rows(numbers, parts)
        locate = partial(self._locate, numbers, parts)
        return ChunkRows(self._objects.kind, made, self._nulls, locate), chunks, places

    def _locate(self, numbers: Sequence[int], parts: Sequence[Sequence[int]], chunk: int, row: int) -> str:
        return self._objects.locate(numbers[chunk], parts[chunk][row])


def _by_chunk(which: Int64s, rows: Int64s) -> tuple[list[int], list[list[int]], Int64s, Int64s]:
    """The record batches, the rows of each; and for each row that is asked for, its place in these."""
    numbers, chunks = np.unique(which, return_inverse=True)
    order = np.argsort(chunks, kind="stable")
    starts = np.searchsorted(chunks[order], np.arange(len(numbers)))
    places = np.empty(len(rows), np.int64)
    places[order] = np.arange(len(rows)) - starts[chunks[order]]
    parts = [part.tolist() for part in np.split(rows[order], starts)[1:]]
    return numbers.tolist(), parts, chunks, places
