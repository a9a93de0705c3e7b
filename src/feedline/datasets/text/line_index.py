"""Index of line bounds in text files: 16 bytes per line.

Bounds are found in one pass over the file, in bounded memory, from single bytes: this limits the encodings.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.file_objects import parts
from feedline.datasets.indexes import Columns
from feedline.datasets.signatures import BEGIN_NBYTES, recognize
from feedline.errors import ArgumentError, SampleError
from feedline.stores.files import File

BOM = b"\xef\xbb\xbf"


_WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encodings by their byte order marks; the longer marks begin with the shorter ones."""


_ZEROS = {
    "utf-32-le": (False, True, True, True),
    "utf-32-be": (True, True, True, False),
    "utf-16-le": (False, True, False, True),
    "utf-16-be": (True, False, True, False),
}
"""By encoding, the bytes of four that are zero in ASCII characters."""


_FEWEST_WIDE_NBYTES = 8
"""Least number of bytes: a shorter text may have zeros for other reasons."""


_SAVE = "save its sheets as 'CSV UTF-8' in a spreadsheet program, or as Parquet with pandas"


_RENAME = "give it the extension {}, and it is decompressed once"


_REMEDIES = {
    b"PK\x03\x04": f"{_SAVE}, or unpack the archive",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": _SAVE,
    b"\x1f\x8b": _RENAME.format(".gz"),
    b"BZh": _RENAME.format(".bz2"),
    b"\xfd7zXZ\0": _RENAME.format(".xz"),
    b"\x28\xb5\x2f\xfd": _RENAME.format(".zst"),
}
"""Remedies for text, by the first bytes of other formats."""


_ASCII = bytes(range(128))


_BLANKS = np.frombuffer(b" \t\r\n", np.uint8)


_CHECKED_LINES = 16
"""Number of lines of a file that are compared with a stored index."""


_SEARCH_NBYTES = 1 << 16
"""Bytes in which a line end is searched at a time."""


_HELD_NBYTES = 1 << 24
"""Most bytes of a line in memory. For longer lines, no check for blanks is made."""


_NONE: NDArray[np.uint64] = np.empty(0, np.uint64)


Bounds = tuple[NDArray[np.uint64], NDArray[np.uint64]]


def encoding_name(encoding: str) -> str:
    """Python's name of a text encoding; ArgumentError for an unknown one."""
    try:
        name = codecs.lookup(encoding).name.removesuffix("-sig")
        "".encode(name)  # raises an error for codecs that are not text encodings, such as base64
    except (LookupError, UnicodeError, TypeError):
        raise ArgumentError(f"encoding={encoding!r} is not a text encoding of Python; see the codecs module") from None
    return name


def has_plain_lines(name: str, delimiter: str = ",") -> bool:
    """True if lines and fields end with single bytes of ASCII.

    False for an encoding such as UTF-16, in which line ends, quotes and delimiters have other bytes than in ASCII, or
    their bytes occur within other characters.
    """
    return _is_ascii(name) and not any(_hides(name, each) for each in f'\n\r\t ",{delimiter}')


def _is_ascii(encoding: str) -> bool:
    """True if bytes below 128 always mean ASCII characters."""
    # The last test excludes ISO 2022, where escape sequences change the meaning of the bytes that follow.
    try:
        same = _ASCII.decode(encoding) == _ASCII.decode("ascii") and _ASCII.decode("ascii").encode(encoding) == _ASCII
    except UnicodeError:
        return False
    return same and b"\x1b" not in "\u3042".encode(encoding, "ignore")


def _hides(encoding: str, character: str) -> bool:
    """True if a character's byte may be another character's second byte."""
    last = character.encode("ascii", "ignore")
    pairs = (bytes([first]) + last for first in range(128, 256))
    return bool(last) and any(pair.decode(encoding, "ignore")[-1:] not in ("", character) for pair in pairs)


class LinePiece(NamedTuple):
    """Complete lines of a file, from byte `at` on.

    Only the last piece of a file may lack its line end. If the first line is too long to hold, `data` lacks its first
    `left_out` bytes.
    """

    at: int
    data: memoryview
    left_out: int = 0


def line_pieces(file: File, held_nbytes: int) -> Iterator[LinePiece]:
    """Read a file in complete lines, without its byte order mark.

    Of a long line, only about the last `held_nbytes` are in memory. SampleError for UTF-16 and for other formats.
    """
    at, left_out, open_line = 0, 0, list[memoryview]()
    for number, part in enumerate(parts(file)):
        if number == 0:
            _check_is_text(file.name, bytes(part[:BEGIN_NBYTES]))
        data = part[len(BOM) :] if number == 0 and part[: len(BOM)] == BOM else part
        at += len(part) - len(data)
        head, last = _first_end(data), _last_end(data)
        open_line.append(data[:head])
        if not head:  # no line ends in this part
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


_UNWRITTEN = bytes(8)


