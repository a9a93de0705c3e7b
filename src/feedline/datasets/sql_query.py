"""One query at one time: the connection is made for it, its result packed, and the connection closed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from feedline import extras
from feedline.datasets.sql_columns import Column, packed
from feedline.errors import ArgumentError, SampleError

Connect = Callable[[], Any]
Params = Sequence[Any] | Mapping[str, Any]

_BLOCK = 8192
_FROM_ENVIRONMENT = "env:"


@dataclass(frozen=True, slots=True, repr=False)
class Query:
    """Where to ask and what; `source` is an address without secrets, `env:NAME`, or a function that connects."""

    source: str | Connect
    sql: str
    params: Params = ()

    def __post_init__(self) -> None:
        if isinstance(self.source, str):
            _refuse_secrets(self.source)

    def __repr__(self) -> str:
        return f"the query {' '.join(self.sql.split())!r}"

    def columns(self) -> dict[str, Column]:
        """The whole result, by the names of its columns; the error of a database names the query."""
        with self._told("could not connect to the database for"):
            connection = _connected(self.source)
        with closing(connection), self._told("the database refused"), closing(connection.cursor()) as cursor:
            cursor.execute(self.sql, *([self.params] if self.params else []))  # some drivers refuse None
            if cursor.description is None:
                raise ArgumentError(f"{self} gives no rows: it must be a SELECT")
            names = [column[0] for column in cursor.description]
            blocks = list(_blocks(cursor))
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ArgumentError(f"{self} gives two columns named {repeated!r}: rename one with AS")
        return {name: packed(name, [block[at] for block in blocks]) for at, name in enumerate(names)}

    def travelling(self) -> Query:
        """The query for another process: a function that connects may hold a password, and stays here."""
        return replace(self, source=_elsewhere) if callable(self.source) else self

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Within the block, an error of a driver becomes ours, without the address, which may hold a password."""
        try:
            yield
        except (ArgumentError, SampleError, ImportError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - each driver has a tree of its own, of which PEP 249 gives the names
            text = _without_secrets(str(error), self.source)
            raise SampleError(f"{what} {self}: {type(error).__name__}: {text}") from None


def _elsewhere() -> Any:
    raise ArgumentError(
        "this copy of the dataset came from another process, and the function that connects to the database did not"
        " come along: ask the original"
    )


def _blocks(cursor: Any) -> Iterator[list[Sequence[Any]]]:
    """The values of each column, some thousand rows at a time."""
    if hasattr(cursor, "fetch_record_batch"):  # ADBC: columns as they are, without a tuple for each row
        for batch in cursor.fetch_record_batch():
            for start in range(0, batch.num_rows, _BLOCK):
                yield [column.slice(start, _BLOCK).to_pylist() for column in batch.columns]
        return
    while rows := cursor.fetchmany(_BLOCK):
        yield list(zip(*rows, strict=True))


def _connected(source: str | Connect) -> Any:
    if callable(source):
        return source()
    address = source
    if source.startswith(_FROM_ENVIRONMENT):
        name = source.removeprefix(_FROM_ENVIRONMENT)
        try:
            address = os.environ[name]
        except KeyError:
            raise ArgumentError(
                f"the environment variable {name} is not set; it should hold a database's URL"
            ) from None
    scheme = urlsplit(address).scheme
    if scheme in ("postgresql", "postgres"):
        return extras.load("adbc_driver_postgresql.dbapi", "sql", "datasets.SQLManifest").connect(address)
    if scheme in ("", "sqlite"):
        return _sqlite(unquote(urlsplit(address).path) if scheme else address)
    raise ArgumentError(
        f"{scheme}:// is no database that SQLManifest opens by itself (sqlite://, postgresql://): give a function that"
        " returns a DB-API connection"
    )


def _sqlite(path: str) -> sqlite3.Connection:
    if not Path(path).exists():  # sqlite3 would make an empty database
        raise FileNotFoundError(f"no such database: {path}")
    return sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)


def _refuse_secrets(address: str) -> None:
    parts = urlsplit(address)
    if parts.password or "password=" in parts.query:
        raise ArgumentError(
            f"the address of the database at {parts.hostname} carries a password, which would show wherever it is"
            " named: set PGPASSWORD or ~/.pgpass, or put the whole URL into an environment variable and give env:NAME"
        )


def _without_secrets(text: str, source: str | Connect) -> str:
    """The message of a driver; some quote the address."""
    if not isinstance(source, str) or not source.startswith(_FROM_ENVIRONMENT):
        return text
    address = os.environ.get(source.removeprefix(_FROM_ENVIRONMENT), "")
    parts = urlsplit(address)
    for secret in (address, parts.password, unquote(parts.password or "")):
        text = text.replace(secret, "...") if secret else text
    return text
