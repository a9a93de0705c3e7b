"""Base of table datasets: rows of chunks as samples and batches.

A chunk is a record batch or a row group as plain arrays. `ChunkRows` reads rows of chunks at hand, `ChunkCache` decodes
chunks on demand and caches them, and `TableDataset` maps the indices of samples to rows of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline import collate
from feedline.core.caches import LoadingCache, PerProcess
from feedline.core.dataset import READS_BATCHES, Batch, BatchRead, Traits, check_reads_batches
from feedline.core.tensors import Allocator, as_indices, one_within, within
from feedline.datasets.tables.cells import Cells
from feedline.datasets.tables.chunks import StructChunk
from feedline.datasets.tables.columns import CellError, StructColumn
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.scattered import Int64s
from feedline.datasets.tables.types import StructType
from feedline.errors import SampleError, note

Locate = Callable[[int, int], str]


class ChunkRows:
    """Rows of several chunks, as samples or as a batch.

    `locate(chunk, row)` describes a row in error messages.
    """

    def __init__(self, kind: StructType, chunks: Sequence[StructChunk], nulls: Nulls, locate: Locate) -> None:
        self._columns = StructColumn("", kind, chunks, nulls)
        self._locate = locate

    @property
    def columns(self) -> StructColumn:
        return self._columns

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        """A dict for each row, given its chunk in `which`."""
        try:
            return self._columns.samples(which, rows)
        except CellError as error:
            raise self._sample_error(error, which, rows) from error

    def batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> dict[str, Any]:
        """The samples default-collated, with tensors in memory from `empty`."""
        try:
            with note_shape_mismatch(partial(self.samples, which, rows), partial(self._describe, which, rows)):
                return self._columns.batch(which, rows, empty)
        except CellError as error:
            raise self._sample_error(error, which, rows) from error

    def _sample_error(self, error: CellError, which: Int64s, rows: Int64s) -> SampleError:
        return SampleError(f"{self._describe(which, rows, error.at)}: column {error.column!r} {error.problem}")

    def _describe(self, which: Int64s, rows: Int64s, at: int) -> str:
        return self._locate(int(which[at]), int(rows[at]))


@contextmanager
def note_shape_mismatch(
    samples: Callable[[], Sequence[dict[str, Any]]], locate: Callable[[int], str]
) -> Iterator[None]:
    """Add a note on the first differing shape to collation errors."""
    try:
        yield
    except RuntimeError as error:
        # Reading the samples again may meet a null of another column. The collation error is the one to report.
        with suppress(SampleError):
            mismatch = _shape_mismatch(
                [{name: _shape(value) for name, value in sample.items()} for sample in samples()]
            )
            if mismatch is not None:
                at, name, shape, first = mismatch
                note(error, f"{locate(at)}: column {name!r} has shape {shape}, and {first} in {locate(0)}")
        raise


def _shape_mismatch(shapes: Sequence[dict[str, Any]]) -> tuple[int, str, Any, Any] | None:
    """The first mismatch: row, column, its shape, the shape in row 0."""
    for at, row in enumerate(shapes):
        for name, shape in row.items():
            if shape != shapes[0][name]:
                return at, name, shape, shapes[0][name]
    return None


def _shape(value: Any) -> Any:
    """The shape of a tensor, or those in a list or dict."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {name: _shape(each) for name, each in value.items()}
    return [_shape(each) for each in value] if isinstance(value, list) else type(value).__name__


class Rows(Protocol):
    """Rows of chunks, wherever these are."""

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        """A dict for each row, given its chunk in `which`."""
        ...

    def batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> Any:
        """The samples default-collated, with tensors in memory from `empty`."""
        ...

    def locate(self, chunk: int, row: int) -> str:
        """Describe a row for error messages."""
        ...


class TableDataset(torch.utils.data.Dataset[Any]):
    """Rows of chunks as samples: dicts by column.

    `shard_sizes` holds the number of samples in each chunk, and `kind` the type of a row.
    """

    def __init__(self, rows: Rows, shard_sizes: NDArray[np.int64], cells: Cells) -> None:
        self.kind = cells.kind
        self.shard_sizes = shard_sizes
        self._rows, self._cells = rows, cells
        self._bounds = np.concatenate(([0], np.cumsum(shard_sizes, dtype=np.int64)))

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, index: int) -> Any:
        """Row `index` in its own memory. Negative indices count from the end."""
        at = one_within(index, len(self), type(self).__name__)
        which, rows = self._places(np.array([at]))
        (sample,) = self._rows.samples(which, rows)
        return self._cells.sample(sample, None, partial(self._locate, which, rows, 0))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices; each chunk is read once.

        Tensors of one column may be views of one tensor, which nothing else uses.
        """
        which, rows = self._places(within(as_indices(indices), len(self), type(self).__name__))
        samples: list[Any] = self._rows.samples(which, rows) if len(rows) else []
        if self._cells.are_plain:
            return samples
        locate = partial(self._locate, which, rows)
        return [self._cells.sample(each, row, partial(locate, row)) for row, each in enumerate(samples)]

    @property
    def traits(self) -> Traits:
        if self._cells.are_plain:
            return READS_BATCHES
        return Traits(thread_safe=True, reads_batches=self._cells.batchable, uses_keys=self._cells.draws)

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch in one pass.

        TypeError if a transform needs single samples.
        """
        check_reads_batches(self)
        which, rows = self._places(within(request.indices, len(self), type(self).__name__))
        batch = self._rows.batch(which, rows, request.allocate)
        locate = partial(self._locate, which, rows)
        return self._cells.batch(batch, request.keys, len(rows), request.allocate, locate)

    def _places(self, inside: Int64s) -> tuple[Int64s, Int64s]:
        """The chunk of each index, and the row there."""
        which = np.searchsorted(self._bounds, inside, side="right") - 1
        return which, inside - self._bounds[which]

    def _locate(self, which: Int64s, rows: Int64s, at: int) -> str:
        return self._rows.locate(int(which[at]), int(rows[at]))


