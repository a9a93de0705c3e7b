"""Iceberg tables: the files of the current snapshot, by metadata and manifests."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from operator import index
from typing import Any

from feedline.core import optional
from feedline.datasets.tables.snapshots import ELEMENT, FieldId, Snapshot, TableColumns, TableFolder, naming_damage
from feedline.datasets.tables.types import pyarrow
from feedline.errors import SampleError

# https://iceberg.apache.org/spec/
_FOLDER = "metadata/"


_METADATA = re.compile(r"v?(\d+)(?:-[0-9a-f-]+)?(?:\.gz)?\.metadata\.json(?:\.gz)?")


_HINT = "version-hint.text"


_TYPES = {
    "boolean": "bool",
    "int": "int32",
    "long": "int64",
    "float": "float",
    "double": "double",
    "date": "date32",
    "time": "time64[us]",
    "timestamp": "timestamp[us]",
    "string": "string",
}
"""Arrow's names of types."""


_DATA = 0
"""The content of a manifest or file with rows; others have deletes."""


_DELETED = 2


ManifestEntry = Mapping[str, Any]


def is_table(folder: TableFolder) -> bool:
    """True for the folder of an Iceberg table."""
    return any(map(_METADATA.fullmatch, folder.names(_FOLDER)))


def read_snapshot(folder: TableFolder, name: str | None = None) -> Snapshot:
    """The files of the current snapshot.

    The metadata file `name`, or the latest one, defines the snapshot. ArgumentError for tables with delete files;
    SampleError for damaged metadata.
    """
    with naming_damage("Iceberg", folder):
        snapshot = _snapshot(folder, name)
        snapshot.check()
    return snapshot


def _snapshot(folder: TableFolder, name: str | None) -> Snapshot:
    metadata = _read_json(folder, f"{_FOLDER}{name or _latest(folder)}")
    location, current = metadata["location"], metadata.get("current-snapshot-id")
    snapshot = next((each for each in metadata.get("snapshots", ()) if each["snapshot-id"] == current), None)
    columns = _columns(folder, metadata)
    partitions = _partitions(metadata, columns)
    files: dict[str, dict[str, str | None]] = {}
    for spec, entry in () if snapshot is None else _entries(folder, snapshot, location):
        file = entry["data_file"]
        if file["file_format"].upper() != "PARQUET":
            raise folder.unsupported_error("an Iceberg", f"with files of the format {file['file_format']}")
        # Files that were not written by Iceberg, but added to the table, may lack the columns of their partition.
        own, values = partitions.get(spec, {}), file.get("partition") or {}
        files[folder.relative(file["file_path"], location)] = {
            column: _text(values[name]) for column, name in own.items() if name in values
        }
    types = {column: columns.types[column] for own in partitions.values() for column in own}
    return Snapshot(files, types, columns)


def _partitions(metadata: ManifestEntry, columns: TableColumns) -> dict[int, dict[str, str]]:
    """Names of partition fields by column, for each partition spec.

    Only of fields whose values are those of the column.
    """
    old = {"spec-id": 0, "fields": metadata.get("partition-spec", ())}
    names = {columns.ids[name].number: name for name in columns.types}
    return {
        spec["spec-id"]: {
            names[field["source-id"]]: field["name"]
            for field in spec["fields"]
            if field["transform"] == "identity" and field["source-id"] in names
        }
        for spec in metadata.get("partition-specs") or [old]
    }


