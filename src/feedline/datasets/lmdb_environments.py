"""LMDB environments of this process: one for each path, shared by the datasets over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from feedline import extras
from feedline.errors import ArgumentError, SampleError
from feedline.stores.blobs import Blobs

_DATABASES = 64


class Environment:
    """An environment open for reading, and the named database in it that is read."""

    def __init__(self, held: Any, database: Any) -> None:
        self._held, self._database = held, database

    def reading(self) -> Any:
        """A transaction, as a context manager; the values that it gets are views that end with it."""
        return self._held.begin(self._database, buffers=True)

    def entries(self) -> int:
        """How many there are."""
        with self.reading() as transaction:
            return int(transaction.stat(self._database)["entries"] if self._database else transaction.stat()["entries"])


def open_environment(path: str, database: str | None, readahead: bool) -> Environment:
    """The environment of a folder or file, read-only and without locks; the first to open it decides on `readahead`."""
    data = data_in(path)
    if not data.exists():
        raise FileNotFoundError(f"no LMDB environment: {data} does not exist")
    return _environment(path, path, data.stat().st_size, database, readahead)


def fetch_environment(blobs: Blobs, database: str | None, readahead: bool) -> Environment:
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
    with naming(name):
        return Environment(held, held.open_db(database.encode(), create=False))


class _OpenEnvironments:
    """Weak references to what is open, so that an environment closes with the last dataset that reads it."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._pid = os.getpid()
        self._locks: dict[int, Lock] = {}  # by process: one that was held at a fork is never released in the child

    def at(self, path: str, name: str, nbytes: int, readahead: bool) -> Any:
        with self._locks.setdefault(os.getpid(), Lock()):
            self._close_inherited()
            held = self._held.get(path)
            if held is None:
                held = self._held[path] = _opened(path, name, nbytes, readahead)
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


def _opened(path: str, name: str, nbytes: int, readahead: bool) -> Any:
    lmdb = extras.load("lmdb", "lmdb", "datasets.LMDB")
    with naming(name):
        environment = lmdb.open(
            path,
            subdir=Path(path).is_dir(),
            readonly=True,
            lock=False,
            readahead=readahead,
            meminit=False,
            max_dbs=_DATABASES,
        )
    wanted = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if nbytes < wanted:  # reading pages that the file does not have would kill the process
        environment.close()
        told = name if "://" in name else data_in(path)
        raise SampleError(f"{told} is truncated: the file has {nbytes} bytes, its header wants {wanted}")
    return environment


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Within the block, errors of the library become ours, with the path and the remedy."""
    lmdb = extras.load("lmdb", "lmdb", "datasets.LMDB")
    try:
        yield
    except lmdb.NotFoundError as error:
        raise ArgumentError(f"{path} has no such named database ({error})") from error
    except lmdb.Error as error:
        if "already open" in str(error):
            raise ArgumentError(
                f"{path} is open in this process through other code, and LMDB allows a process one environment for"
                " each path: close that one first"
            ) from error
        raise SampleError(f"{path} cannot be opened as an LMDB environment: {error}") from error
