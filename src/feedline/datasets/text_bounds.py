"""Where the lines of text files begin and end: 16 bytes a line, found in one pass in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.sidecars import Columns
from feedline.datasets.streams import parts
from feedline.stores.blobs import Blob

BOM = b"\xef\xbb\xbf"
_BLANKS = np.frombuffer(b" \t\r\n", np.uint8)
_LOOKS = 16
_LOOKED_AT = 1 << 16
_NONE: NDArray[np.uint64] = np.empty(0, np.uint64)

Bounds = tuple[NDArray[np.uint64], NDArray[np.uint64]]


class Piece(NamedTuple):
    """Whole lines of a file, of which the first begins at byte `at`; only the last piece may lack the last line end."""

    at: int
    data: memoryview


def pieces(blob: Blob) -> Iterator[Piece]:
    """The content of a file behind its byte order mark, if it has one."""
    at, open_line = 0, list[memoryview]()
    for number, part in enumerate(parts(blob)):
        data = part[len(BOM) :] if number == 0 and part[: len(BOM)] == BOM else part
        at += len(part) - len(data)
        head, last = _first_end(data), _last_end(data)
        open_line.append(data[:head])
        if not head:  # no line ends here
            open_line[-1] = data
            continue
        joined = memoryview(b"".join(open_line)) if len(open_line) > 1 else open_line[0]
        yield Piece(at, joined)
        if head < last:
            yield Piece(at + len(joined), data[head:last])
        at += len(joined) + last - head
        open_line = [data[last:]] if last < len(data) else []
    if any(open_line):
        yield Piece(at, memoryview(b"".join(open_line)))


def line_bounds(blob: Blob) -> Columns:
    """Where each line begins and ends, its line end left out."""
    return gathered(bounds_in(piece.data, piece.at) for piece in pieces(blob))


def filled_line_bounds(blob: Blob) -> Columns:
    """As `line_bounds`, without the lines that hold nothing but blanks."""
    return gathered(_filled(piece) for piece in pieces(blob))


def bounds_in(data: memoryview, at: int) -> Bounds:
    """The lines of a piece."""
    octets = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(octets == ord("\n"))
    starts = np.concatenate([[0], ends + 1])
    stops = np.concatenate([ends, [len(data)]])
    if starts[-1] == len(data):  # the last line has an end: nothing follows
        starts, stops = starts[:-1], stops[:-1]
    stops -= (octets[stops - 1] == ord("\r")) & (stops > starts)
    return (starts + at).astype(np.uint64), (stops + at).astype(np.uint64)


def gathered(several: Iterable[Bounds]) -> dict[str, NDArray[np.uint64]]:
    """The bounds of all pieces as the arrays of a side-car."""
    starts, stops = zip((_NONE, _NONE), *several, strict=False)
    return {"starts": np.concatenate(starts), "stops": np.concatenate(stops)}


def fit(blob: Blob, arrays: Columns) -> bool:
    """Whether some rows of the content begin and end at line ends as the arrays say."""
    starts, stops = (arrays.get(name, _NONE).astype(np.int64) for name in ("starts", "stops"))
    if starts.ndim != 1 or starts.shape != stops.shape or not _in_order(starts, stops, blob.nbytes):
        return False
    some = np.unique(np.linspace(0, max(0, len(starts) - 1), _LOOKS).astype(np.int64))[: len(starts)]
    spans = zip(starts[some].tolist(), stops[some].tolist(), strict=True)
    edges = [edge for start, stop in spans for edge in ((start - 1, start), (stop - 1, stop + 1))]
    inside = [(start, stop) for start, stop in edges if len(BOM) <= start and stop <= blob.nbytes]
    return all(b"\n" in bytes(edge) or b"\r" in bytes(edge) for edge in blob.read(inside))


def _in_order(starts: NDArray[np.int64], stops: NDArray[np.int64], nbytes: int) -> bool:
    if not len(starts):
        return True
    return bool((starts <= stops).all() and (starts[1:] >= stops[:-1]).all() and starts[0] >= 0 and stops[-1] <= nbytes)


def _filled(piece: Piece) -> Bounds:
    starts, stops = bounds_in(piece.data, piece.at)
    # only short lines can be blank, but for oddities: look at those, and at all that begin with a blank
    first = np.frombuffer(piece.data, np.uint8)[(starts - np.uint64(piece.at)).astype(np.int64)]
    suspects = np.flatnonzero((starts == stops) | np.isin(first, _BLANKS)).tolist()
    blank = [row for row in suspects if not bytes(_line(piece, int(starts[row]), int(stops[row]))).strip()]
    return np.delete(starts, blank), np.delete(stops, blank)


def _line(piece: Piece, start: int, stop: int) -> memoryview:
    return piece.data[start - piece.at : stop - piece.at]


def _first_end(data: memoryview) -> int:
    """Behind the first line end, or 0."""
    for at in range(0, len(data), _LOOKED_AT):
        found = bytes(data[at : at + _LOOKED_AT]).find(b"\n")
        if found >= 0:
            return at + found + 1
    return 0


def _last_end(data: memoryview) -> int:
    """Behind the last line end, or 0."""
    for stop in range(len(data), 0, -_LOOKED_AT):
        begin = max(0, stop - _LOOKED_AT)
        found = bytes(data[begin:stop]).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
    return 0