def _text(value: Any) -> str | None:
    """A value of a partition as Arrow parses it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    return (
        value.isoformat()
        if isinstance(value, (date, time))
        else f"{value:f}"
        if isinstance(value, Decimal)
        else str(value)
    )


def _latest(folder: TableFolder) -> str:
    """The metadata file that the hint names, or the newest."""
    names = folder.names(_FOLDER)
    numbered = [(int(match[1]), name) for name in names if (match := _METADATA.fullmatch(name))]
    version = max(numbered)[0]
    if _HINT in names:
        hint = folder.read(f"{_FOLDER}{_HINT}").strip().decode("ascii", "replace")
        # Writers update the hint after the metadata, so it may be too old, but never too new.
        version = max(version, int(hint)) if hint.isdigit() else version
    latest = [name for number, name in numbered if number == version]
    if len(latest) != 1:
        raise SampleError(
            f"the current version of the Iceberg table {folder} is unknown: its metadata has {len(latest)} files of"
            f" version {version} ({', '.join(latest) or 'none'}), and only a catalog knows the current one; pass the"
            " path of that metadata file instead of the path of the table"
        )
    return latest[0]


def _read_json(folder: TableFolder, path: str) -> Any:
    data = folder.read(path)
    try:
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, OSError, EOFError) as error:
        raise _damage_error(folder, path, error) from error


def _columns(folder: TableFolder, metadata: ManifestEntry) -> TableColumns:
    current = metadata.get("current-schema-id")
    schemas = metadata.get("schemas") or [metadata["schema"]]
    fields = next((schema for schema in schemas if schema.get("schema-id") == current), schemas[-1])["fields"]
    for field in fields:
        if field.get("initial-default") is not None:
            raise folder.unsupported_error(
                "an Iceberg", f"whose column {field['name']!r} has a default for older files"
            )
    types = {field["name"]: _arrow_type(field["type"]) for field in fields}
    plain = {name: kind for name, kind in types.items() if kind is not None}
    return TableColumns(list(types), _ids(fields), plain)


def _ids(fields: Iterable[ManifestEntry]) -> dict[str, FieldId]:
    return {field["name"]: FieldId(index(field["id"]), _member_ids(field["type"])) for field in fields}


def _member_ids(kind: Any) -> dict[str, FieldId]:
    """The numbers of the members of a type."""
    if not isinstance(kind, Mapping):
        return {}
    if kind["type"] == "struct":
        return _ids(kind["fields"])
    names = {"element": ELEMENT} if kind["type"] == "list" else {"key": "key", "value": "value"}
    return {ours: FieldId(index(kind[f"{name}-id"]), _member_ids(kind[name])) for name, ours in names.items()}


def _arrow_type(name: Any) -> Any:
    """The Arrow type of a plain type; None for others."""
    arrow = pyarrow("datasets.Parquet")
    if isinstance(name, str) and (match := re.fullmatch(r"decimal\((\d+), *(\d+)\)", name)):
        return arrow.decimal128(int(match[1]), int(match[2]))
    if name == "timestamptz":
        return arrow.timestamp("us", "UTC")
    return arrow.type_for_alias(_TYPES[name]) if isinstance(name, str) and name in _TYPES else None


def _entries(folder: TableFolder, snapshot: ManifestEntry, location: str) -> Iterator[tuple[int, ManifestEntry]]:
    """The entries of all manifests that are not deleted.

    Each with the number of its partition spec.
    """
    manifests = [{"manifest_path": path} for path in snapshot.get("manifests", ())]
    if "manifest-list" in snapshot:
        manifests = _read_avro(folder, folder.relative(snapshot["manifest-list"], location))
    for manifest in manifests:
        for entry in _read_avro(folder, folder.relative(manifest["manifest_path"], location)):
            if entry["status"] == _DELETED:
                continue
            if manifest.get("content", _DATA) != _DATA or entry["data_file"].get("content", _DATA) != _DATA:
                raise folder.unsupported_error(
                    "an Iceberg", f"with delete files, such as {entry['data_file']['file_path']}"
                )
            yield manifest.get("partition_spec_id") or 0, entry


def _read_avro(folder: TableFolder, path: str) -> list[Any]:
    avro = optional.load("fastavro", "avro", "the metadata of an Iceberg table")
    data = io.BytesIO(folder.read(path))
    try:
        return list(avro.reader(data))
    except Exception as error:
        raise _damage_error(folder, path, error) from error


def _damage_error(folder: TableFolder, path: str, error: Exception) -> SampleError:
    return SampleError(f"{folder.address(path)} cannot be read: it is damaged ({error}); repair the Iceberg table")
