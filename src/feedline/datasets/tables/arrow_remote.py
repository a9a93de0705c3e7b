"""Record batches of Arrow files and streams in stores, read independently."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from feedline.core.caches import LRUCache, PerProcess
from feedline.core.kernels import Int64s
from feedline.datasets.flatbuffers import DamagedError
from feedline.datasets.indexes import FooterRead, MetadataCache, key_of
from feedline.datasets.signatures import begin_of, check_format, damage_error
from feedline.datasets.tables.arrow_batches import (
    ColumnChoice,
    ObjectBytes,
    ReadPlan,
    choose,
    plan_columns,
    plan_whole,
    read_batch,
    read_schema,
    validate_batch,
)
from feedline.datasets.tables.arrow_messages import GLANCE_NBYTES, Layout, layout_of, unpack_layout
from feedline.datasets.tables.arrow_rows import ColumnBuffers, columns_of_batch, read_rows
from feedline.datasets.tables.base import ChunkRows
from feedline.datasets.tables.chunks import StructChunk, table_chunk
from feedline.datasets.tables.decoded import CachedRows, FileChunks, Run
from feedline.datasets.tables.nulls import Nulls
from feedline.datasets.tables.types import StructType, check_same_columns, kinds_of, pyarrow
from feedline.stores.files import Extent, FileSet

_log = logging.getLogger("feedline")


_WHAT = "datasets.Arrow"


_PLANS = 4096


_BLOCK_NBYTES = 16 << 20


class _Described(NamedTuple):
    """The index entry of an object, and the offsets of its batches."""

    data: memoryview
    starts: list[int]


class RecordBatches(FileChunks[FileSet]):
    """Non-empty record batches of all objects, numbered in order.

    If some columns are chosen, only their buffers are read. Pickles with the byte offsets of all messages; the metadata
    of record batches stay in the index.
    """

    def __init__(self, files: FileSet, columns: Sequence[str] | None, index: str) -> None:
        self._metadata_cache = MetadataCache(index)
        self._layouts = _read_layouts(files, self._metadata_cache)
        kind = _find_kind(self._layouts, files.names, columns)
        super().__init__(files, kind, [layout.batches[:, 3] for layout in self._layouts])
        self._described: PerProcess[dict[int, _Described]] = PerProcess(dict)
        self._plans: PerProcess[LRUCache[int, ReadPlan]] = PerProcess(partial(LRUCache, _PLANS))
        self._choices: PerProcess[dict[bytes, ColumnChoice]] = PerProcess(dict)

    def decoded(self, number: int) -> StructChunk:
        """The chosen columns of a record batch."""
        batch = self.batch(number)
        with self._naming(number):
            return table_chunk(self.kind, batch)

    def batch(self, number: int) -> Any:
        """The chosen columns as a validated `pyarrow.RecordBatch`."""
        file, _ = self.in_file(number)
        plan = self._plan(number)
        layout = self._layouts[file]
        data = ObjectBytes(plan.spans, self._files[file].read(plan.spans))
        with self._naming(number):
            return validate_batch(read_batch(layout, self._choice(layout), plan, data))

    def columns(self, number: int) -> list[ColumnBuffers] | None:
        """The chosen columns; None if they must be read whole."""
        file, place = self.in_file(number)
        layout = self._layouts[file]
        with self._naming(number):
            return columns_of_batch(layout, place, self._metadata(file, place), self._choice(layout))

    def rows(self, number: int, columns: Sequence[ColumnBuffers], rows: Int64s) -> StructChunk:
        """Only these rows of a record batch, sorted and unique."""
        file, _ = self.in_file(number)
        choice = self._choice(self._layouts[file])
        names = [choice.schema.names[field] for field in choice.fields]
        with self._naming(number):
            return table_chunk(self.kind, validate_batch(read_rows(columns, names, rows, self._files[file].read)))

    def extents(self, number: int) -> list[Extent]:
        """The buffers and dictionaries of the chosen columns of a record batch."""
        file, _ = self.in_file(number)
        return [Extent(file, *span) for span in self._plan(number).spans]

    def _choice(self, layout: Layout) -> ColumnChoice:
        choices = self._choices()
        if layout.head not in choices:
            choices[layout.head] = choose(layout, {name for name, _ in self.kind.fields})
        return choices[layout.head]

    def _plan(self, number: int) -> ReadPlan:
        plans = self._plans()
        plan = plans.get(number)
        return plans.put(number, self._build_plan(number)) if plan is None else plan

    def _build_plan(self, number: int) -> ReadPlan:
        file, place = self.in_file(number)
        layout = self._layouts[file]
        choice = self._choice(layout)
        dictionaries = layout.needed(place, choice.dictionaries)
        if choice.are_all:
            return plan_whole(layout, place, dictionaries)
        metadata = self._metadata(file, place)
        with self._naming(number):
            return plan_columns(layout, place, metadata, choice, dictionaries)

    def _metadata(self, file: int, place: int) -> bytes:
        """The metadata of a record batch with its prefix."""
        described = self._described().get(file) or self._describe(file)
        if described is None:
            # Another process may have replaced the index since this process opened it.
            start, body = self._layouts[file].batches[place, :2].tolist()
            return bytes(self._files[file].read_uncached([(start, body)])[0])
        return bytes(described.data[described.starts[place] : described.starts[place + 1]])

    def _describe(self, file: int) -> _Described | None:
        """The index entry of an object, looked up once in each process."""
        data = self._metadata_cache.get(key_of(self._files.name(file), self._files.info(file)))
        if data is None:
            return None
        batches = self._layouts[file].batches
        stops = np.cumsum([0, *(batches[:, 1] - batches[:, 0]).tolist()])
        # The end of the entry has the metadata of the batches.
        described = self._described()[file] = _Described(memoryview(data), (stops + (len(data) - stops[-1])).tolist())
        return described

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Name the record batch in errors about damage."""
        try:
            yield
        except (pyarrow(_WHAT).ArrowException, OSError, DamagedError, IndexError, struct.error) as error:
            file, place = self.in_file(number)
            raise damage_error(f"record batch {place} of {self._files.name(file)}", "Arrow", error) from error


