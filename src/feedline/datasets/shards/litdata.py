"""`LitData`: what `litdata.optimize` wrote, in any order: samples of any structure, or windows of tokens.

`index.json` of a LitData folder: its chunks, the formats of the leaves, and the structure of a sample.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import compress
from operator import getitem
from typing import Any

from feedline.core.caches import LoadingCache, PerProcess
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.base import Field, FieldRecords, Record
from feedline.datasets.decoding import Decoding, SampleTransform, Where, check_names, split_transform
from feedline.datasets.formats import ShardSummary
from feedline.datasets.shard_summaries import StoredShard, stored_nbytes, summarize_folders
from feedline.datasets.shards.files import ShardFileFields, ShardFiles, ShardSource
from feedline.datasets.shards.folder import IndexedFolder, count, file_name, refuse_overflow, samples
from feedline.datasets.shards.litdata_chunks import ChunkItems, LitDataRows, chunk_ends, items_of
from feedline.datasets.shards.litdata_types import decoder, is_picture
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import Extent, LazyList


@dataclass(frozen=True, slots=True)
class Chunk:
    """A file that the index promises; `dim` counts the tokens in it, where it holds tokens."""

    name: str
    nbytes: int
    items: int
    dim: int | None


@dataclass(frozen=True, slots=True)
class LitDataIndex:
    """What `index.json` tells."""

    chunks: tuple[Chunk, ...]
    formats: tuple[str, ...]
    tree: LeafTree
    codec: str | None
    wrapped: str
    """What is compressed: a whole "chunk", a "batch" of samples, or each "sample"."""
    tokens: bool

    def shards(self) -> list[ShardSource]:
        """The chunks as shards: those that were compressed as a whole say so by their name."""
        whole = f".{self.codec}.bin"
        codecs = [self.codec if chunk.name.endswith(whole) else None for chunk in self.chunks]
        return [
            ShardSource({chunk.name: codec}, chunk.nbytes, chunk.items, {})
            for chunk, codec in zip(self.chunks, codecs, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class LeafTree:
    """A structure of dicts, lists and tuples: `kind` is "" for a leaf, and `keys` are those of a dict."""

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[LeafTree, ...] = ()

    def filled(self, leaves: list[Any]) -> Any:
        """The structure with these leaves, from left to right; takes them from the end of the reversed list."""
        if not self.kind:
            return leaves.pop()
        parts = [child.filled(leaves) for child in self.children]
        return _BUILD[self.kind](self.keys, parts)

    def collated(self, columns: list[Any]) -> Any:
        """The structure that default collate gives such samples, with these columns for leaves, as in `filled`."""
        if not self.kind:
            return columns.pop()
        parts = [child.collated(columns) for child in self.children]
        return parts if self.kind == "builtins.tuple" else _BUILD[self.kind](self.keys, parts)

    def paths(self) -> list[tuple[Any, ...]]:
        """The way to each leaf: keys, and places where there are none; () for a bare leaf."""
        if not self.kind:
            return [()]
        labels = self.keys or range(len(self.children))
        return [(label, *path) for label, child in zip(labels, self.children, strict=True) for path in child.paths()]

    def names(self) -> list[str]:
        """The leaves by name: their path, joined by dots; "" for a bare leaf."""
        return [".".join(map(str, path)) for path in self.paths()]

    def pruned(self, wanted: Iterator[bool]) -> LeafTree | None:
        """The structure of the leaves that are wanted, from left to right; None of none."""
        if not self.kind:
            return self if next(wanted) else None
        labels = self.keys or [None] * len(self.children)
        left = [(label, child.pruned(wanted)) for label, child in zip(labels, self.children, strict=True)]
        kept = [(label, child) for label, child in left if child is not None]
        keys = tuple(label for label, _ in kept) if self.keys else ()
        return LeafTree(self.kind, keys, tuple(child for _, child in kept)) if kept else None


_BUILD: dict[str, Callable[[Sequence[Any], list[Any]], Any]] = {
    "builtins.dict": lambda keys, parts: dict(zip(keys, parts, strict=True)),
    "builtins.list": lambda _, parts: parts,
    "builtins.tuple": lambda _, parts: tuple(parts),
    "collections.OrderedDict": lambda keys, parts: OrderedDict(zip(keys, parts, strict=True)),
}


def index_of(folder: IndexedFolder) -> LitDataIndex:
    """The index in this folder; SampleError tells what is wrong with it, ArgumentError what cannot be read."""
    data, path = folder.index("LitData set"), folder.where("index.json")
    try:
        told = json.loads(data)
        return _index(told["config"], told["chunks"])
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise SampleError(f"{path} is no index of LitData chunks ({type(error).__name__}: {error})") from error


def _index(config: dict[str, Any], chunks: list[dict[str, Any]]) -> LitDataIndex:
    if config.get("encryption"):
        raise ArgumentError("the chunks are encrypted, which is not supported: write them without encryption")
    loader = config.get("item_loader", "PyTreeLoader")
    if loader not in ("PyTreeLoader", "TokensLoader"):
        raise ArgumentError(
            f"the chunks are made for {loader}, not for samples or tokens; read Parquet files with datasets.Parquet"
        )
    codec = config.get("compression") and str(config["compression"]).partition(":")[0]
    formats, tree = tuple(config["data_format"]), _tree(json.loads(config["data_spec"])[1])
    if len(formats) != len(tree.names()):
        raise ValueError(f"{len(formats)} formats for {len(tree.names())} leaves")
    found = tuple(map(_chunk, chunks))
    refuse_overflow(max(chunk.items, chunk.dim or 0) for chunk in found)
    return LitDataIndex(
        found,
        formats,
        tree,
        codec or None,
        config.get("compression_level") or "chunk",
        loader == "TokensLoader",
    )


def _chunk(told: dict[str, Any]) -> Chunk:
    name = file_name(told["filename"])
    nbytes = count(told["chunk_bytes"], f"the size of {name}")
    items = samples(told["chunk_size"], nbytes, f"the number of samples in {name}")
    dim = told.get("dim")
    return Chunk(name, nbytes, items, None if dim is None else count(dim, f"the number of tokens in {name}"))


def _tree(told: dict[str, Any]) -> LeafTree:
    kind = told["type"] or ""
    if kind and kind not in _BUILD:
        raise ArgumentError(f"samples hold a {kind}, of which only dicts, lists and tuples can be built")
    keys = tuple(json.loads(told["context"]) or ()) if told["context"] else ()
    children = tuple(map(_tree, told["children_spec"]))
    if kind.lower().endswith("dict") and len(keys) != len(children):
        raise ValueError(f"{len(keys)} keys for {len(children)} children")
    return LeafTree(kind, keys, children)


_KEPT_NBYTES = 1 << 26
"""How much of compressed or tabular chunks each process keeps decoded."""


class LitData(ShardFileFields):
    """The samples of a LitData folder (with its `index.json`), in the structure in which they were written.

    Tensors, arrays, numbers, texts and bytes come as they were, pictures as PIL images, other files as bytes. `columns`
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
        columns: Sequence[str] | None = None,
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
        wanted = _wanted(columns, self._names, self.path)
        self._paths = None if columns is None else [*compress(index.tree.paths(), wanted)]
        self._tree = index.tree if columns is None else index.tree.pruned(iter(wanted)) or index.tree
        by_leaf, whole = split_transform(transform, [*compress(self._names, wanted)])
        super().__init__(ShardFiles([(folder, shard) for shard in index.shards()], chunk_ends, "litdata", cache))
        FieldRecords.__init__(self, whole)
        self._steps = {name: SampleTransform(each) for name, each in by_leaf.items()}
        kept = PerProcess(partial(LoadingCache[Any, Any], _KEPT_NBYTES))
        self._items = LazyList(partial(_items, self._files, index.wrapped, kept), len(index.chunks))
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
            if self._index.chunks and isinstance(self._items[0], LitDataRows):
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
                " read it without columns="
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
        raise ArgumentError(f"leaf {name!r} of {path} is stored as {error}; leave it out with columns=") from None


