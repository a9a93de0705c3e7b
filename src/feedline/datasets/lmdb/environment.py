"""LMDB environments of this process: one for each path, shared by the datasets over it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Condition, Lock
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

from feedline.core import optional
from feedline.core.paths import missing
from feedline.errors import ArgumentError, SampleError, StateError
from feedline.stores.files import FileSet

_DATABASES = 64


_DATABASE_NBYTES = 48
"""What a main database holds under the name of each other one is a record of this size."""


_LOOKS = 1000


_PATIENCE_S = 60.0


class Environment:
    """An environment open for reading, and the named database in it that is read; `path` is what errors call it."""

    def __init__(self, held: _Open, database: Any) -> None:
        self._held, self._database = held, database
        self.path = held.name

    def reading(self) -> ReadTransaction:
        """A transaction, as a context manager; the values that it gets are views that end with it.

        Entering it raises SampleError if the file was truncated: pages that it does not have would kill the process.
        """
        return ReadTransaction(self._held, self._database)

    def entries(self) -> int:
        """How many there are."""
        with self.reading() as transaction:
            return int(transaction.stat(self._database)["entries"] if self._database else transaction.stat()["entries"])

    def may_be_database(self, value: memoryview) -> bool:
        """Whether a value may be no value, but the record of a named database; `is_database` tells."""
        return self._database is None and len(value) == _DATABASE_NBYTES

    def is_database(self, key: bytes) -> bool:
        """Whether a database lies under this key."""
        return self._held.database(key) is not None

    def databases(self) -> list[str]:
        """The names of the databases, as far as a look at the first keys tells."""
        return self._held.databases()


class ReadTransaction:
    """A transaction for as long as the block runs."""

    __slots__ = ("_database", "_held", "_transaction")

    def __init__(self, held: _Open, database: Any) -> None:
        self._held, self._database = held, database

    def __enter__(self) -> Any:
        self._transaction = transaction = self._held.begin(self._database)
        return transaction

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.end(self._transaction)


def open_environment(path: str, database: str | None, readahead: bool) -> Environment:
    """The environment of a folder or file, read-only and without locks; the first to open it decides on `readahead`."""
    data = data_in(path)
    if not data.exists():
        raise missing(data, "no LMDB environment")
    return _environment(path, path, data.stat().st_size, database, readahead)


def fetch_environment(blobs: FileSet, database: str | None, readahead: bool) -> Environment:
    """As `open_environment`, of an object that is fetched into its cache as a whole."""
    return _environment(blobs.file(0), blobs.name(0), blobs.info(0).size, database, readahead)


def data_in(path: str) -> Path:
    """The file with the data of an environment."""
    return Path(path, "data.mdb") if Path(path).is_dir() else Path(path)


def _environment(path: str, name: str, nbytes: int, database: str | None, readahead: bool) -> Environment:
    """That of which the data are the first `nbytes` of their file; errors name it `name`."""
    held = _OPEN.at(path, name, nbytes, readahead)
    if database is None:
        return Environment(held, None)
    found = held.database(database.encode())
    if found is None:
        known = ", ".join(held.databases())
        remedy = f"it has {known}" if known else "it has none: leave out database="
        raise ArgumentError(f"{name} has no such named database ({database!r}); {remedy}")
    return Environment(held, found)


class _OpenEnvironments:
    """Weak references to what is open, so that an environment closes with the last dataset that reads it."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[str, _Open] = WeakValueDictionary()
        self._pid = os.getpid()
        self._locks: dict[int, Lock] = {}  # by process: one that was held at a fork is never released in the child

    def at(self, path: str, name: str, nbytes: int, readahead: bool) -> _Open:
        with self._locks.setdefault(os.getpid(), Lock()):
            self._close_inherited()
            held = self._held.get(path)
            if held is None or held.is_replaced():
                held = self._held[path] = _Open(path, name, nbytes, readahead)
            return held

    def _close_inherited(self) -> None:
        """After a fork, unmap what the parent had open: LMDB opens no path twice. The parent's own side stays open."""
        if self._pid == os.getpid():
            return
        for environment in list(self._held.values()):
            environment.close()
        self._held.clear()
        self._pid = os.getpid()


# LMDB allows a process one environment for each path, so whoever reads that path has to share it.
_OPEN = _OpenEnvironments()


