"""Files without random access: decompressed or converted once, into a cache.

All formats keep plain content in the same folder of the user's cache, below one limit. Content that was evicted is made
again when its file is opened.
"""

from __future__ import annotations

import gzip
import io
import logging
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from feedline.core import optional
from feedline.core.caches import PerProcess
from feedline.core.paths import Pathlike, make_folder, user_cache
from feedline.core.threads import DaemonPool
from feedline.datasets.compression import LZMAError, is_bomb
from feedline.datasets.file_objects import parts
from feedline.errors import SampleError, StateError
from feedline.stores import Cache, CachedStore, CacheWarning, ObjectInfo, ObjectRange, Store, StoreError
from feedline.stores.base import Views, changed_error
from feedline.stores.cache.entries import PieceKey
from feedline.stores.cache.folder import Folder
from feedline.stores.files import Extent, File, FileSet, GeneratedFile

_log = logging.getLogger("feedline")


PART_NBYTES = 4 << 20


_AT_ONCE = 4
"""Number of files decompressed at once: decompression releases the interpreter lock, and some codecs have both forms in
memory.
"""


_MAPPED_WITHOUT_ROOM = 8
"""Number of files that stay mapped, and so on disk, if the cache has too little space for all."""


Opener = Callable[[io.BufferedReader], Any]
"""Opens the plain content of a compressed file."""


ContentBlocks = Iterable[bytes | memoryview]
"""Content from front to back."""


class _InOrder(io.RawIOBase):
    """The content of a file or object, read forward only."""

    def __init__(self, file: File) -> None:
        super().__init__()
        self._coming: Iterator[memoryview] = parts(file)
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


class _ZlibStream:
    """A decompressor of zlib, used like those of bz2 and lzma."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj()

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail or data, max_length)


class _Streams(io.RawIOBase):
    """The plain content of a file of one or more compressed streams.

    Raises an error for anything else behind a stream, which the classes of bz2 and lzma ignore; zeros may fill up the
    file.
    """

    def __init__(self, file: io.BufferedReader, begin: Callable[[], Any]) -> None:
        super().__init__()
        self._file, self._begin, self._stream = file, begin, begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = b""
        # A piece of the input may produce no output yet, which must not count as the end.
        while not data:
            if self._stream.eof:
                piece = self._behind(self._stream.unused_data)
                if not piece:
                    break
                self._stream = self._begin()
            else:
                piece = self._file.read(PART_NBYTES) if self._stream.needs_input else b""
                if not piece and self._stream.needs_input:
                    raise EOFError("the stream ends before its end mark")
            data = self._stream.decompress(piece, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _behind(self, piece: bytes) -> bytes:
        """Data behind a stream and its zeros."""
        piece = piece.lstrip(b"\0")
        while not piece and (more := self._file.read(PART_NBYTES)):
            piece = more.lstrip(b"\0")
        return piece


def _open_streams(file: io.BufferedReader, begin: Callable[[], Any]) -> Any:
    return io.BufferedReader(_Streams(file, begin), PART_NBYTES)


def _not_empty(file: io.BufferedReader) -> io.BufferedReader:
    if not file.peek(1):  # for the classes of gzip and zstd, a file of no streams
        raise EOFError("it is empty")
    return file


def _open_gzip(file: io.BufferedReader) -> Any:
    return gzip.open(_not_empty(file))


def _open_zlib(file: io.BufferedReader) -> Any:
    return _open_streams(file, _ZlibStream)


def _open_bz2(file: io.BufferedReader) -> Any:
    return _open_streams(file, optional.load_standard("bz2", "a file compressed by bzip2").BZ2Decompressor)


def _open_xz(file: io.BufferedReader) -> Any:
    return _open_streams(file, optional.load_standard("lzma", "a file compressed by xz").LZMADecompressor)


def _zstd(file: io.BufferedReader) -> Any:
    arrow = optional.load("pyarrow", "arrow", "a file compressed by zstd")
    return arrow.CompressedInputStream(arrow.PythonFile(_not_empty(file), "r"), "zstd")


OPENERS: Mapping[str, Opener] = {
    ".gz": _open_gzip,
    ".bz2": _open_bz2,
    ".xz": _open_xz,
    ".zst": _zstd,
    ".zstd": _zstd,
    ".zlib": _open_zlib,
}
"""Functions that open a decompressing file, by the extension of the compressed one."""


_DAMAGE = (EOFError, zlib.error, LZMAError, OSError, ValueError)


class Inflation(NamedTuple):
    """The production of a file's plain content.

    `kind` distinguishes the contents that one file can have. `nbytes` is the size of the content, if an index has it:
    the content is then made when it is first read, otherwise when the dataset is created.
    """

    kind: str
    parts: Callable[[File], ContentBlocks]
    nbytes: int | None = None


def default_cache() -> Path:
    """The folder of plain content in the user's cache."""
    return Path(user_cache("decompressed"))


