"""Where a database is: an address without secrets, `env:NAME` for a variable that holds one, or a function.

One query at one time: the connection is made for it, its result packed, and the connection closed.
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
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.sql import columns
from feedline.datasets.sql.columns import SQLColumn, packed
from feedline.datasets.tables.columns import CellError
from feedline.errors import ArgumentError, FeedlineError, SampleError

Connect = Callable[[], Any]


Source = str | Connect


_FROM_ENVIRONMENT = "env:"


_POSTGRESQL = ("postgresql", "postgres")


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


_FIRST_PAIR = re.compile(r"\s*([\w ]*\w)\s*=\s*[^\s;]*(;?)")


_LIBPQ = frozenset(
    {"host", "hostaddr", "port", "dbname", "user", "password", "passfile", "service", "sslmode", "application_name"}
)
"""What libpq's own strings, `host=db user=me`, begin with."""


_ODBC = frozenset({"dsn", "driver", "server", "data source", "provider"})


_HIDDEN = r"(?:password|passwd|pwd|secret|token)\w*"


_CARRIES_SECRET = re.compile(rf"(?<![/\w])\w*{_HIDDEN}\s*=", re.IGNORECASE)


_SECRET_VALUE = re.compile(
    rf"""({_HIDDEN}["']?\s*[=:]\s*)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|{{[^}}]*}}|[^\s,;&)]+)""", re.IGNORECASE
)


_PASSWORD_OF_URL = re.compile(r"(://[^\s:@/]*):\S*@")


_UNESCAPED = re.compile(r"[/@]|%(?![0-9A-Fa-f]{2})")


def located(source: Pathlike | Connect) -> Source:
    """The source as it can be kept and sent to workers: paths are made absolute, and secrets and connections refused.

    ArgumentError names nothing of an address that may hold a password.
    """
    if hasattr(source, "cursor") and not isinstance(source, type):
        raise ArgumentError(
            f"source is a connection ({_type_name(source)}), which serves one query and cannot go to worker processes:"
            " give a function that opens one, such as lambda: sqlite3.connect(path)"
        )
    if callable(source):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(
            f"source is a {_type_name(source)}, which is no path, no address and no function that returns a DB-API"
            " connection"
        )
    text = os.fspath(source)
    if text.startswith(_FROM_ENVIRONMENT):
        return text
    if isinstance(source, os.PathLike) or not (kind := _kind(text)):
        return str(Path(text).absolute())
    _refuse_unknown(kind)
    userinfo = text.rpartition("@")[0].partition("://")[2]
    if ":" in userinfo or _CARRIES_SECRET.search(unquote(text)):
        raise ArgumentError(
            "the address of the database carries a password, which would show wherever it is named: set PGPASSWORD or"
            " ~/.pgpass, or put the whole address into an environment variable and give env:NAME; an @ or : that"
            " belongs to no password is written %40 or %3A"
        )
    return text


def connected(source: Source) -> Any:
    """A DB-API connection of its own; errors say `what $NAME holds` instead of what comes from the environment."""
    if callable(source):
        return _given(source())
    address, name = _looked_up(source)
    kind = _kind(address)
    if kind in _POSTGRESQL:
        _refuse_unescaped(address, name)
        return optional.load("adbc_driver_postgresql.dbapi", "sql", "datasets.SQLManifest").connect(address)
    _refuse_unknown(kind)
    return _sqlite(address, kind, name)


def redacted(text: str, source: Source) -> str:
    """The words of a driver or of a user's function without what may be a password: some quote the address."""
    for secret in sorted(_secrets(source), key=len, reverse=True):
        text = text.replace(secret, "...")
    return _PASSWORD_OF_URL.sub(r"\1:...@", _SECRET_VALUE.sub(r"\1...", text))


def tells_secrets(error: BaseException, source: Source) -> bool:
    """Whether an exception of a user's function, or one that it came from, has words that `redacted` would change."""
    chain: list[BaseException] = []
    earlier: BaseException | None = error
    while callable(source) and earlier is not None and earlier not in chain:
        chain.append(earlier)
        earlier = earlier.__cause__ or earlier.__context__
    return any(redacted(str(each), source) != str(each) for each in chain)


