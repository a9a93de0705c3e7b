"""Files without random access: decompressed or converted once, into a folder.

The folder in the user's cache keeps a limited total. A file that was removed there is made again when it is opened.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import logging
import lzma
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

from feedline.core import optional
from feedline.core.paths import Pathlike, user_cache
from feedline.core.threads import DaemonPool
from feedline.datasets.compression import is_bomb
from feedline.datasets.file_objects import parts
from feedline.datasets.indexes import key_of
from feedline.errors import SampleError
from feedline.stores import Cache, CacheWarning, ObjectInfo, Store
from feedline.stores.files import Blob, FileSet, LocalFile, RemoteBlob, local_info

_log = logging.getLogger("feedline")


COPY_NBYTES = 4 << 20


_AT_ONCE = 4
"""Files decompressed at once; decompression releases the interpreter lock."""


Opener = Callable[[io.BufferedReader], Any]
"""Opens the plain content of a compressed file."""


Copy = Callable[[Blob, Any, BinaryIO], None]
"""Copies the plain content of a file to another."""


class _InOrder(io.RawIOBase):
    """The content of a file or object, read forward only."""

    def __init__(self, blob: Blob) -> None:
        super().__init__()
        self._coming: Iterator[memoryview] = parts(blob)
        self._part = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not len(self._part):
            self._part = next(self._coming, self._part)
        count = min(len(buffer), len(self._part))
        buffer[:count] = self._part[:count]
        self._part = self._part[count:]
        return count


class _Zlib(io.RawIOBase):
    """The plain content of a zlib stream."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__()
        self._file, self._stream = file, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = b""
        # A piece of the input may give no output yet, which must not look like the end.
        while not data and not self._stream.eof:
            piece = self._stream.unconsumed_tail or self._file.read(COPY_NBYTES)
            if not piece:
                raise EOFError("the stream ends before its end mark")
            data = self._stream.decompress(piece, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _open_zlib(file: io.BufferedReader) -> Any:
    return io.BufferedReader(_Zlib(file), COPY_NBYTES)


def _zstd(file: io.BufferedReader) -> Any:
    arrow = optional.load("pyarrow", "arrow", "a file compressed by zstd")
    return arrow.CompressedInputStream(arrow.PythonFile(file, "r"), "zstd")


OPENERS: Mapping[str, Opener] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstd,
    ".zstd": _zstd,
    ".zlib": _open_zlib,
}
"""Functions that open a decompressing file, by the extension of the compressed one."""


_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, OSError, ValueError)


class Inflation(NamedTuple):
    """Opener of a file, name of its result, and copier of content."""

    opener: Opener
    plain_name: str
    copy: Copy


def opener_of(name: str) -> Opener | None:
    """Opener for files of this name; None for plain files."""
    return OPENERS.get(Path(name).suffix.lower())


def inflated(blobs: FileSet, openers: Sequence[Opener | None], folder: Pathlike | None) -> FileSet:
    """These files, of which those with an opener are decompressed.

    Each version of a file is decompressed once, into `folder` or the user's cache. SampleError for damaged data, and
    for what looks like a decompression bomb.
    """
    ways = [
        opener and Inflation(opener, _plain_name(name), copy_content)
        for name, opener in zip(blobs.names, openers, strict=True)
    ]
    return PlainFiles(blobs, ways, folder) if any(ways) else blobs


def _plain_name(name: str) -> str:
    path = Path(name)
    return path.stem if path.suffix.lower() in OPENERS else path.name


