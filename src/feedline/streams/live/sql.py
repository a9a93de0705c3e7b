"""Rows of a database table that grows, read by ascending key."""

from __future__ import annotations

import operator
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from time import monotonic
from typing import Any, Literal

from feedline.core.paths import Pathlike
from feedline.datasets.sql.connection import normalize_source, open_connection
from feedline.errors import ArgumentError, FeedlineError, SourceAccessError, SourceError, SourceUnavailableError
from feedline.streams.live.base import LiveStream
from feedline.streams.live.decoding import MessageDecode
from feedline.streams.live.terms import LiveLimits, LiveOptions, MessageRun, RetainedRange

_BEFORE_FIRST = -(1 << 63) + 1
"""The place in a table without rows: the next key may be any but the two least ones of 64 bits."""


_ACCESS = ("password", "authentication", "permission denied", "role ")


class SQLRows(LiveStream):
    """Rows of a query with an ascending key; see `LiveStream`.

    The key is a whole number, such as a serial `id`, that no two rows share: `SourceError` otherwise.

    A message is a mapping of the columns. `source` is that of `datasets.SQLManifest`: an address, `env:NAME`, or a
    function that returns a DB-API connection. Partition p of `partitions` has the rows whose key is p modulo their
    number. Places are keys: `key > last` is queried again every `every_s` seconds. Nothing is written to the database,
    so there is no group.

    Transactions may commit in a different order than that of their keys. A row is therefore read only `settle_s`
    seconds after its key, or a larger one, was first seen. Rows of transactions that take longer may be missed.
    """

    def __init__(
        self, source: Pathlike | Callable[[], Any], query: str, *, key: str = "id", partitions: int = 1,
        decode: Callable[[Any], Any] | None = None, start: Literal["earliest", "latest"] = "earliest",
        settle_s: float = 2.0, every_s: float = 0.2, max_wait_s: float = 1.0, stop_after: int | None = None,
        until: Literal["latest"] | datetime | None = None, limits: LiveLimits | None = None,
    ) -> None:  # fmt: skip
        if not key.replace("_", "a").isalnum():
            raise ArgumentError(f"key must be the name of a column, of letters, digits and _; got {key!r}")
        if operator.index(partitions) < 1:
            raise ArgumentError(f"partitions must be at least 1, but is {partitions}")
        if settle_s < 0 or not every_s > 0:
            raise ArgumentError(f"settle_s must not be negative, every_s above 0; got {settle_s!r} and {every_s!r}")
        self.source, self.query, self.key = normalize_source(source), query.strip().rstrip(";"), key
        self._partitions, self.settle_s, self.every_s = partitions, settle_s, every_s
        read: MessageDecode = "bytes" if decode is None else decode
        super().__init__(LiveOptions(None, read, start, max_wait_s, stop_after, until, "raise", limits or LiveLimits()))

    def open_client(self) -> SQLClient:
        """Open a connection."""
        return SQLClient(self)

    def address(self, partition: int, place: int) -> str:  # noqa: ARG002 - keys are those of all partitions
        """Column and value of a row's key."""
        return f"the row {self.key} = {place}"

    def fingerprint(self) -> str:
        """Text with the query, the key and the number of partitions."""
        return f"SQLRows({' '.join(self.query.split())!r}, {self.key!r}, {self._partitions})"

    @property
    def num_partitions(self) -> int:
        """The argument `partitions`."""
        return self._partitions


