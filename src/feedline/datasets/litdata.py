"""`LitData`: what `litdata.optimize` wrote, in any order: samples of any structure, or windows of tokens."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from itertools import compress
from operator import getitem
from typing import Any

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Decoding, Step, Where, refuse_bare, split_transform
from feedline.datasets.files import Pathlike
from feedline.datasets.indexed_folders import IndexedFolder
from feedline.datasets.lazily import Lazily
from feedline.datasets.litdata_chunks import Items, chunk_ends, items_of
from feedline.datasets.litdata_index import index_of
from feedline.datasets.litdata_leaves import decoder, is_picture
from feedline.datasets.litdata_rows import Rows
from feedline.datasets.once import OnceCache
from feedline.datasets.records import Field, FieldRecords
from feedline.datasets.shard_files import ShardFileFields, ShardFiles
from feedline.datasets.sharded_records import Record
from feedline.errors import ArgumentError, SampleError
from feedline.per_process import PerProcess
from feedline.stores import Cache
from feedline.stores.blobs import Extent

_KEPT_NBYTES = 1 << 26
"""How much of compressed or tabular chunks each process keeps decoded."""


class LitData(ShardFileFields):
    """The samples of a LitData folder (with its `index.json`), in the structure in which they were written.

    Tensors, arrays, numbers, texts and bytes come as they were, pictures as PIL images, other files as bytes. `leaves`
    picks some, "image", or "view.0" where they are nested, and samples have the structure that is left of them; those
    stored as pickle are never read. `transform` is a function of the sample, or functions by leaf. For what was written
    with a `TokensLoader`, read `LitDataTokens`.

    `path` is a folder of this machine or the address of one in a store. What a store gives is kept in the folder
    `cache`, if there is one, and so are chunks that were compressed as a whole, which are decompressed on first use (by
    default into the user's cache folder). `options` are those of `open_store`.
    """

    def __init__(
        self,
        path: Pathlike,
        *,
        leaves: Sequence[str] | None = None,
        transform: Transform | Mapping[str, Transform] | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        folder = IndexedFolder(path, cache=cache, options=options)
        self.path = folder.name
        index = index_of(folder)
        if index.tokens:
            raise ArgumentError(f"{self.path} holds tokens: read it with datasets.LitDataTokens(path, window)")
        self._index, self._names = index, index.tree.names()
        wanted = _wanted(leaves, self._names, self.path)
        self._paths = None if leaves is None else [*compress(index.tree.paths(), wanted)]
        self._tree = index.tree if leaves is None else index.tree.pruned(iter(wanted)) or index.tree
        by_leaf, whole = split_transform(transform, [*compress(self._names, wanted)])
        super().__init__(ShardFiles([(folder, shard) for shard in index.shards()], chunk_ends, "litdata", cache))
        FieldRecords.__init__(self, whole)
        self._steps = {name: Step(each) for name, each in by_leaf.items()}
        kept = PerProcess(partial(OnceCache[Any, Any], _KEPT_NBYTES))
        self._items = Lazily(partial(_items, self._files, index.wrapped, kept), len(index.chunks))
        self._leaves = self._leaf_decodings(wanted, by_leaf)

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        items = self._items[shard]
        return (0, 0) if items.kept(row) else items.span(row)

    def _decodings(self) -> list[Decoding]:
        return [decoding for decoding in self._leaves if decoding is not None]

    def _leaf_decodings(self, wanted: Sequence[bool], by_leaf: Mapping[str, Transform]) -> list[Decoding | None]:
        """How each leaf is decoded that is wanted; none where samples come whole, whatever the index says of leaves."""
        formats = zip(self._names, self._index.formats, wanted, strict=True)
        try:
            return [
                _decoding(name, kind, by_leaf.get(name), self.path) if is_wanted else None
                for name, kind, is_wanted in formats
            ]
        except ArgumentError:
            if self._index.chunks and isinstance(self._items[0], Rows):
                return []
            raise

    def _item(self, record: Record) -> Any:
        """The bytes of a sample, or one that came whole."""
        items, (shard, row, data) = self._items[record.shard], record
        # What was kept, so that it was not read, may be forgotten by now.
        return items.item(row, lambda: data or self._files.read([Extent(shard, *items.span(row))])[0])

    def _decoded(self, record: Record, row: int | None) -> Any:
        item = self._item(record)
        if isinstance(item, memoryview):
            leaves = [decoding(data, row, where) for decoding, data, where in self._leaves_in(item, record)]
            return self._step(self._tree.filled(leaves[::-1]), row)
        return self._step(self._picked(self._stepped(item, row), record), row)

    def _fields_in(self, record: Record) -> dict[str, Field]:
        item = self._item(record)
        if not isinstance(item, memoryview):
            raise SampleError(f"{self._where(record)} is a row of a table, others are not; write them again")
        # By number, because names may be equal: keys may hold dots.
        return {str(number): Field(*leaf) for number, leaf in enumerate(self._leaves_in(item, record))}

    def _leaves_in(self, item: memoryview, record: Record) -> list[tuple[Decoding, memoryview, Where]]:
        """The wanted leaves of a sample out of its bytes: the length of each, wanted or not, comes first."""
        count, where = len(self._leaves), partial(self._where, record)
        stop = 4 * count
        try:
            lengths = struct.unpack_from(f"<{count}I", item)
        except struct.error:
            lengths = ()
        if stop + sum(lengths) != len(item) or not lengths:
            raise SampleError(
                f"{where()} is damaged: its leaves do not fill its {len(item)} bytes; copy the chunk again"
            )
        leaves: list[tuple[Decoding, memoryview, Where]] = []
        for name, decoding, length in zip(self._names, self._leaves, lengths, strict=True):
            start, stop = stop, stop + length
            if decoding is not None:
                leaves.append((decoding, item[start:stop], partial(_of_leaf, name, where)))
        return leaves

    def _collated(self, columns: dict[str, Any]) -> Any:
        return self._tree.collated([*columns.values()][::-1])

    def _picked(self, sample: Any, record: Record) -> Any:
        """Of a sample that came whole, as a dict: the leaves that are wanted."""
        if self._paths is None:
            return sample
        try:
            found = [reduce(getitem, path, sample) for path in self._paths]
        except (LookupError, TypeError) as error:
            raise SampleError(
                f"{self._where(record)} has not the structure that its index says ({type(error).__name__}: {error});"
                " read it without leaves="
            ) from error
        return self._tree.filled(found[::-1])

    def _stepped(self, sample: Any, row: int | None) -> Any:
        """A sample that came whole, as a dict: the transforms of its leaves."""
        for name, step in self._steps.items():
            *path, last = name.split(".")
            parent = sample
            for key in path:
                parent = parent[key]
            parent[last] = step(parent[last], row)
        return sample

    def _where(self, record: Record) -> str:
        return f"sample {record.row} of {self._files.where(record.shard)}"


def _of_leaf(name: str, where: Where) -> str:
    return f"leaf {name!r} of {where()}"


def _decoding(name: str, kind: str, transform: Transform | None, path: str) -> Decoding:
    if is_picture(kind) and transform is not None:
        return Decoding("image", transform)
    try:
        return Decoding(decoder(kind), transform, kind=kind.partition(":")[0])
    except ArgumentError as error:
        raise ArgumentError(f"leaf {name!r} of {path} is stored as {error}; leave it out with leaves=") from None


def _wanted(leaves: Sequence[str] | None, names: Sequence[str], path: str) -> list[bool]:
    """Of each leaf, whether it is one of those that were chosen; ArgumentError names one that is not there."""
    if leaves is None:
        return [True] * len(names)
    refuse_bare(leaves, "leaves", "('image', 'label')")
    for leaf in leaves:
        if leaf not in names:
            raise ArgumentError(f"{path} has samples without a leaf {leaf!r}; they have {', '.join(names)}")
    return [name in leaves for name in names]


def _items(files: ShardFiles, wrapped: str, kept: PerProcess[OnceCache[Any, Any]], number: int) -> Items:
    shard = files.shards[number]
    return items_of(files.ends(number), shard.nbytes, shard.samples, files.where(number), wrapped, kept())
