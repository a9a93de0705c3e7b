"""`Arrow`: rows of Arrow files, memory-mapped, or of a table in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from feedline.core.dataset import Ranges, TransformFunction
from feedline.core.kernels import Int64s
from feedline.core.paths import Pathlike
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.tensors import Allocator
from feedline.datasets.decoding import Decode
from feedline.datasets.flatbuffers import DamagedError
from feedline.datasets.formats import FORMATS, KeptShards, ShardSummary
from feedline.datasets.indexes import metadata_path
from feedline.datasets.paths import columns_of, find, listed, paths_of
from feedline.datasets.shard_summaries import divided, total_nbytes
from feedline.datasets.signatures import BEGIN_NBYTES, check_format, damage_error
from feedline.datasets.tables.arrow_batches import validate_batch
from feedline.datasets.tables.arrow_messages import MAGIC, check_single_file
from feedline.datasets.tables.arrow_remote import RecordBatches, SingleRows
from feedline.datasets.tables.base import ChunkRows, TableDataset
from feedline.datasets.tables.cells import Cells
from feedline.datasets.tables.chunks import StructChunk, table_chunk
from feedline.datasets.tables.decoded import CACHE_NBYTES, CachedRows
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import check_same_columns, kinds_of, pyarrow
from feedline.errors import SampleError
from feedline.stores import Cache, ObjectInfo
from feedline.stores.files import local_info
from feedline.stores.urls import absolute

_WHAT = "datasets.Arrow"


_BLOCK_NBYTES = 1 << 20


class Arrow(TableDataset):
    """Rows of Arrow files, of streams, or of a table.

    `paths` is a path or address, a folder of `.arrow` files, a glob or brace pattern, a list of them, or a
    `pyarrow.Table`. Feather 2 files and the cache files of Hugging Face are such files and streams. Samples are dicts
    by column: see `Parquet` for the conversion of types, and for `nulls`, `transform` and `decode`. Files are
    memory-mapped and read in place; compressed ones are decompressed into memory when they are opened. Record batches
    are the shards. Pickles by path; a table in memory by its buffers, out of band where the pickler can.

    For objects in stores, the buffers of the chosen columns are read, through `cache` if it is given, and kept per
    process within `cache_nbytes`, which also limits how many record batches are read at once. With `cache_nbytes=0` and
    no `cache` only the wanted rows are read, if the batches are uncompressed. `options` are passed to `open_store`. The
    metadata of record batches is kept on this machine, in the folder `index_dir`.

    Several streams in one file are read as one if their schemas are equal; several Arrow files in one file are refused.
    Record batches of files are validated before use, so that damage raises SampleError; a table in memory is trusted.
    """

    def __init__(
        self,
        paths: Any,
        columns: Sequence[str] | None = None,
        *,
        nulls: Any = "raise",
        decode: Mapping[str, Decode] | None = None,
        transform: TransformFunction | Mapping[str, TransformFunction] | None = None,
        cache_nbytes: int = CACHE_NBYTES,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        source = _open_source(paths, columns_of(columns), cache, options, index_dir)
        cells = Cells(source.kind, transform, decode)
        source.kind = cells.kind
        policy = Nulls(nulls)
        policy.check(cells.kind)
        rows: _InPlace | CachedRows
        if not isinstance(source, RecordBatches):
            rows = _InPlace(source, policy)
        elif cache_nbytes or cache is not None:
            rows = CachedRows(source, policy, cache_nbytes)
        else:
            rows = SingleRows(source, policy)
        super().__init__(rows, source.sizes, cells)


# `RecordBatches` is not used for files of this machine. One gather of the rows of all mapped batches is 50 to 300 times
# as fast as a gather per batch, and pyarrow opens thousands of batches in a quarter of the time.
class _InPlace:
    """Rows of all record batches of a table or of mapped files.

    The batches are opened on first use, and again after unpickling.
    """

    is_local = True

    def __init__(self, source: _MemoryTable | _MappedFiles, nulls: Nulls) -> None:
        self._source, self._nulls = source, nulls
        self._offsets = ShardOffsets(source.sizes)
        self._rows: ChunkRows | None = None

    @property
    def names(self) -> Sequence[str]:
        return self._source.paths

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        return self._open().samples(which, rows)

    def batch(self, which: Int64s, rows: Int64s, allocate: Allocator) -> Any:
        return self._open().batch(which, rows, allocate)

    def place(self, chunk: int, row: int) -> tuple[str, int]:
        return self._source.place(chunk, row, self._offsets)

    def locate(self, chunk: int, row: int) -> str:
        name, row = self.place(chunk, row)
        return f"{name}, row {row}" if self.names else f"row {row} of {name}"

    def ranges(self, _: Int64s) -> Ranges:
        return []

    def _open(self) -> ChunkRows:
        rows = self._rows
        if rows is None:
            chunks = [self._chunk(number, batch) for number, batch in enumerate(self._source.batches())]
            rows = ChunkRows(self._source.kind, chunks, self._nulls, self.locate)
            self._rows = rows  # two threads may both open the files; either result is valid
        return rows

    def _chunk(self, number: int, batch: Any) -> StructChunk:
        kind = self._source.kind
        try:
            chosen = batch.select([name for name, _ in kind.fields])
            if isinstance(self._source, _MappedFiles):
                validate_batch(chosen, in_place=True)
            return table_chunk(kind, chosen)
        except pyarrow(_WHAT).ArrowException as error:
            raise SampleError(
                f"the record batch of {batch.num_rows} rows from {self.locate(number, 0)} on cannot be read ({error});"
                " write it again, in smaller ones, or leave columns out with columns=[...]"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}


def _open_source(
    paths: Any,
    columns: Sequence[str] | None,
    cache: Cache | Pathlike | None,
    options: Mapping[str, Any] | None,
    index_dir: Pathlike | None,
) -> _MemoryTable | _MappedFiles | RecordBatches:
    if isinstance(paths, pyarrow(_WHAT).Table):
        return _MemoryTable(paths, columns)
    files = find(paths_of(paths, "a pyarrow.Table"), FORMATS["arrow"].pattern, cache=cache, options=options)
    if files.is_local:
        return _MappedFiles(files.names, columns)
    return RecordBatches(files, columns, metadata_path("arrow-messages", map(absolute, listed(paths)), index_dir))


class _MemoryTable:
    """A table in memory."""

    paths = ()

    def __init__(self, table: Any, columns: Sequence[str] | None) -> None:
        self.kind = kinds_of(table.schema, columns, "the table")
        # Columns may be divided into different chunks, so fewer columns may give larger batches.
        self._table = table.select([name for name, _ in self.kind.fields])
        self.sizes = _row_counts(self.batches())

    def batches(self) -> list[Any]:
        """The record batches that are not empty."""
        return [batch for batch in self._table.to_batches() if batch.num_rows]

    @staticmethod
    def place(chunk: int, row: int, rows: ShardOffsets) -> tuple[str, int]:
        return "the table", rows.start(chunk) + row


class _MappedFiles:
    """Arrow files by absolute path, mapped again after unpickling."""

    def __init__(self, paths: Sequence[str], columns: Sequence[str] | None) -> None:
        self.paths = paths
        self._versions = [local_info(path) for path in paths]
        self._mapped: list[list[Any]] | None = None
        self.sizes = _row_counts(self.batches())
        self._files = ShardOffsets(map(len, self._by_file()))
        kinds = [kinds_of(_read_schema(path), columns, path) for path in paths]
        check_same_columns(kinds, paths)
        self.kind = kinds[0]

    def batches(self) -> list[Any]:
        """The record batches that are not empty, with all columns."""
        return [batch for batches in self._by_file() for batch in batches]

    def place(self, chunk: int, row: int, rows: ShardOffsets) -> tuple[str, int]:
        file, number = self._files.one(chunk)
        return self.paths[file], rows.start(chunk) - rows.start(chunk - number) + row

    def _by_file(self) -> list[list[Any]]:
        if self._mapped is None:
            self._mapped = list(map(_read_batches, self.paths, self._versions))
        return self._mapped

    def __getstate__(self) -> dict[str, Any]:
        # For mapped files, only the path may be pickled: a buffer of a mapping would be pickled with all its bytes.
        return {**self.__dict__, "_mapped": None}


def _row_counts(batches: Sequence[Any]) -> Int64s:
    return np.array([batch.num_rows for batch in batches], np.int64)


def _open_readers(path: str) -> Iterator[Any]:
    """Yield the reader of a file, or of each of its streams."""
    arrow = pyarrow(_WHAT)
    mapped = arrow.memory_map(path)
    if mapped.size() >= 8 and mapped.read(len(MAGIC)) == MAGIC:
        check_single_file(mapped.size(), lambda spans: [memoryview(mapped.read_at(b - a, a)) for a, b in spans])
        yield arrow.ipc.open_file(mapped)
        return
    mapped.seek(0)
    schema = None
    while schema is None or _seek_stream(mapped):
        reader = arrow.ipc.open_stream(mapped)
        schema = reader.schema if schema is None else schema
        if not reader.schema.equals(schema, check_metadata=True):
            raise arrow.ArrowInvalid("streams follow each other in it, and their schemas differ")
        yield reader


def _seek_stream(mapped: Any) -> bool:
    """Skip padding after a stream; False at the end."""
    start = mapped.tell()
    for at in range(start, mapped.size(), _BLOCK_NBYTES):
        mapped.seek(at)
        data = mapped.read(_BLOCK_NBYTES)
        rest = data.lstrip(b"\0")
        if rest:
            # Before Arrow 0.15 a stream began with the length of its schema, whose first byte may be zero.
            mapped.seek(at + (len(data) - len(rest)) // 4 * 4)
            return True
    return False


def _read_schema(path: str) -> Any:
    with _naming(path):
        return next(_open_readers(path)).schema


def _read_batches(path: str, version: ObjectInfo) -> list[Any]:
    """Non-empty record batches; StateError if the version has changed."""
    version.state.check(local_info(path).state, path)
    with _naming(path):
        tables = [reader.read_all() for reader in _open_readers(path)]
    return [batch for table in tables for batch in table.to_batches() if batch.num_rows]


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the file in errors about damage."""
    arrow = pyarrow(_WHAT)
    try:
        yield
    except (arrow.ArrowException, DamagedError, OSError, EOFError) as error:
        check_format(path, "Arrow", _begin(path))
        raise damage_error(path, "Arrow", error) from error


def _begin(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(BEGIN_NBYTES)


def summarize_record_batches(paths: Sequence[str]) -> ShardSummary:
    """Summarize the record batches of Arrow files.

    Local files are memory-mapped; others are kept per process.
    """
    sizes = Arrow(list(paths)).shard_sizes.tolist()
    files = find(paths, FORMATS["arrow"].pattern)
    nbytes = divided(total_nbytes(files), sizes)
    return ShardSummary("record batch", sizes, nbytes, None if files.is_local else KeptShards(CACHE_NBYTES, nbytes))