def _check_is_text(name: str, begin: bytes) -> None:
    """Raise SampleError for files of other formats, by their first bytes."""
    found = recognize(begin, name)
    if found is not None and (not found.may_be_text or b"\0" in begin):
        remedy = found.remedy if found.also else _REMEDIES.get(found.magic, found.remedy)
        raise SampleError(f"{name} is {found.what}, not text; {remedy}")
    if begin.startswith(_UNWRITTEN):
        raise SampleError(
            f"{name} begins with zeros, as after a power failure, not with text; re-create it or leave it out"
        )
    wide = _wide_encoding(begin)
    if wide is not None:
        raise SampleError(
            f"{name} is {wide.upper()}; pass encoding={wide!r}, or save it as UTF-8, which spreadsheet programs call"
            " 'CSV UTF-8'"
        )


def _wide_encoding(begin: bytes) -> str | None:
    """The encoding of a text whose characters have two or four bytes.

    Without a byte order mark, it is recognized by the zeros in the first characters, if these are ASCII.
    """
    for mark, encoding in _WIDE.items():
        if begin.startswith(mark):
            return encoding
    known = begin[: _FEWEST_WIDE_NBYTES if len(begin) >= _FEWEST_WIDE_NBYTES else 0]
    zeros = [byte == 0 for byte in known]
    return next((name for name, form in _ZEROS.items() if zeros and zeros == [*form, *form]), None)


def line_bounds(file: File) -> Columns:
    """Bounds of all lines, without line ends."""
    return concatenate_bounds(map(bounds_in, line_pieces(file, _HELD_NBYTES)))


def filled_line_bounds(file: File) -> Columns:
    """Bounds of all lines that are not blank, without line ends."""
    return concatenate_bounds(_filled(piece) for piece in line_pieces(file, _HELD_NBYTES))


def bounds_in(piece: LinePiece) -> Bounds:
    """Bounds of the lines of a piece, without line ends."""
    octets = np.frombuffer(piece.data, np.uint8)
    ends = np.flatnonzero(octets == ord("\n"))
    starts = np.concatenate([[0], ends + 1])
    stops = np.concatenate([ends, [len(octets)]])
    if starts[-1] == len(octets):  # the piece ends with a line end
        starts, stops = starts[:-1], stops[:-1]
    stops -= (octets[stops - 1] == ord("\r")) & (stops > starts)
    starts[1:] += piece.left_out
    stops += piece.left_out
    return (starts + piece.at).astype(np.uint64), (stops + piece.at).astype(np.uint64)


def concatenate_bounds(bounds: Iterable[Bounds]) -> dict[str, NDArray[np.uint64]]:
    """Concatenate the bounds of all pieces into the arrays of an index."""
    starts, stops = zip((_NONE, _NONE), *bounds, strict=False)
    return {"starts": np.concatenate(starts), "stops": np.concatenate(stops)}


def bounds_match(file: File, arrays: Columns) -> bool:
    """Check a sample of bounds against line ends in the file."""
    starts, stops = (arrays.get(name, _NONE).astype(np.int64) for name in ("starts", "stops"))
    if starts.ndim != 1 or starts.shape != stops.shape or not _in_order(starts, stops, file.nbytes):
        return False
    sample = np.unique(np.linspace(0, max(0, len(starts) - 1), _CHECKED_LINES).astype(np.int64))[: len(starts)]
    spans = zip(starts[sample].tolist(), stops[sample].tolist(), strict=True)
    edges = [edge for start, stop in spans for edge in ((start - 1, start), (stop - 1, stop + 1))]
    inside = [(start, stop) for start, stop in edges if len(BOM) <= start and stop <= file.nbytes]
    return all(b"\n" in bytes(edge) or b"\r" in bytes(edge) for edge in file.read(inside))


def _in_order(starts: NDArray[np.int64], stops: NDArray[np.int64], nbytes: int) -> bool:
    if not len(starts):
        return True
    return bool((starts <= stops).all() and (starts[1:] >= stops[:-1]).all() and starts[0] >= 0 and stops[-1] <= nbytes)


def _filled(piece: LinePiece) -> Bounds:
    starts, stops = bounds_in(piece)
    if piece.left_out:  # a long line that is not completely in memory counts as not blank
        return starts, stops
    # Test only empty lines and lines that begin with a blank, because stripping every line would be slow.
    first = np.frombuffer(piece.data, np.uint8)[(starts - np.uint64(piece.at)).astype(np.int64)]
    suspects = np.flatnonzero((starts == stops) | np.isin(first, _BLANKS)).tolist()
    blank = [row for row in suspects if not bytes(_line(piece, int(starts[row]), int(stops[row]))).strip()]
    return np.delete(starts, blank), np.delete(stops, blank)


def _line(piece: LinePiece, start: int, stop: int) -> memoryview:
    return piece.data[start - piece.at : stop - piece.at]


def _first_end(data: memoryview) -> int:
    """Position after the first line end, or 0."""
    for at in range(0, len(data), _SEARCH_NBYTES):
        end = bytes(data[at : at + _SEARCH_NBYTES]).find(b"\n")
        if end >= 0:
            return at + end + 1
    return 0


def _last_end(data: memoryview) -> int:
    """Position after the last line end, or 0."""
    for stop in range(len(data), 0, -_SEARCH_NBYTES):
        begin = max(0, stop - _SEARCH_NBYTES)
        end = bytes(data[begin:stop]).rfind(b"\n")
        if end >= 0:
            return begin + end + 1
    return 0
