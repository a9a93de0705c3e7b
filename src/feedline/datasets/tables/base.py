"""What datasets of tables share: rows of chunks as samples, whole batches in one pass.

Rows of chunks that are made when they are needed, and kept while memory lasts.
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
from feedline.core.dataset import READS_BATCHES, READS_SAMPLES, Batch, BatchRead, Traits, check_reads_batches
from feedline.core.tensors import Allocator, as_indices, one_within, within
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.decoding import SampleTransform
from feedline.datasets.tables.chunks import StructChunk
from feedline.datasets.tables.columns import CellError, Int64s, StructColumn
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import StructType
from feedline.errors import SampleError, note

Locate = Callable[[int, int], str]


class ChunkRows:
    """Rows of some chunks; `locate(chunk, row)` names one for errors, by the numbers that `which` holds."""

    def __init__(self, kind: StructType, chunks: Sequence[StructChunk], nulls: Nulls, locate: Locate) -> None:
        self._columns = StructColumn("", kind, chunks, nulls)
        self._locate = locate

    @property
    def columns(self) -> StructColumn:
        """The columns themselves."""
        return self._columns

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        """A dict for each row; `which` says in which chunk it lies."""
        try:
            return self._columns.samples(which, rows)
        except CellError as error:
            raise self._located(error, which, rows) from error

    def batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> dict[str, Any]:
        """What default-collating the samples gives, tensors in memory from `empty`."""
        try:
            with naming_unlike(partial(self.samples, which, rows), partial(self._where, which, rows)):
                return self._columns.batch(which, rows, empty)
        except CellError as error:
            raise self._located(error, which, rows) from error

    def _located(self, error: CellError, which: Int64s, rows: Int64s) -> SampleError:
        return SampleError(f"{self._where(which, rows, error.at)}: column {error.column!r} {error.problem}")

    def _where(self, which: Int64s, rows: Int64s, at: int) -> str:
        return self._locate(int(which[at]), int(rows[at]))


@contextmanager
def naming_unlike(samples: Callable[[], Sequence[dict[str, Any]]], locate: Callable[[int], str]) -> Iterator[None]:
    """Note on an error of collating these samples which row is the first that is not shaped like row 0."""
    try:
        yield
    except RuntimeError as error:
        with suppress(SampleError):  # another column may have a null, which would have been met later
            found = _unlike([{name: _shape(value) for name, value in sample.items()} for sample in samples()])
            if found is not None:
                at, name, shape, first = found
                note(error, f"{locate(at)}: column {name!r} has shape {shape}, and {first} in {locate(0)}")
        raise


def _unlike(shapes: Sequence[dict[str, Any]]) -> tuple[int, str, Any, Any] | None:
    """The first row of which a column is not shaped as in row 0, that column, and both shapes."""
    for at, row in enumerate(shapes):
        for name, shape in row.items():
            if shape != shapes[0][name]:
                return at, name, shape, shapes[0][name]
    return None


def _shape(value: Any) -> Any:
    """The shape of a tensor, and of those within lists and dicts."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {name: _shape(each) for name, each in value.items()}
    return [_shape(each) for each in value] if isinstance(value, list) else type(value).__name__


