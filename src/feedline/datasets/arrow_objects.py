"""Arrow files and streams that are not all on this machine: their record batches, each read by itself."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.arrow_layouts import damaged, layouts_of
from feedline.datasets.chosen_bodies import chosen_bodies
from feedline.datasets.chunks import StructChunk, table_chunk
from feedline.datasets.concurrently import Concurrently
from feedline.datasets.descriptions import Descriptions
from feedline.datasets.ipc_bodies import Bodies
from feedline.datasets.ipc_columns import Columns
from feedline.datasets.ipc_layout import DamagedError, Layout
from feedline.datasets.kinds import Struct, kinds_of, pyarrow, refuse_different
from feedline.datasets.record_batches import RecordBatch
from feedline.per_process import PerProcess
from feedline.stores import CachedStore, Want
from feedline.stores.blobs import Blobs, Extent

T = TypeVar("T")

_WHAT = "datasets.Arrow"
_NONE = Bodies.of(())


class ArrowObjects:
    """The record batches of all objects, in order, without empty ones. Pickles with where what is read of each lies.

    Where some columns are chosen only their buffers are read of a record batch, unless it can only be read as a whole.
    `by_rows` tells that rows are to be read by themselves: these columns have more than `limit_nbytes` in one of the
    record batches, and of all of them it is known where each row lies.
    """

    def __init__(self, blobs: Blobs, columns: Sequence[str] | None, index: str, limit_nbytes: int) -> None:
        self._blobs = blobs
        layouts = list(map(_filled, layouts_of(blobs, Descriptions(index))))
        self.kind = _kind(layouts, blobs.names, columns)
        self._columns = PerProcess(partial(_columns, list({layout.schema for layout in layouts}), self.kind))
        self._bodies, self._nbytes, self.by_rows = chosen_bodies(layouts, self._columns(), limit_nbytes)
        self._layouts = [layout._replace(bodies=_NONE) for layout in layouts]
        self.sizes: NDArray[np.int64] = np.concatenate([layout.batches[:, 2] for layout in layouts])
        self._bounds = np.concatenate(([0], np.cumsum(self.sizes)))
        self._first = np.cumsum([0, *(len(layout.batches) for layout in layouts)])
        self._concurrently = Concurrently()

    def decoded(self, number: int) -> StructChunk:
        """The columns of a record batch; what is not compressed is a view of what was read, or a small part copied."""
        batch = self._batch(number)
        views = self._blobs[self._place(number)[0]].read(batch.spans)
        with self._naming(number):
            return table_chunk(self.kind, batch.made(views))

    def rows(self, numbers: Sequence[int], rows: Sequence[Sequence[int]]) -> list[StructChunk]:
        """Rows of each of these record batches, all read at once; only if they are read `by_rows`."""
        views = iter(self._blobs.read(self._row_extents(numbers, rows)))
        return [self._rows(number, each, views) for number, each in zip(numbers, rows, strict=True)]

    def each(self, work: Callable[[int], T], numbers: Sequence[int], limit_nbytes: int) -> Iterator[T]:
        """`work` of each of these record batches, in order, on several at once."""
        return self._concurrently.map(work, numbers, lambda number: int(self._nbytes[number]), limit_nbytes)

    def wants(self, numbers: Sequence[int]) -> list[tuple[CachedStore, Want]]:
        """What decoding these record batches wants from caches."""
        places = [(self._place(number)[0], span) for number in numbers for span in self._batch(number).spans]
        return self._blobs.wants([Extent(blob, *span) for blob, span in places])

    def wants_rows(self, numbers: Sequence[int], rows: Sequence[Sequence[int]]) -> list[tuple[CachedStore, Want]]:
        """What `rows` wants from caches."""
        return self._blobs.wants(self._row_extents(numbers, rows))

    def locate(self, number: int, row: int) -> str:
        """A row of a record batch, as the object knows it."""
        blob, _ = self._place(number)
        return f"{self._blobs.name(blob)}, row {int(self._bounds[number] - self._bounds[self._first[blob]]) + row}"

    def _place(self, number: int) -> tuple[int, int]:
        blob = int(np.searchsorted(self._first, number, side="right")) - 1
        return blob, number - int(self._first[blob])

    def _batch(self, number: int) -> RecordBatch:
        blob, place = self._place(number)
        layout = self._layouts[blob]
        return RecordBatch(layout, place, self._columns()[layout.schema], self._bodies[number])

    def _row_extents(self, numbers: Sequence[int], rows: Sequence[Sequence[int]]) -> list[Extent]:
        return [
            Extent(self._place(number)[0], *span)
            for number, each in zip(numbers, rows, strict=True)
            for span in self._batch(number).row_spans(each)
        ]

    def _rows(self, number: int, rows: Sequence[int], views: Iterator[memoryview]) -> StructChunk:
        batch = self._batch(number)
        with self._naming(number):
            return table_chunk(self.kind, batch.rows(rows, list(islice(views, len(batch.row_spans(rows))))))

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Errors of a record batch that is damaged name it."""
        try:
            yield
        except (pyarrow(_WHAT).ArrowException, OSError, DamagedError, IndexError, struct.error) as error:
            blob, place = self._place(number)
            raise damaged(f"record batch {place} of {self._blobs.name(blob)}", error) from error


def _columns(schemas: Iterable[bytes], kind: Struct) -> dict[bytes, Columns]:
    """Those of each schema that are chosen."""
    return {schema: Columns(schema, [name for name, _ in kind.fields]) for schema in schemas}


def _filled(layout: Layout) -> Layout:
    """Without record batches that are empty."""
    filled = layout.batches[:, 2] > 0
    if filled.all():
        return layout
    return layout._replace(batches=layout.batches[filled], bodies=layout.bodies.where(filled))


def _kind(layouts: Sequence[Layout], names: Sequence[str], columns: Sequence[str] | None) -> Struct:
    """The kind of a sample, which all objects must have in common."""
    arrow = pyarrow(_WHAT)
    first: dict[bytes, str] = {}
    for layout, name in zip(layouts, names, strict=True):
        first.setdefault(layout.schema, name)
    schemas = [arrow.ipc.read_schema(arrow.py_buffer(text)) for text in first]
    kinds = [kinds_of(schema, columns, name) for schema, name in zip(schemas, first.values(), strict=True)]
    refuse_different(kinds, list(first.values()))
    return kinds[0]
