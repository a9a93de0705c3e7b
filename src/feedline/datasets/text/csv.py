"""CSV files, with random access to rows.

Without quotes a row is a line, and bounds are found at the speed of a search for line ends. From the first quote on,
Python's csv module finds them, because quoted fields may contain line ends.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np

from feedline.core.dataset import TransformFunction
from feedline.core.paths import Pathlike
from feedline.datasets.formats import FORMATS
from feedline.datasets.indexes import Columns, IndexRecipe
from feedline.datasets.paths import Paths, find
from feedline.datasets.text.line_index import (
    BOM,
    Bounds,
    LinePiece,
    bounds_in,
    bounds_match,
    concatenate_bounds,
    line_pieces,
)
from feedline.datasets.text.lines import (
    MAX_RECORD_NBYTES,
    Options,
    TextRecords,
    check_columns,
    describe_undecodable,
    text_reading,
)
from feedline.datasets.text.plain_text import plain_text
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import File

_FIRST_ROW = "first"
"""Name of the index array with the bytes of the first row."""


_LIMIT = "field limit"
"""Part of the csv module's message for a field over its limit."""


_DELIMITERS = ";\t|,"
"""Delimiters of the usual dialects, which rarely occur in the name of a single column."""


_NO_TEXT = b"\xff"
"""Replacement for a delimiter of several bytes, as in UTF-8. This byte does not occur in UTF-8."""


_ESCAPED = '\\"'
"""A quote in quoted fields, as some programs write it."""


_ESCAPED_HINT = 'quotes in its fields are written as \\": pass escape="\\\\"'


_OPEN_HINT = "ends within a quoted field: is a quote missing, or the file truncated?"


_SEPARATOR_LINE = re.compile(rb'"?sep=.{1,3}"?', re.IGNORECASE)
"""Excel's line before the first row, which is not a likely name of a column."""


Convert = Callable[[str], Any]


