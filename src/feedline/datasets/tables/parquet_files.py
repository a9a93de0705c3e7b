"""Access to Parquet files: local files, objects of stores, or `pyarrow.fs` filesystems.

`StoredFiles` and `FilesystemFiles` open files for pyarrow. `Footers` reads the footers of many files concurrently and
caches them on this machine.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from feedline.core import optional
from feedline.core.caches import LRUCache, PerProcess
from feedline.core.dataset import Ranges
from feedline.core.threads import IO_THREADS
from feedline.datasets.file_objects import RangeFile, SparseFile
from feedline.datasets.indexes import FooterRead, MetadataCache, key_of
from feedline.datasets.paths import Paths, listed, no_files_error
from feedline.datasets.signatures import BEGIN_NBYTES, check_format, damage_error
from feedline.datasets.tables.types import pyarrow, strip_metadata
from feedline.errors import ArgumentError, SampleError
from feedline.stores import ObjectInfo, StoreError
from feedline.stores.base import FileVersion, Range
from feedline.stores.files import Extent, FileSet
from feedline.stores.globs import expand_braces

WHAT = "datasets.Parquet"


_INT96_UNIT = "us"
"""Unit of times in the files of Spark and Impala: in nanoseconds, dates such as 0001-01-01 would overflow."""


Decryption = Callable[[], Any]
"""Returns the decryption properties of pyarrow."""


_MOST_ROWS = 1 << 48
"""Rows of a row group; the sum of many files must fit into an int64, too."""


class StoredFiles:
    """Local files and objects of stores, by number."""

    def __init__(self, files: FileSet, decryption: Decryption | None = None) -> None:
        self._files = files
        self.decryption = None if decryption is None else PerProcess(decryption)
        self.names = files.names
        self.is_local = files.is_local

    def name(self, number: int) -> str:
        """The path or address of a file."""
        return self.names[number]

    def nbytes(self, number: int) -> int:
        """Size of a file in bytes."""
        return self._files.info(number).size

    def key(self, number: int) -> bytes | None:
        """Cache key of the footer; None if it cannot be cached."""
        return key_of(self.names[number], self._files.info(number))

    def read(self, number: int, start: int, stop: int) -> memoryview:
        """Read bytes of a file."""
        # Bypasses the cache of objects, because footers have their own cache.
        return self._files.open(number).read_uncached([(start, stop)])[0]

    @contextmanager
    def open_parquet(self, number: int, metadata: Any, spans: Sequence[Range]) -> Iterator[Any]:
        """Open a ParquetFile; `spans` of an object are read at once."""
        file = self._files.open(number)  # for each use, because a local file is checked for changes when it is mapped
        mapped = file.data is not None
        source = pyarrow(WHAT).BufferReader(file.data) if mapped else SparseFile(file.nbytes, spans, file.read)
        with parquet_file(self.names[number], source, metadata, self.decryption, pre_buffer=False) as reader:
            yield reader

    def ranges(self, extents: Sequence[Extent]) -> Ranges:
        """The object ranges that reads of these extents need from caches."""
        return self._files.ranges(extents)


class FilesystemFiles:
    """Files that a `pyarrow.fs` filesystem reads."""

    is_local = False

    def __init__(self, filesystem: Any, paths: Paths, decryption: Decryption | None = None) -> None:
        self._filesystem = filesystem
        self.decryption = None if decryption is None else PerProcess(decryption)
        names = [path for pattern in listed(paths) for path in expand_braces(str(pattern), self._is_file)]
        infos = filesystem.get_file_info(names)
        for info in infos:
            if not info.is_file:
                raise FileNotFoundError(
                    f"{info.path} is not a file on {type(filesystem).__name__}; pass the paths of single files"
                )
        if not names:
            raise no_files_error()
        self.names = names
        self._infos = [_info(info) for info in infos]

    def name(self, number: int) -> str:
        """The path or address of a file."""
        return self.names[number]

    def nbytes(self, number: int) -> int:
        """Size of a file in bytes."""
        return self._infos[number].size

    def key(self, _: int) -> bytes | None:
        """Always None: a path does not identify the filesystem it belongs to."""
        return None

    def read(self, number: int, start: int, stop: int) -> memoryview:
        """Read bytes of a file."""
        with naming(self.names[number]), self._filesystem.open_input_file(self.names[number]) as file:
            return memoryview(file.read_at(stop - start, start))

    @contextmanager
    def open_parquet(self, number: int, metadata: Any, _: Sequence[Range]) -> Iterator[Any]:
        """Open a ParquetFile, which merges its reads into few requests."""
        path = self.names[number]
        self._infos[number].state.check(_info(self._filesystem.get_file_info(path)).state, path)
        with naming(path):
            source = self._filesystem.open_input_file(path)
        with source, parquet_file(path, source, metadata, self.decryption, pre_buffer=True) as file:
            yield file

    def ranges(self, _: Sequence[Extent]) -> Ranges:
        """Always empty: there is no cache."""
        return []

    def _is_file(self, path: str) -> bool:
        # A brace pattern may be too long for a file name. Other errors recur when the files are listed.
        with suppress(OSError):
            return bool(self._filesystem.get_file_info(path).is_file)
        return False


ParquetFiles = StoredFiles | FilesystemFiles


@contextmanager
def parquet_file(
    name: str, source: Any, metadata: Any, decryption: Decryption | None, *, pre_buffer: bool
) -> Iterator[Any]:
    """Open a ParquetFile and close it on exit."""
    with naming(name):
        file = optional.load("pyarrow.parquet", "arrow", WHAT).ParquetFile(
            source,
            metadata=metadata,
            pre_buffer=pre_buffer,
            page_checksum_verification=True,  # without it, a flipped bit in a plain number would not be noticed
            coerce_int96_timestamp_unit=_INT96_UNIT,
            decryption_properties=decryption and decryption(),
        )
    with file:
        yield file


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn pyarrow's errors about damaged data into a SampleError.

    Errors of stores and of the operating system are unchanged.
    """
    try:
        yield
    except (pyarrow(WHAT).ArrowException, OSError) as error:
        if isinstance(error, StoreError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        if "decrypt" in str(error).lower():
            raise _encrypted_error(what, error) from error
        raise damage_error(what, "Parquet", error) from error


def _encrypted_error(what: str, error: Exception | str) -> SampleError:
    return SampleError(
        f"{what} cannot be decrypted ({error}); pass decryption=, a function that returns pyarrow's"
        " FileDecryptionProperties with the keys of the file, or choose columns that are not encrypted"
    )


def check_single_reader(filesystem: Any, **store_arguments: Any) -> None:
    """Raise ArgumentError for arguments of stores together with a filesystem."""
    for name, value in store_arguments.items():
        if filesystem is not None and value is not None:
            raise ArgumentError(
                f"{name}= cannot be combined with filesystem=, which reads the files itself; leave one of them out"
            )


def _info(info: Any) -> ObjectInfo:
    return ObjectInfo(info.path, *FileVersion.of_mtime(info.size or 0, info.mtime_ns))


_FIRST_READ_NBYTES = 64 << 10
"""Bytes read from the end of the first file; most footers are shorter."""


_TAIL_NBYTES = 8
"""The length of the footer in 4 bytes, then PAR1."""


_SIGNATURE_NBYTES = 28
"""The nonce and the tag of a signed footer."""


_ENCRYPTED = b"PARE"
"""End of a file whose footer is encrypted."""


_MAGIC = b"PAR1"


_SCHEMA_FILE = "_common_metadata"


_LEAST_JOINED = 0.2
"""Share of a file before its last row group's offsets from which it is examined; page indexes take less."""


_MOST_INDEX_NBYTES = 64 << 10
"""Bytes of page indexes between the rows and the footer that are allowed for."""


_PARSED = 256
"""Parsed footers cached per process."""


_CACHE_FROM = 1000
"""Least number of local files for which reads of all footers take noticeably longer than the read of an index."""


_SIZES = struct.Struct("<IIQ")


class Summary(NamedTuple):
    """Metadata of a file that is needed before any row is read."""

    sizes: bytes
    """The number of rows in each row group, little-endian int64."""
    schema: bytes
    """The Arrow schema in Arrow's serialization."""
    largest_nbytes: int
    """Uncompressed size of the largest row group, all columns."""


class _DataReadError(Exception):
    """Data before a footer are read."""


class _FooterFile(RangeFile):
    """A file of which only the footer is there.

    pyarrow opens a file by a read of its last 64 KiB, so bytes before the footer are zeros. When the file is `sealed`,
    reading them raises _DataReadError.
    """

    def __init__(self, footer: memoryview, nbytes: int) -> None:
        super().__init__(nbytes)
        self._footer, self._begin = footer, nbytes - len(footer)
        self.sealed = False

    def _bytes(self, start: int, stop: int) -> memoryview:
        if start >= self._begin:
            return self._footer[start - self._begin : stop - self._begin]
        if self.sealed:
            raise _DataReadError
        return memoryview(bytes(min(stop, self._begin) - start) + self._footer[: max(0, stop - self._begin)])


def _check_chunks(file: Any, source: _FooterFile) -> None:
    """Raise OSError if a column chunk cannot be described."""
    # `RowGroupMetaData.column` ends the process for such a chunk. A read of rows first describes all chunks of its
    # columns, and raises an error. What it cannot read comes after that.
    source.sealed = True
    try:
        next(file.iter_batches(row_groups=range(file.metadata.num_row_groups)), None)
    except (_DataReadError, pyarrow(WHAT).ArrowNotImplementedError) as error:
        # pyarrow's reader keeps the error, whose frames keep the reader: a cycle that no garbage collection sees.
        error.__traceback__ = None


class Footers:
    """The footers of files by number.

    Pickles without them; a footer that is not in the index is read again.
    """

    def __init__(self, files: ParquetFiles, index: str) -> None:
        self._files = files
        self._index = MetadataCache(index)
        self._first_read = FooterRead(_FIRST_READ_NBYTES)
        self._parsed: PerProcess[LRUCache[int, Any]] = PerProcess(partial(LRUCache, _PARSED))

    def summaries(self) -> list[Summary]:
        """All summaries; SampleError for a file that is not Parquet."""
        numbers = range(len(self._files.names))
        if self._files.is_local and len(numbers) < _CACHE_FROM:
            return [_split_footer(self._build(number))[0] for number in numbers]
        keys = [self._key(number) for number in numbers]
        entries = self._index.collect("Parquet footers", self._files.names, keys, self._build, IO_THREADS)
        return [_split_footer(memoryview(entry))[0] for entry in entries]

    def footer(self, number: int) -> memoryview:
        """The bytes of a file from the footer to its end."""
        entry = self._get(self._key(number))
        return _split_footer(self._build(number) if entry is None else entry)[1]

    def metadata(self, number: int) -> Any:
        """The footer as pyarrow's FileMetaData."""
        parsed = self._parsed()
        metadata = parsed.get(number)
        if metadata is None:
            with naming(self._name(number)):
                buffer = pyarrow(WHAT).BufferReader(self.footer(number))
                metadata = parsed.put(number, self._open(buffer).metadata)
        return metadata

    def _open(self, source: Any) -> Any:
        decryption = self._files.decryption
        return optional.load("pyarrow.parquet", "arrow", WHAT).ParquetFile(
            source,
            coerce_int96_timestamp_unit=_INT96_UNIT,
            decryption_properties=decryption and decryption(),
            pre_buffer=True,
        )

    def _key(self, number: int) -> bytes | None:
        # The index stores schemas without encryption, so it must not contain schemas of encrypted files.
        return None if self._files.decryption else self._files.key(number)

    def _name(self, number: int) -> str:
        return self._files.names[number]

    def _get(self, key: bytes | None) -> memoryview | None:
        entry = self._index.get(key)
        return None if entry is None else memoryview(entry)

    def _build(self, number: int) -> memoryview:
        """Build the index entry of a file: its summary, then its footer."""
        footer = self._read(number)
        arrow = pyarrow(WHAT)
        with naming(self._name(number)):
            source = _FooterFile(footer, self._files.nbytes(number))
            file = self._open(arrow.PythonFile(source, "r"))
            metadata = self._parsed().put(number, file.metadata)
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            if any(group.num_columns != metadata.num_columns for group in groups):
                raise damage_error(self._name(number), "Parquet", "a row group has not the columns of the schema")
            self._check_has_rows(number, groups, len(footer))
            # The chunks of encrypted columns cannot be described. A signature follows the footer of a file with some.
            is_signed = len(footer) - _TAIL_NBYTES - metadata.serialized_size == _SIGNATURE_NBYTES
            if groups and self._files.decryption is None and not is_signed:
                _check_chunks(file, source)
                self._check_alone(number, groups[-1], len(footer))
            counts = [group.num_rows for group in groups]
            if min(counts, default=0) < 0 or max(counts, default=0) > _MOST_ROWS:
                raise damage_error(self._name(number), "Parquet", "a row group has an impossible number of rows")
            sizes = np.array(counts, "<i8").tobytes()
            largest = max((group.total_byte_size for group in groups), default=0)
            schema = strip_metadata(file.schema_arrow).serialize().to_pybytes()
        return memoryview(b"".join([_SIZES.pack(len(sizes), len(schema), max(0, largest)), sizes, schema, footer]))

    def _check_has_rows(self, number: int, groups: Sequence[Any], footer_nbytes: int) -> None:
        """Raise ArgumentError for a summary of the files of a folder."""
        name = self._name(number)
        folder, _, base = name.rpartition("/")
        has_data = self._files.nbytes(number) > footer_nbytes + len(_MAGIC)
        is_summary = not has_data and any(group.num_rows and group.num_columns for group in groups)
        if is_summary or (base == _SCHEMA_FILE and not groups):
            what = "lists the row groups of other files" if is_summary else "has the schema of a folder"
            raise ArgumentError(
                f"{name} {what}, and no rows: give the folder {folder}, where it is left out, or files with rows"
            )

    def _check_alone(self, number: int, last: Any, footer_nbytes: int) -> None:
        """Raise SampleError for files that were joined.

        The last footer has the places of rows in the last file.
        """
        chunks = (last.column(at) for at in range(last.num_columns))
        starts = ((each.dictionary_page_offset or each.data_page_offset, each) for each in chunks)
        end = max((start + each.total_compressed_size for start, each in starts), default=0)
        nbytes = self._files.nbytes(number)
        before = nbytes - end - footer_nbytes
        if before < nbytes * _LEAST_JOINED:
            return
        begin = max(0, before - _MOST_INDEX_NBYTES)
        seam = bytes(self._files.read(number, begin, before + 4)).rfind(2 * _MAGIC)
        if seam >= 0:
            raise SampleError(
                f"{self._name(number)} contains several Parquet files, one behind the other; the last one begins at"
                f" byte {begin + seam + 4}. Join their rows (pyarrow.parquet.write_table), or keep them separate"
            )

    def _read(self, number: int) -> memoryview:
        """Read a footer: by one request, or two if it is long."""
        nbytes, name = self._files.nbytes(number), self._name(number)
        start = max(0, nbytes - self._first_read.nbytes)
        end = self._files.read(number, start, nbytes) if nbytes else memoryview(b"")
        wanted = _TAIL_NBYTES + (int.from_bytes(end[-_TAIL_NBYTES:-4], "little") if nbytes > _TAIL_NBYTES else 0)
        if bytes(end[-4:]) == _ENCRYPTED and self._files.decryption is None:
            raise _encrypted_error(name, "it is encrypted")
        if bytes(end[-4:]) not in (_MAGIC, _ENCRYPTED) or wanted > nbytes:
            check_format(name, "Parquet", bytes(self._files.read(number, 0, min(nbytes, BEGIN_NBYTES))))
            raise damage_error(name, "Parquet", "it has no footer at its end")
        self._first_read.learn(wanted)
        if wanted <= len(end):
            return end[-wanted:]
        return memoryview(bytes(self._files.read(number, nbytes - wanted, start)) + bytes(end))


def _split_footer(entry: memoryview) -> tuple[Summary, memoryview]:
    sizes, schema, largest = _SIZES.unpack_from(entry)
    first, second = _SIZES.size + sizes, _SIZES.size + sizes + schema
    summary = Summary(bytes(entry[_SIZES.size : first]), bytes(entry[first:second]), largest)
    return summary, entry[second:]
