"""Base of table datasets whose chunks are decoded on demand, and cached.

`FileChunks` numbers the chunks of all files, `CachedRows` decodes and caches those that hold the wanted rows, and
`DecodedTable` is the dataset. A format subclasses the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from feedline import collate
from feedline.core.caches import LoadingCache, PerProcess
from feedline.core.dataset import Ranges, TransformFunction
from feedline.core.kernels import Int64s
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.stage_parts import DECODING
from feedline.core.tensors import Allocator
from feedline.core.threads import BoundedMap
from feedline.datasets.decoding import Decode
from feedline.datasets.tables.base import ChunkRows, TableDataset, note_shape_mismatch
from feedline.datasets.tables.cells import Cells
from feedline.datasets.tables.chunks import StructChunk
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import StructType
from feedline.stores.files import Extent

T = TypeVar("T")


CACHE_NBYTES = 1 << 29


class ChunkFiles(Protocol):
    """Files by number."""

    @property
    def is_local(self) -> bool: ...

    @property
    def names(self) -> Sequence[str]: ...

    def name(self, number: int) -> str:
        """The path or address of a file."""
        ...

    def ranges(self, extents: Sequence[Extent]) -> Ranges:
        """The ranges of objects that reads of these extents need from caches."""
        ...


F = TypeVar("F", bound=ChunkFiles)


class FileChunks(Generic[F]):
    """The chunks of all files, numbered in order.

    They are blocks, record batches, row groups or stripes. A subclass decodes single ones. `sizes` are the numbers of
    rows in the chunks of each file, `kind` is the type of a row.
    """

    def __init__(self, files: F, kind: StructType, sizes: Sequence[Int64s]) -> None:
        self._files, self.kind = files, kind
        self.sizes: Int64s = np.concatenate(sizes).astype(np.int64)
        """The number of rows in each chunk."""
        self._by_file = ShardOffsets(map(len, sizes))
        self._concurrently = BoundedMap()

    def decoded(self, number: int) -> StructChunk:
        """Decode a chunk. Safe to call from several threads."""
        raise NotImplementedError

    def extents(self, number: int) -> list[Extent]:
        """The bytes that decoding a chunk reads."""
        raise NotImplementedError

    def nbytes(self, number: int) -> int:
        """The approximate size of a decoded chunk."""
        return sum(stop - start for _, start, stop in self.extents(number))

    def each(
        self,
        work: Callable[[int], T],
        numbers: Sequence[int],
        limit_nbytes: int,
        nbytes: Callable[[int], int] | None = None,
    ) -> Iterator[T]:
        """Map `work` over chunks, in order.

        Threads decode chunks of remote files ahead, within `limit_nbytes` of results. `nbytes(number)` is the size of a
        result, by default the size of a decoded chunk.
        """
        if self._files.is_local:
            return map(work, numbers)
        return self._concurrently.map(work, numbers, nbytes or self.nbytes, limit_nbytes)

    def ranges(self, numbers: Int64s) -> Ranges:
        """The ranges of objects that decoding these chunks reads through caches."""
        return self._files.ranges([each for number in np.unique(numbers).tolist() for each in self.extents(number)])

    @property
    def is_local(self) -> bool:
        """True if all files are on this machine."""
        return self._files.is_local

    @property
    def names(self) -> Sequence[str]:
        """The paths or addresses of all files."""
        return self._files.names

    def place(self, number: int, row: int) -> tuple[str, int]:
        """The file of a row, and the row's number there."""
        file, chunk = self.in_file(number)
        return self._files.name(file), int(self.sizes[number - chunk : number].sum()) + row

    def locate(self, number: int, row: int) -> str:
        """Describe a row for error messages."""
        name, row = self.place(number, row)
        return f"{name}, row {row}"

    def in_file(self, number: int) -> tuple[int, int]:
        """The file of a chunk, and its number there."""
        return self._by_file.one(number)


class Run(NamedTuple):
    """A part of a read whose chunks are in memory together."""

    places: Int64s
    """Positions of the run's rows in the read."""
    chunks: ChunkRows
    which: Int64s
    """The chunk of each row, by its number in `chunks`."""
    rows: Int64s


