"""Connections to SQL databases, and queries over them.

A source is an address without secrets, `env:NAME` for a variable that holds one with secrets, or a function that
returns a connection. Each query opens a connection, packs its result, and closes the connection. An address from the
environment is never quoted, and neither is the error of a driver that cannot connect to it.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from feedline.core import optional
from feedline.core.paths import Pathlike
from feedline.datasets.sql import columns
from feedline.datasets.sql.columns import SQLColumn, pack_column
from feedline.datasets.tables.columns import CellError
from feedline.errors import ArgumentError, FeedlineError, SampleError

Connect = Callable[[], Any]


ConnectionSource = str | Connect


_FROM_ENVIRONMENT = "env:"


_POSTGRESQL = ("postgresql", "postgres")


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


_FIRST_PAIR = re.compile(r"\s*([\w ]*\w)\s*=\s*[^\s;]*(;?)")


_LIBPQ = frozenset(
    {"host", "hostaddr", "port", "dbname", "user", "password", "passfile", "service", "sslmode", "application_name"}
)
"""Keywords by which libpq's connection strings, `host=db user=me`, are recognized."""


_ODBC = frozenset({"dsn", "driver", "server", "data source", "provider"})


_HIDDEN = r"(?:password|passwd|pwd|secret|token)\w*"


_CARRIES_SECRET = re.compile(rf"(?<![/\w])\w*{_HIDDEN}\s*=", re.IGNORECASE)


def normalize_source(source: Pathlike | Connect) -> ConnectionSource:
    """Source in a form that can be stored and sent to workers.

    Paths become absolute. ArgumentError for connections and for addresses with secrets. The error quotes no part of an
    address that may contain a password.
    """
    if hasattr(source, "cursor") and not isinstance(source, type):
        raise ArgumentError(
            f"source is a connection ({_type_name(source)}), which serves one query only and cannot be sent to worker"
            " processes: pass a function that opens one, such as lambda: sqlite3.connect(path)"
        )
    if callable(source):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(
            f"source is a {_type_name(source)}: pass a path, an address, or a function that returns a DB-API connection"
        )
    text = os.fspath(source)
    if text.startswith(_FROM_ENVIRONMENT):
        return text
    if isinstance(source, os.PathLike) or not (kind := _scheme(text)):
        return str(Path(text).absolute())
    _check_supported(kind)
    userinfo = text.rpartition("@")[0].partition("://")[2]
    if ":" in userinfo or _CARRIES_SECRET.search(unquote(text)):
        raise ArgumentError(
            "the address of the database contains a password, which every message about it would show: set"
            " PGPASSWORD or ~/.pgpass, or put the whole address into an environment variable and pass env:NAME; write"
            " an @ or : that is not part of a password as %40 or %3A"
        )
    return text


def open_connection(source: ConnectionSource) -> Any:
    """Open a DB-API connection.

    Errors name an address from the environment by its variable, without its value.
    """
    if callable(source):
        return _check_connection(source())
    address, name = _look_up(source)
    kind = _scheme(address)
    if kind in _POSTGRESQL:
        return optional.load("adbc_driver_postgresql.dbapi", "sql", "datasets.SQLManifest").connect(address)
    _check_supported(kind)
    return _sqlite(address, kind, name)


def _scheme(address: str) -> str:
    """Scheme of an address; "" for the path of a file.

    "postgresql" for libpq's connection strings, "odbc" for other strings of key=value pairs.
    """
    url = _URL.match(address)
    if url is not None:
        return url[1].lower()
    if os.path.exists(address):  # noqa: PTH110 - Path.exists raises for a name that is too long, and quotes it
        return ""
    pair = _FIRST_PAIR.match(address)
    if pair is not None and not pair[2] and pair[1] in _LIBPQ:
        return _POSTGRESQL[0]
    is_odbc = pair is not None and (pair[2] or pair[1].lower() in _ODBC)
    return "odbc" if is_odbc or _CARRIES_SECRET.search(address) else ""


def _check_supported(kind: str) -> None:
    if kind == "odbc":
        raise ArgumentError(
            "a string of ODBC key=value pairs is not an address that SQLManifest can open (the path of a SQLite file,"
            " sqlite:///, postgresql://, or libpq's host=... user=...): pass a function that returns a DB-API"
            " connection"
        )
    if kind not in ("", "sqlite", *_POSTGRESQL):
        raise ArgumentError(
            f"{kind}:// is not a database that SQLManifest can open (sqlite://, postgresql://): pass a function that"
            " returns a DB-API connection"
        )


def _check_connection(connection: Any) -> Any:
    if not hasattr(connection, "cursor"):
        raise ArgumentError(
            f"the function passed as source returned {_type_name(connection)}, which has no cursor(): it must return a"
            " DB-API connection"
        )
    return connection


