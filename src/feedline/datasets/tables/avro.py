"""`Avro`: rows of Avro files, with cached blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from feedline.core.dataset import TransformFunction
from feedline.core.paths import Pathlike
from feedline.datasets.decoding import Decode
from feedline.datasets.formats import FORMATS, KeptShards, ShardSummary
from feedline.datasets.indexes import BuiltIndex, Columns, indexes_of
from feedline.datasets.paths import Paths, columns_of, find, paths_of
from feedline.datasets.tables.avro_layout import BLOCKS, arrow_schema, avro, naming_damage, parse_header, records
from feedline.datasets.tables.chunks import StructChunk, table_chunk
from feedline.datasets.tables.decoded import CACHE_NBYTES, DecodedTable, FileChunks
from feedline.datasets.tables.types import check_same_columns, kinds_of, pyarrow
from feedline.errors import SampleError
from feedline.stores import Cache
from feedline.stores.files import Extent, FileSet, LazyList

_WHAT = "datasets.Avro"


_TIMES_LARGER = 4
"""Estimate of the size of a decoded block in proportion to the stored one."""


class Blocks(FileChunks[FileSet]):
    """The blocks of all files, in order."""

    def __init__(self, files: FileSet, columns: Sequence[str] | None, index_dir: Pathlike | None) -> None:
        names = files.names
        indexes = tuple(indexes_of(files, BLOCKS, index_dir))
        self._bounds = LazyList(partial(_bounds, indexes), len(indexes))
        arrays = [each.open_arrays() for each in indexes]
        # Files of one table usually have equal headers: each header is parsed, stored and pickled once.
        headers = [bytes(each["header"]) for each in arrays]
        parsed = {data: parse_header(data, name) for data, name in zip(headers, names, strict=True)}
        self._headers = [parsed[data] for data in headers]
        schemas = {data: arrow_schema(parsed[data].schema, name) for data, name in zip(headers, names, strict=True)}
        self._schemas = [schemas[data] for data in headers]
        kinds = [kinds_of(schema, columns, name) for schema, name in zip(self._schemas, names, strict=True)]
        check_same_columns(kinds, names)
        super().__init__(files, kinds[0], [each["counts"].astype(np.int64) for each in arrays])

    def decoded(self, number: int) -> StructChunk:
        """Decode the chosen columns of a block."""
        file, _ = self.in_file(number)
        (view,) = self._files.read(self.extents(number))
        name = self.locate(number, 0)
        rows = records(self._headers[file], view, name)
        if len(rows) != self.sizes[number]:
            raise SampleError(f"the block of {name} has {len(rows)} records, and its index {self.sizes[number]}")
        return table_chunk(self.kind, self._batch(file, rows, name))

    def extents(self, number: int) -> list[Extent]:
        """The bytes of a block, with its marker."""
        file, block = self.in_file(number)
        bounds = self._bounds[file]
        return [Extent(file, int(bounds["starts"][block]), int(bounds["stops"][block]))]

    def nbytes(self, number: int) -> int:
        return _TIMES_LARGER * super().nbytes(number)

    def _batch(self, file: int, rows: Sequence[Any], name: str) -> Any:
        arrow, schema = pyarrow(_WHAT), self._schemas[file]
        columns = [column for column, _ in self.kind.fields]
        with naming_damage(f"the block of {name}"):
            arrays = [arrow.array([row[column] for row in rows], schema.field(column).type) for column in columns]
        return arrow.RecordBatch.from_arrays(arrays, names=columns)


def _bounds(indexes: tuple[BuiltIndex, ...], number: int) -> Columns:
    return indexes[number].open_arrays()


class Avro(DecodedTable[Blocks]):
    """Records of Avro files as dicts by column.

    `paths` is a path or URL, a folder of `.avro` files, a glob or brace pattern, or a list of these. Types, `nulls`,
    `transform` and `decode` are as in `Parquet`: enums and UUIDs are texts, times the stored integers. A union of
    several types other than null is refused.

    Blocks are the shards. A block is decoded whole when one of its records is needed, and each process caches decoded
    blocks within `cache_nbytes`. When a file is first opened, an index of its blocks is written next to it, or into the
    folder `index_dir`; objects are read once for it. Objects are read through `cache` if it is given; `options` are
    passed to `open_store`.

    SampleError names a file that is damaged.
    """

    def __init__(
        self,
        paths: Paths,
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
        avro()
        files = find(paths_of(paths), FORMATS["avro"].pattern, cache=cache, options=options)
        blocks = Blocks(files, columns_of(columns), index_dir)
        super().__init__(blocks, nulls=nulls, transform=transform, decode=decode, cache_nbytes=cache_nbytes)


def summarize_blocks(paths: Sequence[str]) -> ShardSummary:
    """Records and bytes of the blocks of Avro files."""
    blocks = Avro(list(paths)).chunks
    extents = [blocks.extents(number)[0] for number in range(len(blocks.sizes))]
    nbytes = [stop - start for _, start, stop in extents]
    kept = KeptShards(CACHE_NBYTES, [_TIMES_LARGER * each for each in nbytes])
    return ShardSummary("block", blocks.sizes.tolist(), nbytes, kept)
