"""`SQLManifest`: files and labels listed by a database query.

The query runs once, in the constructor; files are read lazily.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from feedline.core.dataset import TransformFunction
from feedline.core.paths import Pathlike
from feedline.core.tensors import as_indices, normalize_indices
from feedline.datasets.base import Field, FieldRecords
from feedline.datasets.content_digest import digest_below
from feedline.datasets.decoding import Decode, Decoder, ValueDecoder, split_transform
from feedline.datasets.file_root import FileDecoder, FileRoot
from feedline.datasets.sql.columns import SQLColumn, narrowed
from feedline.datasets.sql.connection import Connect, Params, Query, normalize_source
from feedline.errors import ArgumentError, SampleError, StateError
from feedline.stores import Cache, CachedStore, ObjectRange
from feedline.stores.object_reader import Fetched


class SQLManifest(FieldRecords):
    """Rows of a query as samples, with the files that they name.

    A sample is a dict of the row's columns, and under `into` the content of the file in column `path`. `source` is a
    SQLite file, an address (`sqlite:///`, `postgresql://`, libpq's `host=db user=me`) without a password, `env:NAME`
    for a variable that holds one with a password, or a function that returns a DB-API connection. Values are passed to
    the query through `params` only. The query runs once, in the constructor; its rows, sorted by the unique column
    `key`, are kept packed and are sent to worker processes with the dataset. Reading a row with a null raises
    SampleError. Files are read below `root`, a folder or the address of a store; `decode` is "bytes", "text", "npy",
    "image" or a function. `transform` is a function of the sample, or a dict of functions by column.

    Objects are kept in the folder `cache` if one is given; `options` are passed to `open_store`.
    """

    def __init__(
        self,
        source: Pathlike | Connect,
        query: str,
        *,
        root: Pathlike,
        key: str,
        path: str = "path",
        params: Params = (),
        decode: Decode = "bytes",
        into: str = "data",
        transform: TransformFunction | Mapping[str, TransformFunction] | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._query = Query(normalize_source(source), query, params)
        files = FileRoot(root, cache=cache, options=options)
        self._key, self._path, self._into, self._transform = key, path, into, transform
        self._columns = _query_rows(self._query, key, path, into)
        self._nullable = _nullable(self._columns)
        by_column, whole = split_transform(transform, [*self._columns, into])
        super().__init__(whole)
        self._values = {name: ValueDecoder(_identity, by_column.get(name)) for name in self._columns}
        self._files = FileDecoder(files, decode, by_column.get(into))

    def __len__(self) -> int:
        return len(self._columns[self._key])

    @property
    def nbytes(self) -> int:
        """Memory of the packed rows."""
        return sum(part.nbytes for column in self._columns.values() for part in column.parts())

    @property
    def content_fingerprint(self) -> str:
        """Digest of the files' current content, for cached results.

        Computed from a `stat` of each local file, or from the listing of a store.
        """
        paths = self._columns[self._path]
        return digest_below(self._files.root, [path for at in range(len(self)) if isinstance(path := paths[at], str)])

    def column(self, name: str) -> SQLColumn:
        """Values of a column, in the order of samples."""
        return self._columns[name]

    def state_dict(self) -> dict[str, Any]:
        """Number, types and fingerprint of the rows, for `as_of`."""
        types = {name: column.kind for name, column in self._columns.items()}
        return {"rows": len(self), "types": types, "fingerprint": _fingerprint(self._columns)}

    def refreshed(self) -> Self:
        """Run the query again; returns a dataset that includes new rows.

        This dataset and any epoch over it do not change. Pass the new dataset to the loader of the next epoch.
        ArgumentError if the query returns other columns now.
        """
        columns = _query_rows(self._query, self._key, self._path, self._into)
        if columns.keys() != self._columns.keys():
            raise ArgumentError(
                f"{self._query} returned {', '.join(self._columns)}, and returns {', '.join(columns)} now: name the"
                " columns in the query, or create the dataset again"
            )
        return self._with(columns)

    def as_of(self, state: Mapping[str, Any]) -> Self:
        """Dataset of the rows that existed when `state_dict` returned this state.

        It resumes an epoch that began before rows were added. StateError unless those rows are the first rows now:
        otherwise rows were changed or deleted, or new keys are not greater than the old ones.
        """
        rows = int(state["rows"])
        places, types = np.arange(min(rows, len(self))), state.get("types", {})
        first = {name: narrowed(column.take(places), types.get(name, "")) for name, column in self._columns.items()}
        if rows > len(self) or _fingerprint(first) != state["fingerprint"]:
            raise StateError(
                f"{self._query} returns {len(self)} rows, of which the first {rows} are not those of the state: some"
                f" were changed or deleted, or were added with a {self._key} that is not greater than those before;"
                " restore them, or restart the epoch"
            )
        return self._with(first)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_query": self._query.without_function()}

    def __repr__(self) -> str:
        return f"<SQLManifest: {len(self)} rows of {self._query}>"

    def _with(self, columns: dict[str, SQLColumn]) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, _columns=columns, _nullable=_nullable(columns))
        return other

    def _decoders(self) -> list[Decoder]:
        return [*self._values.values(), self._files]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples of these indices; objects of a store are fetched concurrently."""
        places = normalize_indices(as_indices(indices), len(self), "SQLManifest").tolist()
        with self._files.root.fetching([self._file(at) for at in places]) as fetched:
            return [
                self._decode_fields(self._fields_of(at, file), row)
                for row, (at, file) in enumerate(zip(places, fetched, strict=True))
            ]

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into a cache for these samples."""
        named = self._columns[self._path]
        paths = (named[at] for at in normalize_indices(indices, len(self), "SQLManifest").tolist())
        return self._files.root.ranges([path for path in paths if isinstance(path, str)])

    def _fields(self, at: int) -> dict[str, Field]:
        return self._fields_of(at, self._file(at))

    def _fields_of(self, at: int, file: Fetched) -> dict[str, Field]:
        where = partial(self._where, at)
        fields = {name: Field(self._values[name], column[at], where) for name, column in self._columns.items()}
        return {**fields, self._into: Field(self._files, file, where)}

    def _file(self, at: int) -> str:
        """Path in a row; SampleError for a row with a null."""
        for name in self._nullable:
            if self._columns[name][at] is None:
                raise SampleError(
                    f"{self._row(at)} has null for its {name}: replace it, COALESCE({name}, ...) AS {name}; exclude"
                    f" such rows, WHERE {name} IS NOT NULL; drop the column; or pass on_error='skip' to the loader"
                )
        path = self._columns[self._path][at]
        if not isinstance(path, str):
            raise SampleError(f"{self._row(at)} has {path!r} for its path, which is not a string: cast it in the query")
        return path

    def _where(self, at: int) -> str:
        """Description of the file of a row."""
        return f"the file {self._columns[self._path][at]!r} of {self._row(at)}"

    def _row(self, at: int) -> str:
        return f"row {at} ({self._key} = {self._columns[self._key][at]!r}) of {self._query}"


def _identity(value: Any) -> Any:
    return value


def _nullable(columns: Mapping[str, SQLColumn]) -> list[str]:
    """Columns that contain nulls."""
    return [name for name, column in columns.items() if column.nulls is not None]


def _query_rows(query: Query, key: str, path: str, into: str) -> dict[str, SQLColumn]:
    """Rows of the query, sorted by key.

    The order of samples thus depends only on the rows, not on the order in which the database returns them.
    """
    columns = query.columns(key)
    for name, argument in ((key, "key"), (path, "path")):
        if name not in columns:
            raise ArgumentError(f"{query} returns no column {name!r} for {argument}=; it returns {', '.join(columns)}")
    if into in columns:
        raise ArgumentError(f"{query} returns a column {into!r}, the name for the content of files: pass another into=")
    if not len(columns[key]):
        raise ArgumentError(f"{query} returns no rows: check its conditions and params=")
    order = columns[key].order()
    if (np.diff(order) != 1).any():
        columns = {name: column.take(order) for name, column in columns.items()}
    invalid = columns[key].first_invalid_key()
    if invalid is not None:
        raise ArgumentError(
            f"{query} returns rows whose {key} is {columns[key][invalid]!r}, which is null or not unique: pass as key="
            " a column with unique values, so that the order of samples is defined"
        )
    return columns


def _fingerprint(columns: Mapping[str, SQLColumn]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, column in columns.items():
        digest.update(name.encode())
        for part in column.parts():
            digest.update(f" {part.dtype.str} {len(part)} ".encode())
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()
