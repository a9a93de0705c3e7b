"""Rows read from the Arrow table of a Hugging Face dataset."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from feedline.core.kernels import Int64s
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.tensors import Allocator, allocate_tensor, uses_allocator
from feedline.datasets.signatures import damage_error
from feedline.datasets.tables.base import ChunkRows
from feedline.datasets.tables.chunks import table_chunks
from feedline.datasets.tables.columns import CellError, ListColumn, NumberBlock, TableColumn, number_blocks
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import StructType, kind_of, pyarrow

Targets = Mapping[str, torch.dtype | None]


def _without_zeros(texts: list[Any]) -> list[Any]:
    return [text.rstrip("\0") for text in texts]


_TEXTS_IN: dict[str | None, Callable[[list[Any]], list[Any]]] = {
    # `datasets` first makes a NumPy array of the texts, which drops zero characters at the end of a text.
    "torch": _without_zeros,
    "numpy": lambda texts: list(np.asarray(texts)),
}
"""Texts of a batch in each format of `datasets`."""


class StoredRows:
    """Rows of an Arrow table, in the order of the dataset's selection."""

    def __init__(self, dataset: Any, opened: tuple[ChunkRows, ShardOffsets]) -> None:
        self._texts = _TEXTS_IN.get(dataset.format["type"], list)
        self._transposes = dataset.format["type"] is None
        self._rows, self._offsets = opened
        self._blocks: list[tuple[list[str], NumberBlock, np.dtype[Any]]] | None = None
        self._selected: ChunkRows | None = None
        if dataset._indices is not None:
            selection = dataset._indices.table.rename_columns(["row"])
            self._selected, self._selected_offsets = opened_rows(selection, Nulls())

    def samples(self, indices: Int64s) -> list[dict[str, Any]]:
        """A dict of the stored values for each sample."""
        return self._rows.samples(*self._offsets.locate(self._stored(indices)))

    def plain(self, indices: Int64s) -> list[dict[str, Any]]:
        """A dict of Python's own values for each sample.

        `datasets` gives the same without a format.
        """
        where = self._offsets.locate(self._stored(indices))
        fields = self._rows.columns.fields
        try:
            columns = [_plain_values(column, *where) for column in fields.values()]
        except CellError as error:
            raise self._rows.sample_error(error, *where) from error
        return [dict(zip(fields, values, strict=True)) for values in zip(*columns, strict=True)]

    def converted(self, indices: Int64s, targets: Targets) -> list[dict[str, Any]]:
        """A dict for each sample, with tensors cast to the target dtypes."""
        dtypes = list(targets.items())
        texts = self._texts
        return [
            {n: texts([each[n]])[0] if d is None else each[n].to(d) for n, d in dtypes}
            for each in self.samples(indices)
        ]

    def batch(self, indices: Int64s, targets: Targets, allocate: Allocator) -> dict[str, Any]:
        """The collated batch in the target dtypes, in memory from `allocate`."""
        where = self._offsets.locate(self._stored(indices))
        is_shared = allocate is not allocate_tensor and uses_allocator(allocate, _ITEM_NBYTES * len(indices))
        numbers = {} if is_shared else self._numbers(where, targets)
        # A tensor of a target dtype is not cast again, so its final memory can be allocated at once.
        final = set(targets.values())

        def allocate_final(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            is_final = dtype in final and not (self._transposes and len(shape) > 1)
            return (allocate if is_final else allocate_tensor)(shape, dtype)

        left = [name for name in targets if name not in numbers]
        batch = self._rows.batch(*where, allocate_final, left) if left else {}
        formatted = {name: self._formatted(batch[name], targets[name], allocate) for name in left}
        return {name: numbers[name] if name in numbers else formatted[name] for name in targets}

    def _numbers(self, where: tuple[Int64s, Int64s], targets: Targets) -> dict[str, torch.Tensor]:
        """Columns of plain numbers, read together in the target dtypes."""
        blocks = self._blocks
        if blocks is None:
            blocks = self._blocks = list(number_blocks(self._rows.columns.fields, targets))
        found: dict[str, torch.Tensor] = {}
        for names, block, dtype in blocks:
            found.update(zip(names, block.batch(*where, dtype), strict=True))
        return found

    def _formatted(self, values: Any, dtype: torch.dtype | None, allocate: Allocator) -> Any:
        if dtype is None:
            return self._texts(values)
        if self._transposes and values.ndim > 1:  # default collate makes a tensor of each position in the lists
            return [allocate(tuple(line.shape), dtype).copy_(line) for line in values.t().contiguous()]
        return values if values.dtype == dtype else allocate(tuple(values.shape), dtype).copy_(values)

    def _stored(self, indices: Int64s) -> Int64s:
        """Rows of samples in the table, by the selection of the dataset."""
        if self._selected is None:
            return indices
        selected = self._selected.batch(*self._selected_offsets.locate(indices), allocate_tensor)["row"]
        rows: Int64s = selected.numpy().astype(np.int64)
        return rows


_opened: dict[int, dict[tuple[str, ...], tuple[ChunkRows, ShardOffsets]]] = {}
"""Opened columns of tables that are still in use, by the identity of the table."""


def rows_of(table: Any, names: Sequence[str]) -> tuple[ChunkRows, ShardOffsets]:
    """Open columns of a table once, for all loaders of this process.

    A table of a million rows has thousands of chunks, whose look-up takes longer than the epoch of a small loader.
    """
    opened = _opened.get(id(table))
    if opened is None:
        opened = _opened[id(table)] = {}
        weakref.finalize(table, _opened.pop, id(table), None).atexit = False
    key = tuple(names)
    if key not in opened:
        opened[key] = opened_rows(table.select(list(key)), Nulls())  # no lock: of two threads, either result is valid
    return opened[key]


def opened_rows(table: Any, nulls: Nulls) -> tuple[ChunkRows, ShardOffsets]:
    """Open all columns of a table; SampleError if it is damaged."""
    kind = StructType(tuple((field.name, kind_of(field.type, field.name)) for field in table.schema))
    batches = [batch for batch in table.to_batches() if batch.num_rows]
    offsets = ShardOffsets(batch.num_rows for batch in batches)
    for number, batch in enumerate(batches):
        try:
            batch.validate()
        except pyarrow("HuggingFace").ArrowInvalid as error:
            raise damage_error(f"the Hugging Face table from row {offsets.start(number)} on", "Arrow", error) from error
    chunks = table_chunks(kind, batches)
    return ChunkRows(kind, chunks, nulls, lambda chunk, row: f"row {offsets.start(chunk) + row}"), offsets


_ITEM_NBYTES = 8
"""Bytes of the largest number."""


def _plain_values(column: TableColumn, which: Int64s, rows: Int64s) -> list[Any]:
    is_ragged = isinstance(column, ListColumn)
    values = column.samples(which, rows) if is_ragged else column.batch(which, rows, allocate_tensor)
    if isinstance(values, torch.Tensor):
        plain: list[Any] = values.tolist()
        return plain
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in values]
