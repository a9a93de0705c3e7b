"""Text without random access: decompressed and converted once, into a folder."""

from __future__ import annotations

import bz2
import codecs
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
from feedline.datasets.text.line_index import encoding_name, has_plain_lines
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


Opener = Callable[[io.BufferedReader], Any]


_OPENERS: dict[str, Opener] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}
"""Functions that open a decompressing file, by the extension of the compressed one."""


_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, OSError, ValueError)


def plain_text(blobs: FileSet, encoding: str, folder: Pathlike | None, delimiter: str = ",") -> tuple[FileSet, str]:
    """Files whose lines can be found from single bytes, and their encoding.

    Compressed files are decompressed into `folder`, or the user's cache, once for each of their versions. All files are
    converted to UTF-8 there if lines of the encoding do not end as in ASCII. ArgumentError for an unknown encoding.
    """
    name = encoding_name(encoding)
    converted = None if has_plain_lines(name, delimiter) else name
    if converted or any(_opener(each) for each in blobs.names):
        place = Path(folder or user_cache("inflated"))
        blobs = FileSet([_plain(blobs, number, place, converted) for number in range(len(blobs))])
    return blobs, "utf-8" if converted else name


def _opener(name: str) -> Opener | None:
    return _OPENERS.get(Path(name).suffix.lower())


def _plain(blobs: FileSet, number: int, folder: Path, encoding: str | None) -> Any:
    name, info = blobs.names[number], blobs.info(number)
    opener = _opener(name)
    if opener is None and encoding is None:
        blob = blobs[number]
        return (None if isinstance(blob, LocalFile) else blob.store), info
    key = key_of(name, info) or hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).digest()
    plain_name = Path(name).name if opener is None else Path(name).stem
    target = folder.absolute() / f"{key.hex()}-{f'{encoding}-' if encoding else ''}{plain_name}"
    if not target.exists() or not info.is_versioned:
        _write(blobs[number], opener or _as_it_is, encoding, target)
    return None, local_info(str(target))


def _as_it_is(file: io.BufferedReader) -> io.BufferedReader:
    return file


def _write(blob: Blob, opener: Opener, encoding: str | None, target: Path) -> None:
    _log.info("decompressing or converting %s once, into %s", blob.name, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        with partial.open("wb") as file:
            _copy(blob, opener, encoding, file)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _copy(blob: Blob, opener: Opener, encoding: str | None, file: Any) -> None:
    try:
        with opener(io.BufferedReader(_InOrder(blob), _COPY_NBYTES)) as source:
            if encoding is None:
                shutil.copyfileobj(source, file, _COPY_NBYTES)
            else:
                _convert(source, encoding, file)
    except UnicodeDecodeError as error:
        raise SampleError(f"{blob.name} is not {str(encoding).upper()} ({error}); pass its encoding=") from error
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the disk or the store, not from the data
            raise
        raise SampleError(
            f"{blob.name} cannot be decompressed: it is damaged, truncated, or not compressed as its name says"
            f" ({error}); re-create it or leave it out"
        ) from error


def _convert(source: Any, encoding: str, file: Any) -> None:
    """Write text as UTF-8."""
    decoder = codecs.getincrementaldecoder(encoding)()
    while data := source.read(_COPY_NBYTES):
        file.write(decoder.decode(bytes(data)).encode())
    file.write(decoder.decode(b"", True).encode())
