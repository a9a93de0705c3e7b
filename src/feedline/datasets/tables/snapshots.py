"""Snapshots of tables, and access to the metadata in their folders."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from feedline.datasets.tables.types import pyarrow
from feedline.errors import ArgumentError, FeedlineError, SampleError
from feedline.stores import ObjectNotFoundError, Store
from feedline.stores.cache import without_cache
from feedline.stores.urls import join, split

PartitionValues = Mapping[str, str | None]
"""The text of each partition column; None for null."""


_FIELD_ID = b"PARQUET:field_id"


ELEMENT = "[]"
"""Name of the elements of a list."""


class FieldId(NamedTuple):
    """Number by which a table identifies a column or member.

    The member of a list is its `ELEMENT`, those of a map are `key` and `value`.
    """

    number: int
    members: Mapping[str, FieldId]


class TableColumns(NamedTuple):
    """The current columns of a table.

    Files that are older than a column lack it.
    """

    names: Sequence[str]
    ids: Mapping[str, FieldId]
    """Empty if names identify columns."""
    types: Mapping[str, Any]
    """Arrow types, except those of nested and rare types."""

    def check(self, schema: Any, columns: Sequence[str], path: str) -> None:
        """Raise SampleError if one of `columns` is another column in a file.

        `columns` may name members of columns.
        """
        _check_ids([(field.name, field) for field in schema], self.ids, "", columns, path)


def _check_ids(
    fields: Iterable[tuple[str, Any]], ids: Mapping[str, FieldId], above: str, columns: Sequence[str], path: str
) -> None:
    chosen = {name: each for name, each in ids.items() if name == ELEMENT or _is_chosen(f"{above}{name}", columns)}
    names = {each.number: name for name, each in chosen.items()}
    for name, field in fields:
        number = int((field.metadata or {}).get(_FIELD_ID, -1))
        if number >= 0 and names.get(number, name) != name:
            raise _renamed_error(f"{above}{names[number]}", path)
        if name not in chosen:
            continue
        if number not in {-1, chosen[name].number}:
            raise _renamed_error(f"{above}{name}", path)
        # A path of columns= leads through the elements of lists.
        below = above if name == ELEMENT else f"{above}{name}."
        _check_ids(_members(field.type), chosen[name].members, below, columns, path)


def _is_chosen(path: str, columns: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{each}.") or f"{each}.".startswith(f"{path}.") for each in columns)


def _members(kind: Any) -> list[tuple[str, Any]]:
    """The named members of an Arrow type."""
    types = pyarrow("datasets.Parquet").types
    if types.is_struct(kind):
        return [(field.name, field) for field in map(kind.field, range(kind.num_fields))]
    if types.is_map(kind):
        return [("key", kind.key_field), ("value", kind.item_field)]
    return [(ELEMENT, kind.value_field)] if hasattr(kind, "value_field") else []


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

    def check(self) -> None:
        """Raise TypeError for values of wrong types."""
        values = [each for values in self.files.values() for each in values.values() if each is not None]
        for text in (*self.files, *self.types, *self.columns.names, *values):
            if not isinstance(text, str):
                raise TypeError(f"a path, a name or the value of a partition is {text!r:.60}")


@contextmanager
def naming_damage(kind: str, folder: TableFolder) -> Iterator[None]:
    """Turn the errors of unexpected metadata into a SampleError."""
    try:
        yield
    except (FeedlineError, MemoryError):
        raise
    except OSError as error:
        if error.errno not in _NO_SUCH_PATH:
            raise
        raise _damage_error(kind, folder, error) from error
    except Exception as error:
        raise _damage_error(kind, folder, f"{type(error).__name__}: {error}") from error


_NO_SUCH_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
"""Errors of the system for a path that metadata refer to."""


def _damage_error(kind: str, folder: TableFolder, problem: object) -> SampleError:
    return SampleError(
        f"the metadata of the {kind} table {folder} are damaged ({problem}); repair the table with the tool that wrote"
        " it"
    )


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

    def unsupported_error(self, kind: str, what: str) -> ArgumentError:
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
