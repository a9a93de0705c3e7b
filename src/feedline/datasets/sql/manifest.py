"""`SQLManifest`: files and labels that a database lists, asked once and read lazily."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from feedline.core.tensors import as_indices, within
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.base import Field, FieldRecords
from feedline.datasets.content_digest import digest_below
from feedline.datasets.decoding import Decode, Decoding, split_transform
from feedline.datasets.file_root import Fetched, FileDecoding, FileRoot
from feedline.datasets.sql.columns import SQLColumn
from feedline.datasets.sql.connection import Connect, Params, Query, located
from feedline.errors import ArgumentError, SampleError, StateError
from feedline.stores import Cache, CachedStore, ObjectRange


class SQLManifest(FieldRecords):
    """Rows of one query as samples: a dict of its columns, and under `into` the content of the file that `path` names.

    `source` is a SQLite file, an address (`sqlite:///`, `postgresql://`, libpq's `host=db user=me`) without a password,
    `env:NAME` for a variable that holds one, or a function that returns a DB-API connection. Values go into the query
    through `params` alone. The query is asked once, here; its rows, in the order of the unique column `key`, are held
    packed, and travel to worker processes with the dataset. Reading a row that has a null raises SampleError. Files are
    read below `root`, a folder or the address of a store; `decode` is "bytes", "text", "npy", "image" or a function.
    `transform` is a function of the sample, or functions by column.
    What a store gives is kept in the folder `cache`, if there is one; `options` are those of `open_store`.
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
        transform: Transform | Mapping[str, Transform] | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._query = Query(located(source), query, params)
        files = FileRoot(root, cache=cache, options=options)
        self._key, self._path, self._into, self._transform = key, path, into, transform
        self._columns = _ordered(self._query, key, path, into)
        self._nullable = _nullable(self._columns)
        by_column, whole = split_transform(transform, [*self._columns, into])
        super().__init__(whole)
        self._values = {name: Decoding(_same, by_column.get(name)) for name in self._columns}
        self._files = FileDecoding(files, decode, by_column.get(into))

    def __len__(self) -> int:
        return len(self._columns[self._key])

    @property
    def nbytes(self) -> int:
        """The memory that the rows take."""
        return sum(part.nbytes for column in self._columns.values() for part in column.parts())

    @property
    def content_fingerprint(self) -> str:
        """Of the files as they are now: a `stat` of each, or their listing in a store; for results that are kept."""
        paths = self._columns[self._path]
        return digest_below(self._files.root, [path for at in range(len(self)) if isinstance(path := paths[at], str)])

    def column(self, name: str) -> SQLColumn:
        """The values of a column, in the order of the samples: labels for a sampler, say."""
        return self._columns[name]

    def state_dict(self) -> dict[str, Any]:
        """How many rows there are, and what tells them from others; for `as_of`."""
        return {"rows": len(self), "fingerprint": _fingerprint(self._columns)}

    def refreshed(self) -> Self:
        """The query asked anew: rows that came since are there, at the places that their keys give them.

        This dataset, and any epoch that runs over it, stays as it is; the loader of the next epoch takes the new one.
        """
        return self._with(_ordered(self._query, self._key, self._path, self._into))

    def as_of(self, state: Mapping[str, Any]) -> Self:
        """The rows that there were when `state_dict` gave this state: to resume within an epoch, before new rows came.

        StateError if those rows are not the first ones now: some were changed or deleted, or new keys are not greater.
        """
        rows = int(state["rows"])
        first = {name: column.taken(np.arange(min(rows, len(self)))) for name, column in self._columns.items()}
        if rows > len(self) or _fingerprint(first) != state["fingerprint"]:
            raise StateError(
                f"{self._query} gives {len(self)} rows, of which the first {rows} are not those of the state: some were"
                f" changed or deleted, or came with a {self._key} that is not greater than those before; restore them,"
                " or begin the epoch anew"
            )
        return self._with(first)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_query": self._query.traveling()}

    def __repr__(self) -> str:
        return f"<SQLManifest: {len(self)} rows of {self._query}>"

    def _with(self, columns: dict[str, SQLColumn]) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, _columns=columns, _nullable=_nullable(columns))
        return other

    def _decodings(self) -> list[Decoding]:
        return [*self._values.values(), self._files]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices; objects of a store come all at once."""
        places = within(as_indices(indices), len(self), "SQLManifest").tolist()
        with self._files.root.fetching([self._file(at) for at in places]) as fetched:
            return [
                self._made(self._fields_of(at, file), row)
                for row, (at, file) in enumerate(zip(places, fetched, strict=True))
            ]

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """What reading these samples will want from a cache."""
        named = self._columns[self._path]
        paths = (named[at] for at in within(indices, len(self), "SQLManifest").tolist())
        return self._files.root.ranges([path for path in paths if isinstance(path, str)])

    def _fields(self, at: int) -> dict[str, Field]:
        return self._fields_of(at, self._file(at))

    def _fields_of(self, at: int, file: Fetched) -> dict[str, Field]:
        where = partial(self._where, at)
        fields = {name: Field(self._values[name], column[at], where) for name, column in self._columns.items()}
        return {**fields, self._into: Field(self._files, file, where)}

    def _file(self, at: int) -> str:
        """The path that a row names; SampleError where a value of the row is missing."""
        for name in self._nullable:
            if self._columns[name][at] is None:
                raise SampleError(
                    f"{self._row(at)} has null for its {name}: give it a value, COALESCE({name}, ...) AS {name}, leave"
                    f" such rows out, WHERE {name} IS NOT NULL, or the column; or pass on_error='skip' to the loader"
                )
        path = self._columns[self._path][at]
        if not isinstance(path, str):
            raise SampleError(f"{self._row(at)} has {path!r} for its path, which is no text: cast it in the query")
        return path

    def _where(self, at: int) -> str:
        """The file that a row names."""
        return f"the file {self._columns[self._path][at]!r} of {self._row(at)}"

    def _row(self, at: int) -> str:
        return f"row {at} ({self._key} = {self._columns[self._key][at]!r}) of {self._query}"


def _same(value: Any) -> Any:
    return value


def _nullable(columns: Mapping[str, SQLColumn]) -> list[str]:
    """The columns that lack values."""
    return [name for name, column in columns.items() if column.nulls is not None]


def _ordered(query: Query, key: str, path: str, into: str) -> dict[str, SQLColumn]:
    """The rows in the order of their keys, so that the same rows are the same samples whatever order they came in."""
    columns = query.columns(key)
    for name, argument in ((key, "key"), (path, "path")):
        if name not in columns:
            raise ArgumentError(f"{query} gives no column {name!r} for {argument}=; it gives {', '.join(columns)}")
    if into in columns:
        raise ArgumentError(f"{query} gives a column {into!r}, where the content of files goes: give another into=")
    if not len(columns[key]):
        raise ArgumentError(f"{query} gives no rows: check its conditions and params=")
    order = columns[key].order()
    if (np.diff(order) != 1).any():
        columns = {name: column.taken(order) for name, column in columns.items()}
    repeated = columns[key].repeated()
    if repeated is not None:
        raise ArgumentError(
            f"{query} gives rows whose {key} is {columns[key][repeated]!r}, which is no unique key: name a column that"
            " is, so that the order of samples is certain"
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
