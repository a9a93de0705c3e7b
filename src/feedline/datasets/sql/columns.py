"""Packed columns of a query's result.

Rows take a few bytes each instead of Python objects. Values come as Python objects from DB-API drivers, or as Arrow
record batches from ADBC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any, Protocol
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.datasets.strings import PackedBytes
from feedline.datasets.tables.columns import CellError
from feedline.errors import SampleError


class SQLColumn(Protocol):
    """Column of int, float, bool, str or bytes, with None at `nulls`."""

    nulls: NDArray[np.bool_] | None

    @property
    def kind(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, at: int) -> Any: ...
    def take(self, places: NDArray[np.int64]) -> SQLColumn: ...
    def order(self) -> NDArray[np.int64]: ...
    def first_invalid_key(self) -> int | None: ...
    def parts(self) -> list[NDArray[Any]]: ...


class SQLNumbers:
    """Integers, floats or booleans; `nulls` marks missing values."""

    def __init__(self, values: NDArray[Any], nulls: NDArray[np.bool_] | None = None) -> None:
        self.values, self.nulls = values, nulls

    @property
    def kind(self) -> str:
        return self.values.dtype.name

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: int) -> Any:
        return None if self.nulls is not None and self.nulls[at] else self.values[at].item()

    def take(self, places: NDArray[np.int64]) -> SQLNumbers:
        """The rows at these places."""
        return SQLNumbers(self.values[places], _take_nulls(self.nulls, places))

    def order(self) -> NDArray[np.int64]:
        """Places of the values in ascending order."""
        return np.argsort(self.values, kind="stable")

    def first_invalid_key(self) -> int | None:
        """Place of the first null or duplicate of a sorted column."""
        return _first_true(self.values[1:] == self.values[:-1], self.nulls)

    def parts(self) -> list[NDArray[Any]]:
        """The arrays that hold the column."""
        return [self.values] if self.nulls is None else [self.values, self.nulls]


class SQLTexts:
    """Strings or bytes; `nulls` marks missing values."""

    def __init__(self, values: PackedBytes, is_text: bool, nulls: NDArray[np.bool_] | None = None) -> None:
        self.values, self.is_text, self.nulls = values, is_text, nulls

    @property
    def kind(self) -> str:
        return "text" if self.is_text else "bytes"

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: int) -> Any:
        if self.nulls is not None and self.nulls[at]:
            return None
        value = self.values[at]
        return value.decode() if self.is_text else value

    def take(self, places: NDArray[np.int64]) -> SQLTexts:
        """The rows at these places."""
        values = PackedBytes.of(self.values[at] for at in places.tolist())
        return SQLTexts(values, self.is_text, _take_nulls(self.nulls, places))

    def order(self) -> NDArray[np.int64]:
        """Places of the values in byte order.

        For UTF-8, that is the order of code points.
        """
        return np.array(sorted(range(len(self)), key=self.values.__getitem__), np.int64)

    def first_invalid_key(self) -> int | None:
        """Place of the first null or duplicate of a sorted column."""
        same = (self.values[at] == self.values[at + 1] for at in range(len(self) - 1))
        return _first_true(np.fromiter(same, np.bool_, len(self) - 1), self.nulls)

    def parts(self) -> list[NDArray[Any]]:
        """The arrays that hold the column."""
        arrays: list[NDArray[Any]] = [self.values.offsets, self.values.buffer]
        return arrays if self.nulls is None else [*arrays, self.nulls]


def narrowed(column: SQLColumn, kind: str) -> SQLColumn:
    """The column as packed before values of other types were added.

    Returned as it is if its values are not of this kind.
    """
    if kind != "int64" or column.kind == kind:
        return column
    if column.nulls is not None and column.nulls.all():  # only nulls, which are packed as integers
        return SQLNumbers(np.zeros(len(column), np.int64), column.nulls)
    if isinstance(column, SQLNumbers) and (np.abs(column.values) <= _EXACT).all():
        whole = column.values.astype(np.int64)
        return SQLNumbers(whole, column.nulls) if np.array_equal(whole, column.values) else column
    return column


def _take_nulls(nulls: NDArray[np.bool_] | None, places: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    return nulls[places] if nulls is not None and nulls[places].any() else None


def _first_true(same_as_before: NDArray[np.bool_], nulls: NDArray[np.bool_] | None) -> int | None:
    places = np.flatnonzero(np.append(False, same_as_before) | (False if nulls is None else nulls))
    return int(places[0]) if len(places) else None


def pack_column(name: str, blocks: Sequence[Sequence[Any]]) -> SQLColumn:
    """Pack blocks of values; CellError names the row of an unsupported value."""
    types = set[type]().union(*(map(type, values) for values in blocks))
    kinds = {_KINDS.get(each, "") for each in types} - {"null"}
    kind = _common_type(kinds)
    if kind is None:
        raise _type_error(name, blocks)
    nulls = _nulls(blocks)
    if kind in ("text", "bytes"):
        encoded = (_encode(value) for values in blocks for value in values)
        return SQLTexts(PackedBytes.of(encoded), kind == "text", nulls)
    if kind == "float64" and kinds != {"float64"}:
        _raise_for_loss(name, blocks, _is_rounded, "float64, the type of columns with fractions, cannot hold exactly")
    try:
        pieces = [np.array([0 if value is None else value for value in values], kind) for values in blocks]
    except OverflowError:
        _raise_for_loss(name, blocks, _is_beyond, "64 bits cannot hold")
        raise
    return SQLNumbers(np.concatenate(pieces) if pieces else np.empty(0, np.int64), nulls)


def _common_type(kinds: set[str]) -> str | None:
    """Type that can hold values of all these types, or None."""
    if kinds <= {"int64"}:  # or only nulls
        return "int64"
    if kinds <= {"int64", "float64", "decimal"}:
        return "float64"
    return next(iter(kinds)) if len(kinds) == 1 and "" not in kinds else None


def _type_error(name: str, blocks: Sequence[Sequence[Any]]) -> CellError:
    """Error for the first value of an unsupported or mixed type."""
    before: set[str] = set()
    for at, value in enumerate(value for values in blocks for value in values):
        kind = _KINDS.get(type(value), "")
        if not kind:
            return CellError(
                name,
                at,
                f"holds a {type(value).__name__}, which is neither a number, a string, bytes nor null: cast it in the"
                f" query, as in CAST({name} AS TEXT)",
            )
        if kind != "null" and _common_type(before | {kind}) is None:
            others = " and ".join(sorted(before))
            return CellError(
                name, at, f"holds {kind}, {value!r:.60}, after {others}: cast the column to one of them in the query"
            )
        before |= {kind} - {"null"}
    raise AssertionError


def _raise_for_loss(name: str, blocks: Sequence[Sequence[Any]], is_lost: Callable[[Any], bool], problem: str) -> None:
    """Raise CellError for the first value that would not be preserved."""
    for at, value in enumerate(value for values in blocks for value in values):
        if is_lost(value):
            raise CellError(
                name,
                at,
                f"holds {value}, which {problem}: cast it in the query, as in CAST({name} AS BIGINT) or AS TEXT",
            )


def _is_rounded(value: Any) -> bool:
    if type(value) not in (int, Decimal):
        return False
    number = Decimal(value)
    return number.is_finite() and abs(number) > _EXACT and Decimal(float(number)) != number


def _is_beyond(value: Any) -> bool:
    return type(value) is int and not -(1 << 63) <= value < 1 << 63


def _nulls(blocks: Sequence[Sequence[Any]]) -> NDArray[np.bool_] | None:
    marks = np.fromiter((value is None for values in blocks for value in values), np.bool_)
    return marks if marks.any() else None


def _encode(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, (str, UUID)):
        return str(value).encode()
    return bytes(value)


_EXACT = 1 << 53
"""Bound up to which float64 represents every integer."""


_KINDS = {
    type(None): "null",
    bool: "bool",
    int: "int64",
    float: "float64",
    Decimal: "decimal",
    str: "text",
    UUID: "text",
    bytes: "bytes",
    bytearray: "bytes",
    memoryview: "bytes",
}


_SUPPORTED = (
    "boolean",
    "integer",
    "floating",
    "decimal",
    "string",
    "large_string",
    "string_view",
    "binary",
    "large_binary",
    "binary_view",
    "fixed_size_binary",
    "null",
)


_OPAQUE = b"ADBC:postgresql:typname"
"""Metadata key for the type of a column that Arrow lacks; values are in PostgreSQL's binary format."""