CACHE_NBYTES = 1 << 29


class Chunks(Protocol):
    """Source of chunks by number."""

    kind: StructType

    def decoded(self, number: int) -> StructChunk:
        """Decode one chunk."""
        ...

    def each(
        self, work: Callable[[int], StructChunk], numbers: Sequence[int], limit_nbytes: int
    ) -> Iterator[StructChunk]:
        """Map `work` over chunk numbers, in order.

        May run several at once whose decoded chunks fit into `limit_nbytes` together.
        """
        ...

    def locate(self, number: int, row: int) -> str:
        """Describe a row for error messages."""
        ...


class ChunkCache:
    """Rows of chunks that are decoded on demand and cached within `cache_nbytes`.

    A batch that touches more than that is read in several runs, so that memory stays bounded.
    """

    def __init__(self, chunks: Chunks, nulls: Nulls, cache_nbytes: int) -> None:
        self._chunks, self._nulls, self._cache_nbytes = chunks, nulls, cache_nbytes
        self._cache: PerProcess[LoadingCache[int, StructChunk]] = PerProcess(partial(LoadingCache, cache_nbytes))

    @property
    def decoded(self) -> LoadingCache[int, StructChunk]:
        """The decoded chunks of this process, by number."""
        return self._cache()

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        """A dict for each row, given its chunk in `which`."""
        samples: list[Any] = [None] * len(rows)
        for places, chunk_rows, local in self._runs(which):
            run = chunk_rows.samples(local, rows[places])
            for place, sample in zip(places.tolist(), run, strict=True):
                samples[place] = sample
        return samples

    def batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> Any:
        """The samples default-collated, with tensors in memory from `empty`."""
        samples: list[Any] = [None] * len(rows)
        for places, chunk_rows, local in self._runs(which):
            if len(places) == len(rows):
                return chunk_rows.batch(local, rows, empty)
            run = chunk_rows.samples(local, rows[places])
            for place, sample in zip(places.tolist(), run, strict=True):
                samples[place] = sample

        def locate(at: int) -> str:
            return self._chunks.locate(int(which[at]), int(rows[at]))

        with note_shape_mismatch(lambda: samples, locate):
            return collate.default(samples, allocate=empty)

    def locate(self, chunk: int, row: int) -> str:
        """Describe a row for error messages."""
        return self._chunks.locate(chunk, row)

    def _runs(self, which: Int64s) -> Iterator[tuple[Int64s, ChunkRows, Int64s]]:
        """Split a read into runs whose chunks fit into memory.

        Each run is the positions of its rows within `which`, their `ChunkRows`, and the chunk of each row in these.
        """
        decoded, touched = self.decoded, np.unique(which).tolist()
        cached, missing = [n for n in touched if n in decoded], [n for n in touched if n not in decoded]
        # Cached chunks first: decoding the missing ones may evict them, and they would be decoded twice.
        chunks = chain(map(self._chunk, cached), self._chunks.each(self._chunk, missing, self._cache_nbytes))
        run: dict[int, StructChunk] = {}
        for count, (number, chunk) in enumerate(zip([*cached, *missing], chunks, strict=True), start=1):
            run[number] = chunk
            if count == len(touched) or sum(each.nbytes for each in run.values()) >= self._cache_nbytes:
                yield self._run(which, run)
                run = {}

    def _chunk(self, number: int) -> StructChunk:
        return self.decoded.get(number, partial(self._chunks.decoded, number))

    def _run(self, which: Int64s, chunks: dict[int, StructChunk]) -> tuple[Int64s, ChunkRows, Int64s]:
        numbers = np.array(sorted(chunks), np.int64)
        places = np.flatnonzero(np.isin(which, numbers))
        locate = partial(self._locate, numbers.tolist())
        rows = ChunkRows(self._chunks.kind, [chunks[number] for number in numbers.tolist()], self._nulls, locate)
        return places, rows, np.searchsorted(numbers, which[places])

    def _locate(self, numbers: Sequence[int], chunk: int, row: int) -> str:
        return self._chunks.locate(numbers[chunk], row)
