"""Resolution of paths to the data files of tables.

In a plain folder every matching file is data, except those in `_temporary` and similar folders of writers. In the
folder of a Delta or Iceberg table, data are the files of its current snapshot.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from feedline.core.paths import Pathlike
from feedline.core.threads import DaemonPool
from feedline.datasets.paths import FoundFiles, find_each, no_files_error
from feedline.datasets.tables import delta, iceberg
from feedline.datasets.tables.snapshots import PartitionValues, Snapshot, TableColumns, TableFolder
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache, ObjectInfo, ObjectNotFoundError, Store
from feedline.stores.files import FileSet
from feedline.stores.globs import expand_address, expand_braces
from feedline.stores.urls import is_local, join, local_path, split_query

_DELTA, _ICEBERG, _HUDI = "Delta", "Iceberg", "Hudi"


_READERS = {_DELTA: delta.read_snapshot, _ICEBERG: iceberg.read_snapshot}


_EXAMINED = 64
"""Most folders below a given folder that are searched for tables. In a store, each takes three requests."""


_METADATA = re.compile(r"(.+)/metadata/([^/*?{]+\.metadata\.json)")
"""The path of an Iceberg table's metadata file, which selects a version of the table."""


class DataFiles(NamedTuple):
    """Data files, and the facts about them from their folders or tables."""

    files: FileSet
    partitions: list[PartitionValues]
    """Partition columns of each file."""
    types: Mapping[str, Any]
    """Arrow types of partition columns, if a table declares them."""
    table: TableColumns | None
    """Columns of the table that all files belong to, or None."""


def data_files(
    paths: Sequence[Pathlike], inside: str, *, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None
) -> DataFiles:
    """Resolve paths as `find` does, to the data files of tables.

    In a folder, files that match `inside` are data, unless a part of their path below the folder begins with `_` or
    `.`; partition folders such as `_year=2024` are included. In the folder of a Delta or Iceberg table, the data files
    are the files of its current version. ArgumentError for tables that cannot be read by their files alone.
    """
    resolve = partial(find_each, inside=inside, cache=cache, options=options)
    given = [_split_metadata(os.fspath(path)) for path in paths]
    texts = [text for text, _ in given]
    resolved = [_behind_marker(text, several, resolve) for text, several in zip(texts, resolve(texts), strict=True)]
    parts = [_data(text, several, name) for (text, name), several in zip(given, resolved, strict=True)]
    meant = [each for part, _ in parts for each in part]
    if not meant:
        raise no_files_error()
    files, snapshots = FileSet(meant), [snapshot for _, snapshot in parts]
    return DataFiles(files, _partitions(parts, files.names, texts), _types(snapshots), _table(snapshots))


def _split_metadata(path: str) -> tuple[str, str | None]:
    """The folder of an Iceberg table, and the name of its metadata."""
    match = _METADATA.fullmatch(path)
    return (path, None) if match is None else (match[1], match[2])


def _behind_marker(given: str, several: FoundFiles, resolve: Callable[[Sequence[str]], list[FoundFiles]]) -> FoundFiles:
    """Replace the empty object that marks a folder by its files."""
    # Hadoop, consoles and rclone create an object for a folder. Stores list it without the slash at its end.
    if is_local(given) or given.endswith("/") or len(several) != 1 or several[0][1].size:
        return several
    with suppress(ObjectNotFoundError):  # an empty file
        return resolve([f"{given}/"])[0]
    return several


def _partitions(
    parts: Sequence[tuple[FoundFiles, Snapshot | None]], names: Sequence[str], given: Sequence[str]
) -> list[PartitionValues]:
    of_folders = iter(folder_values(names, given))
    partitions: list[PartitionValues] = []
    for part, snapshot in parts:
        values = list(islice(of_folders, len(part)))
        partitions += values if snapshot is None else [snapshot.files[path] for path in sorted(snapshot.files)]
    return partitions


def _types(snapshots: Sequence[Snapshot | None]) -> dict[str, Any]:
    return {name: kind for snapshot in snapshots if snapshot is not None for name, kind in snapshot.types.items()}


def _table(snapshots: Sequence[Snapshot | None]) -> TableColumns | None:
    """The columns if there is a single table and no other file."""
    return snapshots[0].columns if len(snapshots) == 1 and snapshots[0] is not None else None


def _data(given: str, several: FoundFiles, metadata: str | None) -> tuple[FoundFiles, Snapshot | None]:
    """The data files of one path, or the files of its table."""
    folders = [f"{folder.rstrip('/')}/" for folder in _prefixes(given)]
    placed = [_split_name(_name(each), folders) for each in several]
    paths = [path for _, path in placed]
    for name in dict.fromkeys(folder for folder, _ in placed if folder):
        folder = TableFolder(name, several[0][0])
        snapshot = _snapshot(folder, metadata)
        if snapshot is not None:
            return _snapshot_files(name, snapshot, several, placed), snapshot
        _check_no_inner_table(folder, [path for place, path in placed if place == name])
    data = [
        each
        for each, path in zip(several, paths, strict=True)
        if not any(map(_is_aside, path.split("/"))) and not (each[1].size == 0 and _has_below(_name(each), several))
    ]
    if several and not data:
        raise ObjectNotFoundError(f"no files: all names in {given} begin with '_' or '.', and are ignored")
    return data, None


