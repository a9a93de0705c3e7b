"""Rows of record batches by themselves, of columns in which every row takes the same space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.ipc_bodies import Body
from feedline.stores.protocol import Range

Widths = Sequence[int]
"""The bits that a row has in each buffer of a body."""


def have_rows(bodies: Body, widths: Widths, lengths: NDArray[np.int64]) -> bool:
    """Whether so many rows of each of several bodies lie in their buffers as they are; empty ones are left out."""
    held, needed = 8 * bodies.sizes, lengths[:, None] * np.array(widths, np.int64)
    return bodies.codec == 0 and bool(((held == 0) | (held >= needed)).all())


def row_spans(body: Body, widths: Widths, rows: Sequence[int]) -> list[Range]:
    """Where these rows lie: all of them in one buffer, then in the next."""
    return [
        (start + row * bits // 8, start + -(-(row + 1) * bits // 8))
        for (start, stop), bits in zip(body.buffers.tolist(), widths, strict=True)
        if start < stop
        for row in rows
    ]


def taken(
    body: Body, widths: Widths, length: int, rows: Sequence[int], views: Iterable[memoryview]
) -> tuple[Body, list[bytes]]:
    """Of a record batch of this length one that has these rows only, and its buffers, from what lies in `row_spans`."""
    coming = iter(views)
    data = [
        _end_to_end([next(coming) for _ in rows], bits, rows) if start < stop else b""
        for (start, stop), bits in zip(body.buffers.tolist(), widths, strict=True)
    ]
    lengths = body.nodes[:, 0] // length * len(rows)
    unknown = np.full(len(lengths), -1)  # how many of them are null
    return body._replace(nodes=np.stack([lengths, unknown], axis=1)), data


def _end_to_end(views: Sequence[memoryview], bits: int, rows: Sequence[int]) -> bytes:
    if bits % 8 == 0:
        return b"".join(views)
    unpacked = [np.unpackbits(np.frombuffer(view, np.uint8), bitorder="little") for view in views]
    parts = [each[row * bits % 8 :][:bits] for each, row in zip(unpacked, rows, strict=True)]
    return np.packbits(np.concatenate(parts), bitorder="little").tobytes()
