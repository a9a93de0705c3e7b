"""`index.json` of a LitData folder: its chunks, the formats of the leaves, and the structure of a sample."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from feedline.datasets.indexed_folders import IndexedFolder
from feedline.datasets.promises import count, file_name, refuse_overflow, samples
from feedline.datasets.shard_sources import Shard
from feedline.errors import ArgumentError, SampleError


@dataclass(frozen=True, slots=True)
class Chunk:
    """A file that the index promises; `dim` counts the tokens in it, where it holds tokens."""

    name: str
    nbytes: int
    items: int
    dim: int | None


@dataclass(frozen=True, slots=True)
class Index:
    """What `index.json` tells."""

    chunks: tuple[Chunk, ...]
    formats: tuple[str, ...]
    tree: Tree
    codec: str | None
    wrapped: str
    """What is compressed: a whole "chunk", a "batch" of samples, or each "sample"."""
    tokens: bool

    def shards(self) -> list[Shard]:
        """The chunks as shards: those that were compressed as a whole say so by their name."""
        whole = f".{self.codec}.bin"
        codecs = [self.codec if chunk.name.endswith(whole) else None for chunk in self.chunks]
        return [
            Shard({chunk.name: codec}, chunk.nbytes, chunk.items, {})
            for chunk, codec in zip(self.chunks, codecs, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Tree:
    """A structure of dicts, lists and tuples: `kind` is "" for a leaf, and `keys` are those of a dict."""

    kind: str
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()

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

    def pruned(self, wanted: Iterator[bool]) -> Tree | None:
        """The structure of the leaves that are wanted, from left to right; None of none."""
        if not self.kind:
            return self if next(wanted) else None
        labels = self.keys or [None] * len(self.children)
        left = [(label, child.pruned(wanted)) for label, child in zip(labels, self.children, strict=True)]
        kept = [(label, child) for label, child in left if child is not None]
        keys = tuple(label for label, _ in kept) if self.keys else ()
        return Tree(self.kind, keys, tuple(child for _, child in kept)) if kept else None


_BUILD: dict[str, Callable[[Sequence[Any], list[Any]], Any]] = {
    "builtins.dict": lambda keys, parts: dict(zip(keys, parts, strict=True)),
    "builtins.list": lambda _, parts: parts,
    "builtins.tuple": lambda _, parts: tuple(parts),
    "collections.OrderedDict": lambda keys, parts: OrderedDict(zip(keys, parts, strict=True)),
}


def index_of(folder: IndexedFolder) -> Index:
    """The index in this folder; SampleError tells what is wrong with it, ArgumentError what cannot be read."""
    data, path = folder.index("LitData set"), folder.where("index.json")
    try:
        told = json.loads(data)
        return _index(told["config"], told["chunks"])
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise SampleError(f"{path} is no index of LitData chunks ({type(error).__name__}: {error})") from error


def _index(config: dict[str, Any], chunks: list[dict[str, Any]]) -> Index:
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
    return Index(
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


def _tree(told: dict[str, Any]) -> Tree:
    kind = told["type"] or ""
    if kind and kind not in _BUILD:
        raise ArgumentError(f"samples hold a {kind}, of which only dicts, lists and tuples can be built")
    keys = tuple(json.loads(told["context"]) or ()) if told["context"] else ()
    children = tuple(map(_tree, told["children_spec"]))
    if kind.lower().endswith("dict") and len(keys) != len(children):
        raise ValueError(f"{len(keys)} keys for {len(children)} children")
    return Tree(kind, keys, children)
