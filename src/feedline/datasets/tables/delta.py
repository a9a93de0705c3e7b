"""Delta tables: the files of the current version, by the transaction log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from feedline.core import optional
from feedline.datasets.tables.snapshots import Snapshot, TableColumns, TableFolder, naming_damage
from feedline.datasets.tables.types import pyarrow
from feedline.errors import SampleError

# https://github.com/delta-io/delta/blob/master/PROTOCOL.md
LOG = "_delta_log"


_WHAT = "datasets.Parquet"


_COMMIT = re.compile(r"(\d{20})\.json")


_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")


_NEW_CHECKPOINT = re.compile(r"\d{20}\.checkpoint\.[0-9a-f-]{36}\.(?:json|parquet)")


_HARMLESS = {
    "appendOnly",
    "columnMapping",  # refused according to its mode, which may be "none"
    "deletionVectors",  # refused if a current file has a deletion vector
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "vacuumProtocolCheck",
}
"""Reader features that leave the rows of a file unchanged."""


_TYPES = {
    "string": "string",
    "long": "int64",
    "integer": "int32",
    "short": "int16",
    "byte": "int8",
    "float": "float",
    "double": "double",
    "boolean": "bool",
    "date": "date32",
    "timestamp_ntz": "timestamp[us]",
}
"""Arrow's names of types."""


DeltaAction = Mapping[str, Any]


def is_table(folder: TableFolder) -> bool:
    """True for the folder of a Delta table."""
    return folder.has(f"{LOG}/")


def read_snapshot(folder: TableFolder) -> Snapshot:
    """The files of the latest version.

    ArgumentError for features that change the rows of a file; SampleError for a damaged log.
    """
    with naming_damage("Delta", folder):
        snapshot = _snapshot(folder)
        snapshot.check()
    return snapshot


def _snapshot(folder: TableFolder) -> Snapshot:
    files, metadata = _replay(folder)
    if metadata is None:
        raise SampleError(f"the log of the Delta table {folder} is damaged: no version has a schema; repair the table")
    _check_mapping(folder, metadata)
    for path, vector in files:
        if vector is not None:
            raise folder.unsupported_error("a Delta", f"with deletion vectors, such as that of {path}")
    fields = json.loads(metadata["schemaString"])["fields"]
    partitions = set(metadata.get("partitionColumns") or ())
    types = {field["name"]: _arrow_type(folder, field) for field in fields if field["name"] in partitions}
    values = {path: dict(add.get("partitionValues") or {}) for (path, _), add in files.items()}
    by_path = {_path(folder, path): {name: each.get(name) or None for name in types} for path, each in values.items()}
    known = {field["name"]: _plain_type(field["type"]) for field in fields}
    simple = {name: kind for name, kind in known.items() if kind is not None}
    return Snapshot(by_path, types, TableColumns(list(known), {}, simple))


def _replay(folder: TableFolder) -> tuple[dict[tuple[str, str | None], DeltaAction], DeltaAction | None]:
    """The files that remain after all versions, and the latest metadata."""
    files: dict[tuple[str, str | None], DeltaAction] = {}
    metadata: DeltaAction | None = None
    for actions in _versions(folder):
        # A commit is a set of actions: one that rewrites a file under its own name may list the removal last.
        for action in actions:
            if remove := action.get("remove"):
                files.pop(_key(remove), None)
        for action in actions:
            if add := action.get("add"):
                files[_key(add)] = add
            if protocol := action.get("protocol"):
                _check_features(folder, protocol)
            metadata = action.get("metaData") or metadata
    return files, metadata


def _versions(folder: TableFolder) -> Iterator[list[DeltaAction]]:
    """The actions of the latest checkpoint, then of each commit after it."""
    names = folder.names(f"{LOG}/")
    commits = {int(match[1]): name for name in names if (match := _COMMIT.fullmatch(name))}
    start, parts = _latest_checkpoint(names)
    if start is None and 0 not in commits and any(map(_NEW_CHECKPOINT.fullmatch, names)):
        raise folder.unsupported_error("a Delta", "with checkpoints of version 2")
    later = sorted(number for number in commits if start is None or number > start)
    first = 0 if start is None else start + 1
    if later != list(range(first, first + len(later))) or (start is None and not later):
        raise SampleError(
            f"the log of the Delta table {folder} is damaged: commits from version {first} on are missing; repair the"
            " table with the tool that wrote it"
        )
    for part in parts:
        yield _read_checkpoint(folder, part)
    for number in later:
        yield _read_commit(folder, f"{LOG}/{commits[number]}")


