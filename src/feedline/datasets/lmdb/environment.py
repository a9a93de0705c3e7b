"""LMDB environments that are open in this process.

LMDB allows a process to open each path once, so datasets over the same path share one environment.
"""

from __future__ import annotations

import logging
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
from feedline.core.caches import PerProcess
from feedline.core.paths import missing_error
from feedline.datasets.indexes import MetadataCache, key_of, metadata_path
from feedline.datasets.lmdb.pages import DamageError, Pages, Tree, main_tree, page_nbytes, tree_of
from feedline.errors import ArgumentError, SampleError, StateError
from feedline.stores import ObjectInfo
from feedline.stores.files import FileSet, local_info

_log = logging.getLogger("feedline")


_MAX_DATABASES = 64


_DATABASE_NBYTES = 48
"""Bytes of the record that a main database has for each named database."""


_SCANNED_KEYS = 1000


_REMAP_TIMEOUT_S = 60.0


class Environment:
    """Open environment, with the named database that is read.

    `path` names it in errors.
    """

    def __init__(self, environment: _OpenEnvironment, database: Any) -> None:
        self._environment, self._database = environment, database
        self.path = environment.name

    def reading(self) -> ReadTransaction:
        """Read transaction, as a context manager.

        Values are views that end with the transaction. Entering raises SampleError if the file was truncated: reading a
        missing page would kill the process.
        """
        return ReadTransaction(self._environment, self._database)

    def entries(self) -> int:
        """Number of entries."""
        with self.reading() as transaction:
            return int(transaction.stat(self._database)["entries"] if self._database else transaction.stat()["entries"])

    def may_be_database(self, value: memoryview) -> bool:
        """True if a value has the size of a named database's record.

        Only `is_database` is certain.
        """
        return self._database is None and len(value) == _DATABASE_NBYTES

    def is_database(self, key: bytes) -> bool:
        """True if a named database is stored under this key."""
        return self._environment.database(key) is not None

    def databases(self) -> list[str]:
        """Names of the databases found among the first keys."""
        return self._environment.databases()


class ReadTransaction:
    """Context manager of one read transaction."""

    __slots__ = ("_database", "_environment", "_transaction")

    def __init__(self, environment: _OpenEnvironment, database: Any) -> None:
        self._environment, self._database = environment, database

    def __enter__(self) -> Any:
        self._transaction = transaction = self._environment.begin(self._database)
        return transaction

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._environment.end(self._transaction)
        if error is not None:
            self._environment.refuse_damage(error)


def open_environment(path: str, database: str | None, readahead: bool) -> Environment:
    """Open the environment of a folder or file, read-only and without locks.

    The first call for a path determines `readahead`.
    """
    data = data_in(path)
    if not data.exists():
        raise missing_error(data, "no LMDB environment")
    return _open_named(path, path, local_info(str(data)), database, readahead)


def fetch_environment(files: FileSet, database: str | None, readahead: bool) -> Environment:
    """Open a remote environment, fetched whole into its cache."""
    return _open_named(files.local_path(0), files.name(0), files.info(0), database, readahead)


def data_in(path: str) -> Path:
    """Data file of an environment."""
    return Path(path, "data.mdb") if Path(path).is_dir() else Path(path)


def _open_named(path: str, name: str, info: ObjectInfo, database: str | None, readahead: bool) -> Environment:
    """Open the environment whose data are the first bytes of their file.

    Errors name it by `name`.
    """
    environment = _OPEN_ENVIRONMENTS.at(path, name, info.size, readahead)
    environment.check_pages(info, b"")
    if database is None:
        return Environment(environment, None)
    handle = environment.database(database.encode())
    if handle is None:
        known = ", ".join(environment.databases())
        remedy = f"it has {known}" if known else "it has none: leave out database="
        raise ArgumentError(f"{name} has no named database {database!r}; {remedy}")
    environment.check_pages(info, database.encode())
    return Environment(environment, handle)


