"""Files without random access: decompressed or converted once, into a folder."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import logging
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
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
from feedline.stores import ObjectInfo, Store
from feedline.stores.files import Blob, FileSet, LocalFile, local_info

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


def inflated(blobs: FileSet, openers: list[Opener | None], folder: Pathlike | None) -> FileSet:
    """These files, of which those with an opener are decompressed.

    Each version of a file is decompressed once, into `folder` or the user's cache. SampleError for damaged data, and
    for what looks like a decompression bomb.
    """
    if not any(openers):
        return blobs
    ways = [
        opener and Inflation(opener, _plain_name(name), copy_content)
        for name, opener in zip(blobs.names, openers, strict=True)
    ]
    place = inflation_folder(folder)
    with DaemonPool(_AT_ONCE) as pool:
        return FileSet(list(pool.map(partial(plain_file, blobs, folder=place), range(len(blobs)), ways)))


def _plain_name(name: str) -> str:
    path = Path(name)
    return path.stem if path.suffix.lower() in OPENERS else path.name


def inflation_folder(folder: Pathlike | None) -> Path:
    """The folder of decompressed files: `folder`, or one in the user's cache."""
    return Path(folder or user_cache("inflated")).absolute()


def plain_file(blobs: FileSet, number: int, way: Inflation | None, *, folder: Path) -> tuple[Store | None, ObjectInfo]:
    """The inflated file; without a way to inflate it, the file itself."""
    name, info = blobs.names[number], blobs.info(number)
    if way is None:
        blob = blobs[number]
        return (None if isinstance(blob, LocalFile) else blob.store), info
    key = key_of(name, info) or hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).digest()
    target = folder / f"{key.hex()}-{way.plain_name}"
    if not target.exists() or not info.is_versioned:
        _write(blobs[number], way, target)
    return None, local_info(str(target))


def _write(blob: Blob, way: Inflation, target: Path) -> None:
    _log.info("decompressing or converting %s once, into %s", blob.name, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        with unfinished.open("wb") as file:
            _inflate(blob, way, file)
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
