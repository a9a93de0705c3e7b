"""The folder of a cache, for one process."""

from __future__ import annotations

import errno
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic, time_ns
from typing import NamedTuple, TypeVar
from uuid import uuid4

from feedline.core.caches import LRUCache
from feedline.core.store_metrics import count
from feedline.errors import CacheWarning
from feedline.stores.cache.entries import (
    DamagedEntryError,
    PieceKey,
    checksum,
    checksum_of,
    file_nbytes,
    is_abandoned,
    map_sealed,
    open_entry,
    seal,
    temporary,
    write,
)
from feedline.stores.cache.locks import Account, AccountFile, AccountHeldError, FetchLocks, find_or_make
from feedline.stores.cache.settings import Cache

_log = logging.getLogger("feedline")


T = TypeVar("T")


_LAYOUT = "v1"


_MAPPED, _MAPPED_NBYTES, _MAPPED_SHARE = 4096, 4 << 30, 4
"""Bounds of the pieces that stay mapped: their number, their bytes, and the divisor of the limit that bounds them.

An evicted piece takes space on the disk as long as any process has it mapped.
"""


_TOUCHED_EVERY_S = 60.0
"""Least time between two records of a piece's use: each one is a system call."""


_TRUSTED = 1 << 16
"""Number of files whose checksum this process remembers as correct."""


_CHECKED_NBYTES = 256 << 20
"""Larger files are synced when they are written, so that their footer alone proves them complete. A checksum would read
the whole file in each process that opens it, which takes longer than most of its reads.
"""


_CLOCKS_DIFFER_NS = 3600 * 10**9
"""Most that clocks may differ: a file that was used later than now by more has the time of a wrong clock."""


_SPARE = 16
"""Divisor of the limit: this share is freed in addition to the needed bytes, so that not every write counts all
files."""


WriteContent = Callable[[Callable[[int, memoryview], None]], int | None]
"""Writes all bytes of a piece by calls of `write_at(place, data)`, from any thread; returns their checksum if known."""


class _NoRoomError(OSError):
    """Concurrent writes exceed the limit of the cache."""


class _MappedEntry(NamedTuple):
    data: memoryview
    touched_s: float


class _CachedFile(NamedTuple):
    used_ns: int
    nbytes: int
    path: str


