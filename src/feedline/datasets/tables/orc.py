"""`ORC`: rows of ORC files, with cached stripes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from feedline.core import optional
from feedline.core.caches import LRUCache, PerProcess
from feedline.core.dataset import TransformFunction
from feedline.core.paths import Pathlike
from feedline.core.threads import IO_THREADS
from feedline.datasets.decoding import Decode
from feedline.datasets.file_objects import RangeFile, ReadRanges, merge_ranges
from feedline.datasets.formats import FORMATS, KeptShards, ShardSummary
from feedline.datasets.indexes import MetadataCache, key_of, metadata_path
from feedline.datasets.paths import Paths, columns_of, find, paths_of
from feedline.datasets.shard_summaries import divided, total_nbytes
from feedline.datasets.signatures import begin_of, check_format, damage_error
from feedline.datasets.tables.chunks import StructChunk, chunk_of_chunked, table_chunk
from feedline.datasets.tables.decoded import CACHE_NBYTES, DecodedTable, FileChunks
from feedline.datasets.tables.orc_layout import DamagedORCError, ORCLayout, read_layout
from feedline.datasets.tables.orc_stripes import check_stripe
from feedline.datasets.tables.types import check_same_columns, kinds_of, pyarrow
from feedline.stores import Cache, StoreError
from feedline.stores.base import Range
from feedline.stores.files import Extent, FileSet
from feedline.stores.requests import FetchedRanges
from feedline.stores.urls import absolute

_WHAT = "datasets.ORC"


_LAYOUTS = 256
"""Layouts of files cached per process."""


class Layouts:
    """The layouts of files by number, cached on this machine.

    Pickles without them; one that is not in the index is read again.
    """

    def __init__(self, files: FileSet, index: str) -> None:
        self._files = files
        self._index = MetadataCache(index)
        self._parsed: PerProcess[LRUCache[int, ORCLayout]] = PerProcess(partial(LRUCache, _LAYOUTS))

    def all(self) -> list[ORCLayout]:
        """The layouts of all files; SampleError for another format."""
        numbers = range(len(self._files))
        if self._files.is_local:
            return [_unpack(self._build(number)) for number in numbers]
        keys = [self._key(number) for number in numbers]
        return list(map(_unpack, self._index.collect("ORC footers", self._files.names, keys, self._build, IO_THREADS)))

    def __getitem__(self, number: int) -> ORCLayout:
        parsed = self._parsed()
        layout = parsed.get(number)
        if layout is None:
            entry = self._index.get(self._key(number))
            layout = parsed.put(number, _unpack(self._build(number) if entry is None else entry))
        return layout

    def _key(self, number: int) -> bytes | None:
        return key_of(self._files.name(number), self._files.info(number))

    def _build(self, number: int) -> bytes:
        file = self._files.open(number)
        try:
            # pyarrow finds the streams of a file of this machine itself.
            with_streams = file.data is None
            return _pack(read_layout(file.nbytes, file.read_uncached, with_streams=with_streams))
        except DamagedORCError as error:
            check_format(file.name, "ORC", begin_of(file))
            raise damage_error(file.name, "ORC", error) from error


class Stripes(FileChunks[FileSet]):
    """The stripes of all files, in order.

    Holds no open files; pickles without the footers.
    """

    def __init__(self, files: FileSet, columns: Sequence[str] | None, index: str) -> None:
        self._layouts, names = Layouts(files, index), files.names
        layouts = self._layouts.all()
        schemas = [_schema(files, number, layout) for number, layout in enumerate(layouts)]
        kinds = [kinds_of(schema, columns, name) for schema, name in zip(schemas, names, strict=True)]
        check_same_columns(kinds, names)
        super().__init__(files, kinds[0], [layout.stripes[:, 3] for layout in layouts])
        self._fields = [[schema.names.index(name) for name, _ in self.kind.fields] for schema in schemas]

    def decoded(self, number: int) -> StructChunk:
        """Decode the chosen columns of a stripe."""
        file, stripe = self.in_file(number)
        names = [name for name, _ in self.kind.fields]
        with (
            _naming(f"stripe {stripe} of {self._files.name(file)}"),
            self._open(number) as source,
        ):
            check_stripe(
                self._layouts[file], stripe, dict(zip(self._fields[file], names, strict=True)), _reader(source)
            )
            batch = optional.load("pyarrow.orc", "arrow", _WHAT).ORCFile(source).read_stripe(stripe, columns=names)
            if isinstance(batch, pyarrow(_WHAT).RecordBatch):
                return table_chunk(self.kind, batch)
            return StructChunk(tuple(chunk_of_chunked(kind, batch.column(name)) for name, kind in self.kind.fields))

    def extents(self, number: int) -> list[Extent]:
        """The streams of the chosen columns of a stripe."""
        file, _ = self.in_file(number)
        return [Extent(file, *span) for span in self._spans(number)]

    def locate(self, number: int, row: int) -> str:
        return f"{super().locate(number, row)} (stripe {self.in_file(number)[1]})"

    def _spans(self, number: int) -> list[Range]:
        file, stripe = self.in_file(number)
        return merge_ranges(self._layouts[file].spans(stripe, self._fields[file]))

    @contextmanager
    def _open(self, number: int) -> Iterator[Any]:
        """Open the file of a stripe for pyarrow.

        From a store, all bytes for the stripe are read at once.
        """
        which, _ = self.in_file(number)
        file = self._files.open(which)  # for each use, because a local file is checked for changes when it is mapped
        if file.data is not None:
            yield pyarrow(_WHAT).BufferReader(file.data)
            return
        spans = self._spans(number)
        with _TailedFile(
            file.nbytes, self._layouts[which].tail, FetchedRanges(spans, file.read(spans)), file.read
        ) as source:
            yield source


def _reader(source: Any) -> Callable[[int, int], bytes | memoryview]:
    def read(start: int, stop: int) -> Any:
        source.seek(start)
        return source.read(stop - start)

    return read


def _schema(files: FileSet, number: int, layout: ORCLayout) -> Any:
    with _naming(files.name(number)):
        orc = optional.load("pyarrow.orc", "arrow", _WHAT)
        source = _TailedFile(files.info(number).size, layout.tail, FetchedRanges(), files.open(number).read)
        return orc.ORCFile(source).schema


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn errors about damaged data into a SampleError."""
    try:
        yield
    except (pyarrow(_WHAT).ArrowException, DamagedORCError, OSError) as error:
        if isinstance(error, StoreError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise damage_error(what, "ORC", error) from error


class _TailedFile(RangeFile):
    """A file with its end and some ranges in memory."""

    def __init__(self, nbytes: int, tail: bytes, held: FetchedRanges, read: ReadRanges) -> None:
        super().__init__(nbytes)
        self._tail, self._held, self._read = memoryview(tail), held, read

    def _bytes(self, start: int, stop: int) -> memoryview:
        # Each stripe opens the file for pyarrow, which then reads the footer: the tail saves that request.
        held = self._held.find(start, stop)
        end = self._nbytes - len(self._tail)
        if held is not None:
            return held
        return self._tail[start - end : stop - end] if start >= end else self._read([(start, stop)])[0]


def _pack(layout: ORCLayout) -> bytes:
    described = [len(layout.tail), len(layout.stripes), len(layout.streams), *layout[3:]]
    sizes = json.dumps(described).encode()
    arrays = (layout.stripes.astype("<i8").tobytes(), layout.streams.astype("<i8").tobytes())
    return b"".join([len(sizes).to_bytes(4, "little"), sizes, layout.tail, *arrays])


def _unpack(entry: bytes | memoryview) -> ORCLayout:
    data = bytes(entry)
    start = 4 + int.from_bytes(data[:4], "little")
    tail, stripes, streams, types, codec, block_nbytes = json.loads(data[4:start])
    arrays = np.frombuffer(data[start + tail :], "<i8").astype(np.int64).reshape(-1, 4)
    assert len(arrays) == stripes + streams
    columns = [(kind, members) for kind, members in types]
    return ORCLayout(data[start : start + tail], arrays[:stripes], arrays[stripes:], columns, codec, block_nbytes)


class ORC(DecodedTable[Stripes]):
    """Rows of ORC files as dicts by column.

    `paths` is a path or URL, a folder of `.orc` files, a glob or brace pattern, or a list of these. Columns, types,
    `nulls`, `transform` and `decode` are as in `Parquet`; times are nanoseconds.

    Stripes are the shards. A stripe is decoded whole when one of its rows is needed, and each process caches decoded
    stripes within `cache_nbytes`. From stores only the streams of the chosen columns are read, through `cache` if it is
    given; `options` are passed to `open_store`. The footers of objects are kept on this machine, in the folder
    `index_dir`.

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
        given = paths_of(paths)
        files = find(given, FORMATS["orc"].pattern, cache=cache, options=options)
        stripes = Stripes(files, columns_of(columns), metadata_path("orc-layouts", map(absolute, given), index_dir))
        super().__init__(stripes, nulls=nulls, transform=transform, decode=decode, cache_nbytes=cache_nbytes)


def summarize_stripes(paths: Sequence[str]) -> ShardSummary:
    """Rows and bytes of the stripes of ORC files."""
    dataset = ORC(list(paths))
    sizes = dataset.shard_sizes.tolist()
    nbytes = divided(total_nbytes(find(paths, FORMATS["orc"].pattern)), sizes)
    return ShardSummary("stripe", sizes, nbytes, KeptShards(CACHE_NBYTES, nbytes))
