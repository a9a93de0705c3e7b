"""Compressed text files, decompressed once into a folder."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import logging
import lzma
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from feedline.core import optional
from feedline.core.paths import user_cache
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.file_objects import parts
from feedline.datasets.indexes import key_of
from feedline.errors import SampleError
from feedline.stores.files import Blob, FileSet, LocalFile, local_info

_log = logging.getLogger("feedline")


_COPY_NBYTES = 4 << 20


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


def _zstd(file: io.BufferedReader) -> Any:
    arrow = optional.load("pyarrow", "arrow", "a file compressed by zstd")
    return arrow.CompressedInputStream(arrow.PythonFile(file, "r"), "zstd")


_OPENERS: dict[str, Callable[[io.BufferedReader], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}
"""Functions that open a decompressing file, by the extension of the compressed one."""


_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, OSError, ValueError)


def decompressed(blobs: FileSet, folder: Pathlike | None) -> FileSet:
    """Replace compressed files by decompressed ones in `folder`, or the user's cache.

    A file is decompressed once for each of its versions. Files without a known extension stay as they are.
    """
    if not any(_opener(name) for name in blobs.names):
        return blobs
    place = Path(folder or user_cache("inflated"))
    return FileSet([_plain(blobs, number, place) for number in range(len(blobs))])


def _opener(name: str) -> Callable[[io.BufferedReader], Any] | None:
    return _OPENERS.get(Path(name).suffix.lower())


def _plain(blobs: FileSet, number: int, folder: Path) -> Any:
    name, info = blobs.names[number], blobs.info(number)
    opener = _opener(name)
    if opener is None:
        blob = blobs[number]
        return (None if isinstance(blob, LocalFile) else blob.store), info
    key = key_of(name, info) or hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).digest()
    target = folder.absolute() / f"{key.hex()}-{Path(name).stem}"
    if not target.exists() or not info.is_versioned:
        _decompress(blobs[number], opener, target)
    return None, local_info(str(target))


def _decompress(blob: Blob, opener: Callable[[io.BufferedReader], Any], target: Path) -> None:
    _log.info("decompressing %s once, into %s", blob.name, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        with partial.open("wb") as file:
            _copy(blob, opener, file)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _copy(blob: Blob, opener: Callable[[io.BufferedReader], Any], file: Any) -> None:
    try:
        with opener(io.BufferedReader(_InOrder(blob), _COPY_NBYTES)) as source:
            shutil.copyfileobj(source, file, _COPY_NBYTES)
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the disk or the store, not from the data
            raise
        raise SampleError(
            f"{blob.name} cannot be decompressed: it is damaged, truncated, or not compressed as its name says"
            f" ({error}); re-create it or leave it out"
        ) from error