class Folder:
    """Pieces by key, in a folder that other processes share.

    Safe to use from several threads; any process may be killed while it uses the folder. A piece is written to a
    temporary file, under a lock that distinguishes a running writer from a killed one, and renamed to its place when it
    is complete: a file with its final name is complete. Removing a piece removes only its name; a process that has it
    mapped keeps the data. So eviction needs no coordination, and nothing that is being read can change.
    """

    def __init__(self, cache: Cache) -> None:
        self._root = Path(cache.folder, _LAYOUT)
        self._account_file = AccountFile(self._root / "size-account")
        self._temporary = self._root / "temporary"
        self._piece_nbytes, self._limit_nbytes = cache.piece_nbytes, 0
        self._writable = True
        self._trusted: LRUCache[str, int] = LRUCache(_TRUSTED)
        self._warned: set[str] = set()
        try:
            self._prepare()
            self._limit_nbytes = cache.limit_nbytes()
            self._tidy()
        except OSError as error:
            self._stop_writing(error)
        share = self._limit_nbytes // _MAPPED_SHARE if self._writable else _MAPPED_NBYTES
        mapped_nbytes = min(_MAPPED_NBYTES, share)
        self._maps: LRUCache[str, _MappedEntry] = LRUCache(max(8, min(_MAPPED, mapped_nbytes // cache.piece_nbytes)))

    def _prepare(self) -> None:
        for part in ("temporary", "objects"):
            (self._root / part).mkdir(parents=True, exist_ok=True)

    def _tidy(self) -> None:
        try:
            with self._account_file.locked() as account:
                if any(self._temporary.iterdir()):
                    self._sweep()
                held = account.nbytes
                if held > self._limit_nbytes:
                    held = account.nbytes = self._sweep() + sum(file.nbytes for file in self._files())
        except AccountHeldError as error:
            self._warn_held(error)
            return
        if held > self._limit_nbytes:
            self._warn(
                f"the cache in {self._root} holds {held:,} bytes, more than this limit of "
                f"{self._limit_nbytes:,}: the least recently used pieces are evicted, even if another job needs them. "
                "Give jobs that share a folder the same limit="
            )

    def fetch_locks(self) -> FetchLocks:
        """A context manager, in which pieces can be locked for fetching."""
        return FetchLocks(self._root / "fetch-locks")

    def find_or_make(self, key: PieceKey, find: Callable[[], T | None], make: Callable[[], T]) -> T:
        """The result of `find()`; if that is None, of `make()`.

        One process calls `make` while others wait.
        """
        return find_or_make(self._root / "fetch-locks", key.name(), find, make)

    def has(self, key: PieceKey) -> bool:
        """True if a piece has a file, without opening it."""
        return self._path(key.name()).exists()

    def get(self, key: PieceKey, nbytes: int | None = None) -> memoryview | None:
        """The data of a piece, or None.

        A damaged piece, or one that has not `nbytes` bytes, is removed and counted.
        """
        data = self.in_memory(key)
        return self._open(key.name(), nbytes) if data is None or nbytes not in (None, data.nbytes) else data

    def in_memory(self, key: PieceKey) -> memoryview | None:
        """The data of a piece, if this process has it mapped."""
        name = key.name()
        mapped = self._maps.get(name)
        if mapped is None:
            return None
        if monotonic() - mapped.touched_s > _TOUCHED_EVERY_S:
            self._touch(name, mapped.data)
        return mapped.data

    def put(self, key: PieceKey, data: memoryview) -> None:
        """Keep a piece.

        If it cannot be kept, it is dropped, with one CacheWarning per cause. When the disk is full or cannot be written
        to, this process writes nothing more.
        """
        if not self._writable:
            return
        if file_nbytes(data.nbytes) > self._limit_nbytes:
            self._warn(
                f"the cache in {self._root} cannot keep pieces of {self._piece_nbytes:,} bytes within its limit "
                f"of {self._limit_nbytes:,}: they are fetched each time. Raise limit=, or lower piece_nbytes="
            )
            return
        try:
            self._write(key.name(), data.nbytes, partial(_fill_with, data))
        except _NoRoomError:
            return
        except AccountHeldError as error:
            self._warn_held(error)
        except OSError as error:
            self._stop_writing(error)

    def file(self, key: PieceKey) -> str | None:
        """The path of a piece's file, or None.

        It was checked when this process first opened it.
        """
        name = key.name()
        # Opened although only the path is needed: this checks the file, and marks it as used, so that it is evicted
        # last.
        return str(self._path(name)) if self._open(name) is not None else None

    def put_file(self, key: PieceKey, nbytes: int, fill: WriteContent) -> str:
        """Keep a piece that `fill` writes; returns the path of its file.

        OSError if it cannot be kept, unlike `put`, which may drop pieces.
        """
        name = key.name()
        self._write(name, nbytes, fill)
        return str(self._path(name))

    def put_parts(self, key: PieceKey, parts: Iterable[bytes | memoryview]) -> memoryview:
        """Keep content of unknown size; returns it, mapped.

        OSError if it cannot be kept; exceptions of `parts` are raised.
        """
        name, nbytes = key.name(), 0
        if not self._temporary.is_dir():
            self._prepare()  # the folder was removed
        with self._new_file(name, file_nbytes(0)) as fd:
            for part in parts:
                self._reserve(len(part), partial(os.ftruncate, fd, file_nbytes(nbytes + len(part))))
                write(fd, nbytes, memoryview(part))
                nbytes += len(part)
            seal(fd, nbytes, checksum_of(fd, nbytes))
            # Mapped before the file has its final name, because it may be evicted at once.
            return map_sealed(fd, nbytes)

    def _path(self, name: str) -> Path:
        return self._root / "objects" / name[:2] / name

    def _open(self, name: str, nbytes: int | None = None) -> memoryview | None:
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                # A file that was evicted and fetched again has another inode, and its checksum is not known yet.
                status = os.fstat(file.fileno())
                is_known = self._trusted.get(name) == status.st_ino
                data = open_entry(file, trusted=is_known or status.st_size > _CHECKED_NBYTES)
                if nbytes not in (None, data.nbytes):
                    raise DamagedEntryError
        except FileNotFoundError:
            return None
        except DamagedEntryError:
            _log.warning("%s of the cache is damaged; it is removed and fetched again", path)
            count(cache_damaged=1)
            with suppress(OSError):
                path.unlink()
            return None
        except OSError as error:
            _log.warning("%s of the cache cannot be read (%s); it is fetched again", path, error.strerror)
            return None
        self._trusted.put(name, status.st_ino)
        self._touch(name, data)
        return data

    def _touch(self, name: str, data: memoryview) -> None:
        """Record that the piece was used just now."""
        with suppress(OSError):  # evicted since then, or a folder that cannot be written to
            os.utime(self._path(name))
        self._maps.put(name, _MappedEntry(data, monotonic()))

    def _write(self, name: str, nbytes: int, fill: WriteContent) -> None:
        try:
            self._write_now(name, nbytes, fill)
        except FileNotFoundError:
            # Only a removed folder is created again: with any other cause, the second attempt would fail, too.
            if self._temporary.is_dir():
                raise
            self._prepare()  # the folder was removed
            self._write_now(name, nbytes, fill)

    def _write_now(self, name: str, nbytes: int, fill: WriteContent) -> None:
        with self._new_file(name, file_nbytes(nbytes)) as fd:
            known = fill(partial(write, fd))
            seal(fd, nbytes, checksum_of(fd, nbytes) if known is None else known)

    @contextmanager
    def _new_file(self, name: str, nbytes: int) -> Iterator[int]:
        """A temporary file of this size, which the block must seal.

        It then gets its final name.
        """
        temp = self._temporary / uuid4().hex
        with ExitStack() as stack:
            # Created under the lock, and with its size, so that a count by another process includes it.
            fd = self._reserve(nbytes, lambda: stack.enter_context(temporary(temp, nbytes)))
            yield fd
            status = os.fstat(fd)
            if status.st_size > _CHECKED_NBYTES:
                os.fsync(fd)
            # Not by `core.paths.Replacement`: its temporary files are counted and locked, and share one folder. Renamed
            # when sealed, so that a final name means a complete file. Small files are not synced: after a power loss,
            # their checksum reveals damage.
            try:
                temp.replace(self._path(name))
            except FileNotFoundError:  # the first piece of its part of the names
                self._path(name).parent.mkdir(exist_ok=True)
                temp.replace(self._path(name))
            self._trusted.put(name, status.st_ino)

    def _reserve(self, needed: int, take: Callable[[], T]) -> T:
        """Reserve space, and call `take`; evict files first if needed."""
        with self._account_file.locked() as account:
            if not account.known or account.nbytes + needed > self._limit_nbytes:
                self._make_room(account, needed)
            # Reserved before it is taken: if the process is killed in between, the number is too large, never too
            # small.
            account.nbytes += needed
            return take()

    def _make_room(self, account: Account, needed: int) -> None:
        """Count the files, and evict the least recently used ones.

        Stops when there is enough space.
        """
        taken, files = self._sweep(), sorted(self._files())
        taken += sum(file.nbytes for file in files)
        if taken + needed > self._limit_nbytes:
            wanted = max(0, self._limit_nbytes - needed - self._limit_nbytes // _SPARE)
            for file in files:
                if taken <= wanted:
                    break
                # Another process may evict at the same moment: files that it has removed are subtracted, too.
                with suppress(FileNotFoundError):
                    os.unlink(file.path)  # noqa: PTH108 - thousands of them
                    count(cache_evicted=1)
                taken -= file.nbytes
        account.nbytes = taken
        if taken + needed > self._limit_nbytes:
            raise _NoRoomError

    def _sweep(self) -> int:
        """Remove files of dead writers; return the bytes of living ones."""
        living = 0
        for path in self._temporary.iterdir():
            # The writer's lock counts, not the age of the file: over a slow line, writing one file may take an hour.
            if is_abandoned(path):
                path.unlink(missing_ok=True)
            else:
                living += _nbytes(path)
        return living

    def _files(self) -> Iterator[_CachedFile]:
        latest_ns = time_ns() + _CLOCKS_DIFFER_NS
        for folder in os.scandir(self._root / "objects"):
            for entry in os.scandir(folder.path):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    # With a time in the future, from another clock, a file would stay for years, so it is evicted
                    # first.
                    used_ns = status.st_mtime_ns if status.st_mtime_ns <= latest_ns else 0
                    yield _CachedFile(used_ns, status.st_size, entry.path)

    def _stop_writing(self, error: OSError) -> None:
        self._writable = False
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else f"it cannot be written to ({error.strerror})"
        remedy = "free some room" if full else "give a folder that can be written to"
        self._warn(
            f"the cache in {self._root} stores no more data in this process: {reason}. Its present content is still "
            f"used; {remedy} and start again"
        )

    def _warn_held(self, error: AccountHeldError) -> None:
        self._warn(
            f"the cache in {self._root} stores no new data for now: {error.strerror}, and is probably stopped. Its "
            "present content is still used; continue or end that process"
        )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, CacheWarning, stacklevel=2)


def _fill_with(data: memoryview, write_at: Callable[[int, memoryview], None]) -> int:
    write_at(0, data)
    return checksum(data)


def _nbytes(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