def _kind(address: str) -> str:
    """The scheme of an address, that of PostgreSQL for libpq's strings; "odbc", and "" for the path of a file."""
    url = _URL.match(address)
    if url is not None:
        return url[1].lower()
    if os.path.exists(address):  # noqa: PTH110 - Path.exists raises where a name is too long, and quotes it
        return ""
    pair = _FIRST_PAIR.match(address)
    if pair is not None and not pair[2] and pair[1] in _LIBPQ:
        return _POSTGRESQL[0]
    is_odbc = pair is not None and (pair[2] or pair[1].lower() in _ODBC)
    return "odbc" if is_odbc or _CARRIES_SECRET.search(address) else ""


def _refuse_unknown(kind: str) -> None:
    if kind == "odbc":
        raise ArgumentError(
            "a string of key=value pairs, as ODBC takes them, is no address that SQLManifest opens by itself (the path"
            " of a SQLite file, sqlite:///, postgresql://, or libpq's host=... user=...): give a function that returns"
            " a DB-API connection"
        )
    if kind not in ("", "sqlite", *_POSTGRESQL):
        raise ArgumentError(
            f"{kind}:// is no database that SQLManifest opens by itself (sqlite://, postgresql://): give a function"
            " that returns a DB-API connection"
        )


def _given(connection: Any) -> Any:
    if not hasattr(connection, "cursor"):
        raise ArgumentError(
            f"the function given as source returned {_type_name(connection)}, which has no cursor(): it must return a"
            " DB-API connection"
        )
    return connection


def _looked_up(source: str) -> tuple[str, str]:
    """An address, and what errors call it: nothing that comes from the environment is quoted."""
    if not source.startswith(_FROM_ENVIRONMENT):
        return source, source
    name = source.removeprefix(_FROM_ENVIRONMENT)
    try:
        return os.environ[name], f"what ${name} holds"
    except KeyError:
        raise ArgumentError(
            f"the environment variable {name} is not set; it should hold a database's address"
        ) from None


def _refuse_unescaped(address: str, name: str) -> None:
    """Where a password is not escaped, libpq takes a part of it for the host or the port, and quotes it."""
    password = _password_of(address)
    if password is not None and _UNESCAPED.search(password):
        raise ArgumentError(
            f"{name} has a /, @ or % before its last @ that is not percent-encoded: / is written %2F, @ is %40"
            " and % is %25"
        )


def _password_of(address: str) -> str | None:
    """What stands between the first : and the last @ of a URL."""
    if _URL.match(address) is None:
        return None
    userinfo, at, _ = address.partition("://")[2].rpartition("@")
    return userinfo.partition(":")[2] if at and ":" in userinfo else None


def _sqlite(address: str, kind: str, name: str) -> sqlite3.Connection:
    path = unquote(re.split("[?#]", address.partition("://")[2])[0]) if kind else address
    is_absolute = not kind or path.startswith("/")
    if not is_absolute or not os.path.isfile(path):  # noqa: PTH113 - as above; sqlite3 would make an empty database
        raise FileNotFoundError(f"no such database: {name}{_meant(path) if kind else ''}")
    return sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)


def _meant(path: str) -> str:
    if not os.path.isfile(path.lstrip("/")):  # noqa: PTH113 - as above
        return ""
    return (
        ". What follows sqlite:// is an absolute path here; for the file of this name in the working directory, which"
        " is there, give its path alone"
    )


def _secrets(source: Source) -> Iterator[str]:
    """The address that a variable holds, and the passwords in it, as they are written and as they are meant."""
    if not isinstance(source, str) or not source.startswith(_FROM_ENVIRONMENT):
        return
    address = os.environ.get(source.removeprefix(_FROM_ENVIRONMENT), "")
    found = [pair[2] for pair in _SECRET_VALUE.finditer(address)]
    for secret in (address, _password_of(address) or "", *found):
        yield from {secret, unquote(secret), secret.strip("'\"{}")} - {""}


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


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

    def columns(self, key: str) -> dict[str, SQLColumn]:
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

    def traveling(self) -> Query:
        """The query for another process: a function that connects may hold a password, and stays here."""
        return replace(self, source=_elsewhere) if callable(self.source) else self

    def _packed(self, blocks: Mapping[str, Sequence[Sequence[Any]]], key: str) -> dict[str, SQLColumn]:
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
        yield from columns.blocks(cursor.fetch_record_batch(), _BLOCK)
        return
    while rows := cursor.fetchmany(_BLOCK):
        if isinstance(rows[0], Mapping):
            rows = [[row[name] for name in names] for row in rows]
        yield list(zip(*rows, strict=True))