class PlainFiles(FileSet):
    """Files of which some are decompressed or converted, into a folder.

    The result has a time of change that follows from the version of its source, so that an index fits a result that is
    made again. In the user's cache, the results that were not used for longest are removed beyond the limit of a
    `Cache`.
    """

    def __init__(self, sources: FileSet, ways: Sequence[Inflation | None], folder: Pathlike | None) -> None:
        self.sources = sources
        self._ways = ways
        self._is_limited = folder is None
        self._folder = Path(folder or user_cache("decompressed")).absolute()
        with DaemonPool(_AT_ONCE) as pool:
            super().__init__(list(pool.map(partial(self._plain, is_new=True), range(len(sources)))))
        if self._is_limited:
            self._check_room()

    def origin(self, number: int) -> str:
        return self.sources.name(number)

    def open(self, number: int) -> LocalFile | RemoteBlob:
        """Open a file; a result that was removed is made again."""
        if self._ways[number] is not None:
            self._plain(number, is_new=False)
        return super().open(number)

    def _plain(self, number: int, *, is_new: bool) -> tuple[Store | None, ObjectInfo]:
        """The result of a file, or a file that needs no conversion.

        A result from an earlier dataset is used if the source has a version.
        """
        way = self._ways[number]
        if way is None:
            return self.sources.store(number), self.sources.info(number)
        name, info = self.sources.name(number), self.sources.info(number)
        key = key_of(name, info) or hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        target = self._folder / f"{key.hex()}-{way.plain_name}"
        if not target.exists() or (is_new and not info.is_versioned):
            # Where no version tells, another content of this length would pass for the one that was indexed.
            _write(self.sources[number], way, target, _changed_ns(key) if info.is_versioned else time.time_ns())
        with suppress(OSError):  # others have filled the folder, or it is read-only
            os.utime(target, ns=(time.time_ns(), target.stat().st_mtime_ns))
        return None, local_info(str(target))

    def _check_room(self) -> None:
        """Remove results that this dataset does not use, beyond the limit."""
        own = {self.info(number).path for number, way in enumerate(self._ways) if way is not None}
        kept = sorted(_results(self._folder), key=lambda each: (each.path in own, each.used_ns), reverse=True)
        limit, total = Cache(self._folder).limit_nbytes(), 0
        for each in kept:
            total += each.nbytes
            if total > limit and each.path not in own:
                Path(each.path).unlink(missing_ok=True)
        used = sum(each.nbytes for each in kept if each.path in own)
        if used > limit:
            warnings.warn(
                f"decompressed, the files of {self.origins[0]} and others take {used:,} bytes, and {self._folder} is"
                f" to keep {limit:,}: pass index_dir=, a folder with more room",
                CacheWarning,
                stacklevel=5,
            )


def _changed_ns(key: bytes) -> int:
    """The time of change of a result."""
    return (int.from_bytes(key[:4], "little") >> 1) * 10**9  # whole seconds, which every file system keeps


class _Result(NamedTuple):
    path: str
    nbytes: int
    used_ns: int


# Without the indexes next to results, which other datasets would miss: they are small.
_RESULT = re.compile(r"[0-9a-f]{32}-.+(?<![-.]index)")


def _results(folder: Path) -> Iterator[_Result]:
    """The files of a folder that are results of `PlainFiles`."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process may remove it
                if _RESULT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat()
                    yield _Result(entry.path, status.st_size, status.st_atime_ns)


def _write(blob: Blob, way: Inflation, target: Path, changed_ns: int) -> None:
    _log.info("decompressing or converting %s once, into %s", blob.name, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        with unfinished.open("wb") as file:
            _inflate(blob, way, file)
        # Before it has its name: another process may open it at once, and would see it change.
        os.utime(unfinished, ns=(time.time_ns(), changed_ns))
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _inflate(blob: Blob, way: Inflation, file: BinaryIO) -> None:
    try:
        with way.opener(io.BufferedReader(_InOrder(blob), COPY_NBYTES)) as source:
            way.copy(blob, source, file)
    except SampleError:
        raise
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the disk or the store, not from the data
            raise
        raise SampleError(
            f"{blob.name} cannot be decompressed: it is damaged, truncated, or not compressed as its name says"
            f" ({error}); re-create it or leave it out"
        ) from error


def copy_content(blob: Blob, source: Any, file: BinaryIO) -> None:
    """Copy decompressed content; SampleError for a decompression bomb."""
    nbytes = 0
    while data := source.read(COPY_NBYTES):
        nbytes += len(data)
        # Checked while it is written: a small file could fill the disk.
        if is_bomb(nbytes, blob.nbytes):
            raise SampleError(
                f"{blob.name} has {blob.nbytes:,} bytes and decompresses to more than {nbytes:,}, like a decompression"
                " bomb; if you trust it, decompress it yourself and pass the plain file"
            )
        file.write(data)
