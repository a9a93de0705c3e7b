"""`LitData`: samples of the chunks that `litdata.optimize` wrote.

`index.json` lists the chunks, the formats of the leaves, and the structure of a sample. Any order is cheap.
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
from feedline.core.dataset import TransformFunction
from feedline.core.paths import Pathlike
from feedline.core.sample_transform import SampleTransform
from feedline.datasets.base import Field, FieldRecords, Record
from feedline.datasets.decoding import Decoder, ValueDecoder, Where, check_names, decoder_of, split_transform
from feedline.datasets.formats import ShardSummary
from feedline.datasets.shard_summaries import StoredShard, summarize_folders
from feedline.datasets.shards.files import ShardFileFields, ShardFiles, ShardSource
from feedline.datasets.shards.folder import IndexedFolder, check_count, check_file_name, check_samples, check_total
from feedline.datasets.shards.litdata_chunks import ChunkItems, LitDataRows, chunk_ends, open_items
from feedline.datasets.shards.litdata_types import decode_function, is_image
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import Extent, LazyList


@dataclass(frozen=True, slots=True)
class Chunk:
    """File listed in the index; `dim` is its number of tokens."""

    name: str
    nbytes: int
    items: int
    dim: int | None


@dataclass(frozen=True, slots=True)
class LitDataIndex:
    """Content of `index.json`."""

    chunks: tuple[Chunk, ...]
    formats: tuple[str, ...]
    tree: LeafTree
    codec: str | None
    wrapped: str
    """Unit of compression: a whole "chunk", a "batch" of samples, or each "sample"."""
    tokens: bool

    def shards(self) -> list[ShardSource]:
        """The chunks as shards; compressed ones have a suffix in their names."""
        whole = f".{self.codec}.bin"
        codecs = [self.codec if chunk.name.endswith(whole) else None for chunk in self.chunks]
        return [
            ShardSource({chunk.name: codec}, chunk.nbytes, chunk.items, {})
            for chunk, codec in zip(self.chunks, codecs, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class LeafTree:
    """Structure of dicts, lists and tuples around the leaves of a sample.

    `kind` is the type, "" for a leaf; `keys` are the keys of a dict.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[LeafTree, ...] = ()

    def fill(self, leaves: list[Any]) -> Any:
        """Structure with these leaves; `leaves` is in reverse order and is consumed."""
        if not self.kind:
            return leaves.pop()
        parts = [child.fill(leaves) for child in self.children]
        return _BUILD[self.kind](self.keys, parts)

    def collate(self, columns: list[Any]) -> Any:
        """Batch structure of default collate, with `columns` for leaves, as in `fill`."""
        if not self.kind:
            return columns.pop()
        parts = [child.collate(columns) for child in self.children]
        return parts if self.kind == "builtins.tuple" else _BUILD[self.kind](self.keys, parts)

    def paths(self) -> list[tuple[Any, ...]]:
        """Path to each leaf, of keys or positions (() for a leaf)."""
        if not self.kind:
            return [()]
        labels = self.keys or range(len(self.children))
        return [(label, *path) for label, child in zip(labels, self.children, strict=True) for path in child.paths()]

    def names(self) -> list[str]:
        """Dotted path of each leaf; "" for a bare leaf."""
        return [".".join(map(str, path)) for path in self.paths()]

    def prune(self, wanted: Iterator[bool]) -> LeafTree | None:
        """Structure with only the wanted leaves; None without any."""
        if not self.kind:
            return self if next(wanted) else None
        labels = self.keys or [None] * len(self.children)
        pruned = [(label, child.prune(wanted)) for label, child in zip(labels, self.children, strict=True)]
        wanted_children = [(label, child) for label, child in pruned if child is not None]
        keys = tuple(label for label, _ in wanted_children) if self.keys else ()
        return LeafTree(self.kind, keys, tuple(child for _, child in wanted_children)) if wanted_children else None