def opener_of(name: str) -> Opener | None:
    """Opener for files of this name; None for plain files."""
    return OPENERS.get(Path(name).suffix.lower())


def inflated(files: FileSet, openers: Sequence[Opener | None], cache: Cache | Pathlike | None) -> FileSet:
    """The files; files with an opener are decompressed.

    Each version of a file is decompressed once, into `cache` or the user's cache. SampleError for damaged data, and for
    data that looks like a decompression bomb.
    """
    inflations = [opener and Inflation("decompressed", partial(converted, opener, plain_parts)) for opener in openers]
    return PlainFiles(files, inflations, cache) if any(inflations) else files


class PlainFiles(FileSet):
    """Files, some of them decompressed or converted into a cache.

    They have the names of their sources. One process of the machine makes content, while others that need it wait. The
    version of content depends only on the version of its source, so that an index fits content that is produced again.
    Content of sources without versions is kept for this set only. A CacheWarning reports too little space for the whole
    content.
    """

    def __init__(
        self, sources: FileSet, inflations: Sequence[Inflation | None], cache: Cache | Pathlike | None
    ) -> None:
        self.sources, self._inflations = sources, inflations
        self._cache = cache if isinstance(cache, Cache) else Cache(default_cache() if cache is None else Path(cache))
        make_folder(self._cache.folder, f"cache={self._cache.folder!r}")
        self._own = uuid4().hex
        # Content is large, so few should stay mapped by the folder: pieces larger than most of it.
        self._folder = PerProcess(partial(Folder, replace(self._cache, piece_nbytes=1 << 30)))
        self._openers = PerProcess(partial(DaemonPool, _AT_ONCE, "feedline-inflate"))
        with DaemonPool(_AT_ONCE) as pool:
            objects = list(pool.map(self._described, range(len(sources))))
        super().__init__(objects, None if self._has_room(objects) else _MAPPED_WITHOUT_ROOM)

    def __fingerprint__(self) -> FileSet:
        """The files before decompression, independent of the place of their content."""
        return self.sources

    def open(self, number: int) -> File:
        """Open a file; evicted content is produced again."""
        if self._inflations[number] is None:
            return super().open(number)
        info, data = self.info(number), self._content(number)
        if len(data) != info.size:  # after an eviction, a source without versions may have other content
            raise changed_error(StateError, info.path, f"its content had {info.size} bytes, and has {len(data)} now")
        return GeneratedFile(info.path, data, info.version)

    def read(self, extents: Sequence[Extent]) -> Views:
        """One view per extent; missing content is produced, several files at once."""
        made, opened = {each.file for each in extents if self._inflations[each.file] is not None}, self._opened()
        if sum(opened.get(number) is None for number in made) < 2:
            return super().read(extents)
        files = dict(zip(made, self._openers().map(self.__getitem__, made), strict=True))
        others = iter(super().read([each for each in extents if each.file not in made]))
        return [
            files[number].read([(start, stop)])[0] if number in made else next(others)
            for number, start, stop in extents
        ]

    def ranges(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, ObjectRange]]:
        """The object ranges that a prefetch must fetch.

        For missing content these are whole sources.
        """
        plain = [each for each in extents if self._inflations[each.file] is None]
        missing = {each.file for each in extents if self.is_missing(each.file)}
        whole = [Extent(number, 0, self.sources.info(number).size) for number in missing]
        return [*self.sources.ranges(whole), *super().ranges(plain)]

    def is_missing(self, number: int) -> bool:
        """True if a file's content must be produced before reads."""
        inflation = self._inflations[number]
        return inflation is not None and not self._folder().has(self._key(number, inflation))

    def _described(self, number: int) -> tuple[Store | None, ObjectInfo]:
        inflation, info = self._inflations[number], self.sources.info(number)
        if inflation is None:
            return self.sources.store(number), info
        nbytes = len(self._content(number)) if inflation.nbytes is None else inflation.nbytes
        return None, ObjectInfo(self.sources.name(number), nbytes, self._version(info, inflation))

    def _version(self, info: ObjectInfo, inflation: Inflation) -> str:
        version = info.version if info.is_versioned else f"{info.version} {self._own}"
        return f"{version} {inflation.kind}"

    def _key(self, number: int, inflation: Inflation) -> PieceKey:
        return PieceKey(self.sources.name(number), self._version(self.sources.info(number), inflation), 0, 0)

    def _content(self, number: int) -> memoryview:
        inflation = self._inflations[number]
        assert inflation is not None
        folder, key = self._folder(), self._key(number, inflation)
        return folder.find_or_make(key, partial(folder.get, key), partial(self._make, number, inflation, key))

    def _make(self, number: int, inflation: Inflation, key: PieceKey) -> memoryview:
        """Write content to the cache; StoreError without enough space."""
        source, name = self.sources.open(number), self.sources.name(number)
        _log.info("decompressing or converting %s once, into %s", name, self._cache.folder)
        try:
            return self._folder().put_parts(key, inflation.parts(source))
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"{name} cannot be kept decompressed in {self._cache.folder}"
                f" ({error.strerror or 'the limit of the cache is lower'}): pass cache=, a folder with more space"
            ) from error

    def _has_room(self, objects: Sequence[tuple[Store | None, ObjectInfo]]) -> bool:
        nbytes = sum(
            info.size for inflation, (_, info) in zip(self._inflations, objects, strict=True) if inflation is not None
        )
        cache, limit = self._cache, self._cache.limit_nbytes()
        if nbytes > limit:
            warnings.warn(
                f"decompressed, {self.sources.name(0)} and others take {nbytes:,} bytes, but the cache in"
                f" {cache.folder} keeps {limit:,}: in random order, they are decompressed again and again. Pass"
                " cache=stores.Cache(folder, limit=...) with a higher limit, or use samplers.ShardShuffled",
                CacheWarning,
                stacklevel=5,
            )
        return nbytes <= limit


def converted(opener: Opener, convert: Callable[[File, Any], ContentBlocks], file: File) -> ContentBlocks:
    """The content of an opened file, converted; SampleError for damaged data."""
    try:
        with opener(io.BufferedReader(_InOrder(file), PART_NBYTES)) as source:
            yield from convert(file, source)
    except SampleError:
        raise
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk or the store, not of the data
            raise
        raise SampleError(
            f"{file.name} cannot be decompressed: it is damaged, truncated, or not compressed as its name says"
            f" ({error}); re-create it or leave it out"
        ) from error


def plain_parts(file: File, source: Any) -> ContentBlocks:
    """Decompressed content; SampleError for a decompression bomb."""
    nbytes = 0
    while data := source.read(PART_NBYTES):
        nbytes += len(data)
        # Checked while the content is written: a small file could fill the disk.
        if is_bomb(nbytes, file.nbytes):
            raise SampleError(
                f"{file.name} has {file.nbytes:,} bytes and decompresses to more than {nbytes:,}, like a decompression"
                " bomb; if you trust it, decompress it yourself and pass the plain file"
            )
        yield data
