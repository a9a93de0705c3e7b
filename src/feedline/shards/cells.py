"""Where the fields of samples lie in their tar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.errors import SampleError
from feedline.shards.index import Index
from feedline.shards.tar import BLOCK, ShardError


class Cell(NamedTuple):
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


def located(index: Index, rows: NDArray[np.int64], fields: Sequence[str], nbytes: int) -> Located:
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
    index: Index, rows: NDArray[np.int64], choices: Sequence[Sequence[str]] | None
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


def _lacking(index: Index, row: int, fields: Sequence[str]) -> SampleError:
    return SampleError(
        f"{index.tar}: sample {index.key(row)!r} has no {' or '.join(fields)}; it has "
        f"{', '.join(index.present(row))}. Pack it again with all its parts, or pass on_error='skip' to the "
        f"loader"
    )
