"""Files of this machine, memory-mapped.

The module also has mappings without file descriptors, and the interval at which files in use are checked, because a
truncated mapped file would crash the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from feedline.core.caches import LRUCache, PerProcess
from feedline.core.paths import expand_user, files_below, is_special
from feedline.core.stage_parts import READ_FILES
from feedline.errors import ObjectNotFoundError
from feedline.stores.base import FileVersion, ObjectInfo, Range, Views, check_version
from feedline.stores.requests import Requests, check_ranges, check_within, spans_for
from feedline.stores.urls import absolute, check_path, join

_OPEN_AT_ONCE = 64


_SMALL_NBYTES = 64 << 10
"""A whole file up to this size is read, not mapped: a mapping costs more than the copy."""


_PAGE_GAPS = Requests(gap_nbytes=mmap.PAGESIZE)


class _MappedVersion(NamedTuple):
    version: str
    data: memoryview


def map_whole(path: str, check: Callable[[os.stat_result], None], *, read_ahead: bool = True) -> memoryview:
    """Map a file read-only; `check` raises for a wrong status.

    Without `read_ahead` the kernel reads only the pages that are touched or passed to `will_need`.
    """
    with open(path, "rb", buffering=0) as file:
        # The status of the open descriptor: the name may refer to another file by now.
        status = os.fstat(file.fileno())
        check(status)
        if not read_ahead and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b"")


def will_need(data: memoryview, spans: Sequence[Range], at_least: int = 1) -> None:
    """Ask the kernel to read ranges of a mapped file ahead.

    Ranges of fewer than `at_least` bytes are left out.
    """
    mapping = data.obj
    if not isinstance(mapping, mmap.mmap) or not hasattr(mapping, "madvise"):  # no mapping, or Windows
        return
    for start, stop in spans:
        if stop - start >= at_least:
            first = start - start % mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, first, stop - first)


class LocalStore:
    """The files below a folder.

    Data are views of the mapped files, which truncation of a file invalidates.
    """

    def __init__(self, folder: str = "/") -> None:
        self._folder = absolute(expand_user(folder))
        self._maps: PerProcess[LRUCache[str, _MappedVersion]] = PerProcess(lambda: LRUCache(_OPEN_AT_ONCE))

    @property
    def url(self) -> str:
        """The folder."""
        return self._folder

    def __fingerprint__(self) -> str:
        """The address; its data do not depend on options or caches."""
        return self.url

    def __repr__(self) -> str:
        return f"LocalStore({self._folder!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalStore, (self._folder,)

    def info(self, path: str) -> ObjectInfo:
        """The current size and version of one file.

        Its version consists of inode, size and modification time.
        """
        status = self._status(path)
        return ObjectInfo(path, status.st_size, _version(status))

    def size(self, path: str) -> int:
        """The size of one file in bytes."""
        return self._status(path).st_size

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        """Read the bytes from `start` up to `stop`, or to the end."""
        with READ_FILES as part:
            data = self._read(path, start, stop, version)
            part.count(len(data))
        return data

    def _read(self, path: str, start: int, stop: int | None, version: str | None) -> memoryview:
        status = self._status(path)
        if stop is None and 0 <= start <= status.st_size <= _SMALL_NBYTES:
            check_version(version, _version(status), self._file(path))
            return memoryview(Path(self._file(path)).read_bytes())[start:]
        stop = max(start, status.st_size) if stop is None else stop
        return self._cut(path, status, [(start, stop)], version)[0]

    def read_many(self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None) -> Views:
        """One view for each range."""
        with READ_FILES as part:
            views = self._cut(path, self._status(path), ranges, version)
            if part.timed:
                part.count(sum(map(len, views)))
        return views

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List every file whose path begins with `prefix`, sorted by path.

        Links to folders are followed, except to a folder that contains the link; links to nothing are left out.
        OSError for a folder that cannot be read.
        """
        folder, slash, beginning = check_path(prefix).rpartition("/")
        top = Path(self._file(folder + slash))
        files = files_below(str(top), beginning) if top.is_dir() else ()
        for path in sorted(Path(file).relative_to(self._folder).as_posix() for file in files):
            if not is_special(self._file(path)):
                try:
                    info = self.info(path)
                except ObjectNotFoundError:  # a link to nothing, or deleted since
                    continue
                yield info

    def _file(self, path: str) -> str:
        return os.path.join(self._folder, check_path(path))  # noqa: PTH118 - per sample, and Path costs microseconds

    def _status(self, path: str) -> os.stat_result:
        file = self._file(path)
        try:
            return os.stat(file)  # noqa: PTH116 - as in _file
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectNotFoundError(f"{file}: there is no such file") from None

    def _cut(self, path: str, status: os.stat_result, ranges: Sequence[tuple[int, int]], version: str | None) -> Views:
        check_ranges(ranges, join(self.url, path))
        file, now = self._file(path), _version(status)
        check_version(version, now, file)
        check_within(ranges, status.st_size, file)
        data = self._map(file, now)
        will_need(data, spans_for(ranges, _PAGE_GAPS))
        return [data[start:stop] for start, stop in ranges]

    def _map(self, file: str, version: str) -> memoryview:
        maps = self._maps()
        known = maps.get(file)
        if known is not None and known.version == version:
            return known.data
        # Reads in random order: the kernel's own read-ahead would fetch more than requested.
        data = map_whole(file, lambda now: check_version(version, _version(now), file), read_ahead=False)
        return maps.put(file, _MappedVersion(version, data)).data


def _version(status: os.stat_result) -> str:
    return FileVersion.of(status, with_inode=True).tag


if sys.platform != "win32":
    _C = ctypes.CDLL(None, use_errno=True)
    _C.mmap.restype = ctypes.c_void_p
    _C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    _C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


_FAILED = ctypes.c_void_p(-1).value


def map_file(fd: int, nbytes: int) -> memoryview:
    """Map the first bytes of a file read-only.

    They are unmapped when the last view is dropped. The file may be closed and removed before that, whereas Python's
    own mapping keeps a descriptor. OSError if the process has too many mappings.
    """
    if nbytes == 0:
        return memoryview(b"")
    address = _C.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _C.munmap, address, nbytes).atexit = False
    return memoryview(memory).cast("B").toreadonly()


RECHECK_S = 0.1
"""Rare enough that checks cost nothing, even if each is a request to a file server."""


class RecheckTimer:
    """The interval between checks; a failed check stays due.

    Pickles as new.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def is_due(self) -> bool:
        """True if the next check is due."""
        return monotonic() >= self._next

    def done(self) -> None:
        """Record a check that found nothing wrong."""
        self._next = monotonic() + RECHECK_S

    def __reduce__(self) -> tuple[Any, ...]:
        return RecheckTimer, ()