class CSV(TextRecords):
    r"""Rows of CSV files as dicts by column.

    The first row names the columns and has to be the same in all files. If it is one name that contains semicolons,
    tabs or bars, `delimiter` must be given, or `columns` must be that name. `columns` is a list of names, or a dict of
    conversions by name, `{"x": float}`: types or functions of the text. Without a conversion, values are `str`. `bool`
    accepts true and false, yes and no, 1 and 0.

    Rows are read as by Python's csv module in its default dialect, with `delimiter`. Empty lines are skipped. Where
    quotes in quoted fields are written as \" instead of twice, pass `escape="\\"`: as with the module's `escapechar`,
    the character after it is taken literally. `transform(row)` or `transform(row, rng)` is applied to each row.
    `paths`, `encoding`, `index_dir`, compressed files and `max_record_nbytes`, here the largest row, are as in `Lines`.
    Objects of stores are cached in the folder `cache`, if given; `options` are passed to `open_store`.

    SampleError names file and line of a row that does not fit the first one, or cannot be converted.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | Mapping[str, Convert] | None = None,
        *,
        delimiter: str = ",",
        escape: str | None = None,
        transform: TransformFunction | None = None,
        encoding: str = "utf-8",
        max_record_nbytes: int = MAX_RECORD_NBYTES,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Options = None,
    ) -> None:
        _check_delimiter(delimiter)
        _check_escape(escape, delimiter)
        check_columns(columns)
        found = find(paths, FORMATS["csv"].pattern, cache=cache, options=options)
        files, encoding = plain_text(found, encoding, cache, f"{delimiter}{escape or ''}")
        reading = text_reading(index_dir, encoding, max_record_nbytes)
        mark = _encode_delimiter(delimiter, reading.encoding)
        # Row bounds depend on the dialect: indexes for two dialects must not replace each other.
        suffix = f"csv{int.from_bytes(mark)}{'' if escape is None else f'e{ord(escape)}'}-index"
        scan = partial(row_bounds, mark=mark, escape=escape, held_nbytes=max_record_nbytes)
        super().__init__(files, IndexRecipe(lambda name: f".{name}.{suffix}", scan, _is_valid), reading, transform)
        self._dialect: dict[str, Any] = {"delimiter": delimiter, "escapechar": escape}
        self._header = self._shared_header()
        _check_names(columns, self._header, delimiter, self.paths[0])
        self._columns = _select_columns(columns, self._header, self.paths[0])

    def _shared_header(self) -> list[str]:
        first_rows = [bytes(each.open_arrays()[_FIRST_ROW]) for each in self._indexes]
        header = partial(_header, dialect=self._dialect, encoding=self._encoding)
        headers = {row: header(row, path) for row, path in zip(first_rows, self.paths, strict=True)}
        for path, row in zip(self.paths, first_rows, strict=True):
            if headers[row] != headers[first_rows[0]]:
                raise SampleError(
                    f"{path} has the columns {headers[row]} in its first row, but {self.paths[0]} has"
                    f" {headers[first_rows[0]]}; files that are read together need the same first row"
                )
        return headers[first_rows[0]]

    def _value(self, text: str, file: int, at: int) -> dict[str, Any]:
        fields = self._fields(text, file, at)
        if len(fields) != len(self._header):
            raise SampleError(
                f"{self._describe(file, at)} has {len(fields)} fields, but the first row has {len(self._header)}; is a"
                " quote or a delimiter missing?"
            )
        return {name: self._convert(fields[place], name, to, file, at) for name, place, to in self._columns}

    def _fields(self, text: str, file: int, at: int) -> list[str]:
        try:
            return _parse_row(text, self._dialect)
        except csv.Error as error:
            raise SampleError(f"{self._describe(file, at)} {_describe_csv_error(error)}") from error

    def _convert(self, text: str, name: str, to: Convert | None, file: int, at: int) -> Any:
        if to is None:
            return text
        try:
            return to(text)
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            kind = getattr(to, "__name__", type(to).__name__)
            raise SampleError(
                f"{self._describe(file, at)} column {name!r}: cannot convert {text!r} to"
                f" {kind if kind.startswith('__') else kind.removeprefix('_')}"
                f" ({error})"
            ) from error


def _check_delimiter(delimiter: object) -> None:
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise ArgumentError(f"delimiter={delimiter!r} must be one character that is not a quote, line end or NUL")


def _check_escape(escape: object, delimiter: str) -> None:
    if escape is None:
        return
    if not isinstance(escape, str) or len(escape) != 1 or not escape.isascii() or escape in f'"\r\n\0 {delimiter}':
        raise ArgumentError(
            f"escape={escape!r} must be one ASCII character that is not a quote, blank, line end, NUL or the delimiter"
        )


def _parse_row(text: str, dialect: Mapping[str, Any]) -> list[str]:
    """Fields of a row.

    csv.Error also if its quotes are escaped in a way that `dialect` reads as ends of fields, and if it ends within
    quotes: such a row is the last one, and may have swallowed others.
    """
    rows = csv.reader([text, ""], **dialect)
    fields = next(rows)
    if _ESCAPED in text and dialect["escapechar"] is None:
        try:
            next(csv.reader([text], strict=True, **dialect))
        except csv.Error as error:  # text after a closing quote, which is joined to the field if not strict
            raise csv.Error(_ESCAPED_HINT) from error
    if rows.line_num > 1:  # the row has not ended yet
        raise csv.Error(_OPEN_HINT)
    return fields


def _encode_delimiter(delimiter: str, encoding: str) -> bytes:
    """The bytes of a delimiter, which occur only as that character."""
    mark = delimiter.encode(encoding, "ignore")
    if len(mark) != 1 and (encoding != "utf-8" or not mark):
        raise ArgumentError(f"delimiter={delimiter!r} is not a single byte in {encoding.upper()}; use another one")
    return mark


def _describe_csv_error(error: csv.Error) -> str:
    """Describe a row that the csv module cannot parse, with a remedy."""
    if _LIMIT in str(error):
        return f"is not CSV ({error}); is a quote missing? csv.field_size_limit raises the limit for long fields"
    if str(error) == _OPEN_HINT:
        return f"{error} Repair the row, or pass on_error='skip' to the loader"
    if str(error) == _ESCAPED_HINT:
        return f"is not in the default dialect of CSV; {error}"
    return f"is not CSV ({error}); quote the field, or pass on_error='skip' to the loader"


def _header(row: bytes, path: str, dialect: Mapping[str, Any], encoding: str) -> list[str]:
    if not row.strip(b"\r\n"):
        raise SampleError(f"{path} is empty; its first row has to name the columns")
    try:
        names = _parse_row(row.decode(encoding), dialect)
    except UnicodeDecodeError as error:
        raise SampleError(f"{path}: the first row {describe_undecodable(encoding, error)}") from error
    except csv.Error as error:
        hint = "; do its lines end in a carriage return only? Rewrite them with \\n" * (b"\r" in row)
        raise SampleError(f"{path}: the first row is not CSV ({error}){hint}") from error
    if _SEPARATOR_LINE.fullmatch(row):
        raise SampleError(
            f"{path} begins with the line {row.decode(encoding)!r}, which tells Excel the delimiter, instead of names"
            " of columns; delete that line, and pass delimiter="
        )
    if len(set(names)) < len(names):
        raise SampleError(f"{path}: the first row names a column twice: {names}")
    return names


def _check_names(columns: object, header: Sequence[str], delimiter: str, path: str) -> None:
    """Raise ArgumentError for a first row that another delimiter divides.

    Without this error, each sample would be one text of all columns.
    """
    likely = next((mark for mark in _DELIMITERS if mark != delimiter and mark in header[0]), None)
    if columns is None and len(header) == 1 and likely is not None:
        raise ArgumentError(
            f"{path} has one column, {header[0]!r}, according to its first row; pass delimiter={likely!r} if it has"
            f" several, or columns=[{header[0]!r}] if it has one"
        )


def _select_columns(
    columns: Sequence[str] | Mapping[str, Convert] | None, header: Sequence[str], path: str
) -> list[tuple[str, int, Convert | None]]:
    """Name, position in the row, and conversion of each column."""
    for name in header if columns is None else columns:
        if name not in header:
            raise ArgumentError(f"column {name!r} is not in {path}; there are {', '.join(header)}")
    kinds = columns if isinstance(columns, Mapping) else dict.fromkeys(header if columns is None else columns)
    return [(name, header.index(name), _bool if kind is bool else kind) for name, kind in kinds.items()]


def _bool(text: str) -> bool:
    word = text.strip().lower()
    if word in {"true", "yes", "1", "t", "y"}:
        return True
    if word in {"false", "no", "0", "f", "n"}:
        return False
    raise ValueError("neither true nor false")


def row_bounds(file: File, mark: bytes, held_nbytes: int, escape: str | None = None) -> Columns:
    """Bounds of all rows except the first, and that row's bytes."""
    bounds = concatenate_bounds(_rows(file, mark, escape, held_nbytes))
    starts, stops = bounds["starts"], bounds["stops"]
    first = file.read([(int(starts[0]), int(stops[0]))])[0] if len(starts) else b""
    return {"starts": starts[1:], "stops": stops[1:], _FIRST_ROW: np.frombuffer(bytes(first), np.uint8)}


