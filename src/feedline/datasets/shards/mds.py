"""`MDS`: samples of the shards that Mosaic's StreamingDataset reads, binary and text.

Values are decoded as by Mosaic's own reader; columns encoded as pickle are never read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from feedline.core.dataset import TransformFunction
from feedline.core.paths import Pathlike
from feedline.datasets.base import Field, FieldRecords, Record
from feedline.datasets.decoding import Decoder, ValueDecoder, check_names, decoder_of, split_transform
from feedline.datasets.formats import ShardSummary
from feedline.datasets.paths import Paths, listed
from feedline.datasets.shard_summaries import StoredShard, summarize_folders
from feedline.datasets.shards.files import ReadBytes, ShardFileFields, ShardFiles, ShardSource, offsets_in
from feedline.datasets.shards.folder import IndexedFolder
from feedline.datasets.shards.mds_index import MDSColumns, MDSFile, MDSShard, read_shards
from feedline.datasets.shards.mds_values import decode_function, is_image
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import LazyList


class MDS(ShardFileFields):
    """Samples of folders of Mosaic Streaming, as dicts.

    Values equal the values of Mosaic's own reader. Shards may be binary, or of text (CSV, TSV, XSV, JSON).

    `paths` is a local folder, with its `index.json`, the address of one in a store, or several of these, whose samples
    are concatenated. `columns` chooses columns; those encoded as pickle are never read. `transform` is a function of
    the sample, or a dict of functions by column.

    Objects are kept in the folder `cache` if one is given. Compressed shards are decompressed on first use, into
    `cache` or the user's cache folder, and checked against the hashes in the index. With `check_hashes`, the
    constructor checks all other shards, too. `options` are passed to `open_store`.

    SampleError names an index or shard that is damaged, and a value that cannot be decoded.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        transform: TransformFunction | Mapping[str, TransformFunction] | None = None,
        check_hashes: bool = False,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if columns is not None:
            check_names(columns, "columns", "('image', 'label')")
        folders = [IndexedFolder(each, cache=cache, options=options) for each in listed(paths)]
        self.paths = [folder.name for folder in folders]
        _check_distinct(self.paths)
        known: dict[MDSColumns, MDSColumns] = {}
        shards = [(folder, each) for folder in folders for each in read_shards(folder, known)]
        names = tuple(columns) if columns is not None else tuple(dict.fromkeys(n for kind in known for n in kind.names))
        by_column, whole = split_transform(transform, names)
        sources = [(folder, _shard_source(each, each.raw, each.zipped)) for folder, each in shards]
        is_text = all(shard.meta is not None for _, shard in shards)
        super().__init__(ShardFiles(sources, None if is_text else _ends, "mds", cache))
        FieldRecords.__init__(self, whole)
        layouts = {kind: _build_layout(kind, names, by_column, ", ".join(self.paths)) for kind in known}
        self._layouts = tuple(layouts.values())
        places = {kind: number for number, kind in enumerate(layouts)}
        self._kinds = [places[each.columns] for _, each in shards]
        offsets = _Offsets(self._files, shards, cache)
        self._offsets = LazyList(offsets.read, len(shards))
        if check_hashes:
            self._files.check()
            offsets.check()

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        self._files.file(shard)  # raises if the file has changed
        offsets = self._offsets[shard]
        return offsets[row], offsets[row + 1]

    def _decoders(self) -> list[Decoder]:
        """Decodings of all shards.

        A column whose encoding differs between shards appears several times.
        """
        return [decoding for layout in self._layouts for _, _, decoding in layout.wanted]

    def _fields_in(self, record: Record) -> dict[str, Field]:
        layout, (shard, row, data) = self._layouts[self._kinds[record.shard]], record
        try:
            parts = layout.columns.split(data)
        except (ValueError, struct.error) as error:
            raise SampleError(f"{self._where(shard, row)} is damaged ({error}); copy the shard again") from error
        fields = {}
        for number, name, decoding in layout.wanted:
            fields[name] = Field(decoding, parts[number], partial(self._where, shard, row, name))
        return fields

    def _where(self, shard: int, row: int, name: str | None = None) -> str:
        return f"{'' if name is None else f'column {name!r} of '}sample {row} of {self._files.where(shard)}"


