"""Where Parquet files lie: on this machine, in a store, or in a filesystem of pyarrow's; opened for pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from feedline import extras
from feedline.datasets.descriptions import key_of
from feedline.datasets.kinds import pyarrow
from feedline.datasets.paths import Paths, listed
from feedline.datasets.sparse import SparseFile
from feedline.datasets.uncached import uncached
from feedline.errors import ArgumentError, SampleError
from feedline.stores import CachedStore, ObjectInfo, StoreError, Want
from feedline.stores.blobs import Blobs, Extent, LocalBlob, RemoteBlob, refuse_changed
from feedline.stores.patterns import unbraced
from feedline.stores.protocol import Range

WHAT = "datasets.Parquet"


class StoredFiles:
    """Files of this machine and objects of stores."""

    def __init__(self, blobs: Blobs) -> None:
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
        return uncached(self._opened(number))([(start, stop)])[0]

    @contextmanager
    def opened(self, number: int, metadata: Any, spans: Sequence[Range]) -> Iterator[Any]:
        """A ParquetFile; of an object these spans are read at once."""
        blob = self._opened(number)
        if isinstance(blob, LocalBlob):
            source = pyarrow(WHAT).BufferReader(blob.data)
        else:
            source = SparseFile(blob.nbytes, spans, blob.read)
        with parquet_file(self.names[number], source, metadata, pre_buffer=False) as file:
            yield file

    def wants(self, spans: Sequence[tuple[int, Range]]) -> list[tuple[CachedStore, Want]]:
        """What reading these spans of these files wants from caches."""
        return self._blobs.wants([Extent(number, *span) for number, span in spans])

    def _opened(self, number: int) -> LocalBlob | RemoteBlob:
        """A file is opened for each use, because what changes under a mapping that is kept would not be noticed."""
        info = self._blobs.info(number)
        if self.is_local or self.names[number] == info.path:
            return LocalBlob(info.path, info.size, info.version)
        return self._blobs[number]


class FilesystemFiles:
    """Files of a filesystem of `pyarrow.fs`, which reads them."""

    is_local = False

    def __init__(self, filesystem: Any, paths: Paths) -> None:
        self._filesystem = filesystem
        found = [path for given in listed(paths) for path in unbraced(str(given), self._is_there)]
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
        refuse_changed(path, self._infos[number], _info(self._filesystem.get_file_info(path)))
        with naming(path):
            source = self._filesystem.open_input_file(path)
        with source, parquet_file(path, source, metadata, pre_buffer=True) as file:
            yield file

    def wants(self, _: Sequence[tuple[int, Range]]) -> list[tuple[CachedStore, Want]]:
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
        file = extras.load("pyarrow.parquet", "arrow", WHAT).ParquetFile(
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
