"""One record batch of an Arrow file or stream: which bytes its columns, or rows of them, are made of, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feedline.datasets.ipc_arrays import Bytes, arrays_of
from feedline.datasets.ipc_bodies import Body
from feedline.datasets.ipc_columns import Columns
from feedline.datasets.ipc_layout import DamagedError, Layout
from feedline.datasets.ipc_rows import row_spans, taken
from feedline.datasets.kinds import pyarrow
from feedline.datasets.sparse import end_to_end
from feedline.stores.protocol import Range

_WHAT = "datasets.Arrow"


@dataclass(frozen=True)
class RecordBatch:
    """A record batch by its number in a layout, of which these columns are chosen.

    What is made is pyarrow's; DamagedError, an IndexError, or an error of Arrow's says that something is damaged.
    """

    layout: Layout
    number: int
    columns: Columns
    body: Body | None
    """What belongs to these columns; None if it is read as a whole."""

    @property
    def spans(self) -> list[Range]:
        """What has to be read: the buffers of the columns behind their dictionaries, or whole messages."""
        if self.body is None:
            return self.layout.needed(self.number)
        *dictionaries, _ = self.layout.needed(self.number, self.columns.dictionaries)
        return [*dictionaries, *self.body.spans]

    def made(self, views: Sequence[memoryview]) -> Any:
        """The columns, of what lies in `spans`: views of that, or copies where most of what they hold is not needed."""
        if self.body is None:
            return self._streamed(views)
        first = len(views) - len(self.body.spans)
        coming = map(_kept, views[first:])
        data = [next(coming) if start < stop else b"" for start, stop in self.body.buffers.tolist()]
        found = self._batch(self.body, data, views[:first])
        if found.num_rows != self._length:
            raise DamagedError(f"it has {found.num_rows} rows instead of {self._length}")
        return found

    def row_spans(self, rows: Sequence[int]) -> list[Range]:
        """What has to be read of it for these rows, if they have their places."""
        return row_spans(*self._places, rows)

    def rows(self, rows: Sequence[int], views: Sequence[memoryview]) -> Any:
        """These rows of the columns, of what lies in `row_spans(rows)`."""
        return self._batch(*taken(*self._places, self._length, rows, views))

    @property
    def _length(self) -> int:
        return int(self.layout.batches[self.number, 2])

    @property
    def _places(self) -> tuple[Body, list[int]]:
        assert self.body is not None
        assert self.columns.widths is not None
        return self.body, self.columns.widths

    def _streamed(self, views: Sequence[memoryview]) -> Any:
        arrow = pyarrow(_WHAT)
        file = arrow.PythonFile(end_to_end([memoryview(self.layout.schema), *views]), "r")
        try:
            found = arrow.ipc.open_stream(file).read_next_batch()
        except StopIteration as error:
            raise DamagedError("there is no record batch") from error
        found.validate()
        return found

    def _batch(self, body: Body, data: Sequence[Bytes], dictionaries: Sequence[memoryview] = ()) -> Any:
        arrays = arrays_of(self.columns.chosen.values(), body, data, dictionaries)
        found = pyarrow(_WHAT).RecordBatch.from_arrays(arrays, names=list(self.columns.chosen))
        found.validate()
        return found


def _kept(view: memoryview) -> memoryview:
    """The same bytes, lest far more be held in memory for as long as they are."""
    whole = memoryview(view.obj).nbytes
    return view if 2 * view.nbytes >= whole else memoryview(bytes(view))
