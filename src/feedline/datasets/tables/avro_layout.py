"""Headers, schemas and blocks of Avro files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from feedline.core import optional
from feedline.datasets.file_objects import Stream
from feedline.datasets.indexes import Columns, IndexRecipe
from feedline.datasets.signatures import begin_of, check_format, damage_error
from feedline.datasets.tables.types import pyarrow
from feedline.errors import ArgumentError, FeedlineError, MissingExtraError
from feedline.stores.files import File

# https://avro.apache.org/docs/1.12.0/specification/
_WHAT = "datasets.Avro"


_MAGIC = b"Obj\x01"


_SYNC_NBYTES = 16


_MOST_VARINT_NBYTES = 10


def avro() -> Any:
    """Import fastavro."""
    return optional.load("fastavro", "avro", _WHAT)


@contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Turn the errors of libraries for unreadable data into a SampleError."""
    try:
        yield
    except (FeedlineError, MemoryError):
        raise
    except Exception as error:
        raise _damage_error(name, error) from error


class AvroHeader(NamedTuple):
    """The header of an Avro file: its bytes, and its schema."""

    data: bytes
    schema: Any


def parse_header(data: bytes, name: str) -> AvroHeader:
    """Parse the header in an index."""
    with naming_damage(name):
        reader = avro().reader(io.BytesIO(data))
        return AvroHeader(data, json.loads(reader.metadata["avro.schema"]))


def records(header: AvroHeader, block: memoryview, name: str) -> list[Any]:
    """Decode the records of a block; times are the stored integers."""
    with naming_damage(name):
        plain = json.dumps(_without_times(header.schema))
        reader = avro().reader(io.BytesIO(_with_schema(header.data, plain.encode()) + bytes(block)))
        return list(reader)


_PLAIN = {"uuid", "date", "time-millis", "time-micros"} | {
    f"{kind}timestamp-{unit}" for kind in ("", "local-") for unit in ("millis", "micros", "nanos")
}


