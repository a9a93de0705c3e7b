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

from feedline.datasets.arrays import Transform
from feedline.datasets.blob_indexes import Kind
from feedline.datasets.files import Pathlike
from feedline.datasets.lines import Options, TextRecords
from feedline.datasets.paths import Paths, find
from feedline.datasets.sidecars import Columns
from feedline.datasets.text_bounds import BOM, Bounds, Piece, bounds_in, fit, gathered, pieces
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.blobs import Blob

_FIRST_ROW = "first"
"""The array of an index that holds the bytes of the first row."""

Convert = Callable[[str], Any]


class CSV(TextRecords):
    """The rows of CSV files as dicts by column, under the names in their first row, which all files must share.

    `columns` chooses columns, as a list, or as a dict that also says what their texts become: `{"x": float}`; a type
    or any function of the text. Else values are `str`. `bool` takes true and false, yes and no, 1 and 0. Read as
    Python's csv module does, with its default dialect but for `delimiter`; empty lines are left out. Objects of stores
    are kept in the folder `cache`, if one is given; `options` are those of `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | Mapping[str, Convert] | None = None,
        *,
        delimiter: str = ",",
        transform: Transform | None = None,
        index: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Options = None,
    ) -> None:
        suffix, scan = f"csv{ord(delimiter)}-index", partial(row_bounds, delimiter=delimiter)
        kind = Kind(lambda name: f"{name}.{suffix}", scan, _fits)
        super().__init__(find(paths, "**/*.csv", cache=cache, options=options), kind, index, transform)
        self._delimiter = delimiter
        self._header = self._shared_header()
        self._wanted = _wanted(columns, self._header, self.paths[0])

    def _shared_header(self) -> list[str]:
        first_rows = [bytes(each.opened()[_FIRST_ROW]) for each in self._indexes]
        headers = {row: _header(row, path, self._delimiter) for row, path in zip(first_rows, self.paths, strict=True)}
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
            raise SampleError(
                f"{self._where(file, at)} is not CSV ({error}); csv.field_size_limit raises the limit for long fields"
            ) from error

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


def _header(row: bytes, path: str, delimiter: str) -> list[str]:
    if not row:
        raise SampleError(f"{path} is empty; its first row should name the columns")
    try:
        names = next(csv.reader([row.decode("utf-8")], delimiter=delimiter))
    except UnicodeDecodeError as error:
        raise SampleError(f"{path}: the first row is not UTF-8 ({error}); write it again") from error
    except csv.Error as error:
        raise SampleError(f"{path}: the first row is not CSV ({error}); write it again") from error
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


def row_bounds(blob: Blob, delimiter: str) -> Columns:
    """Where each row behind the first begins and ends, and the bytes of the first."""
    found = gathered(_rows(blob, delimiter))
    starts, stops = found["starts"], found["stops"]
    first = blob.read([(int(starts[0]), int(stops[0]))])[0] if len(starts) else b""
    return {"starts": starts[1:], "stops": stops[1:], _FIRST_ROW: np.frombuffer(bytes(first), np.uint8)}


def _fits(blob: Blob, arrays: Columns) -> bool:
    """Whether the first row is the one of the index, and rows begin and end where it says."""
    first = bytes(arrays.get(_FIRST_ROW, b""))
    begin = bytes(blob.read([(0, min(blob.nbytes, len(BOM) + len(first)))])[0])
    return bool(first) and begin.removeprefix(BOM).startswith(first) and fit(blob, arrays)


def _rows(blob: Blob, delimiter: str) -> Iterator[Bounds]:
    """The rows that are not empty; as long as nothing is quoted, every line is one."""
    coming = pieces(blob)
    for piece in coming:
        if b'"' in bytes(piece.data):
            yield _quoted(chain([piece], coming), delimiter, blob.name)
            return
        starts, stops = bounds_in(piece.data, piece.at)
        filled = starts < stops
        yield starts[filled], stops[filled]


def _quoted(coming: Iterator[Piece], delimiter: str, name: str) -> Bounds:
    """As Python's csv module finds them; to it, characters stand for bytes."""
    first = next(coming)
    start = stop = first.at
    starts, stops = array("Q"), array("Q")

    def lines() -> Iterator[str]:
        nonlocal stop
        for piece in chain([first], coming):
            for line in BytesIO(piece.data):
                stop += len(line)
                yield line.decode("latin-1")

    try:
        for fields in csv.reader(lines(), delimiter=delimiter):
            if fields:
                starts.append(start)
                stops.append(stop)
            start = stop
    except csv.Error as error:
        raise SampleError(
            f"{name}: the row that begins at byte {start} is not CSV ({error}); csv.field_size_limit raises the"
            " limit for long fields"
        ) from error
    return np.frombuffer(starts, np.uint64), np.frombuffer(stops, np.uint64)