def _latest_checkpoint(names: Sequence[str]) -> tuple[int | None, list[str]]:
    """Version and files of the latest complete checkpoint."""
    found: dict[tuple[int, int], list[str]] = {}
    for name in names:
        if match := _CHECKPOINT.fullmatch(name):
            found.setdefault((int(match[1]), int(match[3] or 1)), []).append(name)
    complete = [(version, parts) for (version, count), parts in found.items() if len(parts) == count]
    return max(complete, default=(None, []), key=lambda each: each[0])


def _read_checkpoint(folder: TableFolder, name: str) -> list[DeltaAction]:
    parquet = optional.load("pyarrow.parquet", "arrow", _WHAT)
    arrow = pyarrow(_WHAT)
    try:
        file = parquet.ParquetFile(arrow.BufferReader(folder.read(f"{LOG}/{name}")))
        wanted = [column for column in ("add", "metaData", "protocol") if column in file.schema_arrow.names]
        actions: list[DeltaAction] = file.read(columns=wanted).to_pylist(maps_as_pydicts="lossy")
    except (arrow.ArrowException, OSError) as error:
        raise _damage_error(folder, f"{LOG}/{name}", error) from error
    return actions


def _read_commit(folder: TableFolder, path: str) -> list[DeltaAction]:
    try:
        return [json.loads(line) for line in folder.read(path).splitlines() if line.strip()]
    except ValueError as error:
        raise _damage_error(folder, path, error) from error


def _damage_error(folder: TableFolder, path: str, error: Exception) -> SampleError:
    return SampleError(f"{folder.address(path)} cannot be read: it is damaged ({error}); repair the Delta table")


def _key(action: DeltaAction) -> tuple[str, str | None]:
    """Path and deletion vector of a file, which identify it."""
    vector = action.get("deletionVector")
    named = vector and f"{vector['storageType']}{vector['pathOrInlineDv']}@{vector.get('offset')}"
    return action["path"], named or None


def _path(folder: TableFolder, written: str) -> str:
    path = unquote(written)
    return folder.relative(path, folder.name) if ":" in path.partition("/")[0] or path.startswith("/") else path


def _check_features(folder: TableFolder, protocol: DeltaAction) -> None:
    unknown = sorted(set(protocol.get("readerFeatures") or ()) - _HARMLESS)
    if unknown or protocol.get("minReaderVersion", 1) > 3:
        feature = unknown[0] if unknown else f"reader version {protocol['minReaderVersion']}"
        raise folder.unsupported_error("a Delta", f"with the feature {feature}, which is not supported")


def _check_mapping(folder: TableFolder, metadata: DeltaAction) -> None:
    mode = (metadata.get("configuration") or {}).get("delta.columnMapping.mode", "none")
    if mode != "none":
        raise folder.unsupported_error(
            "a Delta", f"with column mapping by {mode}, so its files have other column names"
        )


def _arrow_type(folder: TableFolder, field: DeltaAction) -> Any:
    kind = _plain_type(field["type"])
    if kind is None:
        raise folder.unsupported_error("a Delta", f"with a partition column {field['name']!r} of type {field['type']}")
    return kind


def _plain_type(name: Any) -> Any:
    """The Arrow type of a plain type; None for others."""
    arrow = pyarrow(_WHAT)
    if name == "timestamp":
        return arrow.timestamp("us", "UTC")
    if isinstance(name, str) and (match := re.fullmatch(r"decimal\((\d+), *(-?\d+)\)", name)):
        return arrow.decimal128(int(match[1]), int(match[2]))
    return arrow.type_for_alias(_TYPES[name]) if isinstance(name, str) and name in _TYPES else None
