"""`Arrow`: rows of Arrow files, memory-mapped, or of a table in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.core.dataset import Transform
from feedline.core.paths import Pathlike
from feedline.core.tensors import Allocator, within
from feedline.datasets.decoding import Decode
from feedline.datasets.formats import FORMATS, KeptShards, ShardSummary
from feedline.datasets.indexes import place_of
from feedline.datasets.paths import columns_of, find, listed, paths_of
from feedline.datasets.shard_summaries import divided, total_nbytes
from feedline.datasets.tables.arrow_batches import validate_batch
from feedline.datasets.tables.arrow_messages import MAGIC, DamagedError, check_single_file
from feedline.datasets.tables.arrow_remote import ArrowObjects, damage_error
from feedline.datasets.tables.base import CACHE_NBYTES, ChunkCache, ChunkRows, TableDataset
from feedline.datasets.tables.cells import Cells
from feedline.datasets.tables.chunks import StructChunk, table_chunk
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.scattered import Int64s
from feedline.datasets.tables.types import StructType, check_same_columns, kinds_of, pyarrow
from feedline.errors import SampleError
from feedline.stores import Cache, CachedStore, ObjectInfo, ObjectRange
from feedline.stores.files import FileSet, local_info
from feedline.stores.urls import absolute

_WHAT = "datasets.Arrow"


_BLOCK_NBYTES = 1 << 20


class Arrow(TableDataset):
    """Rows of Arrow files, of streams, or of a table.

    `paths` is a path or address, a folder of `.arrow` files, a glob or brace pattern, a list of them, or a
    `pyarrow.Table`. Feather 2 files and the cache files of Hugging Face are such files and streams. Samples are dicts
    by column: see `Parquet` for what the types become, and for `nulls`, `transform` and `decode`. Files are
    memory-mapped and read in place; compressed ones are decompressed into memory when they are opened. Record batches
    are the shards. Pickles by path; a table in memory by its buffers, out of band where the pickler can.

    Of objects in stores the buffers of the chosen columns are read, through `cache` if it is given, and kept per
    process within `cache_nbytes`, which also limits how many record batches are read at once. `options` are those of
    `open_store`. The metadata of record batches are kept on this machine, in the folder `index_dir`.

    Streams that follow each other in one file are read as one if their schemas are equal; files that do are refused.
    Record batches of files are validated before use, so that damage raises SampleError; a table in memory is trusted.
    """

    def __init__(
        self,
        paths: Any,
        columns: Sequence[str] | None = None,
        *,
        nulls: Any = "raise",
        transform: Transform | Mapping[str, Transform] | None = None,
        decode: Mapping[str, Decode] | None = None,
        cache_nbytes: int = CACHE_NBYTES,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
        index_dir: Pathlike | None = None,
    ) -> None:
        checked = Nulls(nulls)
        self._objects: ArrowObjects | None = None
        rows: _InPlace | ChunkCache
        columns = columns_of(columns)
        opened = _open_source(paths, cache, options)
        if isinstance(opened, FileSet):
            place = place_of("arrow-messages", map(absolute, listed(paths)), index_dir)
            objects = self._objects = ArrowObjects(opened, columns, place)
            cells = Cells(objects.kind, transform, decode)
            objects.kind, sizes = cells.kind, objects.sizes
            rows = ChunkCache(objects, checked, cache_nbytes)
        else:
            cells = Cells(opened.kind(columns), transform, decode)
            batches = opened.batches([name for name, _ in cells.kind.fields])
            sizes = np.array([batch.num_rows for batch in batches], np.int64)
            rows = _InPlace(opened, cells.kind, sizes, checked)
        checked.check(cells.kind)
        super().__init__(rows, sizes, cells)

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Ranges of each cached store that reading these samples takes, for prefetching."""
        if self._objects is None:
            return []
        which, _ = self._places(within(indices, len(self), type(self).__name__))
        return self._objects.ranges(np.unique(which).tolist())