class SingleRows(CachedRows):
    """Rows of record batches, read individually and not cached.

    Batches whose rows cannot be read individually are read as a whole.
    """

    def __init__(self, batches: RecordBatches, nulls: Nulls) -> None:
        super().__init__(batches, nulls, cache_nbytes=0)
        self._batches = batches

    def _runs(self, which: Int64s, rows: Int64s) -> Iterator[Run]:
        columns = {number: self._batches.columns(number) for number in np.unique(which).tolist()}
        readable = [number for number, each in columns.items() if each is not None]
        is_single = np.isin(which, readable)
        if readable:
            yield self._read(which, rows, np.flatnonzero(is_single), columns)
        left = np.flatnonzero(~is_single)
        if len(left):
            for run in super()._runs(which[left], rows[left]):
                yield run._replace(places=left[run.places])

    def _read(
        self, which: Int64s, rows: Int64s, places: Int64s, columns: Mapping[int, list[ColumnBuffers] | None]
    ) -> Run:
        numbers, local = np.unique(which[places], return_inverse=True)
        wanted = {number: np.unique(rows[which == number]) for number in numbers.tolist()}

        def read(number: int) -> StructChunk:
            buffers = columns[number]
            assert buffers is not None
            return self._batches.rows(number, buffers, wanted[number])

        # No limit: the rows take as much memory as their samples.
        chunks = list(self._batches.each(read, numbers.tolist(), 0, lambda _: 0))
        at = np.empty(len(places), np.int64)
        for each, number in enumerate(numbers.tolist()):
            at[local == each] = np.searchsorted(wanted[number], rows[places][local == each])

        def locate(chunk: int, row: int) -> str:
            number = int(numbers[chunk])
            return self.locate(number, int(wanted[number][row]))

        return Run(places, ChunkRows(self._batches.kind, chunks, self._nulls, locate), local, at)


def _read_layouts(files: FileSet, cache: MetadataCache) -> list[Layout]:
    """Layouts of all objects, from the index or the objects."""
    keys = [key_of(files.name(number), files.info(number)) for number in range(len(files))]
    described = cache.collect(
        "messages of Arrow objects", files.names, keys, partial(_examine, files, FooterRead(GLANCE_NBYTES))
    )
    heads: dict[bytes, bytes] = {}  # equal schemas are stored and pickled once
    layouts = list(map(unpack_layout, described))
    return [layout._replace(head=heads.setdefault(layout.head, layout.head)) for layout in layouts]


def _examine(files: FileSet, first_read: FooterRead, number: int) -> bytes:
    """Read the packed layout of an object."""
    file = files[number]

    def blocks(start: int) -> Iterator[tuple[int, memoryview]]:
        _log.info(
            "%s is an Arrow stream, which has no table of contents: it is read from byte %d on; write it as a file"
            " (pyarrow.ipc.new_file) to avoid that",
            file.name,
            start,
        )
        for at in range(start, file.nbytes, _BLOCK_NBYTES):
            yield at, file.read([(at, min(at + _BLOCK_NBYTES, file.nbytes))])[0]

    try:
        return layout_of(file.nbytes, file.read_uncached, blocks, first_read)
    except DamagedError as error:
        check_format(file.name, "Arrow", begin_of(file))
        raise damage_error(file.name, "Arrow", error) from error


def _find_kind(layouts: Sequence[Layout], names: Sequence[str], columns: Sequence[str] | None) -> StructType:
    """The kind of a sample; objects of another kind are refused."""
    arrow = pyarrow(_WHAT)
    schemas: dict[bytes, Any] = {}
    first: dict[bytes, tuple[Any, str]] = {}
    for layout, name in zip(layouts, names, strict=True):
        if layout.head not in schemas:
            try:
                schemas[layout.head] = read_schema(layout)
            except (arrow.ArrowException, OSError) as error:
                raise damage_error(name, "Arrow", error) from error
            first.setdefault(schemas[layout.head].serialize().to_pybytes(), (schemas[layout.head], name))
    kinds = [kinds_of(schema, columns, name) for schema, name in first.values()]
    check_same_columns(kinds, [name for _, name in first.values()])
    return kinds[0]
