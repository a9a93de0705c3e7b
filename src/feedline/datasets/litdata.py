"""`LitData`: what `litdata.optimize` wrote, in any order: samples of any structure, or windows of tokens."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Decoding, Step, Where, split_transform
from feedline.datasets.files import Pathlike
from feedline.datasets.inflating import inflated_file
from feedline.datasets.lazily import Lazily
from feedline.datasets.litdata_chunks import ArrowItems, Items, items_of
from feedline.datasets.litdata_index import Chunk, Index, index_of
from feedline.datasets.litdata_leaves import decoder, is_picture
from feedline.datasets.once import OnceCache
from feedline.datasets.records import Records
from feedline.errors import ArgumentError, SampleError
from feedline.per_process import PerProcess

_KEPT_NBYTES = 1 << 26
"""How much of compressed or tabular chunks each process keeps decoded."""


class LitData(Records):
    """The samples of a LitData folder (with its `index.json`), in the structure in which they were written.

    Tensors, arrays, numbers, texts and bytes come as they were, pictures as PIL images, other files as bytes; pickle
    is never read. `transform` is a function of the sample, or functions by leaf: "image", or "view.0" where leaves are
    nested. Chunks compressed as a whole are decompressed on first use into the folder `cache` (by default one in the
    user's cache folder). For what was written with a `TokensLoader`, read `LitDataTokens`.
    """

    def __init__(
        self,
        path: Pathlike,
        *,
        transform: Transform | Mapping[str, Transform] | None = None,
        cache: Pathlike | None = None,
    ) -> None:
        self.path = str(Path(path).resolve())
        index = index_of(Path(self.path))
        if index.tokens:
            raise ArgumentError(f"{self.path} holds tokens: read it with datasets.LitDataTokens(path, window)")
        self._index, self._names = index, index.tree.names()
        by_leaf, whole = split_transform(transform, self._names)
        self._steps = {name: Step(each) for name, each in by_leaf.items()}
        self._step = Step(whole)
        self._firsts = np.cumsum([0, *(chunk.items for chunk in index.chunks)])
        self._chunks = PerProcess(partial(_opened_on_use, Path(self.path), index, cache))
        self._leaves = self._decodings(by_leaf)

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """The samples of each chunk, for `ShardShuffled`."""
        return np.diff(self._firsts)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _sample(self, at: int, row: int | None) -> Any:
        number = int(np.searchsorted(self._firsts, at, side="right")) - 1
        at -= int(self._firsts[number])
        item = self._chunks()[number].item(at)
        where = partial(self._where, number, at)
        made = self._made(item, row, where) if isinstance(item, memoryview) else self._stepped(item, row)
        return self._step(made, row)

    def _decodings(self, by_leaf: Mapping[str, Transform]) -> list[Decoding]:
        """How each leaf is decoded; none where samples come whole, whatever the index says of their leaves."""
        formats = zip(self._names, self._index.formats, strict=True)
        try:
            return [_decoding(name, kind, by_leaf.get(name), self.path) for name, kind in formats]
        except ArgumentError:
            if self._index.chunks and isinstance(self._chunks()[0], ArrowItems):
                return []
            raise

    def _made(self, item: memoryview, row: int | None, where: Where) -> Any:
        """The sample out of its bytes: the length of each leaf, then the leaves."""
        count = len(self._leaves)
        stop = 4 * count
        try:
            lengths = struct.unpack_from(f"<{count}I", item)
        except struct.error:
            lengths = ()
        if stop + sum(lengths) != len(item) or not lengths:
            raise SampleError(
                f"{where()} is damaged: its leaves do not fill its {len(item)} bytes; copy the chunk again"
            )
        leaves = []
        for name, decoding, length in zip(self._names, self._leaves, lengths, strict=True):
            start, stop = stop, stop + length
            leaves.append(decoding(item[start:stop], row, partial(_of_leaf, name, where)))
        return self._index.tree.filled(leaves[::-1])

    def _stepped(self, sample: Any, row: int | None) -> Any:
        """A sample that came whole, as a dict: the transforms of its leaves."""
        for name, step in self._steps.items():
            *path, last = name.split(".")
            parent = sample
            for key in path:
                parent = parent[key]
            parent[last] = step(parent[last], row)
        return sample

    def _where(self, number: int, at: int) -> str:
        return f"sample {at} of {Path(self.path, self._index.chunks[number].name)}"


def _of_leaf(name: str, where: Where) -> str:
    return f"leaf {name!r} of {where()}"


def _decoding(name: str, kind: str, transform: Transform | None, path: str) -> Decoding:
    if is_picture(kind) and transform is not None:
        return Decoding("image", transform)
    try:
        return Decoding(decoder(kind), transform)
    except ArgumentError as error:
        raise ArgumentError(f"leaf {name!r} of {path} is stored as {error}; write it again as something else") from None


def _opened_on_use(folder: Path, index: Index, cache: Pathlike | None) -> Lazily[Items]:
    return Lazily(partial(_opened, folder, index, cache, OnceCache(_KEPT_NBYTES)), len(index.chunks))


def _opened(folder: Path, index: Index, cache: Pathlike | None, kept: OnceCache[Any, Any], number: int) -> Items:
    chunk = index.chunks[number]
    return items_of(mapped(folder, chunk, index, cache), chunk.items, folder / chunk.name, index.wrapped, kept)


def mapped(folder: Path, chunk: Chunk, index: Index, cache: Pathlike | None) -> NDArray[np.uint8]:
    """The bytes of a chunk, those of one that was compressed as a whole after decompression."""
    path = folder / chunk.name
    if index.codec is not None and chunk.name.endswith(f".{index.codec}.bin"):
        path = inflated_file(path, index.codec, chunk.nbytes, "litdata", cache)
    found = path.stat().st_size
    if found != chunk.nbytes:
        raise SampleError(f"{path} has {found} bytes, its index promises {chunk.nbytes}; copy it again")
    whole: NDArray[np.uint8] = np.memmap(path, np.uint8, "r").view(np.ndarray)
    return whole