def _wanted(leaves: Sequence[str] | None, names: Sequence[str], path: str) -> list[bool]:
    """Of each leaf, whether it is one of those that were chosen; ArgumentError names one that is not there."""
    if leaves is None:
        return [True] * len(names)
    check_names(leaves, "columns", "('image', 'label')")
    for leaf in leaves:
        if leaf not in names:
            raise ArgumentError(f"{path} has samples without a leaf {leaf!r}; they have {', '.join(names)}")
    return [name in leaves for name in names]


def _items(files: ShardFiles, wrapped: str, kept: PerProcess[LoadingCache[Any, Any]], number: int) -> ChunkItems:
    shard = files.shards[number]
    return items_of(files.ends(number), shard.nbytes, shard.samples, files.where(number), wrapped, kept())


_FRAMED = (
    "samples are compressed some at a time: each lot is read once while the chunks of a window, decompressed, fit into"
    " 64 MiB in each process, else again"
)


_TOKENS = (
    "samples are the texts as they were written; LitDataTokens makes windows of their tokens, which lie in the same"
    " chunks, and mix as these do"
)


def is_index(data: bytes) -> bool:
    """Whether an `index.json` is that of LitData chunks."""
    try:
        return "chunks" in json.loads(data)
    except (ValueError, TypeError, RecursionError):
        return False


def summarize_chunks(paths: Sequence[str]) -> ShardSummary:
    """The chunks of LitData folders."""
    folders = [(folder, index_of(folder)) for folder in map(IndexedFolder, paths)]
    note = None
    for _, index in folders:
        note = _TOKENS if index.tokens else _FRAMED if index.codec and index.wrapped == "batch" else note
    return summarize_folders("chunk", (shard for each in folders for shard in _stored(*each)), note)


def _stored(folder: IndexedFolder, index: LitDataIndex) -> Iterator[StoredShard]:
    shards = index.shards()
    for shard, file in zip(shards, folder.files([[*shard.forms] for shard in shards]), strict=True):
        is_compressed = shard.forms[file.name] is not None
        yield StoredShard(shard.samples, stored_nbytes(folder, file), shard.nbytes, is_compressed)
