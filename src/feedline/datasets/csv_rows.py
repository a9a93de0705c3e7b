"""`CSV`: rows of CSV files by number, quoted line ends included."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from feedline.datasets.arrays import Transform
from feedline.datasets.files import Pathlike
from feedline.datasets.lines import TextRecords, blocks, first_byte, line_bounds, mapped
from feedline.datasets.paths import Paths, matching
from feedline.datasets.sidecars import Columns
from feedline.errors import ArgumentError, SampleError

Convert = Callable[[str], Any]


class CSV(TextRecords):
    """The rows of CSV files as dicts by column, under the names in their first row, which all files must share.

    `columns` chooses columns, as a list, or as a dict that also says what their texts become: `{"x": float}`; a type
    or any function of the text. Else values are `str`. `bool` takes true and false, yes and no, 1 and 0. Read as
    Python's csv module does, with its default dialect but for `delimiter`; empty lines are left out.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | Mapping[str, Convert] | None = None,
        *,
        delimiter: str = ",",
        transform: Transform | None = None,
        index: Pathlike | None = None,
    ) -> None:
        found = matching(paths, "**/*.csv")
        self._delimiter = delimiter
        self._header = _shared_header(found, delimiter)
        self._wanted = _wanted(columns, self._header, found[0])
        super().__init__(found, partial(row_bounds, delimiter=delimiter), f"csv{ord(delimiter)}", index, transform)

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


def _shared_header(paths: Sequence[str], delimiter: str) -> list[str]:
    headers = [_header(path, delimiter) for path in paths]
    for path, header in zip(paths, headers, strict=True):
        if header != headers[0]:
            raise SampleError(
                f"{path} begins with the columns {header}, but {paths[0]} with {headers[0]}; files that are read"
                " together have the same first row"
            )
    return headers[0]


def _header(path: str, delimiter: str) -> list[str]:
    for _, _, fields in _records(path, delimiter):
        if len(set(fields)) < len(fields):
            raise SampleError(f"{path}: the first row names a column twice: {fields}")
        return [field.encode("latin-1").decode("utf-8") for field in fields]
    raise SampleError(f"{path} is empty; its first row should name the columns")


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


def row_bounds(path: str, delimiter: str) -> Columns:
    """Where each row behind the first begins and ends."""
    if not any(b'"' in bytes(block) for block in blocks(mapped(path))):
        bounds = line_bounds(path)  # every line is a row
        filled = bounds["starts"] < bounds["stops"]
        return {name: places[filled][1:] for name, places in bounds.items()}
    starts, stops = array("Q"), array("Q")
    for start, stop, _ in _records(path, delimiter):
        starts.append(start)
        stops.append(stop)
    return {"starts": np.frombuffer(starts, np.uint64)[1:], "stops": np.frombuffer(stops, np.uint64)[1:]}


def _records(path: str, delimiter: str) -> Iterator[tuple[int, int, list[str]]]:
    """Each row that is not empty with the bytes it takes; its characters stand for bytes."""
    with open(path, "rb") as file:
        file.seek(first_byte(memoryview(file.read(3))))
        start = stop = file.tell()

        def lines() -> Iterator[str]:
            nonlocal stop
            for line in file:
                stop += len(line)
                yield line.decode("latin-1")

        try:
            for fields in csv.reader(lines(), delimiter=delimiter):
                if fields:
                    yield start, stop, fields
                start = stop
        except csv.Error as error:
            raise SampleError(
                f"{path}: the row that begins at byte {start} is not CSV ({error}); csv.field_size_limit raises the"
                " limit for long fields"
            ) from error
