"""`CSV`: rows of CSV files by number, quoted line ends included."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np

from feedline.datasets.arrays.npy import Transform
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.formats import FORMATS
from feedline.datasets.indexes import Columns, IndexRecipe
from feedline.datasets.paths import Paths, find
from feedline.datasets.text.line_index import BOM, Bounds, LinePiece, bounds_in, fit, gathered, pieces
from feedline.datasets.text.lines import MOST_NBYTES, Options, TextRecords, not_in, reading, refuse_text
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import Blob

_FIRST_ROW = "first"
"""The array of an index that holds the bytes of the first row."""


_LIMIT = "field limit"
"""In the message of the csv module for a field that is too long for it."""


_NO_TEXT = b"\xff"
"""Stands for a delimiter of several bytes, which only UTF-8 may have: this byte is none of its."""


Convert = Callable[[str], Any]


class CSV(TextRecords):
    """The rows of CSV files as dicts by column, under the names in their first row, which all files must share.

    `columns` chooses columns, as a list, or as a dict that also says what their texts become: `{"x": float}`; a type
    or any function of the text. Else values are `str`. `bool` takes true and false, yes and no, 1 and 0. Read as
    Python's csv module does, with its default dialect but for `delimiter`; empty lines are left out. `encoding` and
    `most_nbytes`, of a row, are as in `Lines`. Objects of stores are kept in the folder `cache`, if one is given;
    `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | Mapping[str, Convert] | None = None,
        *,
        delimiter: str = ",",
        transform: Transform | None = None,
        index_dir: Pathlike | None = None,
        encoding: str = "utf-8",
        most_nbytes: int = MOST_NBYTES,
        cache: Cache | Pathlike | None = None,
        options: Options = None,
    ) -> None:
        _refuse_delimiter(delimiter)
        refuse_text(columns)
        how = reading(index_dir, encoding, most_nbytes, delimiter)
        mark = _mark(delimiter, how.encoding)
        suffix = f"csv{int.from_bytes(mark)}-index"
        scan = partial(row_bounds, mark=mark, held_nbytes=most_nbytes)
        blobs = find(paths, FORMATS["csv"].pattern, cache=cache, options=options)
        super().__init__(blobs, IndexRecipe(lambda name: f"{name}.{suffix}", scan, _fits), how, transform)
        self._delimiter = delimiter
        self._header = self._shared_header()
        self._wanted = _wanted(columns, self._header, self.paths[0])

    def _shared_header(self) -> list[str]:
        first_rows = [bytes(each.open_arrays()[_FIRST_ROW]) for each in self._indexes]
        header = partial(_header, delimiter=self._delimiter, encoding=self._encoding)
        headers = {row: header(row, path) for row, path in zip(first_rows, self.paths, strict=True)}
        for path, row in zip(self.paths, first_rows, strict=True):
            if headers[row] != headers[first_rows[0]]:
                raise SampleError(
                    f"{path} begins with the columns {headers[row]}, but {self.paths[0]} with"
                    f" {headers[first_rows[0]]}; files that are read together have the same first row"
                )
        return headers[first_rows[0]]

    def _value(self, text: str, file: int, at: int) -> dict[str, Any]:
        fields = self._fields(text, file, at)
        if len(fields) != len(self._header):
            raise SampleError(
                f"{self._where(file, at)} has {len(fields)} fields, the first row has {len(self._header)}; is a quote"
                " or a delimiter missing?"
            )
        return {name: self._converted(fields[place], name, to, file, at) for name, place, to in self._wanted}

    def _fields(self, text: str, file: int, at: int) -> list[str]:
        try:
            return next(csv.reader([text], delimiter=self._delimiter))
        except csv.Error as error:
            raise SampleError(f"{self._where(file, at)} {_no_csv(error)}") from error

    def _converted(self, text: str, name: str, to: Convert | None, file: int, at: int) -> Any:
        if to is None:
            return text
        try:
            return to(text)
        except (ValueError, TypeError, ArithmeticError) as error:
            kind = getattr(to, "__name__", type(to).__name__)
            raise SampleError(
                f"{self._where(file, at)} column {name!r}: {text!r} is no {kind.removeprefix('_')} ({error})"
            ) from error


def _refuse_delimiter(delimiter: object) -> None:
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise ArgumentError(f"delimiter={delimiter!r}: one character is expected, and no quote or line end")


def _mark(delimiter: str, encoding: str) -> bytes:
    """The bytes of a delimiter, which are found wherever they are a character of their own."""
    found = delimiter.encode(encoding, "ignore")
    if len(found) != 1 and (encoding != "utf-8" or not found):
        raise ArgumentError(f"delimiter={delimiter!r} is no single byte in {encoding.upper()}")
    return found


def _no_csv(error: csv.Error) -> str:
    """What to say of a row of which the csv module can make nothing."""
    if _LIMIT in str(error):
        return f"is not CSV ({error}); is a quote missing? csv.field_size_limit raises the limit for long fields"
    return f"is not CSV ({error}); quote the field, or pass on_error='skip' to the loader"


def _header(row: bytes, path: str, delimiter: str, encoding: str) -> list[str]:
    if not row:
        raise SampleError(f"{path} is empty; its first row should name the columns")
    try:
        names = next(csv.reader([row.decode(encoding)], delimiter=delimiter))
    except UnicodeDecodeError as error:
        raise SampleError(f"{path}: the first row {not_in(encoding, error)}") from error
    except csv.Error as error:
        hint = "; do its lines end with a carriage return alone? Write them with \\n" * (b"\r" in row)
        raise SampleError(f"{path}: the first row is not CSV ({error}){hint}") from error
    if len(set(names)) < len(names):
        raise SampleError(f"{path}: the first row names a column twice: {names}")
    return names


def _wanted(
    columns: Sequence[str] | Mapping[str, Convert] | None, header: Sequence[str], path: str
) -> list[tuple[str, int, Convert | None]]:
    """The columns of a sample: name, place in the row, conversion."""
    for name in header if columns is None else columns:
        if name not in header:
            raise ArgumentError(f"column {name!r} is not in {path}; there are {', '.join(header)}")
    kinds = columns if isinstance(columns, Mapping) else dict.fromkeys(header if columns is None else columns)
    return [(name, header.index(name), _bool if kind is bool else kind) for name, kind in kinds.items()]


def _bool(text: str) -> bool:
    told = text.strip().lower()
    if told in {"true", "yes", "1", "t", "y"}:
        return True
    if told in {"false", "no", "0", "f", "n"}:
        return False
    raise ValueError("neither true nor false")


def row_bounds(blob: Blob, mark: bytes, held_nbytes: int) -> Columns:
    """Where each row behind the first begins and ends, and the bytes of the first."""
    found = gathered(_rows(blob, mark, held_nbytes))
    starts, stops = found["starts"], found["stops"]
    first = blob.read([(int(starts[0]), int(stops[0]))])[0] if len(starts) else b""
    return {"starts": starts[1:], "stops": stops[1:], _FIRST_ROW: np.frombuffer(bytes(first), np.uint8)}


def _fits(blob: Blob, arrays: Columns) -> bool:
    """Whether the first row is the one of the index, and rows begin and end where it says."""
    first = bytes(arrays.get(_FIRST_ROW, b""))
    begin = bytes(blob.read([(0, min(blob.nbytes, len(BOM) + len(first)))])[0])
    return bool(first) and begin.removeprefix(BOM).startswith(first) and fit(blob, arrays)


def _rows(blob: Blob, mark: bytes, held_nbytes: int) -> Iterator[Bounds]:
    """The rows that are not empty; as long as nothing is quoted, every line is one."""
    coming = _held(blob, held_nbytes)
    for piece in coming:
        if b'"' in bytes(piece.data):
            yield _quoted(chain([piece], coming), mark, blob.name)
            return
        starts, stops = bounds_in(piece)
        filled = starts < stops
        yield starts[filled], stops[filled]


def _held(blob: Blob, held_nbytes: int) -> Iterator[LinePiece]:
    for piece in pieces(blob, held_nbytes):
        if piece.left_out:
            raise SampleError(
                f"{blob.name}: the line at byte {piece.at} has more than {held_nbytes:,} bytes; is this a CSV file?"
                " most_nbytes= raises the limit"
            )
        yield piece


def _quoted(coming: Iterator[LinePiece], mark: bytes, name: str) -> Bounds:
    """As Python's csv module finds them; to it, characters stand for bytes. What is no row to it is one that is bad."""
    first = next(coming)
    start = stop = first.at
    starts, stops = array("Q"), array("Q")

    def lines() -> Iterator[str]:
        nonlocal stop
        for piece in chain([first], coming):
            for line in BytesIO(piece.data):
                stop += len(line)
                yield (line if len(mark) == 1 else line.replace(mark, _NO_TEXT)).decode("latin-1")

    rows = csv.reader(lines(), delimiter=(mark if len(mark) == 1 else _NO_TEXT).decode("latin-1"))
    while True:
        try:
            filled = bool(next(rows))
        except StopIteration:
            break
        except csv.Error as error:
            if _LIMIT in str(error):  # where the row ends is not known
                raise SampleError(f"{name}: the row that begins at byte {start} {_no_csv(error)}") from error
            filled = True
        if filled:
            starts.append(start)
            stops.append(stop)
        start = stop
    return np.frombuffer(starts, np.uint64), np.frombuffer(stops, np.uint64)
