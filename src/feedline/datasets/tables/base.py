"""Base of table datasets: rows of chunks as samples and batches.

A chunk is a record batch or a row group as plain arrays. `ChunkRows` reads rows of chunks in memory, and `TableDataset`
maps the indices of samples to rows of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from feedline.core.dataset import READS_BATCHES, Batch, BatchRead, Ranges, Traits, check_reads_batches
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.kernels import Int64s
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.tensors import Allocator, as_indices, normalize_index, normalize_indices
from feedline.datasets.tables.cells import Cells
from feedline.datasets.tables.chunks import StructChunk
from feedline.datasets.tables.columns import CellError, StructColumn
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import StructType
from feedline.errors import SampleError, note

LocateRow = Callable[[int, int], str]


class ChunkRows:
    """Rows of several chunks, as samples or as a batch.

    `locate(chunk, row)` describes a row in error messages.
    """

    def __init__(self, kind: StructType, chunks: Sequence[StructChunk], nulls: Nulls, locate: LocateRow) -> None:
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
            raise self.sample_error(error, which, rows) from error

    def batch(
        self, which: Int64s, rows: Int64s, allocate: Allocator, names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Default-collated samples in memory from `allocate`.

        They have the columns `names`, or all columns.
        """
        try:
            with note_shape_mismatch(partial(self.samples, which, rows), partial(self._describe, which, rows)):
                return self._columns.batch(which, rows, allocate, names)
        except CellError as error:
            raise self.sample_error(error, which, rows) from error

    def sample_error(self, error: CellError, which: Int64s, rows: Int64s) -> SampleError:
        """The error of a cell with the place of its row."""
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
        # The second read of the samples may raise for a null of another column. The collation error must be reported.
        with suppress(SampleError):
            mismatch = _shape_mismatch(
                [{name: _shape(value) for name, value in sample.items()} for sample in samples()]
            )
            if mismatch is not None:
                at, name, shape, first = mismatch
                note(error, f"{locate(at)}: column {name!r} has shape {shape}, and {first} in {locate(0)}")
        raise


def _shape_mismatch(shapes: Sequence[dict[str, Any]]) -> tuple[int, str, Any, Any] | None:
    """First mismatch: row, column, its shape, and that in row 0."""
    for at, row in enumerate(shapes):
        for name, shape in row.items():
            if shape != shapes[0][name]:
                return at, name, shape, shapes[0][name]
    return None


def _shape(value: Any) -> Any:
    """The shape of a tensor, or shapes in a list or dict."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {name: _shape(each) for name, each in value.items()}
    return [_shape(each) for each in value] if isinstance(value, list) else type(value).__name__


class Rows(Protocol):
    """Rows of chunks, in memory or in files."""

    @property
    def is_local(self) -> bool:
        """True if no data are read from stores."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The file names in order; none for a table in memory."""
        ...

    def samples(self, which: Int64s, rows: Int64s) -> list[dict[str, Any]]:
        """A dict for each row, given its chunk in `which`."""
        ...

    def batch(self, which: Int64s, rows: Int64s, allocate: Allocator) -> Any:
        """The samples default-collated, with tensors in memory from `allocate`."""
        ...

    def place(self, chunk: int, row: int) -> tuple[str, int]:
        """The file of a row, and the row's number there."""
        ...

    def locate(self, chunk: int, row: int) -> str:
        """Describe a row for error messages."""
        ...

    def ranges(self, chunks: Int64s) -> Ranges:
        """The ranges of objects that decoding these chunks reads through caches."""
        ...


class TableDataset(torch.utils.data.Dataset[Any]):
    """Rows of chunks as samples: dicts by column.

    `shard_sizes` holds the number of samples in each chunk, and `kind` the type of a row.
    """

    def __init__(self, rows: Rows, shard_sizes: Int64s, cells: Cells) -> None:
        self.kind = cells.kind
        self.shard_sizes = shard_sizes
        self._rows, self._cells = rows, cells
        self._offsets = ShardOffsets(shard_sizes)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Any:
        """Row `index` in its own memory. Negative indices count from the end."""
        at = normalize_index(index, len(self), type(self).__name__)
        which, rows = self._places(np.array([at]))
        # Not a view of the chunk: one kept sample must not keep a whole row group or mapping in memory.
        (sample,) = self._rows.samples(which, rows)
        return self._cells.sample(sample, None, partial(self._locate, which, rows, 0))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices; each chunk is read once.

        Tensors of one column may be views of one tensor, which belongs to these samples.
        """
        which, rows = self._places(normalize_indices(as_indices(indices), len(self), type(self).__name__))
        samples: list[Any] = self._rows.samples(which, rows) if len(rows) else []
        if self._cells.are_plain:
            return samples
        locate = partial(self._locate, which, rows)
        return [self._cells.sample(each, row, partial(locate, row)) for row, each in enumerate(samples)]

    @property
    def traits(self) -> Traits:
        if self._cells.are_plain:
            return READS_BATCHES
        return Traits(thread_safe=True, reads_batches=self._cells.batchable, uses_keys=self._cells.uses_keys)

    def read_batch(self, request: BatchRead) -> Batch:
        """The collated batch in one pass.

        TypeError if a transform needs single samples.
        """
        check_reads_batches(self)
        which, rows = self._places(normalize_indices(request.indices, len(self), type(self).__name__))
        batch = self._rows.batch(which, rows, request.allocate)
        locate = partial(self._locate, which, rows)
        return self._cells.batch(batch, request.keys, len(rows), request.allocate, locate)

    def ranges(self, indices: Int64s) -> Ranges:
        """The ranges to fetch into caches before these samples are read."""
        if self._rows.is_local:
            return []
        which, _ = self._places(normalize_indices(indices, len(self), type(self).__name__))
        return self._rows.ranges(which)

    def address(self, index: int) -> tuple[str, str]:
        """The file of sample `index`, and its row there: `"row 7"`."""
        which, rows = self._places(np.array([normalize_index(index, len(self), type(self).__name__)]))
        file, row = self._rows.place(int(which[0]), int(rows[0]))
        return file, f"row {row}"

    @property
    def listing_fingerprint(self) -> str | None:
        """A digest of file names in order and chunk sizes.

        None for a table in memory. A loader refuses a state with another digest.
        """
        names = self._rows.names
        return digest_of(names, self.shard_sizes) if names else None

    def _places(self, inside: Int64s) -> tuple[Int64s, Int64s]:
        """The chunk of each index, and the row there."""
        return self._offsets.locate(inside)

    def _locate(self, which: Int64s, rows: Int64s, at: int) -> str:
        return self._rows.locate(int(which[at]), int(rows[at]))
