"""Snapshots of tables, and access to the metadata in their folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from feedline.errors import ArgumentError, SampleError
from feedline.stores import ObjectNotFoundError, Store
from feedline.stores.cache import without_cache
from feedline.stores.urls import join, split

PartitionValues = Mapping[str, str | None]
"""The text of each partition column; None for null."""


_FIELD_ID = b"PARQUET:field_id"


class TableColumns(NamedTuple):
    """The current columns of a table.

    Files that are older than a column lack it.
    """

    names: Sequence[str]
    ids: Mapping[str, int]
    """Numbers by which the table identifies columns; empty if names identify them."""

    def check(self, schema: Any, columns: Sequence[str], path: str) -> None:
        """Raise SampleError if one of `columns` is another column in a file."""
        names = {self.ids[name]: name for name in columns if name in self.ids}
        for field in schema:
            number = int((field.metadata or {}).get(_FIELD_ID, -1))
            if number >= 0 and names.get(number, field.name) != field.name:
                raise _renamed_error(names[number], path)
            if number >= 0 and field.name in columns and self.ids.get(field.name, number) != number:
                raise _renamed_error(field.name, path)


def _renamed_error(column: str, path: str) -> SampleError:
    return SampleError(
        f"column {column!r} of the table was renamed or replaced since {path} was written; rewrite the data files of"
        " the table, or leave the column out with columns=[...]"
    )


class Snapshot(NamedTuple):
    """The files of the current version of a table."""

    files: Mapping[str, PartitionValues]
    """Partition values by path below the folder."""
    types: Mapping[str, Any]
    """Arrow types of the partition columns."""
    columns: TableColumns


class TableFolder:
    """A folder whose small metadata files are listed and read.

    `name` is an absolute path or an address that ends in a slash; `store` is None for a local folder.
    """

    def __init__(self, name: str, store: Store | None) -> None:
        self.name = name
        self._store = None if store is None else without_cache(store)
        self._prefix = "" if store is None else split(name).path

    def __str__(self) -> str:
        return self.name.rstrip("/")

    def below(self, path: str) -> TableFolder:
        """A folder below this one."""
        return TableFolder(f"{self.name}{path}/", self._store)

    def has(self, folder: str) -> bool:
        """True if a folder in this folder exists."""
        if self._store is None:
            return Path(self.name, folder).is_dir()
        with suppress(ObjectNotFoundError):  # stores with real folders raise for a missing one
            return any(True for _ in self._store.list(f"{self._prefix}{folder}"))
        return False

    def names(self, folder: str) -> list[str]:
        """The sorted names of files in a folder; none if missing."""
        if self._store is None:
            place = Path(self.name, folder)
            return sorted(entry.name for entry in place.iterdir() if entry.is_file()) if place.is_dir() else []
        prefix = f"{self._prefix}{folder}"
        paths: list[str] = []
        with suppress(ObjectNotFoundError):
            paths = [info.path.removeprefix(prefix) for info in self._store.list(prefix)]
        return sorted(path for path in paths if path and "/" not in path)

    def read(self, path: str) -> bytes:
        """Read a file by its path below the folder."""
        if self._store is None:
            return Path(self.name, path).read_bytes()
        return bytes(self._store.read(f"{self._prefix}{path}"))

    def relative(self, address: str, location: str) -> str:
        """The path below the folder of an address in the metadata.

        `location` is the address of the table when it was written. The table may have been moved since then.
        """
        # Writers spell one store in several ways: s3a://, file:/ and file:///.
        path, base = _without_scheme(address), f"{_without_scheme(location).rstrip('/')}/"
        for prefix in (base, _without_scheme(self.name)):
            if path.startswith(prefix):
                return path[len(prefix) :]
        raise ArgumentError(
            f"the table {self} refers to {address}, which is not in its folder; pass the paths of the files of its"
            " current version"
        )

    def refusal(self, kind: str, what: str) -> ArgumentError:
        """The error for a table that uses an unsupported feature."""
        return ArgumentError(
            f"{self} is {kind} table {what}; write its current rows as Parquet files with the tool that wrote the"
            " table, and read those"
        )

    def address(self, path: str) -> str:
        """The address of a file in the folder, for messages."""
        return f"{self.name}{path}" if self._store is None else join(self._store.url, f"{self._prefix}{path}")


def _without_scheme(address: str) -> str:
    scheme, colon, rest = address.partition(":")
    return f"/{rest.lstrip('/')}" if colon and "/" not in scheme else f"/{address.lstrip('/')}"
