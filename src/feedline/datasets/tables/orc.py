"""`ORC`: rows of ORC files, with cached stripes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.caches import LoadingCache, LRUCache, PerProcess
from feedline.core.dataset import Transform, digest_of
from feedline.core.paths import Pathlike
from feedline.core.tensors import within
from feedline.core.threads import BoundedMap, DaemonPool
from feedline.datasets.decoding import Decode
from feedline.datasets.file_objects import RangeFile, Read, merge_ranges
from feedline.datasets.formats import FORMATS, KeptShards, ShardSummary
from feedline.datasets.indexes import MetadataCache, key_of, place_of
from feedline.datasets.paths import Paths, columns_of, find, paths_of
from feedline.datasets.shard_summaries import divided, total_nbytes
from feedline.datasets.tables.base import CACHE_NBYTES, ChunkCache, TableDataset
from feedline.datasets.tables.cells import Cells
from feedline.datasets.tables.chunks import StructChunk, chunk_of_chunked, table_chunk
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.orc_layout import DamagedORCError, ORCLayout, read_layout
from feedline.datasets.tables.types import StructType, check_same_columns, kinds_of, pyarrow
from feedline.errors import SampleError
from feedline.stores import Cache, CachedStore, ObjectRange, StoreError
from feedline.stores.base import Range
from feedline.stores.files import Extent, FileSet, LocalFile, RemoteBlob
from feedline.stores.requests import FetchedRanges
from feedline.stores.urls import absolute

T = TypeVar("T")


_log = logging.getLogger("feedline")


_WHAT = "datasets.ORC"


_LAYOUTS = 256
"""Layouts of files cached per process."""


_READ_AT_ONCE = 8


class ORC(TableDataset):
    """Rows of ORC files as dicts by column.

    `paths` is a path or URL, a folder of `.orc` files, a glob or brace pattern, or a list of these. Columns, types,
    `nulls`, `transform` and `decode` are as in `Parquet`; times are nanoseconds.

    Stripes are the shards. A stripe is decoded whole when one of its rows is needed, and each process caches decoded
    stripes within `cache_nbytes`. From stores only the streams of the chosen columns are read, through `cache` if it is
    given; `options` are those of `open_store`. The footers of objects are kept on this machine, in the folder
    `index_dir`.
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
        given = paths_of(paths)
        blobs = find(given, FORMATS["orc"].pattern, cache=cache, options=options)
        self._stripes = Stripes(blobs, columns_of(columns), place_of("orc-footers", map(absolute, given), index_dir))
        cells = Cells(self._stripes.kind, transform, decode)
        self._stripes.kind = cells.kind
        policy = Nulls(nulls)
        policy.check(cells.kind)
        self._chunks = ChunkCache(self._stripes, policy, cache_nbytes)
        super().__init__(self._chunks, self._stripes.sizes, cells)

    @property
    def decoded(self) -> LoadingCache[int, StructChunk]:
        """The decoded stripes of this process, by number."""
        return self._chunks.decoded

    @property
    def listing_fingerprint(self) -> str:
        """A digest of file names in order and stripe sizes."""
        return digest_of(self._stripes.names, self.shard_sizes)

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """The ranges to fetch into caches before these samples are read."""
        which, _ = self._places(within(indices, len(self), type(self).__name__))
        return self._stripes.ranges(np.unique(which).tolist())