class _InPlace:
    """Rows of all record batches of a table or of mapped files.

    The batches are opened on first use, and again after unpickling.
    """

    def __init__(self, source: _Table | _ArrowFiles, kind: StructType, sizes: Int64s, nulls: Nulls) -> None:
        self._source, self._kind, self._nulls = source, kind, nulls
        self._bounds = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        self._rows: ChunkRows | None = None

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        return self._open().samples(which, rows)

    def batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> Any:
        return self._open().batch(which, rows, empty)

    def _open(self) -> ChunkRows:
        rows = self._rows
        if rows is None:
            names = [name for name, _ in self._kind.fields]
            chunks = [self._chunk(number, batch) for number, batch in enumerate(self._source.batches(names))]
            rows = ChunkRows(self._kind, chunks, self._nulls, self.locate)
            self._rows = rows  # two threads may both open the files; either result will do
        return rows

    def _chunk(self, number: int, batch: Any) -> StructChunk:
        try:
            chosen = batch.select([name for name, _ in self._kind.fields])
            if isinstance(self._source, _ArrowFiles):
                validate_batch(chosen, in_place=True)
            return table_chunk(self._kind, chosen)
        except pyarrow(_WHAT).ArrowException as error:
            raise SampleError(
                f"the record batch of {batch.num_rows} rows from {self.locate(number, 0)} on cannot be read ({error});"
                " write it again, in smaller ones, or leave columns out with columns=[...]"
            ) from error

    def locate(self, chunk: int, row: int) -> str:
        return self._source.locate(chunk, row, self._bounds)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}


def _open_source(
    paths: Any, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None
) -> _Table | _ArrowFiles | FileSet:
    if isinstance(paths, pyarrow(_WHAT).Table):
        return _Table(paths)
    blobs = find(paths_of(paths, "a pyarrow.Table"), FORMATS["arrow"].pattern, cache=cache, options=options)
    return _ArrowFiles(blobs.names) if blobs.is_local else blobs


class _Table:
    """A table in memory."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def kind(self, columns: Sequence[str] | None) -> StructType:
        return kinds_of(self._table.schema, columns, "the table")

    def batches(self, columns: Sequence[str] | None) -> list[Any]:
        """The record batches that are not empty."""
        # The chunks of columns differ, so fewer columns may give larger batches.
        table = self._table if columns is None else self._table.select(list(columns))
        return [batch for batch in table.to_batches() if batch.num_rows]

    @staticmethod
    def locate(chunk: int, row: int, bounds: Int64s) -> str:
        return f"row {int(bounds[chunk]) + row} of the table"


class _ArrowFiles:
    """Arrow files by absolute path, mapped again after unpickling."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self._versions = [local_info(path) for path in self.paths]
        self._tables: list[list[Any]] | None = None
        self._counts = list(accumulate((len(batches) for batches in self._mapped()), initial=0))

    def _mapped(self) -> list[list[Any]]:
        if self._tables is None:
            self._tables = list(map(_read_batches, self.paths, self._versions))
        return self._tables

    def kind(self, columns: Sequence[str] | None) -> StructType:
        kinds = [kinds_of(_read_schema(path), columns, path) for path in self.paths]
        check_same_columns(kinds, self.paths)
        return kinds[0]

    def batches(self, _: Sequence[str] | None) -> list[Any]:
        return [batch for batches in self._mapped() for batch in batches]

    def locate(self, chunk: int, row: int, bounds: Int64s) -> str:
        file = int(np.searchsorted(self._counts, chunk, side="right")) - 1
        return f"{self.paths[file]}, row {int(bounds[chunk] - bounds[self._counts[file]]) + row}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": None}


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
    """Skip padding behind a stream; False at the end."""
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
        raise damage_error(path, error) from error


def summarize_record_batches(paths: Sequence[str]) -> ShardSummary:
    """Summarize the record batches of Arrow files.

    Local files are memory-mapped; others are kept per process.
    """
    sizes = Arrow(list(paths)).shard_sizes.tolist()
    files = find(paths, FORMATS["arrow"].pattern)
    nbytes = divided(total_nbytes(files), sizes)
    return ShardSummary("record batch", sizes, nbytes, None if files.is_local else KeptShards(CACHE_NBYTES, nbytes))