class CachedRows:
    """Rows of chunks that are decoded on demand and cached within `cache_nbytes`.

    A batch that needs more memory is read in several runs, so that memory stays bounded.
    """

    def __init__(self, chunks: FileChunks[Any], nulls: Nulls, cache_nbytes: int) -> None:
        self._chunks, self._nulls, self._cache_nbytes = chunks, nulls, cache_nbytes
        # A forked worker must not wait for a chunk that a thread of the parent was decoding at the fork.
        self._cache: PerProcess[LoadingCache[int, StructChunk]] = PerProcess(partial(LoadingCache, cache_nbytes))

    @property
    def decoded(self) -> LoadingCache[int, StructChunk]:
        """The decoded chunks of this process, by number."""
        return self._cache()

    @property
    def is_local(self) -> bool:
        return self._chunks.is_local

    @property
    def names(self) -> Sequence[str]:
        return self._chunks.names

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        """A dict for each row, given its chunk in `which`."""
        samples: list[Any] = [None] * len(rows)
        with DECODING:
            for run in self._runs(which, rows):
                _put(samples, run.places, run.chunks.samples(run.which, run.rows))
        return samples

    def batch(self, which: Int64s, rows: Int64s, allocate: Allocator) -> Any:
        """The samples default-collated, with tensors in memory from `allocate`."""
        samples: list[Any] = [None] * len(rows)
        with DECODING:
            for run in self._runs(which, rows):
                if len(run.places) == len(rows):
                    return run.chunks.batch(run.which, run.rows, allocate)
                _put(samples, run.places, run.chunks.samples(run.which, run.rows))

        def locate(at: int) -> str:
            return self.locate(int(which[at]), int(rows[at]))

        with note_shape_mismatch(lambda: samples, locate):
            return collate.default(samples, allocate=allocate)

    def place(self, chunk: int, row: int) -> tuple[str, int]:
        return self._chunks.place(chunk, row)

    def locate(self, chunk: int, row: int) -> str:
        return self._chunks.locate(chunk, row)

    def ranges(self, chunks: Int64s) -> Ranges:
        return self._chunks.ranges(chunks)

    def _runs(self, which: Int64s, rows: Int64s) -> Iterator[Run]:
        """Split a read into runs whose chunks fit into memory."""
        decoded, touched = self.decoded, np.unique(which).tolist()
        # Each chunk is looked up once: another thread may decode or evict it between two look-ups, and its rows would
        # be lost.
        is_cached = [number in decoded for number in touched]
        cached = [number for number, known in zip(touched, is_cached, strict=True) if known]
        missing = [number for number, known in zip(touched, is_cached, strict=True) if not known]
        # Cached chunks come first: the decoding of missing ones may evict them, and they would be decoded twice.
        chunks = chain(map(self._chunk, cached), self._chunks.each(self._chunk, missing, self._cache_nbytes))
        run: dict[int, StructChunk] = {}
        nbytes = 0
        for count, (number, chunk) in enumerate(zip([*cached, *missing], chunks, strict=True), start=1):
            run[number] = chunk
            nbytes += chunk.nbytes
            if count == len(touched) or nbytes >= self._cache_nbytes:
                yield self._run(which, rows, run, are_all=len(run) == len(touched))
                run, nbytes = {}, 0

    def _chunk(self, number: int) -> StructChunk:
        return self.decoded.get(number, partial(self._chunks.decoded, number))

    def _run(self, which: Int64s, rows: Int64s, chunks: dict[int, StructChunk], *, are_all: bool) -> Run:
        numbers = sorted(chunks)
        # Usually there is only one run, and a search for its rows would take as long as the gathering of a few rows.
        places = np.arange(len(which)) if are_all else np.flatnonzero(np.isin(which, numbers))
        locate = partial(self._locate, numbers)
        held = ChunkRows(self._chunks.kind, [chunks[number] for number in numbers], self._nulls, locate)
        return Run(places, held, np.searchsorted(np.array(numbers), which[places]), rows[places])

    def _locate(self, numbers: Sequence[int], chunk: int, row: int) -> str:
        return self._chunks.locate(numbers[chunk], row)


def _put(samples: list[Any], places: Int64s, run: Sequence[Any]) -> None:
    for place, sample in zip(places.tolist(), run, strict=True):
        samples[place] = sample


C = TypeVar("C", bound="FileChunks[Any]")


class DecodedTable(TableDataset, Generic[C]):
    """Rows of chunks that are decoded on demand.

    The base of `Avro`, `ORC` and `Parquet`. A chunk is decoded whole when one of its rows is needed, and each process
    caches decoded chunks within `cache_nbytes`. ArgumentError for `nulls`, `transform` or `decode` that do not fit the
    columns.
    """

    def __init__(
        self,
        chunks: C,
        *,
        nulls: Any,
        transform: TransformFunction | Mapping[str, TransformFunction] | None,
        decode: Mapping[str, Decode] | None,
        cache_nbytes: int,
    ) -> None:
        cells = Cells(chunks.kind, transform, decode)
        chunks.kind = cells.kind  # decoding leaves out members that are not read by a decoder of a column
        policy = Nulls(nulls)
        policy.check(cells.kind)
        self.chunks = chunks
        self._cached = CachedRows(chunks, policy, cache_nbytes)
        super().__init__(self._cached, self._shard_sizes(), cells)

    @property
    def decoded(self) -> LoadingCache[int, StructChunk]:
        """The decoded chunks of this process, by number."""
        return self._cached.decoded

    def _shard_sizes(self) -> Int64s:
        """The number of samples in each chunk.

        Called once, when the arguments are checked, because filters may read columns of all files.
        """
        return self.chunks.sizes