class Stripes:
    """The stripes of all files, in order.

    Holds no open files; pickles without the footers.
    """

    def __init__(self, blobs: FileSet, columns: Sequence[str] | None, index: str) -> None:
        self._blobs, self.names = blobs, blobs.names
        self._index = MetadataCache(index)
        self._layouts: PerProcess[LRUCache[int, ORCLayout]] = PerProcess(partial(LRUCache, _LAYOUTS))
        self._concurrently = BoundedMap()
        layouts = self._read_all()
        schemas = [self._schema(number, layout) for number, layout in enumerate(layouts)]
        kinds = [kinds_of(schema, columns, name) for schema, name in zip(schemas, self.names, strict=True)]
        check_same_columns(kinds, self.names)
        self.kind: StructType = kinds[0]
        self._fields = [[schema.names.index(name) for name, _ in self.kind.fields] for schema in schemas]
        self.sizes: NDArray[np.int64] = np.concatenate([layout.stripes[:, 3] for layout in layouts])
        self._first = np.cumsum([0, *(len(layout.stripes) for layout in layouts)])

    def decoded(self, number: int) -> StructChunk:
        """Decode the chosen columns of a stripe."""
        file, stripe = self._place(number)
        names = [name for name, _ in self.kind.fields]
        with self._naming(f"stripe {stripe} of {self.names[file]}"), self._opened(file, self._spans(number)) as source:
            batch = optional.load("pyarrow.orc", "arrow", _WHAT).ORCFile(source).read_stripe(stripe, columns=names)
            if isinstance(batch, pyarrow(_WHAT).RecordBatch):
                return table_chunk(self.kind, batch)
            return StructChunk(tuple(chunk_of_chunked(kind, batch.column(name)) for name, kind in self.kind.fields))

    def each(self, work: Callable[[int], T], numbers: Sequence[int], limit_nbytes: int) -> Iterator[T]:
        """Map `work` over stripes, in order.

        Those of objects run ahead in threads.
        """
        if self._blobs.is_local:
            return map(work, numbers)
        return self._concurrently.map(work, numbers, self._nbytes, limit_nbytes)

    def ranges(self, numbers: Sequence[int]) -> list[tuple[CachedStore, ObjectRange]]:
        """The ranges that decoding these stripes reads through caches."""
        if self._blobs.is_local:
            return []
        return self._blobs.ranges([Extent(self._place(n)[0], *span) for n in numbers for span in self._spans(n)])

    def locate(self, number: int, row: int) -> str:
        """Describe a row by its file and its number there."""
        file, stripe = self._place(number)
        before = int(self.sizes[number - stripe : number].sum())
        return f"{self.names[file]}, row {before + row} (stripe {stripe})"

    def _place(self, number: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first, number, side="right")) - 1
        return file, number - int(self._first[file])

    def _spans(self, number: int) -> list[Range]:
        file, stripe = self._place(number)
        return merge_ranges(self._layout(file).spans(stripe, self._fields[file]))

    def _nbytes(self, number: int) -> int:
        return sum(stop - start for start, stop in self._spans(number))

    @contextmanager
    def _opened(self, file: int, spans: Sequence[Range]) -> Iterator[Any]:
        """Open a file for pyarrow, after one read of `spans`."""
        blob = self._blob(file)
        if isinstance(blob, LocalFile):
            yield pyarrow(_WHAT).BufferReader(blob.data)
            return
        with _TailedFile(
            blob.nbytes, self._layout(file).tail, FetchedRanges(spans, blob.read(spans)), blob.read
        ) as source:
            yield source

    def _blob(self, number: int) -> LocalFile | RemoteBlob:
        # Local files are opened for each use: the check for changes is made when they are mapped.
        info = self._blobs.info(number)
        if self._blobs.is_local or self.names[number] == info.path:
            return LocalFile(info.path, info.size, info.version)
        return self._blobs[number]

    def _schema(self, number: int, layout: ORCLayout) -> Any:
        with self._naming(self.names[number]):
            orc = optional.load("pyarrow.orc", "arrow", _WHAT)
            info = self._blobs.info(number)
            source = _TailedFile(info.size, layout.tail, FetchedRanges(), self._blob(number).read)
            return orc.ORCFile(source).schema

    def _layout(self, number: int) -> ORCLayout:
        layouts = self._layouts()
        layout = layouts.get(number)
        return layouts.put(number, _unpack(self._entry(number))) if layout is None else layout

    def _entry(self, number: int) -> bytes | memoryview:
        entry = self._index.get(key_of(self.names[number], self._blobs.info(number)))
        return self._build(number) if entry is None else entry

    def _read_all(self) -> list[ORCLayout]:
        numbers = range(len(self.names))
        if self._blobs.is_local:
            return [_unpack(self._build(number)) for number in numbers]
        keys = [key_of(self.names[number], self._blobs.info(number)) for number in numbers]
        entries = {number: entry for number in numbers if (entry := self._index.get(keys[number])) is not None}
        missing = [number for number in numbers if number not in entries]
        if missing:
            _log.info("reading the footers of %d ORC files, beginning with %s", len(missing), self.names[missing[0]])
            with DaemonPool(_READ_AT_ONCE) as pool:
                entries |= zip(missing, pool.map(self._build, missing), strict=True)
            self._index.replace({keys[number]: entries[number] for number in numbers})
        return [_unpack(entries[number]) for number in numbers]

    def _build(self, number: int) -> bytes:
        blob = self._blob(number)
        with self._naming(blob.name):
            return _pack(read_layout(blob.nbytes, blob.read_uncached))

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn errors on damaged data into a SampleError."""
        try:
            yield
        except (pyarrow(_WHAT).ArrowException, DamagedORCError, OSError) as error:
            if isinstance(error, StoreError) or (isinstance(error, OSError) and error.errno is not None):
                raise
            raise SampleError(
                f"{what} cannot be read: it is damaged, truncated, or not ORC ({error}); re-create it or leave it out"
            ) from error


class _TailedFile(RangeFile):
    """A file with its end and some ranges in memory."""

    def __init__(self, nbytes: int, tail: bytes, held: FetchedRanges, read: Read) -> None:
        super().__init__(nbytes)
        self._tail, self._held, self._read = memoryview(tail), held, read

    def _bytes(self, start: int, stop: int) -> memoryview:
        held = self._held.find(start, stop)
        end = self._nbytes - len(self._tail)
        if held is not None:
            return held
        return self._tail[start - end : stop - end] if start >= end else self._read([(start, stop)])[0]


def _pack(layout: ORCLayout) -> bytes:
    sizes = json.dumps([len(layout.tail), len(layout.stripes), len(layout.streams), layout.fields]).encode()
    arrays = (layout.stripes.astype("<i8").tobytes(), layout.streams.astype("<i8").tobytes())
    return b"".join([len(sizes).to_bytes(4, "little"), sizes, layout.tail, *arrays])


def _unpack(entry: bytes | memoryview) -> ORCLayout:
    data = bytes(entry)
    start = 4 + int.from_bytes(data[:4], "little")
    tail, stripes, streams, fields = json.loads(data[4:start])
    arrays = np.frombuffer(data[start + tail :], "<i8").astype(np.int64).reshape(-1, 4)
    assert len(arrays) == stripes + streams
    pairs = [(first, last) for first, last in fields]
    return ORCLayout(data[start : start + tail], arrays[:stripes], arrays[stripes:], pairs)


def summarize_stripes(paths: Sequence[str]) -> ShardSummary:
    """Rows and bytes of the stripes of ORC files."""
    dataset = ORC(list(paths))
    sizes = dataset.shard_sizes.tolist()
    nbytes = divided(total_nbytes(find(paths, FORMATS["orc"].pattern)), sizes)
    return ShardSummary("stripe", sizes, nbytes, KeptShards(CACHE_NBYTES, nbytes))