_BUILD: dict[str, Callable[[Sequence[Any], list[Any]], Any]] = {
    "builtins.dict": lambda keys, parts: dict(zip(keys, parts, strict=True)),
    "builtins.list": lambda _, parts: parts,
    "builtins.tuple": lambda _, parts: tuple(parts),
    "collections.OrderedDict": lambda keys, parts: OrderedDict(zip(keys, parts, strict=True)),
}


def read_index(folder: IndexedFolder) -> LitDataIndex:
    """Read the index of a folder.

    SampleError for a damaged index, ArgumentError for unsupported content.
    """
    data, path = folder.index("LitData set"), folder.where("index.json")
    try:
        content = json.loads(data)
        return _parse_index(content["config"], content["chunks"])
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise SampleError(f"{path} is not an index of LitData chunks ({problem}); copy it again") from error


def _parse_index(config: dict[str, Any], chunks: list[dict[str, Any]]) -> LitDataIndex:
    if config.get("encryption"):
        raise ArgumentError("the chunks are encrypted, which is not supported; write them without encryption")
    loader = config.get("item_loader", "PyTreeLoader")
    if loader not in ("PyTreeLoader", "TokensLoader"):
        raise ArgumentError(
            f"the chunks were written for {loader}, which is not supported; read Parquet files with datasets.Parquet"
        )
    codec = config.get("compression") and str(config["compression"]).partition(":")[0]
    formats, tree = tuple(map(_text, config["data_format"])), _parse_tree(json.loads(config["data_spec"])[1])
    if len(formats) != len(tree.names()):
        raise ValueError(f"{len(formats)} formats for {len(tree.names())} leaves")
    parsed = tuple(map(_parse_chunk, chunks))
    check_total(max(chunk.items, chunk.dim or 0) for chunk in parsed)
    return LitDataIndex(
        parsed,
        formats,
        tree,
        codec or None,
        _text(config.get("compression_level") or "chunk"),
        loader == "TokensLoader",
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not a text")
    return value


def _parse_chunk(entry: dict[str, Any]) -> Chunk:
    name = check_file_name(entry["filename"])
    nbytes = check_count(entry["chunk_bytes"], f"the size of {name}")
    items = check_samples(entry["chunk_size"], nbytes, f"the number of samples in {name}")
    dim = entry.get("dim")
    return Chunk(name, nbytes, items, None if dim is None else check_count(dim, f"the number of tokens in {name}"))


def _parse_tree(spec: dict[str, Any]) -> LeafTree:
    kind = spec["type"] or ""
    if kind and kind not in _BUILD:
        raise ArgumentError(f"samples hold a {kind}; only dicts, lists and tuples are supported")
    keys = tuple(json.loads(spec["context"]) or ()) if spec["context"] else ()
    children = tuple(map(_parse_tree, spec["children_spec"]))
    if kind.lower().endswith("dict") and len(keys) != len(children):
        raise ValueError(f"{len(keys)} keys for {len(children)} children")
    return LeafTree(kind, keys, children)


_CACHE_NBYTES = 1 << 26
"""Size of the decoded frames and record batches that each process keeps, in bytes."""


class LitData(ShardFileFields):
    """Samples of a LitData folder, structured as they were written.

    Tensors, arrays, numbers, strings and bytes are returned as they were written, images as PIL images, other files
    as bytes. `columns` chooses leaves by name, such as "image", or "view.0" for nested ones; samples keep the structure
    around them. Leaves stored as pickle are never read. `transform` is a function of the sample, or a dict of functions
    by leaf. Use `LitDataTokens` for chunks written with a `TokensLoader`.

    `path` is a local folder, with its `index.json`, or the address of one in a store. Objects are kept in the folder
    `cache` if one is given. Chunks that were compressed as a whole are decompressed on first use, into `cache` or the
    user's cache folder. `options` are passed to `open_store`.

    SampleError names an index or chunk that is damaged, and a leaf that cannot be decoded.
    """

    def __init__(
        self,
        path: Pathlike,
        columns: Sequence[str] | None = None,
        *,
        transform: TransformFunction | Mapping[str, TransformFunction] | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        folder = IndexedFolder(path, cache=cache, options=options)
        self.path = folder.name
        index = read_index(folder)
        if index.tokens:
            raise ArgumentError(f"{self.path} holds tokens: read it with datasets.LitDataTokens(path, window)")
        self._index, self._names = index, index.tree.names()
        wanted = _choose_leaves(columns, self._names, self.path)
        self._paths = None if columns is None else [*compress(index.tree.paths(), wanted)]
        self._tree = index.tree if columns is None else index.tree.prune(iter(wanted)) or index.tree
        by_leaf, whole = split_transform(transform, [*compress(self._names, wanted)])
        super().__init__(ShardFiles([(folder, shard) for shard in index.shards()], chunk_ends, "litdata", cache))
        FieldRecords.__init__(self, whole)
        leaves = zip(index.tree.paths(), self._names, strict=True)
        self._steps = [(path, SampleTransform(by_leaf[name])) for path, name in leaves if name in by_leaf]
        caches = PerProcess(partial(LoadingCache[Any, Any], _CACHE_NBYTES))
        self._items = LazyList(partial(_open_items, self._files, index.wrapped, caches), len(index.chunks))
        self._leaves = self._leaf_decoders(wanted, by_leaf)

    def _span(self, shard: int, row: int) -> tuple[int, int]:
        self._files.file(shard)  # raises if the file has changed
        items = self._items[shard]
        return (0, 0) if items.is_cached(row) else items.span(row)

    def _decoders(self) -> list[Decoder]:
        return [decoding for decoding in self._leaves if decoding is not None]

    def _leaf_decoders(self, wanted: Sequence[bool], by_leaf: Mapping[str, TransformFunction]) -> list[Decoder | None]:
        """Decoder of each leaf, None for unwanted ones.

        Empty if chunks have table rows, for any formats in the index.
        """
        formats = zip(self._names, self._index.formats, wanted, strict=True)
        try:
            return [
                _build_decoder(name, kind, by_leaf.get(name), self.path) if is_wanted else None
                for name, kind, is_wanted in formats
            ]
        except ArgumentError:
            if self._index.chunks and isinstance(self._items[0], LitDataRows):
                return []
            raise

    def _item(self, record: Record) -> Any:
        """Bytes of a sample; a table row itself."""
        items, (shard, row, data) = self._items[record.shard], record
        # A batch that was in the cache, and was therefore not read, may have been evicted since then.
        return items.item(row, lambda: data or self._files.read([Extent(shard, *items.span(row))])[0])

    def _decode_record(self, record: Record, row: int | None) -> Any:
        item = self._item(record)
        if isinstance(item, memoryview):
            leaves = [decoding(data, row, where) for decoding, data, where in self._leaves_in(item, record)]
            return self._step(self._tree.fill(leaves[::-1]), row)
        return self._step(self._select_from_row(self._transform_row(item, record, row), record), row)

    def _fields_in(self, record: Record) -> dict[str, Field]:
        item = self._item(record)
        if not isinstance(item, memoryview):
            raise SampleError(f"{self._where(record)} is a table row, but other samples are not; write them again")
        # Keyed by number: names need not be unique, because keys may contain dots.
        return {str(number): Field(*leaf) for number, leaf in enumerate(self._leaves_in(item, record))}

    def _leaves_in(self, item: memoryview, record: Record) -> list[tuple[Decoder, memoryview, Where]]:
        """Split the bytes of a sample into its wanted leaves.

        The lengths of all leaves come first.
        """
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
        leaves: list[tuple[Decoder, memoryview, Where]] = []
        for name, decoding, length in zip(self._names, self._leaves, lengths, strict=True):
            start, stop = stop, stop + length
            if decoding is not None:
                leaves.append((decoding, item[start:stop], partial(_describe_leaf, name, where)))
        return leaves

    def _assemble_batch(self, columns: dict[str, Any]) -> Any:
        return self._tree.collate([*columns.values()][::-1])

    def _select_from_row(self, sample: Any, record: Record) -> Any:
        """Wanted leaves of a sample that is a table row."""
        if self._paths is None:
            return sample
        leaves = [self._part_of_row(sample, path, record) for path in self._paths]
        return self._tree.fill(leaves[::-1])

    def _transform_row(self, sample: Any, record: Record, row: int | None) -> Any:
        """Apply the transforms of leaves to a table row, in place."""
        for path, step in self._steps:
            value = step(self._part_of_row(sample, path, record), row)
            self._part_of_row(sample, path[:-1], record)[path[-1]] = value
        return sample

    def _part_of_row(self, sample: Any, path: tuple[Any, ...], record: Record) -> Any:
        """The part of a table row at a path; SampleError without one."""
        try:
            return reduce(getitem, path, sample)
        except (LookupError, TypeError) as error:
            raise SampleError(
                f"{self._where(record)} does not have the structure in its index ({type(error).__name__}: {error});"
                " read it without columns= and transforms of leaves"
            ) from error

    def _where(self, record: Record) -> str:
        return f"sample {record.row} of {self._files.where(record.shard)}"


def _describe_leaf(name: str, where: Where) -> str:
    return f"leaf {name!r} of {where()}"


def _build_decoder(name: str, kind: str, transform: TransformFunction | None, path: str) -> Decoder:
    if is_image(kind) and transform is not None:
        return decoder_of("image", transform)
    try:
        return ValueDecoder(decode_function(kind), transform, kind=kind.partition(":")[0])
    except ArgumentError as error:
        raise ArgumentError(f"leaf {name!r} of {path} is stored as {error}; leave it out with columns=") from None


def _choose_leaves(leaves: Sequence[str] | None, names: Sequence[str], path: str) -> list[bool]:
    """True for each chosen leaf; ArgumentError names an unknown one."""
    if leaves is None:
        return [True] * len(names)
    check_names(leaves, "columns", "('image', 'label')")
    for leaf in leaves:
        if leaf not in names:
            raise ArgumentError(f"the samples of {path} have no leaf {leaf!r}; they have {', '.join(names)}")
    return [name in leaves for name in names]


def _open_items(files: ShardFiles, wrapped: str, caches: PerProcess[LoadingCache[Any, Any]], number: int) -> ChunkItems:
    shard = files.shards[number]
    return open_items(files.ends(number), shard.nbytes, shard.samples, files.where(number), wrapped, caches())


_FRAMED = (
    "samples are compressed in batches: each batch is read once if the decompressed chunks of a window fit into 64 MiB"
    " per process, otherwise repeatedly"
)


_TOKENS = (
    "samples are the texts as they were written; LitDataTokens makes windows of their tokens, from the same chunks, and"
    " they mix in the same way"
)


def is_index(data: bytes) -> bool:
    """True if `data` is an `index.json` of LitData chunks."""
    try:
        return "chunks" in json.loads(data)
    except (ValueError, TypeError, RecursionError):
        return False


def summarize_chunks(paths: Sequence[str]) -> ShardSummary:
    """Chunks of LitData folders."""
    folders = [(folder, read_index(folder)) for folder in map(IndexedFolder, paths)]
    note = None
    for _, index in folders:
        note = _TOKENS if index.tokens else _FRAMED if index.codec and index.wrapped == "batch" else note
    return summarize_folders("chunk", (shard for each in folders for shard in _stored_shards(*each)), note)


def _stored_shards(folder: IndexedFolder, index: LitDataIndex) -> Iterator[StoredShard]:
    shards = index.shards()
    for shard, file in zip(shards, folder.files([[*shard.forms] for shard in shards]), strict=True):
        is_compressed = shard.forms[file.name] is not None
        yield StoredShard(shard.samples, folder.nbytes(file), shard.nbytes, is_compressed)
