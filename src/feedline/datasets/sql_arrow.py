"""What ADBC gives: record batches, told by the types that the database itself names, as values of Python."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from feedline import extras
from feedline.errors import SampleError

_HELD = (
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
"""Names the type of a column that Arrow has no type for; its bytes are PostgreSQL's own."""
_TYPE = b"POSTGRESQL:type"


def blocks(reader: Any, size: int) -> Iterator[list[Sequence[Any]]]:
    """The values of each column, at most `size` rows at a time; SampleError names a column of a type not held here."""
    values_of = [_reading(field) for field in reader.schema]
    for batch in reader:
        for start in range(0, batch.num_rows, size):
            yield [read(column.slice(start, size)) for read, column in zip(values_of, batch.columns, strict=True)]


def _reading(field: Any) -> Callable[[Any], Sequence[Any]]:
    metadata = field.metadata or {}
    name = (metadata.get(_OPAQUE) or metadata.get(_TYPE) or str(field.type).encode()).decode()
    if name == "numeric":
        return _decimals
    if name == "uuid":
        return _uuids
    opaque = _OPAQUE in metadata or getattr(field.type, "extension_name", "") == "arrow.opaque"
    if opaque or name == "money" or not _is_held(field.type):
        raise SampleError(
            f"column {field.name!r} of the query is of the type {name}, which is neither a number, a text nor bytes:"
            f" cast it in the query, as in CAST({field.name} AS {'NUMERIC' if name == 'money' else 'TEXT'})"
        )
    return _plain


def _is_held(arrow_type: Any) -> bool:
    types = extras.load("pyarrow", "sql", "datasets.SQLManifest").types
    stored = getattr(arrow_type, "storage_type", arrow_type)
    if types.is_dictionary(stored):
        stored = stored.value_type
    return any(getattr(types, f"is_{name}")(stored) for name in _HELD)


def _plain(column: Any) -> Sequence[Any]:
    values: Sequence[Any] = column.to_pylist()
    return values


def _decimals(column: Any) -> Sequence[Any]:
    return [None if value is None else Decimal(value) for value in column.to_pylist()]


def _uuids(column: Any) -> Sequence[Any]:
    stored = getattr(column, "storage", column).to_pylist()  # as bytes, whether this pyarrow knows UUIDs or not
    return [None if value is None else str(uuid.UUID(bytes=value)) for value in stored]