_TYPE = b"POSTGRESQL:type"


def blocks(reader: Any, size: int) -> Iterator[list[Sequence[Any]]]:
    """Values of each column, in blocks of at most `size` rows.

    SampleError names a column of an unsupported type.
    """
    values_of = [_reader_for(field) for field in reader.schema]
    for batch in reader:
        for start in range(0, batch.num_rows, size):
            yield [read(column.slice(start, size)) for read, column in zip(values_of, batch.columns, strict=True)]


def _reader_for(field: Any) -> Callable[[Any], Sequence[Any]]:
    metadata = field.metadata or {}
    name = (metadata.get(_OPAQUE) or metadata.get(_TYPE) or str(field.type).encode()).decode()
    if name == "numeric":
        return _decimals
    if name == "uuid":
        return _uuids
    opaque = _OPAQUE in metadata or getattr(field.type, "extension_name", "") == "arrow.opaque"
    if opaque or name == "money" or not _is_supported(field.type):
        raise SampleError(
            f"column {field.name!r} of the query has the type {name}, which is neither a number, a string nor bytes:"
            f" cast it in the query, as in CAST({field.name} AS {'NUMERIC' if name == 'money' else 'TEXT'})"
        )
    return _plain


def _is_supported(arrow_type: Any) -> bool:
    types = optional.load("pyarrow", "sql", "datasets.SQLManifest").types
    stored = getattr(arrow_type, "storage_type", arrow_type)
    if types.is_dictionary(stored):
        stored = stored.value_type
    return any(getattr(types, f"is_{name}")(stored) for name in _SUPPORTED)


def _plain(column: Any) -> Sequence[Any]:
    values: Sequence[Any] = column.to_pylist()
    return values


def _decimals(column: Any) -> Sequence[Any]:
    return [None if value is None else Decimal(value) for value in column.to_pylist()]


def _uuids(column: Any) -> Sequence[Any]:
    stored = getattr(column, "storage", column).to_pylist()  # bytes with or without pyarrow's UUID type
    return [None if value is None else str(UUID(bytes=value)) for value in stored]
