"""Where the lines of text files begin and end: 16 bytes a line, found in one pass in bounded memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.file_objects import parts
from feedline.datasets.indexes import Columns
from feedline.errors import ArgumentError, SampleError
from feedline.stores.files import Blob

BOM = b"\xef\xbb\xbf"


_WIDE_BOMS = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE


_ASCII = bytes(range(128))


_TO_UTF8 = "iconv -f UTF-16 -t UTF-8 OLD > NEW"


_BLANKS = np.frombuffer(b" \t\r\n", np.uint8)


_LOOKS = 16


_LOOKED_AT = 1 << 16


_HELD_NBYTES = 1 << 24
"""Of a longer line only the end is held: all else that would be looked for is whether it is blank."""


_NONE: NDArray[np.uint64] = np.empty(0, np.uint64)


Bounds = tuple[NDArray[np.uint64], NDArray[np.uint64]]


def line_encoding(encoding: str, delimiter: str = ",") -> str:
    """The name of an encoding in which lines and fields end at the bytes at which they end in ASCII.

    ArgumentError for others, such as UTF-16, of which no line can be found so.
    """
    try:
        name = codecs.lookup(encoding).name.removesuffix("-sig")
        "".encode(name)  # refused by what turns bytes into bytes
    except (LookupError, UnicodeError, TypeError):
        raise ArgumentError(f"encoding={encoding!r} is none that Python has for texts") from None
    if not _is_ascii(name) or any(_hides(name, each) for each in f'\n\r\t ",{delimiter}'):
        raise ArgumentError(
            f"encoding={encoding!r}: where lines and fields end cannot be told from single bytes; write the files as"
            f" UTF-8, such as by `{_TO_UTF8.replace('UTF-16', encoding)}`"
        )
    return name


def _is_ascii(encoding: str) -> bool:
    """Whether bytes below 128 are what they are in ASCII, whatever stands before them: ISO 2022 has escapes."""
    try:
        same = _ASCII.decode(encoding) == _ASCII.decode("ascii") and _ASCII.decode("ascii").encode(encoding) == _ASCII
    except UnicodeError:
        return False
    return same and b"\x1b" not in "\u3042".encode(encoding, "ignore")


def _hides(encoding: str, character: str) -> bool:
    """Whether the byte of this character may be the second half of another one."""
    last = character.encode("ascii", "ignore")
    pairs = (bytes([first]) + last for first in range(128, 256))
    return bool(last) and any(pair.decode(encoding, "ignore")[-1:] not in ("", character) for pair in pairs)


class LinePiece(NamedTuple):
    """Whole lines of a file, of which the first begins at byte `at`; only the last piece may lack the last line end.

    Where the first line is too long to be held, `data` lacks its first `left_out` bytes.
    """

    at: int
    data: memoryview
    left_out: int = 0


def pieces(blob: Blob, held_nbytes: int) -> Iterator[LinePiece]:
    """The content of a file behind its byte order mark, if it has one; of a longer line, `held_nbytes` and a part."""
    at, left_out, open_line = 0, 0, list[memoryview]()
    for number, part in enumerate(parts(blob)):
        if number == 0 and bytes(part[:2]) in _WIDE_BOMS:
            raise SampleError(
                f"{blob.name} is UTF-16, of which no line can be found by itself; write it as UTF-8: by `{_TO_UTF8}`,"
                " or saved as 'CSV UTF-8' by a spreadsheet"
            )
        data = part[len(BOM) :] if number == 0 and part[: len(BOM)] == BOM else part
        at += len(part) - len(data)
        head, last = _first_end(data), _last_end(data)
        open_line.append(data[:head])
        if not head:  # no line ends here
            open_line[-1] = data
            while sum(map(len, open_line[:-1])) > held_nbytes:
                left_out += len(open_line.pop(0))
            continue
        joined = memoryview(b"".join(open_line)) if len(open_line) > 1 else open_line[0]
        yield LinePiece(at, joined, left_out)
        at += left_out + len(joined)
        if head < last:
            yield LinePiece(at, data[head:last])
        at += last - head
        left_out, open_line = 0, [data[last:]] if last < len(data) else []
    if any(open_line):
        yield LinePiece(at, memoryview(b"".join(open_line)), left_out)


def line_bounds(blob: Blob) -> Columns:
    """Where each line begins and ends, its line end left out."""
    return gathered(map(bounds_in, pieces(blob, _HELD_NBYTES)))


def filled_line_bounds(blob: Blob) -> Columns:
    """As `line_bounds`, without the lines that hold nothing but blanks."""
    return gathered(_filled(piece) for piece in pieces(blob, _HELD_NBYTES))


def bounds_in(piece: LinePiece) -> Bounds:
    """The lines of a piece."""
    octets = np.frombuffer(piece.data, np.uint8)
    ends = np.flatnonzero(octets == ord("\n"))
    starts = np.concatenate([[0], ends + 1])
    stops = np.concatenate([ends, [len(octets)]])
    if starts[-1] == len(octets):  # the last line has an end: nothing follows
        starts, stops = starts[:-1], stops[:-1]
    stops -= (octets[stops - 1] == ord("\r")) & (stops > starts)
    starts[1:] += piece.left_out
    stops += piece.left_out
    return (starts + piece.at).astype(np.uint64), (stops + piece.at).astype(np.uint64)


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


def _filled(piece: LinePiece) -> Bounds:
    starts, stops = bounds_in(piece)
    if piece.left_out:  # alone in its piece, and taken for one that is not blank
        return starts, stops
    # only short lines can be blank, but for oddities: look at those, and at all that begin with a blank
    first = np.frombuffer(piece.data, np.uint8)[(starts - np.uint64(piece.at)).astype(np.int64)]
    suspects = np.flatnonzero((starts == stops) | np.isin(first, _BLANKS)).tolist()
    blank = [row for row in suspects if not bytes(_line(piece, int(starts[row]), int(stops[row]))).strip()]
    return np.delete(starts, blank), np.delete(stops, blank)


def _line(piece: LinePiece, start: int, stop: int) -> memoryview:
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
