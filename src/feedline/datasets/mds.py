"""`MDS`: the shards that Mosaic's StreamingDataset reads, in any order."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Decoding, refuse_bare, split_transform
from feedline.datasets.files import Pathlike
from feedline.datasets.indexed_folders import IndexedFolder
from feedline.datasets.lazily import Lazily
from feedline.datasets.mds_encodings import decoder, is_picture
from feedline.datasets.mds_index import Columns, shards_of
from feedline.datasets.mds_index import Shard as Told
from feedline.datasets.paths import Paths, listed
from feedline.datasets.records import Field, FieldRecords
from feedline.datasets.shard_ends import Read, offsets_in
from feedline.datasets.shard_files import ShardFileFields, ShardFiles
from feedline.datasets.shard_sources import Shard
from feedline.datasets.sharded_records import Record
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache


class MDS(ShardFileFields):
    """The samples of an MDS folder (with its `index.json`) as dicts of what Mosaic's own reader gives.

    `path` is a folder of this machine or the address of one in a store, or several, whose samples follow one another.
    `columns` picks some; those encoded as pickle are never read. `transform` is a function of the sample, or functions
    by column.

    What a store gives is kept in the folder `cache`, if there is one, and so are compressed shards, which are
    decompressed on first use (by default into the user's cache folder), and their hashes compared where the index has
    some; `check_hashes` compares those of the others now. `options` are those of `open_store`.
    """

    def __init__(
        self,
        path: Paths,
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | Mapping[str, Transform] | None = None,
        cache: Cache | Pathlike | None = None,
        check_hashes: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if columns is not None:
            refuse_bare(columns, "columns", "('image', 'label')")
        folders = [IndexedFolder(each, cache=cache, options=options) for each in listed(path)]
        self.paths = [folder.name for folder in folders]
        _refuse_twice(self.paths)
        known: dict[Columns, Columns] = {}
        told = [(folder, each) for folder in folders for each in shards_of(folder, known)]
        names = tuple(columns) if columns is not None else tuple(dict.fromkeys(n for kind in known for n in kind.names))
        by_column, whole = split_transform(transform, names)
        super().__init__(ShardFiles([(folder, _shard(each)) for folder, each in told], _ends, "mds", cache))
        FieldRecords.__init__(self, whole)
        layouts = {kind: _layout(kind, names, by_column, ", ".join(self.paths)) for kind in known}
        self._layouts = tuple(layouts.values())
        places = {kind: number for number, kind in enumerate(layouts)}
        self._kinds = [places[each.columns] for _, each in told]
        self._offsets = Lazily(partial(_offsets, self._files), len(told))
        if check_hashes:
            self._files.check()

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        offsets = self._offsets[shard]
        return offsets[row], offsets[row + 1]

    def _decodings(self) -> list[Decoding]:
        """Of all shards: a column that is encoded otherwise in some of them has no one decoding."""
        return [decoding for layout in self._layouts for _, _, decoding in layout.wanted]

    def _fields_in(self, record: Record) -> dict[str, Field]:
        layout, (shard, row, data) = self._layouts[self._kinds[record.shard]], record
        try:
            spans = layout.spans(data)
        except (ValueError, struct.error) as error:
            raise SampleError(f"{self._where(shard, row)} is damaged ({error}); copy the shard again") from error
        fields = {}
        for number, name, decoding in layout.wanted:
            start, stop = spans[number]
            fields[name] = Field(decoding, data[start:stop], partial(self._where, shard, row, name))
        return fields

    def _where(self, shard: int, row: int, name: str | None = None) -> str:
        return f"{'' if name is None else f'column {name!r} of '}sample {row} of {self._files.where(shard)}"


@dataclass(frozen=True, slots=True)
class _Layout:
    """How samples of some shards are laid out, and what decodes the columns that are wanted."""

    heads: str
    sizes: tuple[int | None, ...]
    wanted: tuple[tuple[int, str, Decoding], ...]

    def spans(self, data: memoryview) -> list[tuple[int, int]]:
        """From where to where each column goes; ValueError if it goes too far."""
        lengths = iter(struct.unpack_from(self.heads, data))
        at, found = struct.calcsize(self.heads), []
        for size in self.sizes:
            start, at = at, at + (next(lengths) if size is None else size)
            found.append((start, at))
        if at != len(data):
            raise ValueError(f"its columns take {at} bytes of {len(data)}")
        return found


def _refuse_twice(paths: Sequence[str]) -> None:
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ArgumentError(f"{path} is named twice, so that its samples would be, too")


def _shard(told: Told) -> Shard:
    forms: dict[str, str | None] = {told.raw.name: None}
    if told.zipped is not None and told.codec is not None:
        forms[told.zipped.name] = told.codec
    return Shard(forms, told.raw.nbytes, told.samples, told.raw.hashes)


def _ends(read: Read, nbytes: int, samples: int) -> tuple[memoryview, memoryview]:
    """The number of samples, and where each begins: nothing at the end is needed."""
    return read(0, min(nbytes, 4 * (samples + 2))), memoryview(b"")


def _offsets(files: ShardFiles, number: int) -> memoryview:
    begin, shard = files.ends(number).begin, files.shards[number]
    return offsets_in(begin, shard.samples, shard.nbytes, files.where(number))


def _layout(columns: Columns, names: Sequence[str], by_column: Mapping[str, Transform], path: str) -> _Layout:
    wanted = []
    for name in names:
        if name not in columns.names:
            raise ArgumentError(f"{path} has shards without a column {name!r}; they have {', '.join(columns.names)}")
        number = columns.names.index(name)
        wanted.append((number, name, _decoding(name, columns.encodings[number], by_column.get(name), path)))
    return _Layout(f"<{columns.sizes.count(None)}I", columns.sizes, tuple(wanted))


def _decoding(name: str, encoding: str, transform: Transform | None, path: str) -> Decoding:
    if is_picture(encoding) and transform is not None:
        return Decoding("image", transform)
    try:
        return Decoding(decoder(encoding), transform, kind=encoding.partition(":")[0])
    except ArgumentError as error:
        raise ArgumentError(f"column {name!r} of {path} is encoded as {error}; leave it out with columns=") from None
