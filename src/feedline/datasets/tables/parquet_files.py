"""Where Parquet files lie: on this machine, in a store, or in a filesystem of pyarrow's; opened for pyarrow.

The footers of Parquet files: read many at once, and those of many files kept on this machine.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from feedline.core import optional
from feedline.core.caches import LRUCache, PerProcess
from feedline.core.threads import DaemonPool
from feedline.datasets.file_objects import SparseFile
from feedline.datasets.indexes import MetadataCache, key_of
from feedline.datasets.paths import Paths, listed
from feedline.datasets.tables.types import bare, pyarrow
from feedline.errors import ArgumentError, SampleError
from feedline.stores import CachedStore, ObjectInfo, ObjectRange, StoreError
from feedline.stores.base import Range
from feedline.stores.files import Extent, FileSet, LocalFile, RemoteBlob
from feedline.stores.globs import expand_braces

WHAT = "datasets.Parquet"


class StoredFiles:
    """Files of this machine and objects of stores."""

    def __init__(self, blobs: FileSet) -> None:
        self._blobs = blobs
        self.names = blobs.names
        self.is_local = blobs.is_local

    def nbytes(self, number: int) -> int:
        """The size of a file."""
        return self._blobs.info(number).size

    def key(self, number: int) -> bytes | None:
        """What its description is kept under, if it can be."""
        return key_of(self.names[number], self._blobs.info(number))

    def read(self, number: int, start: int, stop: int) -> memoryview:
        """Bytes of a file, around the cache: they are kept elsewhere."""
        return self._opened(number).read_uncached([(start, stop)])[0]

    @contextmanager
    def opened(self, number: int, metadata: Any, spans: Sequence[Range]) -> Iterator[Any]:
        """A ParquetFile; of an object these spans are read at once."""
        blob = self._opened(number)
        if isinstance(blob, LocalFile):
            source = pyarrow(WHAT).BufferReader(blob.data)
        else:
            source = SparseFile(blob.nbytes, spans, blob.read)
        with parquet_file(self.names[number], source, metadata, pre_buffer=False) as file:
            yield file

    def ranges(self, spans: Sequence[tuple[int, Range]]) -> list[tuple[CachedStore, ObjectRange]]:
        """What reading these spans of these files wants from caches."""
        return self._blobs.ranges([Extent(number, *span) for number, span in spans])

    def _opened(self, number: int) -> LocalFile | RemoteBlob:
        """A file is opened for each use, because what changes under a mapping that is kept would not be noticed."""
        info = self._blobs.info(number)
        if self.is_local or self.names[number] == info.path:
            return LocalFile(info.path, info.size, info.version)
        return self._blobs[number]


class FilesystemFiles:
    """Files of a filesystem of `pyarrow.fs`, which reads them."""

    is_local = False

    def __init__(self, filesystem: Any, paths: Paths) -> None:
        self._filesystem = filesystem
        found = [path for given in listed(paths) for path in expand_braces(str(given), self._is_there)]
        infos = filesystem.get_file_info(found)
        for info in infos:
            if not info.is_file:
                raise FileNotFoundError(f"{info.path} is no file on {type(filesystem).__name__}; list files one by one")
        if not found:
            raise FileNotFoundError("no files: the list of paths is empty")
        self.names = found
        self._infos = [_info(info) for info in infos]

    def nbytes(self, number: int) -> int:
        """The size of a file."""
        return self._infos[number].size

    def key(self, _: int) -> bytes | None:
        """Not kept: a path within a filesystem does not tell which one it is."""
        return None

    def read(self, number: int, start: int, stop: int) -> memoryview:
        """Bytes of a file."""
        with naming(self.names[number]), self._filesystem.open_input_file(self.names[number]) as file:
            return memoryview(file.read_at(stop - start, start))

    @contextmanager
    def opened(self, number: int, metadata: Any, _: Sequence[Range]) -> Iterator[Any]:
        """A ParquetFile, which reads what it needs with as few requests as it can."""
        path = self.names[number]
        self._infos[number].state.check(_info(self._filesystem.get_file_info(path)).state, path)
        with naming(path):
            source = self._filesystem.open_input_file(path)
        with source, parquet_file(path, source, metadata, pre_buffer=True) as file:
            yield file

    def ranges(self, _: Sequence[tuple[int, Range]]) -> list[tuple[CachedStore, ObjectRange]]:
        """Nothing: there is no cache."""
        return []

    def _is_there(self, path: str) -> bool:
        # A list in braces may be longer than a name may be; all else that is wrong shows when files are asked for.
        with suppress(OSError):
            return bool(self._filesystem.get_file_info(path).is_file)
        return False


Files = StoredFiles | FilesystemFiles


@contextmanager
def parquet_file(name: str, source: Any, metadata: Any, *, pre_buffer: bool) -> Iterator[Any]:
    """A ParquetFile, closed at the end."""
    with naming(name):
        file = optional.load("pyarrow.parquet", "arrow", WHAT).ParquetFile(
            source, metadata=metadata, pre_buffer=pre_buffer, page_checksum_verification=True
        )
    with file:
        yield file


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn what pyarrow raises on damaged data into errors that say where; what a store or the system says stays."""
    try:
        yield
    except (pyarrow(WHAT).ArrowException, OSError) as error:
        if isinstance(error, StoreError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise SampleError(
            f"{what} cannot be read: it is damaged, cut short, or not Parquet ({error}); write it again or leave it out"
        ) from error


def refuse_two_readers(filesystem: Any, **given: Any) -> None:
    """ArgumentError for arguments that are for addresses, where a filesystem does the reading."""
    for name, value in given.items():
        if filesystem is not None and value is not None:
            raise ArgumentError(
                f"{name}= is for paths and addresses; with filesystem=, the filesystem does the reading"
            )


def _info(told: Any) -> ObjectInfo:
    return ObjectInfo(told.path, told.size or 0, f"{told.size}-{told.mtime_ns}")


_log = logging.getLogger("feedline")


_GLANCE_NBYTES = 64 << 10


_TAIL_NBYTES = 8
"""The length of the footer, then PAR1."""


_PARSED = 256


_KEPT_FROM = 1000
"""From so many files of this machine on, opening a table takes noticeably longer than looking into an index."""


_SIZES = struct.Struct("<IIQ")


class Summary(NamedTuple):
    """What has to be known of every file before any is read."""

    sizes: bytes
    """The rows of each row group, int64."""
    schema: bytes
    """The Arrow schema, as Arrow serializes it."""
    largest_nbytes: int
    """Of its largest row group, in all its columns, not compressed."""


class Footers:
    """The footers of files by number. Pickles without them: what is not kept in the index is read again."""

    def __init__(self, files: Files, index: str) -> None:
        self._files = files
        self._kept = MetadataCache(index)
        self._parsed: PerProcess[LRUCache[int, Any]] = PerProcess(partial(LRUCache, _PARSED))

    def summaries(self) -> list[Summary]:
        """Of all files; SampleError names one that is no Parquet file."""
        numbers = range(len(self._files.names))
        if self._files.is_local and len(numbers) < _KEPT_FROM:
            return [_split(self._made(number))[0] for number in numbers]
        keys = [self._files.key(number) for number in numbers]
        described = {number: kept for number in numbers if (kept := self._get(keys[number])) is not None}
        lacking = [number for number in numbers if number not in described]
        if lacking:
            _log.info("the footers of %d Parquet files are read, the first is %s", len(lacking), self._name(lacking[0]))
            described |= zip(lacking, self._made_at_once(lacking), strict=True)
            self._kept.replace({keys[number]: described[number] for number in numbers})
        return [_split(described[number])[0] for number in numbers]

    def footer(self, number: int) -> memoryview:
        """The end of a file from the footer on."""
        kept = self._get(self._files.key(number))
        return _split(self._made(number) if kept is None else kept)[1]

    def metadata(self, number: int) -> Any:
        """The footer as pyarrow's FileMetaData."""
        parsed = self._parsed()
        found = parsed.get(number)
        if found is None:
            with naming(self._name(number)):
                buffer = pyarrow(WHAT).BufferReader(self.footer(number))
                found = parsed.put(number, optional.load("pyarrow.parquet", "arrow", WHAT).read_metadata(buffer))
        return found

    def _name(self, number: int) -> str:
        return self._files.names[number]

    def _get(self, key: bytes | None) -> memoryview | None:
        found = self._kept.get(key)
        return None if found is None else memoryview(found)

    def _made_at_once(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        with DaemonPool() as pool:
            yield from pool.map(self._made, numbers)

    def _made(self, number: int) -> memoryview:
        """The description of a file, worked out from its footer."""
        footer = self._read(number)
        arrow = pyarrow(WHAT)
        with naming(self._name(number)):
            file = optional.load("pyarrow.parquet", "arrow", WHAT).ParquetFile(arrow.BufferReader(footer))
            metadata = self._parsed().put(number, file.metadata)
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            sizes = np.array([group.num_rows for group in groups], "<i8").tobytes()
            largest = max((group.total_byte_size for group in groups), default=0)
            schema = bare(file.schema_arrow).serialize().to_pybytes()
        return memoryview(b"".join([_SIZES.pack(len(sizes), len(schema), max(0, largest)), sizes, schema, footer]))

    def _read(self, number: int) -> memoryview:
        """One request, but for footers that are longer than usual."""
        nbytes, name = self._files.nbytes(number), self._name(number)
        start = max(0, nbytes - _GLANCE_NBYTES)
        glance = self._files.read(number, start, nbytes) if nbytes else memoryview(b"")
        wanted = _TAIL_NBYTES + (int.from_bytes(glance[-_TAIL_NBYTES:-4], "little") if nbytes > _TAIL_NBYTES else 0)
        if bytes(glance[-4:]) != b"PAR1" or wanted > nbytes:
            raise SampleError(
                f"{name} cannot be read: it is damaged, cut short, or not Parquet (no footer is at its end); write it"
                " again or leave it out"
            )
        if wanted <= len(glance):
            return glance[-wanted:]
        return memoryview(bytes(self._files.read(number, nbytes - wanted, start)) + bytes(glance))


def _split(description: memoryview) -> tuple[Summary, memoryview]:
    sizes, schema, largest = _SIZES.unpack_from(description)
    first, second = _SIZES.size + sizes, _SIZES.size + sizes + schema
    summary = Summary(bytes(description[_SIZES.size : first]), bytes(description[first:second]), largest)
    return summary, description[second:]