def _without_times(schema: Any) -> Any:
    """The schema with plain integers for times, and texts for UUIDs."""
    if isinstance(schema, list):
        return [_without_times(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {name: value for name, value in schema.items() if name != "logicalType" or value not in _PLAIN}
    for name in ("type", "items", "values"):
        if name in plain:
            plain[name] = _without_times(plain[name])
    if "fields" in plain:
        plain["fields"] = [_without_times(field) for field in plain["fields"]]
    return plain


def _with_schema(header: bytes, schema: bytes) -> bytes:
    """The header with another schema."""
    reader = avro().reader(io.BytesIO(header))
    metadata = {**reader.metadata, "avro.schema": schema.decode()}
    pairs = b"".join(_text(key.encode()) + _text(value.encode()) for key, value in metadata.items())
    return _MAGIC + _long(len(metadata)) + pairs + _long(0) + header[-_SYNC_NBYTES:]


def _text(data: bytes) -> bytes:
    return _long(len(data)) + data


def _long(value: int) -> bytes:
    """A number of at least 0, as a zigzag varint."""
    value, data = value << 1, bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


class _ByteCursor:
    """The bytes of a file in order, with their position."""

    def __init__(self, file: File) -> None:
        self._stream, self._nbytes, self.at = Stream(file), file.nbytes, 0

    @property
    def is_at_end(self) -> bool:
        return self.at >= self._nbytes

    def take(self, nbytes: int) -> memoryview:
        if nbytes < 0 or self.at + nbytes > self._nbytes:
            raise ValueError(f"a length reaches beyond its end at byte {self.at}")
        self.at += nbytes
        return self._stream.take(nbytes)

    def long(self) -> int:
        value = 0
        for place in range(_MOST_VARINT_NBYTES):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return value >> 1 ^ -(value & 1)
        raise ValueError(f"no number is at byte {self.at}")


def scan_blocks(file: File) -> Columns:
    """Bounds and record counts of all blocks, and the header."""
    try:
        return _scan(_ByteCursor(file))
    except ValueError as error:
        check_format(file.name, "Avro", begin_of(file))
        raise _damage_error(file.name, error) from error


def _scan(file: _ByteCursor) -> Columns:
    header = bytearray()
    if bytes(file.take(len(_MAGIC))) != _MAGIC:
        raise ValueError("it does not begin as an Avro file")
    header += _MAGIC
    while count := file.long():
        if count < 0:  # the next number is the size of this part of the metadata
            file.long()
        header += _long(abs(count))
        for _ in range(2 * abs(count)):
            header += _text(bytes(file.take(file.long())))
    sync = bytes(file.take(_SYNC_NBYTES))
    header += _long(0) + sync
    rows = list(_blocks(file, sync))
    starts, stops, counts = np.array(rows, np.uint64).reshape(-1, 3).T
    return {"starts": starts, "stops": stops, "counts": counts, "header": np.frombuffer(bytes(header), np.uint8)}


def _blocks(file: _ByteCursor, sync: bytes) -> Iterator[tuple[int, int, int]]:
    while not file.is_at_end:
        start, count = file.at, file.long()
        file.take(file.long())
        if count < 0 or bytes(file.take(_SYNC_NBYTES)) != sync:
            raise ValueError(f"the block at byte {start} does not end in the marker of the file")
        if count:
            yield start, file.at, count


def _matches(file: File, arrays: Columns) -> bool:
    """Check an index against the markers at the ends of blocks."""
    if set(arrays) != {"starts", "stops", "counts", "header"}:
        return False
    stops, sync = arrays["stops"].astype(np.int64), bytes(arrays["header"][-_SYNC_NBYTES:])
    if len(stops) and int(stops[-1]) != file.nbytes:
        return False
    chosen = stops[np.unique(np.linspace(0, len(stops) - 1, 16).astype(np.int64))] if len(stops) else stops
    return all(bytes(view) == sync for view in file.read([(stop - _SYNC_NBYTES, stop) for stop in chosen.tolist()]))


BLOCKS = IndexRecipe(lambda name: f".{name}.avro-index", scan_blocks, _matches)


def _damage_error(name: str, error: Exception) -> Exception:
    if "need to install" in str(error):  # fastavro names the package of a codec
        return MissingExtraError(f"{name} cannot be read: {error}")
    return damage_error(name, "Avro", error)


def arrow_schema(schema: Any, name: str) -> Any:
    """The Arrow schema of records; ArgumentError for unsupported types."""
    with naming_damage(name):  # fastavro reads headers without a check of every part of their schema
        return _record_schema(schema, name)


def _record_schema(schema: Any, name: str) -> Any:
    types = _Types(name)
    if not isinstance(schema, Mapping) or schema.get("type") != "record":
        raise ArgumentError(f"{name} holds values that are not records, such as {schema!r:.60}; write them as records")
    return pyarrow(_WHAT).schema(types.fields(schema))


class _Types:
    """Arrow types of Avro types; names may refer to earlier types."""

    def __init__(self, file: str) -> None:
        self._file, self._arrow = file, pyarrow(_WHAT)
        self._named: dict[str, Any] = {}
        """By full name."""
        self._open: set[str] = set()
        self._namespace = ""

    def fields(self, schema: Mapping[str, Any]) -> list[Any]:
        """The columns of the outermost record."""
        name = self._full_name(schema)
        self._namespace = name.rpartition(".")[0]
        self._open.add(name)
        return [self._arrow.field(each["name"], self.of(each["type"], each["name"])) for each in schema["fields"]]

    def of(self, schema: Any, column: str) -> Any:
        """The type of a schema."""
        if isinstance(schema, list):
            return self._union(schema, column)
        if isinstance(schema, str):
            return self._plain(schema, column)
        if isinstance(schema["type"], (list, Mapping)):
            return self.of(schema["type"], column)
        arrow, namespace, name = self._logical(schema), self._namespace, self._full_name(schema)
        self._namespace = name.rpartition(".")[0] if "name" in schema else namespace
        kind = self._complex(schema, column, name) if arrow is None else arrow
        self._namespace = namespace
        if "name" in schema:
            self._named[name] = kind
        return kind

    def _full_name(self, schema: Mapping[str, Any]) -> str:
        """The name of a type with its namespace.

        Without one of its own, a type has the namespace of the enclosing type.
        """
        name: str = schema.get("name", "")
        space = schema.get("namespace", self._namespace)
        return name if "." in name or not space else f"{space}.{name}"

    def _union(self, choices: list[Any], column: str) -> Any:
        kinds = [each for each in choices if each != "null"]
        if len(kinds) > 1:
            raise self._unsupported_error(column, f"a union of {', '.join(map(_name_of, kinds))}")
        return self.of(kinds[0], column) if kinds else self._arrow.null()

    def _plain(self, name: str, column: str) -> Any:
        arrow = self._arrow
        plain = {"int": "int32", "long": "int64", "boolean": "bool", "bytes": "binary"}.get(name, name)
        if name in {"null", "boolean", "int", "long", "float", "double", "bytes", "string"}:
            return arrow.type_for_alias(plain)
        full = self._full_name({"name": name})
        if full in self._open:
            raise self._unsupported_error(column, f"the record {name}, which contains itself")
        if full not in self._named:
            raise self._unsupported_error(column, f"the unknown type {name}")
        return self._named[full]

    def _complex(self, schema: Mapping[str, Any], column: str, name: str) -> Any:
        arrow, kind = self._arrow, schema["type"]
        if kind == "array":
            return arrow.list_(self.of(schema["items"], column))
        if kind == "map":
            return arrow.map_(arrow.string(), self.of(schema["values"], column))
        if kind == "enum":
            return arrow.string()
        if kind == "fixed":
            return arrow.binary(schema["size"])
        if kind not in {"record", "error"}:
            return self._plain(kind, column)
        self._open.add(name)
        fields = [
            arrow.field(each["name"], self.of(each["type"], f"{column}.{each['name']}")) for each in schema["fields"]
        ]
        self._open.discard(name)
        return arrow.struct(fields)

    def _logical(self, schema: Mapping[str, Any]) -> Any:
        arrow, name = self._arrow, schema.get("logicalType", "")
        if name == "decimal":
            wide = schema["precision"] > 38
            return (arrow.decimal256 if wide else arrow.decimal128)(schema["precision"], schema.get("scale", 0))
        if name not in _PLAIN - {"uuid"}:
            return None
        kind, _, unit = name.rpartition("-")
        short = {"millis": "ms", "micros": "us", "nanos": "ns"}.get(unit, "")
        if kind == "timestamp":
            return arrow.timestamp(short, "UTC")
        if kind == "local-timestamp":
            return arrow.timestamp(short)
        return {"time-millis": arrow.time32("ms"), "time-micros": arrow.time64("us")}.get(name, arrow.date32())

    def _unsupported_error(self, column: str, what: str) -> ArgumentError:
        return ArgumentError(
            f"column {column!r} of {self._file} is {what}, which cannot become a tensor, text, list or dict; write it"
            " as another type"
        )


def _name_of(schema: Any) -> str:
    return str(schema.get("logicalType", schema["type"])) if isinstance(schema, Mapping) else str(schema)
