"""One query at one time: the connection is made for it, its result packed, and the connection closed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from feedline.datasets import sql_arrow
from feedline.datasets.columns import CellError
from feedline.datasets.sql_columns import Column, packed
from feedline.datasets.sql_source import Source, connected, redacted, tells_secrets
from feedline.errors import ArgumentError, FeedlineError, SampleError

Params = Sequence[Any] | Mapping[str, Any]

_BLOCK = 8192


@dataclass(frozen=True, slots=True, repr=False)
class Query:
    """Where to ask and what; `source` is what `located` gives."""

    source: Source
    sql: str
    params: Params = ()

    def __repr__(self) -> str:
        return f"the query {' '.join(self.sql.split())!r}"

    def columns(self, key: str) -> dict[str, Column]:
        """The whole result, by the names of its columns; errors name the query, and a row by its column `key`."""
        with self._told("could not connect to the database for"):
            connection = connected(self.source)
        with self._told("the database refused"), closing(connection), closing(connection.cursor()) as cursor:
            cursor.execute(self.sql, *([self.params] if self.params else []))  # some drivers refuse None
            if cursor.description is None:
                raise ArgumentError(f"{self} gives no rows: it must be a SELECT")
            names = [column[0] for column in cursor.description]
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                raise ArgumentError(f"{self} gives two columns named {repeated!r}: rename one with AS")
            blocks = list(_blocks(cursor, names))
        return self._packed({name: [block[at] for block in blocks] for at, name in enumerate(names)}, key)

    def travelling(self) -> Query:
        """The query for another process: a function that connects may hold a password, and stays here."""
        return replace(self, source=_elsewhere) if callable(self.source) else self

    def _packed(self, blocks: Mapping[str, Sequence[Sequence[Any]]], key: str) -> dict[str, Column]:
        try:
            return {name: packed(name, values) for name, values in blocks.items()}
        except CellError as error:
            keys = (value for values in blocks.get(key, ()) for value in values)
            named = next((f" ({key} = {value!r})" for at, value in enumerate(keys) if at == error.at), "")
            raise SampleError(
                f"row {error.at}{named} of the result of {self}: column {error.column!r} {error.problem}"
            ) from None

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Within the block, an error of a driver becomes ours, without what may be a password in its words."""
        try:
            yield
        except Exception as error:  # each driver has a tree of its own, of which PEP 249 gives the names
            if isinstance(error, (FeedlineError, ImportError, OSError)) and not tells_secrets(error, self.source):
                raise
            text = redacted(str(error), self.source)  # `from None`: a traceback would show it as it was
            raise SampleError(f"{what} {self}: {type(error).__name__}: {text}") from None


def _elsewhere() -> Any:
    raise ArgumentError(
        "this copy of the dataset came from another process, and the function that connects to the database did not"
        " come along: ask the original"
    )


def _blocks(cursor: Any, names: Sequence[str]) -> Iterator[list[Sequence[Any]]]:
    """The values of each column, some thousand rows at a time."""
    if hasattr(cursor, "fetch_record_batch"):  # ADBC: columns as they are, without a tuple for each row
        yield from sql_arrow.blocks(cursor.fetch_record_batch(), _BLOCK)
        return
    while rows := cursor.fetchmany(_BLOCK):
        if isinstance(rows[0], Mapping):
            rows = [[row[name] for name in names] for row in rows]
        yield list(zip(*rows, strict=True))
