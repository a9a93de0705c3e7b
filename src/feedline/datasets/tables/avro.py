"""`Avro`: rows of Avro files, with cached blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import LoadingCache
from feedline.core.dataset import Transform, digest_of
from feedline.core.paths import Pathlike
from feedline.core.tensors import one_within, within
from feedline.core.threads import BoundedMap
from feedline.datasets.decoding import Decode
from feedline.datasets.formats import FORMATS, KeptShards, ShardSummary
from feedline.datasets.indexes import BuiltIndex, Columns, indexes_of
from feedline.datasets.paths import Paths, columns_of, find, paths_of
from feedline.datasets.tables.avro_layout import BLOCKS, arrow_schema, avro, parse_header, records
from feedline.datasets.tables.base import CACHE_NBYTES, ChunkCache, TableDataset
from feedline.datasets.tables.cells import Cells
from feedline.datasets.tables.chunks import StructChunk, table_chunk
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import StructType, check_same_columns, kinds_of, pyarrow
from feedline.errors import SampleError
from feedline.stores import Cache, CachedStore, ObjectRange
from feedline.stores.files import Extent, FileSet, LazyList

T = TypeVar("T")


_WHAT = "datasets.Avro"


_TIMES_LARGER = 4
"""Estimate of the size of a decoded block in proportion to the stored one."""


class Avro(TableDataset):
    """Records of Avro files as dicts by column.

    `paths` is a path or URL, a folder of `.avro` files, a glob or brace pattern, or a list of these. Types, `nulls`,
    `transform` and `decode` are as in `Parquet`: enums and UUIDs are texts, times the stored integers. A union of
    several types but null is refused.

    Blocks are the shards. A block is decoded whole when one of its records is needed, and each process caches decoded
    blocks within `cache_nbytes`. When a file is first opened, an index of its blocks is written next to it, or into the
    folder `index_dir`; objects are read once for it. Objects are read through `cache` if it is given; `options` are
    those of `open_store`.
    """

    def __init__(
        self,
        paths: Paths,
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
        avro()
        blobs = find(paths_of(paths), FORMATS["avro"].pattern, cache=cache, options=options)
        self._blocks = Blocks(blobs, columns_of(columns), index_dir)
        cells = Cells(self._blocks.kind, transform, decode)
        self._blocks.kind = cells.kind
        policy = Nulls(nulls)
        policy.check(cells.kind)
        self._chunks = ChunkCache(self._blocks, policy, cache_nbytes)
        super().__init__(self._chunks, self._blocks.sizes, cells)

    @property
    def decoded(self) -> LoadingCache[int, StructChunk]:
        """The decoded blocks of this process, by number."""
        return self._chunks.decoded

    @property
    def listing_fingerprint(self) -> str:
        """A digest of file names in order and block sizes."""
        return digest_of(self._blocks.names, self.shard_sizes)

    def address(self, index: int) -> tuple[str, str]:
        """The file of sample `index`, and its record there: `"record 7"`."""
        which, rows = self._places(np.array([one_within(index, len(self), type(self).__name__)]))
        file, record = self._blocks.place(int(which[0]), int(rows[0]))
        return self._blocks.names[file], f"record {record}"

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """The ranges to fetch into caches before these samples are read."""
        which, _ = self._places(within(indices, len(self), type(self).__name__))
        return self._blocks.ranges(np.unique(which).tolist())


class Blocks:
    """The blocks of all files, in order."""

    def __init__(self, blobs: FileSet, columns: Sequence[str] | None, index_dir: Pathlike | None) -> None:
        self._blobs, self.names = blobs, blobs.names
        indexes = tuple(indexes_of(blobs, BLOCKS, index_dir))
        self._bounds = LazyList(partial(_bounds, indexes), len(indexes))
        arrays = [each.open_arrays() for each in indexes]
        headers = [bytes(each["header"]) for each in arrays]
        parsed = {data: parse_header(data, name) for data, name in zip(headers, self.names, strict=True)}
        self._headers = [parsed[data] for data in headers]
        schemas = {
            data: arrow_schema(parsed[data].schema, name) for data, name in zip(headers, self.names, strict=True)
        }
        self._schemas = [schemas[data] for data in headers]
        kinds = [kinds_of(schema, columns, name) for schema, name in zip(self._schemas, self.names, strict=True)]
        check_same_columns(kinds, self.names)
        self.kind: StructType = kinds[0]
        counts = [each["counts"].astype(np.int64) for each in arrays]
        self.sizes: NDArray[np.int64] = np.concatenate(counts)
        self._first = np.cumsum([0, *map(len, counts)])
        self._concurrently = BoundedMap()

    def decoded(self, number: int) -> StructChunk:
        """Decode the chosen columns of a block."""
        file, _ = self._place(number)
        (view,) = self._blobs.read([self._extent(number)])
        name = self.locate(number, 0)
        rows = records(self._headers[file], view, name)
        if len(rows) != self.sizes[number]:
            raise SampleError(f"the block of {name} has {len(rows)} records, and its index {self.sizes[number]}")
        return table_chunk(self.kind, self._batch(file, rows, name))

    def each(self, work: Callable[[int], T], numbers: Sequence[int], limit_nbytes: int) -> Iterator[T]:
        """Map `work` over blocks, in order.

        Those of objects run ahead in threads.
        """
        if self._blobs.is_local:
            return map(work, numbers)
        return self._concurrently.map(work, numbers, self._nbytes, limit_nbytes)

    def ranges(self, numbers: Sequence[int]) -> list[tuple[CachedStore, ObjectRange]]:
        """The ranges that decoding these blocks reads through caches."""
        return [] if self._blobs.is_local else self._blobs.ranges([self._extent(number) for number in numbers])

    def place(self, number: int, row: int) -> tuple[int, int]:
        """The file of a row, and its number there."""
        file, block = self._place(number)
        return file, int(self.sizes[number - block : number].sum()) + row

    def locate(self, number: int, row: int) -> str:
        """Describe a row by its file and its number there."""
        file, record = self.place(number, row)
        return f"{self.names[file]}, row {record}"

    def _place(self, number: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        return file, number - int(self._first[file])

    def _extent(self, number: int) -> Extent:
        file, block = self._place(number)
        bounds = self._bounds[file]
        return Extent(file, int(bounds["starts"][block]), int(bounds["stops"][block]))

    def _nbytes(self, number: int) -> int:
        _, start, stop = self._extent(number)
        return _TIMES_LARGER * (stop - start)

    def _batch(self, file: int, rows: Sequence[Any], name: str) -> Any:
        arrow, schema = pyarrow(_WHAT), self._schemas[file]
        columns = [column for column, _ in self.kind.fields]
        try:
            arrays = [arrow.array([row[column] for row in rows], schema.field(column).type) for column in columns]
        except arrow.ArrowException as error:
            raise SampleError(f"the block of {name} cannot be read ({error}); write the file again") from error
        return arrow.RecordBatch.from_arrays(arrays, names=columns)


def _bounds(indexes: tuple[BuiltIndex, ...], number: int) -> Columns:
    return indexes[number].open_arrays()


def summarize_blocks(paths: Sequence[str]) -> ShardSummary:
    """Records and bytes of the blocks of Avro files."""
    dataset = Avro(list(paths))
    blocks = dataset._blocks
    extents = [blocks._extent(number) for number in range(len(blocks.sizes))]
    nbytes = [stop - start for _, start, stop in extents]
    kept = KeptShards(CACHE_NBYTES, [_TIMES_LARGER * each for each in nbytes])
    return ShardSummary("block", blocks.sizes.tolist(), nbytes, kept)
