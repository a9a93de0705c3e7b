"""Arrow files and streams that are not all on this machine: their record batches, each read by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.chunks import StructChunk, table_chunk
from feedline.datasets.concurrently import Concurrently
from feedline.datasets.descriptions import Descriptions, key_of
from feedline.datasets.ipc_layout import DamagedError, Layout, layout_of, unpacked
from feedline.datasets.kinds import Struct, kinds_of, pyarrow, refuse_different
from feedline.datasets.sparse import end_to_end
from feedline.datasets.uncached import uncached
from feedline.errors import SampleError
from feedline.stores import CachedStore, Want
from feedline.stores.blobs import Blobs, Extent

T = TypeVar("T")

_log = logging.getLogger("feedline")

_WHAT = "datasets.Arrow"
_BLOCK_NBYTES = 16 << 20
_LAID_OUT_AT_ONCE = 8
"""Objects gone through at the same time, of each of which a block is in memory."""


class ArrowObjects:
    """The record batches of all objects, in order, without empty ones. Pickles with where each lies."""

    def __init__(self, blobs: Blobs, columns: Sequence[str] | None, index: str) -> None:
        self._blobs = blobs
        layouts = _layouts(blobs, Descriptions(index))
        self.kind = _kind(layouts, blobs.names, columns)
        self._layouts = [layout._replace(batches=layout.batches[layout.batches[:, 2] > 0]) for layout in layouts]
        self.sizes: NDArray[np.int64] = np.concatenate([layout.batches[:, 2] for layout in self._layouts])
        self._bounds = np.concatenate(([0], np.cumsum(self.sizes)))
        self._first = np.cumsum([0, *(len(layout.batches) for layout in self._layouts)])
        self._concurrently = Concurrently()

    def decoded(self, number: int) -> StructChunk:
        """The columns of a record batch; what is not compressed is a view of what was read."""
        blob, batch = self._place(number)
        layout = self._layouts[blob]
        views = [memoryview(layout.schema), *self._blobs[blob].read(layout.needed(batch))]
        arrow = pyarrow(_WHAT)
        try:
            found = arrow.ipc.open_stream(arrow.PythonFile(end_to_end(views), "r")).read_next_batch()
            found.validate()
        except (arrow.ArrowException, OSError, StopIteration) as error:
            raise _damaged(f"record batch {batch} of {self._blobs.name(blob)}", error) from error
        return table_chunk(self.kind, found)

    def each(self, work: Callable[[int], T], numbers: Sequence[int], limit_nbytes: int) -> Iterator[T]:
        """`work` of each of these record batches, in order, on several at once."""
        return self._concurrently.map(work, numbers, self._nbytes, limit_nbytes)

    def wants(self, numbers: Sequence[int]) -> list[tuple[CachedStore, Want]]:
        """What decoding these record batches wants from caches."""
        places = map(self._place, numbers)
        return self._blobs.wants(
            [Extent(blob, *span) for blob, batch in places for span in self._layouts[blob].needed(batch)]
        )

    def locate(self, number: int, row: int) -> str:
        """A row of a record batch, as the object knows it."""
        blob, _ = self._place(number)
        return f"{self._blobs.name(blob)}, row {int(self._bounds[number] - self._bounds[self._first[blob]]) + row}"

    def _place(self, number: int) -> tuple[int, int]:
        blob = int(np.searchsorted(self._first, number, side="right")) - 1
        return blob, number - int(self._first[blob])

    def _nbytes(self, number: int) -> int:
        blob, batch = self._place(number)
        start, stop, _ = self._layouts[blob].batches[batch].tolist()
        return int(stop - start)


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


def _layouts(blobs: Blobs, kept: Descriptions) -> list[Layout]:
    """Of all objects; those that the index does not have are looked into, several at once."""
    keys = [key_of(blobs.name(number), blobs.info(number)) for number in range(len(blobs))]
    described = {number: found for number, key in enumerate(keys) if (found := kept.get(key)) is not None}
    lacking = [number for number in range(len(blobs)) if number not in described]
    if lacking:
        _log.info("%d Arrow objects are looked into, the first is %s", len(lacking), blobs.name(lacking[0]))
        with ThreadPoolExecutor(_LAID_OUT_AT_ONCE) as pool:
            made = pool.map(lambda number: _laid_out(blobs, number).packed(), lacking)
            described |= zip(lacking, made, strict=True)
        kept.replace({key: described[number] for number, key in enumerate(keys)})
    return [unpacked(described[number]) for number in range(len(blobs))]


def _laid_out(blobs: Blobs, number: int) -> Layout:
    blob = blobs[number]

    def blocks(start: int) -> Iterator[tuple[int, memoryview]]:
        _log.info(
            "%s is an Arrow stream, which has no table of contents: it is read from byte %d on; written as a file"
            " (pyarrow.ipc.new_file), it need not be",
            blob.name,
            start,
        )
        for at in range(start, blob.nbytes, _BLOCK_NBYTES):
            yield at, blob.read([(at, min(at + _BLOCK_NBYTES, blob.nbytes))])[0]

    try:
        return layout_of(blob.nbytes, uncached(blob), blocks)
    except DamagedError as error:
        raise _damaged(blob.name, error) from error


def _damaged(what: str, error: Exception) -> SampleError:
    return SampleError(f"{what} is no whole Arrow file or stream ({error}); write it again, or leave it out")
