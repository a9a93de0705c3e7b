"""Iceberg tables: the files of the current snapshot, by metadata and manifests."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from feedline.core import optional
from feedline.datasets.tables.snapshots import Snapshot, TableColumns, TableFolder
from feedline.errors import SampleError

# https://iceberg.apache.org/spec/
_FOLDER = "metadata/"


_METADATA = re.compile(r"v?(\d+)(?:-[0-9a-f-]+)?(?:\.gz)?\.metadata\.json(?:\.gz)?")


_HINT = "version-hint.text"


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
    metadata = _read_json(folder, f"{_FOLDER}{name or _latest(folder)}")
    location, current = metadata["location"], metadata.get("current-snapshot-id")
    snapshot = next((each for each in metadata.get("snapshots", ()) if each["snapshot-id"] == current), None)
    files: dict[str, dict[str, str | None]] = {}
    for entry in () if snapshot is None else _entries(folder, snapshot, location):
        file = entry["data_file"]
        if file["file_format"].upper() != "PARQUET":
            raise folder.refusal("an Iceberg", f"with files of the format {file['file_format']}")
        # Partition columns are derived from columns that the files store, so no columns are added.
        files[folder.relative(file["file_path"], location)] = {}
    return Snapshot(files, {}, _columns(folder, metadata))


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
        raise _damage(folder, path, error) from error


def _columns(folder: TableFolder, metadata: ManifestEntry) -> TableColumns:
    current = metadata.get("current-schema-id")
    schemas = metadata.get("schemas") or [metadata["schema"]]
    fields = next((schema for schema in schemas if schema.get("schema-id") == current), schemas[-1])["fields"]
    for field in fields:
        if field.get("initial-default") is not None:
            raise folder.refusal("an Iceberg", f"whose column {field['name']!r} has a default for older files")
    return TableColumns([field["name"] for field in fields], {field["name"]: field["id"] for field in fields})


def _entries(folder: TableFolder, snapshot: ManifestEntry, location: str) -> Iterator[ManifestEntry]:
    """The entries of all manifests that are not deleted."""
    manifests = [{"manifest_path": path} for path in snapshot.get("manifests", ())]
    if "manifest-list" in snapshot:
        manifests = _read_avro(folder, folder.relative(snapshot["manifest-list"], location))
    for manifest in manifests:
        for entry in _read_avro(folder, folder.relative(manifest["manifest_path"], location)):
            if entry["status"] == _DELETED:
                continue
            if manifest.get("content", _DATA) != _DATA or entry["data_file"].get("content", _DATA) != _DATA:
                raise folder.refusal("an Iceberg", f"with delete files, such as {entry['data_file']['file_path']}")
            yield entry


def _read_avro(folder: TableFolder, path: str) -> list[Any]:
    avro = optional.load("fastavro", "avro", "the metadata of an Iceberg table")
    try:
        return list(avro.reader(io.BytesIO(folder.read(path))))
    except (ValueError, EOFError, LookupError, TypeError) as error:
        raise _damage(folder, path, error) from error


def _damage(folder: TableFolder, path: str, error: Exception) -> SampleError:
    return SampleError(f"{folder.address(path)} cannot be read: it is damaged ({error}); repair the Iceberg table")