class SQLClient:
    """A connection to a database; see `LiveClient`."""

    def __init__(self, stream: SQLRows) -> None:
        self._stream = stream
        self._places: dict[int, int] = {}
        self._seen: list[tuple[float, int]] = []
        """Times, and the largest key at each."""
        self._pause = threading.Event()  # never set: a wait that other threads do not delay
        self._connection: Any = None
        if isinstance(self._guarded(self._connect), sqlite3.Connection):
            self.close()

    def retained(self, partition: int) -> RetainedRange:  # noqa: ARG002 - keys are those of all partitions
        """One less than the smallest key, and the largest key.

        Without rows, both are below all keys.
        """
        query = f"SELECT MIN({self._key}), MAX({self._key}) FROM ({self._stream.query}) AS rows_"  # noqa: S608
        first, last = self._rows(query)[1][0]
        return RetainedRange(
            _BEFORE_FIRST if first is None else int(first) - 1, _BEFORE_FIRST if last is None else int(last)
        )

    def is_lost(self, partition: int, place: int, retained: RetainedRange) -> bool:  # noqa: ARG002 - the protocol
        """False: deleted rows need not be read."""
        return False

    def committed(self, partition: int) -> None:
        """None: nothing is written to the database."""

    def commit(self, places: Mapping[int, int]) -> None:
        """Do nothing: nothing is written to the database."""

    def seek(self, partition: int, place: int) -> None:
        """Read keys above `place`."""
        self._places[partition] = place

    def poll(self, partitions: Sequence[int], most: int, timeout_s: float) -> list[MessageRun]:
        """The next rows; queries until there are some, or until `timeout_s`."""
        give_up_s = monotonic() + timeout_s
        while True:
            horizon = self._horizon()
            chunks = [] if horizon is None else [self._chunk(number, horizon, most) for number in partitions]
            left_s = give_up_s - monotonic()
            if any(chunk.messages for chunk in chunks) or left_s <= 0:
                return chunks
            self._pause.wait(min(left_s, self._stream.every_s))

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # each driver has errors of its own, and nothing was written
                connection.close()

    def _connect(self) -> Any:
        if self._connection is None:
            self._connection = open_connection(self._stream.source)
        return self._connection

    @property
    def _key(self) -> str:
        return self._stream.key

    def _horizon(self) -> int | None:
        """The largest settled key, or None."""
        now_s, largest = monotonic(), self.retained(0).end
        if not self._seen or largest > self._seen[-1][1]:
            self._seen.append((now_s, largest))
        settled = [key for seen_s, key in self._seen if now_s - seen_s >= self._stream.settle_s]
        del self._seen[: max(0, len(settled) - 1)]
        return settled[-1] if settled else None

    def _chunk(self, number: int, horizon: int, most: int) -> MessageRun:
        place, count = self._places[number], self._stream.num_partitions
        # In SQL, the remainder of a negative key is negative.
        share = "" if count == 1 else f" AND ({self._key} % {count} + {count}) % {count} = {number}"
        # The query is the user's own, and the rest are whole numbers and a checked name.
        within = f"{self._key} > {int(place)} AND {self._key} <= {int(horizon)}{share}"
        query = f"SELECT * FROM ({self._stream.query}) AS rows_ WHERE {within} ORDER BY {self._key}"  # noqa: S608
        names, rows = self._rows(f"{query} LIMIT {max(1, most) + 1}")
        at = self._column(names)
        places = [int(row[at]) for row in rows]
        self._check_ascending(places)  # one row more than is returned: the limit may fall between rows of equal keys
        end = horizon if len(rows) <= max(1, most) else None  # all up to there was read
        del rows[max(1, most) :], places[max(1, most) :]
        self._places[number] = max([place, *places[-1:]]) if end is None else max(place, end)
        return MessageRun(number, [dict(zip(names, row, strict=True)) for row in rows], places, self._places[number])

    def _column(self, names: list[str]) -> int:
        """Number of the key's column, whose case may differ."""
        for found in (names, [name.lower() for name in names]):
            for key in (self._key, self._key.lower()):
                if key in found:
                    return found.index(key)
        raise SourceError(
            f"key={self._key!r} is not a column of the query, which has {', '.join(names)}: select it, too"
        )

    def _check_ascending(self, keys: list[int]) -> None:
        for before, after in pairwise(keys):
            if after <= before:
                raise SourceError(
                    f"several rows of {self._stream.fingerprint()} have the key {self._key} = {after}, so a place"
                    " between them could not be kept: pass key= a column with a value of its own in each row"
                )

    def _rows(self, query: str) -> tuple[list[str], list[Sequence[Any]]]:
        def ask() -> tuple[list[str], list[Sequence[Any]]]:
            connection = self._connect()
            cursor = connection.cursor()
            try:
                cursor.execute(query)
                names = [column[0] for column in cursor.description]
                return names, list(cursor.fetchall())
            finally:
                cursor.close()
                connection.rollback()  # the next query must see later commits
                if isinstance(connection, sqlite3.Connection):  # belongs to this thread, and costs microseconds
                    self.close()

        names, rows = self._guarded(ask)
        return names, rows

    def _guarded(self, act: Callable[[], Any]) -> Any:
        """Return the result of `act`, and translate errors of the driver."""
        try:
            return act()
        except (FeedlineError, ImportError, FileNotFoundError):
            raise
        except Exception as error:  # noqa: BLE001 - PEP 249 names the exceptions, but each driver has classes of its own
            self._raise(error)

    def _raise(self, error: Exception) -> None:
        source = self._stream.source
        is_hidden = isinstance(source, str) and source.startswith("env:")
        text = type(error).__name__ if is_hidden else f"{type(error).__name__}: {error}"
        who = f"the database of {self._stream.fingerprint()}"
        # From None where the address is hidden: the driver's error may quote it with its password.
        cause = None if is_hidden else error
        words = str(error).lower()
        if any(word in words for word in _ACCESS):
            raise SourceAccessError(f"{who} refuses the credentials: {text}; check source=") from cause
        if any(word in words for word in ("connect", "server closed", "terminating", "timeout", "could not receive")):
            raise SourceUnavailableError(f"{who} does not answer: {text}; check source=") from cause
        raise SourceError(f"{who} refuses the query: {text}") from cause