def _look_up(source: str) -> tuple[str, str]:
    """Address of a source, and its name for errors.

    Errors never quote an address from the environment.
    """
    if not source.startswith(_FROM_ENVIRONMENT):
        return source, source
    name = source.removeprefix(_FROM_ENVIRONMENT)
    try:
        return os.environ[name], f"what ${name} holds"
    except KeyError:
        raise ArgumentError(
            f"the environment variable {name} is not set; it should hold a database's address"
        ) from None


def _sqlite(address: str, kind: str, name: str) -> sqlite3.Connection:
    path = unquote(re.split("[?#]", address.partition("://")[2])[0]) if kind else address
    is_absolute = not kind or path.startswith("/")
    if not is_absolute or not os.path.isfile(path):  # noqa: PTH113 - as above; sqlite3 would create an empty database
        raise FileNotFoundError(f"no such database: {name}{_relative_path_hint(path) if kind else ''}")
    return sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)


def _relative_path_hint(path: str) -> str:
    if not os.path.isfile(path.lstrip("/")):  # noqa: PTH113 - as above
        return ""
    return (
        ". The path after sqlite:// is absolute; to open the existing file of this name in the working directory, pass"
        " its path alone"
    )


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


Params = Sequence[Any] | Mapping[str, Any]


_BLOCK = 8192


@dataclass(frozen=True, slots=True, repr=False)
class Query:
    """Query and the normalized source that it is sent to."""

    source: ConnectionSource
    sql: str
    params: Params = ()

    def __repr__(self) -> str:
        return f"the query {' '.join(self.sql.split())!r}"

    def columns(self, key: str) -> dict[str, SQLColumn]:
        """Run the query; returns its columns by name.

        Errors name the query, and rows by their value of column `key`.
        """
        connection = self._connect()
        with self._translating(), closing(connection), closing(connection.cursor()) as cursor:
            cursor.execute(self.sql, *([self.params] if self.params else []))  # some drivers refuse None as parameters
            if cursor.description is None:
                raise ArgumentError(f"{self} returns no rows: it must be a SELECT")
            names = [column[0] for column in cursor.description]
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                raise ArgumentError(f"{self} returns two columns named {repeated!r}: rename one with AS")
            blocks = list(_blocks(cursor, names))
        return self._pack({name: [block[at] for block in blocks] for at, name in enumerate(names)}, key)

    def without_function(self) -> Query:
        """Copy for another process, without a function that connects.

        Such a function may contain a password.
        """
        return replace(self, source=_raise_elsewhere) if callable(self.source) else self

    def _pack(self, blocks: Mapping[str, Sequence[Sequence[Any]]], key: str) -> dict[str, SQLColumn]:
        try:
            return {name: pack_column(name, values) for name, values in blocks.items()}
        except CellError as error:
            keys = (value for values in blocks.get(key, ()) for value in values)
            named = next((f" ({key} = {value!r})" for at, value in enumerate(keys) if at == error.at), "")
            raise SampleError(
                f"row {error.at}{named} of the result of {self}: column {error.column!r} {error.problem}"
            ) from None

    def _connect(self) -> Any:
        """Connect; errors of the user's own function are unchanged."""
        if callable(self.source):
            return open_connection(self.source)
        try:
            return open_connection(self.source)
        except (FeedlineError, ImportError, OSError):
            raise
        except Exception as error:  # PEP 249 names the exceptions, but each driver has its own classes
            if not self.source.startswith(_FROM_ENVIRONMENT):
                raise SampleError(
                    f"could not connect to the database for {self}: {type(error).__name__}: {error}"
                ) from error
            # `from None`: the driver's error, which a traceback would show, may quote the address and its password.
            raise SampleError(
                f"could not connect to the database for {self}: {type(error).__name__}. The driver's message is not"
                f" shown, because it may quote what ${self.source.removeprefix(_FROM_ENVIRONMENT)} holds; to see it,"
                " pass a function that connects"
            ) from None

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """Translate errors of a driver within the block."""
        try:
            yield
        except (FeedlineError, ImportError, OSError):
            raise
        except Exception as error:
            raise SampleError(f"the database refused {self}: {type(error).__name__}: {error}") from error


def _raise_elsewhere() -> Any:
    raise ArgumentError(
        "this copy of the dataset came from another process, without the function that connects to the database:"
        " query through the original dataset"
    )


def _blocks(cursor: Any, names: Sequence[str]) -> Iterator[list[Sequence[Any]]]:
    """Values of each column, in blocks of rows."""
    if hasattr(cursor, "fetch_record_batch"):  # ADBC returns columns, without a tuple per row
        yield from columns.blocks(cursor.fetch_record_batch(), _BLOCK)
        return
    while rows := cursor.fetchmany(_BLOCK):
        if isinstance(rows[0], Mapping):
            rows = [[row[name] for name in names] for row in rows]
        yield list(zip(*rows, strict=True))