def _is_valid(file: File, arrays: Columns) -> bool:
    """Check an index against the first row and some bounds."""
    first = bytes(arrays.get(_FIRST_ROW, b""))
    begin = bytes(file.read([(0, min(file.nbytes, len(BOM) + len(first)))])[0])
    return bool(first) and begin.removeprefix(BOM).startswith(first) and bounds_match(file, arrays)


def _rows(file: File, mark: bytes, escape: str | None, held_nbytes: int) -> Iterator[Bounds]:
    """Bounds of the rows that are not empty."""
    special = (b'"',) if escape is None else (b'"', escape.encode())
    remaining = _checked_pieces(file, held_nbytes)
    for piece in remaining:
        data = bytes(piece.data)
        if any(each in data for each in special):
            # From here on, a line end may be quoted or escaped. All earlier lines are complete rows.
            yield _parse_rows(chain([piece], remaining), mark, escape, file.name)
            return
        starts, stops = bounds_in(piece)
        filled = starts < stops
        yield starts[filled], stops[filled]


def _checked_pieces(file: File, held_nbytes: int) -> Iterator[LinePiece]:
    for piece in line_pieces(file, held_nbytes):
        if piece.left_out:
            raise SampleError(
                f"{file.name}: the line at byte {piece.at} has more than {held_nbytes:,} bytes; is this a CSV file?"
                " max_record_nbytes= raises the limit"
            )
        yield piece


def _parse_rows(remaining: Iterator[LinePiece], mark: bytes, escape: str | None, name: str) -> Bounds:
    """Bounds of rows as Python's csv module finds them.

    A row that the module cannot parse is kept, and raises an error when it is read.
    """
    first = next(remaining)
    start = stop = first.at
    starts, stops = array("Q"), array("Q")

    def lines() -> Iterator[str]:
        nonlocal stop
        for piece in chain([first], remaining):
            for line in BytesIO(piece.data):
                stop += len(line)
                # For any encoding, Latin-1 maps each byte to one character: the parser only needs the structure.
                yield (line if len(mark) == 1 else line.replace(mark, _NO_TEXT)).decode("latin-1")

    delimiter = (mark if len(mark) == 1 else _NO_TEXT).decode("latin-1")
    rows = csv.reader(lines(), delimiter=delimiter, escapechar=escape)
    while True:
        try:
            filled = bool(next(rows))
        except StopIteration:
            break
        except csv.Error as error:
            if _LIMIT in str(error):  # the end of the row is unknown
                raise SampleError(f"{name}: the row at byte {start} {_describe_csv_error(error)}") from error
            filled = True
        if filled:
            starts.append(start)
            stops.append(stop)
        start = stop
    return np.frombuffer(starts, np.uint64), np.frombuffer(stops, np.uint64)