def _has_below(name: str, several: FoundFiles) -> bool:
    """True if a file has the name of a folder."""
    return any(_name(each).startswith(f"{name}/") for each in several)


def _folders_of(paths: Iterable[str]) -> set[str]:
    return {parent for path in paths for parent in map(str, Path(path).parents)}


def _snapshot(folder: TableFolder, metadata: str | None) -> Snapshot | None:
    """The current snapshot if the folder is the folder of a table.

    `metadata` is the name of an Iceberg table's metadata file that selects a version.
    """
    if metadata is not None:
        return iceberg.read_snapshot(folder, metadata)
    kind = _table_kind(folder)
    if kind == _HUDI:
        raise ArgumentError(
            f"{folder} is a Hudi table, whose folder also holds files that are no longer part of it; write its current"
            " rows as Parquet files, such as with Spark, and read those"
        )
    return None if kind is None else _READERS[kind](folder)


def _table_kind(folder: TableFolder) -> str | None:
    if folder.has(".hoodie/"):
        return _HUDI
    return _DELTA if delta.is_table(folder) else _ICEBERG if iceberg.is_table(folder) else None


def _check_no_inner_table(folder: TableFolder, paths: Sequence[str]) -> None:
    """Raise ArgumentError for a table in a folder below the given one."""
    names = sorted(name for name in _folders_of(paths) if name != "." and "=" not in name)[:_EXAMINED]
    inner = [folder.below(name) for name in names]
    with DaemonPool() as pool:
        kinds = list(pool.map(_table_kind, inner)) if inner else []
    for table, kind in zip(inner, kinds, strict=True):
        if kind is not None:
            raise ArgumentError(
                f"{folder} contains {table}, which is a table of {kind}: its folder also holds files that are no longer"
                " part of it; give the folder of the table itself"
            )


def _snapshot_files(
    folder: str, snapshot: Snapshot, several: FoundFiles, placed: Sequence[tuple[str, str]]
) -> FoundFiles:
    """The listed files of a snapshot; SampleError for a missing one."""
    if not snapshot.files:
        raise ObjectNotFoundError(f"no files: the current version of the table {folder.rstrip('/')} is empty")
    if any(place != folder for place, _ in placed):
        raise ArgumentError(f"{folder.rstrip('/')} is a table; give it as a separate path, without a pattern")
    listed = {path: each for (_, path), each in zip(placed, several, strict=True)}
    missing = next((path for path in snapshot.files if path not in listed), None)
    if missing is not None:
        raise SampleError(
            f"{folder}{missing} is a file of the current version of the table {folder.rstrip('/')}, and does not exist;"
            " restore it, or repair the table with the tool that wrote it"
        )
    return [listed[path] for path in sorted(snapshot.files)]


def _prefixes(given: str) -> list[str]:
    """Prefixes of the names found for a path with braces."""
    if not is_local(given):
        return [split_query(each)[0] for each in expand_address(given)]
    return [str(Path(path).absolute()) for path in expand_braces(local_path(given))]


def _name(each: tuple[Store | None, ObjectInfo]) -> str:
    store, info = each
    return info.path if store is None else join(store.url, info.path)


def _split_name(name: str, folders: Sequence[str]) -> tuple[str, str]:
    """Split a file name into a given folder and the rest.

    Both are empty for a file given by its name or a pattern.
    """
    return next(((folder, name[len(folder) :]) for folder in folders if name.startswith(folder)), ("", ""))


def _is_aside(part: str) -> bool:
    return part.startswith(("_", ".")) and "=" not in part


def folder_values(names: Sequence[str], given: Iterable[str]) -> list[PartitionValues]:
    """The values of folders named `name=value`, for each file.

    For a given folder, the folders below it count; for a given file or pattern, all folders in its path.
    """
    bases = _bases(given)
    return [_values(_below(name, bases)) if "=" in name else {} for name in names]


def _bases(given: Iterable[str]) -> list[str]:
    """Path prefixes whose folders are not partitions, the longest first."""
    bases = set()
    for each in given:
        path = each.removeprefix("file://")
        if is_local(each) and not os.path.isabs(path):  # noqa: PTH117 - a string, never opened
            bases.add(os.path.join(os.getcwd(), ""))  # noqa: PTH109, PTH118
            path = os.path.abspath(path)  # noqa: PTH100
        bases.add(f"{path.rstrip('/')}/")
    return sorted(bases, key=len, reverse=True)


def _below(name: str, bases: Sequence[str]) -> str:
    return next((name[len(base) :] for base in bases if name.startswith(base)), name)


def _values(path: str) -> PartitionValues:
    parts = (part.partition("=") for part in path.split("/")[:-1])
    return {unquote(name): unquote(value) for name, mark, value in parts if mark and name}