class _OpenEnvironments:
    """Weak references to the open environments.

    An environment closes with the last dataset that reads it.
    """

    def __init__(self) -> None:
        self._by_path: WeakValueDictionary[str, _OpenEnvironment] = WeakValueDictionary()
        self._lock = PerProcess(self._begin)

    def at(self, path: str, name: str, nbytes: int, readahead: bool) -> _OpenEnvironment:
        with self._lock():
            environment = self._by_path.get(path)
            if environment is None or environment.is_replaced():
                environment = self._by_path[path] = _OpenEnvironment(path, name, nbytes, readahead)
            return environment

    def _begin(self) -> Lock:
        """Unmap the environments inherited by a fork; return a lock.

        LMDB opens no path twice in a process. The parent's own environments stay open.
        """
        # LMDB does not support an environment that was opened before a fork.
        for environment in list(self._by_path.values()):
            environment.close()
        self._by_path.clear()
        return Lock()


# LMDB allows a process one environment per path, so all datasets share this table.
_OPEN_ENVIRONMENTS = _OpenEnvironments()


class _OpenEnvironment:
    """Open lmdb environment that counts its transactions.

    Safe to use from several threads.
    """

    def __init__(self, path: str, name: str, nbytes: int, readahead: bool) -> None:
        self.name = name
        self._data = data_in(path)
        self._library = optional.load("lmdb", "lmdb", "datasets.LMDB")
        _check_head(self._data, name)
        self._environment = _open_lmdb(self._library, path, name, readahead)
        self._page_nbytes = int(self._environment.stat()["psize"])
        with self._data.open("rb", buffering=0) as file:
            self._status = os.fstat(file.fileno())
            # mmap.size() is a cheaper way to learn the size of the file than a `stat` of its path.
            self._byte = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self._lock = Lock()
        self._ended = Condition(self._lock)
        self._waiting = self._transactions = self._mappings = 0
        self._nbytes = nbytes
        try:
            self._check_length(nbytes)
        except SampleError:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the data."""
        self._environment.close()

    def is_replaced(self) -> bool:
        """True if the path now holds another file."""
        try:
            return not os.path.samestat(self._status, self._data.stat())
        except OSError:
            return True

    def begin(self, database: Any) -> Any:
        """Begin a transaction on the current data."""
        with self._lock:
            # Checked before each transaction: reading a page beyond the end of the file would kill the process.
            nbytes = self._byte.size()
            if nbytes < self._nbytes:
                self._check_length(nbytes)
            self._nbytes = nbytes
            try:
                transaction = self._environment.begin(database, None, False, True)
            except self._library.MapResizedError as error:
                self._remap(error)
                transaction = self._environment.begin(database, None, False, True)
            self._transactions += 1
        return transaction

    def check_pages(self, info: ObjectInfo, database: bytes) -> None:
        """Raise SampleError if a page of a database is damaged.

        The main database has an empty name. All pages are read, once for each version of the file.
        """
        checked = MetadataCache(metadata_path("lmdb-pages", [self.name, database.decode("utf-8", "replace")], None))
        key = key_of(self.name, info)
        if checked.get(key) is not None:
            return
        _log.info("checking the pages of %s, once", self.name)
        while True:
            before = self._last_transaction()
            try:
                self._check_tree(database)
                break
            except DamageError as error:
                # A writer may have reused pages to which the tree of an older transaction refers.
                if self._last_transaction() == before:
                    raise SampleError(f"{self.name} is damaged: {error}; copy the environment again") from error
        checked.replace({key: b"checked"})

    def _last_transaction(self) -> int:
        return int(self._environment.info()["last_txnid"])

    def _check_tree(self, database: bytes) -> None:
        with self._data.open("rb", buffering=0) as file, ReadTransaction(self, None) as transaction:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            main = main_tree(data, self._page_nbytes)
            tree: Tree | None = main.tree if not database else tree_of(bytes(transaction.get(database)))
            if tree is not None:
                Pages(data, self._page_nbytes, main.last_page).check(tree)

    def end(self, transaction: Any) -> None:
        """End a transaction and all views that it returned."""
        with self._lock:
            transaction.abort()
            self._transactions -= 1
            if self._waiting:
                self._ended.notify_all()

    def refuse_damage(self, error: BaseException) -> None:
        """Raise SampleError if an error of LMDB ended a transaction."""
        if isinstance(error, self._library.Error):
            with translate_errors(self.name):
                raise error

    def _remap(self, error: Exception) -> None:
        """Map the additions of another process, once all transactions have ended.

        No transaction begins in that time: the lock is held except during the wait, and a new transaction finds the map
        too small and also waits here.
        """
        before = self._mappings
        self._waiting += 1
        ended = self._ended.wait_for(lambda: not self._transactions or self._mappings > before, _REMAP_TIMEOUT_S)
        self._waiting -= 1
        if not ended:
            raise StateError(
                f"{self.name} was enlarged by another process, and cannot be mapped again, because a transaction of"
                f" this process did not end within {_REMAP_TIMEOUT_S:g} s: do not read a dataset within its own decode="
                " function, or create the dataset again"
            ) from error
        # Another thread may have remapped the file while this one waited.
        if self._mappings == before:
            with translate_errors(self.name):
                self._environment.set_mapsize(0)
            self._mappings += 1

    def _check_length(self, nbytes: int) -> None:
        wanted = 2 * self._page_nbytes  # info() reads only the two meta pages
        if nbytes >= wanted:
            wanted = (self._environment.info()["last_pgno"] + 1) * self._page_nbytes
        if nbytes < wanted:
            name = self.name if "://" in self.name else self._data
            raise SampleError(
                f"{name} is truncated: the file has {nbytes} bytes, its header requires {wanted}; copy the environment"
                " again"
            )

    def database(self, name: bytes) -> Any:
        """Open the named database; None if there is none."""
        if b"\0" in name:  # lmdb would read the name only up to the NUL
            return None
        with ReadTransaction(self, None), self._lock, translate_errors(self.name):
            try:
                return self._environment.open_db(name, create=False)
            except (self._library.NotFoundError, self._library.IncompatibleError, self._library.BadValsizeError):
                return None

    def databases(self) -> list[str]:
        """Names of the databases found among the first keys."""
        with ReadTransaction(self, None) as transaction, transaction.cursor() as cursor:
            records = islice(cursor, _SCANNED_KEYS)
            keys = [bytes(key) for key, value in records if len(value) == _DATABASE_NBYTES]
        return [key.decode("utf-8", "replace") for key in keys[:_MAX_DATABASES] if self.database(key) is not None]


def _check_head(data: Path, name: str) -> None:
    """Raise SampleError for an impossible page size.

    The library would divide by it.
    """
    with data.open("rb", buffering=0) as file:
        head = file.read(48)
    try:
        page_nbytes(head)
    except DamageError as error:
        raise SampleError(f"{name} cannot be opened as an LMDB environment: {error}") from error


def _open_lmdb(library: Any, path: str, name: str, readahead: bool) -> Any:
    with translate_errors(name):
        return library.open(
            path,
            subdir=Path(path).is_dir(),
            readonly=True,
            # A lock file would have to be written, on a disk that may be read-only.
            lock=False,
            readahead=readahead,
            meminit=False,
            max_dbs=_MAX_DATABASES,
        )


@contextmanager
def translate_errors(path: str) -> Iterator[None]:
    """Translate errors of lmdb within the block into feedline's, naming the path."""
    lmdb = optional.load("lmdb", "lmdb", "datasets.LMDB")
    try:
        yield
    except lmdb.Error as error:
        if "already open" in str(error):
            raise ArgumentError(
                f"{path} is open in this process through other code, or by datasets created before its file was"
                " replaced, and LMDB allows one environment per path in a process: close that one first"
            ) from error
        raise SampleError(f"{path} cannot be opened as an LMDB environment: {error}") from error