class _Open:
    """An environment of the library, with the number of its transactions. Safe to use from several threads."""

    def __init__(self, path: str, name: str, nbytes: int, readahead: bool) -> None:
        self.name = name
        self._data = data_in(path)
        self._library = optional.load("lmdb", "lmdb", "datasets.LMDB")
        self._environment = _opened(self._library, path, name, readahead)
        self._page_nbytes = int(self._environment.stat()["psize"])
        with self._data.open("rb", buffering=0) as file:
            self._status = os.fstat(file.fileno())
            self._byte = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)  # tells the size faster than a `stat`
        self._lock = Lock()
        self._ended = Condition(self._lock)
        self._waiting = self._transactions = self._mappings = 0
        self._nbytes = nbytes
        try:
            self._refuse_truncated(nbytes)
        except SampleError:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the data."""
        self._environment.close()

    def is_replaced(self) -> bool:
        """Whether another file lies at the path by now."""
        try:
            return not os.path.samestat(self._status, self._data.stat())
        except OSError:
            return True

    def begin(self, database: Any) -> Any:
        """A transaction, over all that was written up to now."""
        with self._lock:
            nbytes = self._byte.size()
            if nbytes < self._nbytes:
                self._refuse_truncated(nbytes)
            self._nbytes = nbytes
            try:
                transaction = self._environment.begin(database, None, False, True)
            except self._library.MapResizedError as error:
                self._map_anew(error)
                transaction = self._environment.begin(database, None, False, True)
            self._transactions += 1
        return transaction

    def end(self, transaction: Any) -> None:
        """End it, and with it the views that it gave."""
        with self._lock:
            transaction.abort()
            self._transactions -= 1
            if self._waiting:
                self._ended.notify_all()

    def _map_anew(self, error: Exception) -> None:
        """Map what another process has added, once nobody holds views of what was mapped before.

        No transaction begins meanwhile: each would find that the map is too small, and wait here as well.
        """
        before = self._mappings
        self._waiting += 1
        ended = self._ended.wait_for(lambda: not self._transactions or self._mappings > before, _PATIENCE_S)
        self._waiting -= 1
        if not ended:
            raise StateError(
                f"{self.name} was made larger by another process, and cannot be mapped anew, because a transaction of"
                f" this process did not end for {_PATIENCE_S:g} s: do not read a dataset within its own decode="
                " function, or make the dataset anew"
            ) from error
        if self._mappings == before:
            with naming(self.name):
                self._environment.set_mapsize(0)
            self._mappings += 1

    def _refuse_truncated(self, nbytes: int) -> None:
        wanted = 2 * self._page_nbytes  # all that the library reads when it is asked
        if nbytes >= wanted:
            wanted = (self._environment.info()["last_pgno"] + 1) * self._page_nbytes
        if nbytes < wanted:
            told = self.name if "://" in self.name else self._data
            raise SampleError(
                f"{told} is truncated: the file has {nbytes} bytes, its header wants {wanted}; copy the environment"
                " again"
            )

    def database(self, name: bytes) -> Any:
        """The named database; None if there is none."""
        if b"\0" in name:  # the library would read up to there
            return None
        with ReadTransaction(self, None), self._lock, naming(self.name):
            try:
                return self._environment.open_db(name, create=False)
            except (self._library.NotFoundError, self._library.IncompatibleError, self._library.BadValsizeError):
                return None

    def databases(self) -> list[str]:
        """The names of the databases, as far as a look at the first keys tells."""
        with ReadTransaction(self, None) as transaction, transaction.cursor() as cursor:
            records = islice(cursor, _LOOKS)
            keys = [bytes(key) for key, value in records if len(value) == _DATABASE_NBYTES]
        return [key.decode("utf-8", "replace") for key in keys[:_DATABASES] if self.database(key) is not None]


def _opened(library: Any, path: str, name: str, readahead: bool) -> Any:
    with naming(name):
        return library.open(
            path,
            subdir=Path(path).is_dir(),
            readonly=True,
            lock=False,
            readahead=readahead,
            meminit=False,
            max_dbs=_DATABASES,
        )


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Within the block, errors of the library become ours, with the path and the remedy."""
    lmdb = optional.load("lmdb", "lmdb", "datasets.LMDB")
    try:
        yield
    except lmdb.Error as error:
        if "already open" in str(error):
            raise ArgumentError(
                f"{path} is open in this process through other code, or by datasets from before its file was replaced,"
                " and LMDB allows a process one environment for each path: close that one first"
            ) from error
        raise SampleError(f"{path} cannot be opened as an LMDB environment: {error}") from error