@dataclass(frozen=True, slots=True)
class _ShardLayout:
    """Columns of some shards, and the decoders of wanted ones.

    `wanted` has their numbers and names.
    """

    columns: MDSColumns
    wanted: tuple[tuple[int, str, Decoder], ...]


class _Offsets:
    """Offsets of the samples in each shard.

    They are in its head, or in the file next to a shard of text.
    """

    def __init__(
        self, files: ShardFiles, shards: Sequence[tuple[IndexedFolder, MDSShard]], cache: Cache | Pathlike | None
    ) -> None:
        text = [(number, folder, shard) for number, (folder, shard) in enumerate(shards) if shard.meta is not None]
        sources = [
            (folder, _shard_source(shard, shard.meta, shard.zipped_meta)) for _, folder, shard in text if shard.meta
        ]
        self._files = files
        self._metas = ShardFiles(sources, _ends, "mds", cache) if sources else None
        self._places = {number: place for place, (number, _, _) in enumerate(text)}

    def read(self, number: int) -> memoryview:
        """Offsets of a shard; SampleError if they are damaged."""
        shard = self._files.shards[number]
        if self._metas is None or number not in self._places:
            begin = self._files.ends(number).begin
            return offsets_in(begin, shard.samples, shard.nbytes, self._files.where(number))
        place = self._places[number]
        return offsets_in(
            self._metas.ends(place).begin, shard.samples, shard.nbytes, self._metas.where(place), is_apart=True
        )

    def check(self) -> None:
        """Raise SampleError for the first file of offsets with other hashes."""
        if self._metas is not None:
            self._metas.check()


def _check_distinct(paths: Sequence[str]) -> None:
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ArgumentError(f"{path} is listed twice; its samples would be duplicated")


def _shard_source(shard: MDSShard, raw: MDSFile, zipped: MDSFile | None) -> ShardSource:
    forms: dict[str, str | None] = {raw.name: None}
    if zipped is not None and shard.codec is not None:
        forms[zipped.name] = shard.codec
    return ShardSource(forms, raw.nbytes, shard.samples, raw.hashes)


def _ends(read: ReadBytes, nbytes: int, samples: int) -> tuple[memoryview, memoryview]:
    """Ends of a shard: number of samples with offsets, and no bytes."""
    return read(0, min(nbytes, 4 * (samples + 2))), memoryview(b"")


def _build_layout(
    columns: MDSColumns, names: Sequence[str], by_column: Mapping[str, TransformFunction], path: str
) -> _ShardLayout:
    wanted = []
    for name in names:
        if name not in columns.names:
            raise ArgumentError(f"shards of {path} have no column {name!r}; they have {', '.join(columns.names)}")
        number = columns.names.index(name)
        wanted.append((number, name, _build_decoder(columns, number, by_column.get(name), path)))
    return _ShardLayout(columns, tuple(wanted))


def _build_decoder(columns: MDSColumns, number: int, transform: TransformFunction | None, path: str) -> Decoder:
    name, encoding = columns.names[number], columns.encodings[number]
    if is_image(encoding) and transform is not None:
        return decoder_of("image", transform)
    try:
        return ValueDecoder(decode_function(encoding, columns.form), transform, kind=encoding.partition(":")[0])
    except ArgumentError as error:
        raise ArgumentError(f"column {name!r} of {path} is encoded as {error}; leave it out with columns=") from None


def summarize_shards(paths: Sequence[str]) -> ShardSummary:
    """Shards of MDS folders."""
    return summarize_folders(
        "shard", (shard for folder in map(IndexedFolder, paths) for shard in _stored_shards(folder))
    )


def _stored_shards(folder: IndexedFolder) -> Iterator[StoredShard]:
    shards = read_shards(folder, {})
    files = folder.files([[each.name for each in (shard.raw, shard.zipped) if each] for shard in shards])
    for shard, file in zip(shards, files, strict=True):
        is_compressed = file.name != shard.raw.name
        yield StoredShard(shard.samples, folder.nbytes(file), shard.raw.nbytes, is_compressed)