class TableDataset(torch.utils.data.Dataset[Any]):
    """Rows of chunks as samples: dicts by column. `shard_sizes` are the rows of each chunk."""

    def __init__(self, shard_sizes: NDArray[np.int64], transform: Transform | None) -> None:
        self.shard_sizes = shard_sizes
        self._step = SampleTransform(transform)
        self._bounds = np.concatenate(([0], np.cumsum(shard_sizes, dtype=np.int64)))

    def _samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, index: int) -> Any:
        """Row `index`, in memory of its own; negative indices count from the end."""
        at = one_within(index, len(self), type(self).__name__)
        return self._step(self._samples(*self._places(np.array([at])))[0], None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The rows of these indices, each chunk read once; they share memory with each other only."""
        inside = within(as_indices(indices), len(self), type(self).__name__)
        samples = self._samples(*self._places(inside))
        return [self._step(sample, row) for row, sample in enumerate(samples)] if self._step.transform else samples

    @property
    def traits(self) -> Traits:
        return READS_BATCHES if self._step.transform is None else READS_SAMPLES

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch in one pass; TypeError with a transform, which has to see each sample."""
        check_reads_batches(self)
        places = self._places(within(request.indices, len(self), type(self).__name__))
        return self._batch(*places, request.allocate)

    def _places(self, inside: Int64s) -> tuple[Int64s, Int64s]:
        """The chunk of each row, and its place there."""
        which = np.searchsorted(self._bounds, inside, side="right") - 1
        return which, inside - self._bounds[which]


CACHE_NBYTES = 1 << 29


class Chunks(Protocol):
    """What makes chunks by number."""

    kind: StructType

    def decoded(self, number: int) -> StructChunk:
        """A chunk, made now."""
        ...

    def each(
        self, work: Callable[[int], StructChunk], numbers: Sequence[int], limit_nbytes: int
    ) -> Iterator[StructChunk]:
        """`work` of each number, in order; several at once, within this memory, where that is faster."""
        ...

    def locate(self, number: int, row: int) -> str:
        """What a row of a chunk is called."""
        ...


class ChunkCache:
    """Rows of `chunks`; those of a batch are made first, as many at a time as fit into `cache_nbytes`."""

    def __init__(self, chunks: Chunks, nulls: Nulls, cache_nbytes: int) -> None:
        self._chunks, self._nulls, self._cache_nbytes = chunks, nulls, cache_nbytes
        self._cache: PerProcess[LoadingCache[int, StructChunk]] = PerProcess(partial(LoadingCache, cache_nbytes))

    @property
    def decoded(self) -> LoadingCache[int, StructChunk]:
        """The chunks of this process, by number."""
        return self._cache()

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        """A dict for each row; `which` says in which chunk it lies."""
        samples: list[Any] = [None] * len(rows)
        for places, chunk_rows, local in self._runs(which):
            found = chunk_rows.samples(local, rows[places])
            for place, sample in zip(places.tolist(), found, strict=True):
                samples[place] = sample
        return samples

    def batch(self, which: Int64s, rows: Int64s, empty: Allocator) -> Any:
        """What default-collating the samples gives, tensors in memory from `empty`."""
        samples: list[Any] = [None] * len(rows)
        for places, chunk_rows, local in self._runs(which):
            if len(places) == len(rows):
                return chunk_rows.batch(local, rows, empty)
            found = chunk_rows.samples(local, rows[places])
            for place, sample in zip(places.tolist(), found, strict=True):
                samples[place] = sample

        def locate(at: int) -> str:
            return self._chunks.locate(int(which[at]), int(rows[at]))

        with naming_unlike(lambda: samples, locate):
            return collate.default(samples, empty=empty)

    def _runs(self, which: Int64s) -> Iterator[tuple[Int64s, ChunkRows, Int64s]]:
        """Which rows can be taken now, from what, and the chunk of each therein: as many chunks at a time as fit.

        Those that are kept come first, lest they make room for others and be made again.
        """
        decoded, touched = self.decoded, np.unique(which).tolist()
        kept, lacking = [n for n in touched if n in decoded], [n for n in touched if n not in decoded]
        chunks = chain(map(self._chunk, kept), self._chunks.each(self._chunk, lacking, self._cache_nbytes))
        held: dict[int, StructChunk] = {}
        for count, (number, chunk) in enumerate(zip([*kept, *lacking], chunks, strict=True), start=1):
            held[number] = chunk
            if count == len(touched) or sum(each.nbytes for each in held.values()) >= self._cache_nbytes:
                yield self._run(which, held)
                held = {}

    def _chunk(self, number: int) -> StructChunk:
        return self.decoded.get(number, partial(self._chunks.decoded, number))

    def _run(self, which: Int64s, held: dict[int, StructChunk]) -> tuple[Int64s, ChunkRows, Int64s]:
        numbers = np.array(sorted(held), np.int64)
        places = np.flatnonzero(np.isin(which, numbers))
        locate = partial(self._locate, numbers.tolist())
        rows = ChunkRows(self._chunks.kind, [held[number] for number in numbers.tolist()], self._nulls, locate)
        return places, rows, np.searchsorted(numbers, which[places])

    def _locate(self, numbers: Sequence[int], chunk: int, row: int) -> str:
        return self._chunks.locate(numbers[chunk], row)
