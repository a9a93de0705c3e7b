"""The shards of a dataset of any format: samples and bytes of each, and what reading a sample takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from feedline.cli.inspect.formats import InspectedFormat
from feedline.core.paths import user_cache
from feedline.core.tree import leaves
from feedline.datasets import CSV, HDF5, JSONL, ArrayFile, Arrow, Lines, TFRecord, Zarr
from feedline.datasets.indexes import place_of
from feedline.datasets.paths import find
from feedline.datasets.shards.folder import Found, IndexedFolder
from feedline.datasets.shards.litdata import index_of
from feedline.datasets.shards.mds import shards_of
from feedline.datasets.tables.base import CACHE_NBYTES
from feedline.datasets.tables.parquet_files import Footers, StoredFiles
from feedline.datasets.tables.types import pyarrow
from feedline.errors import ArgumentError
from feedline.stores import Cache, open_store
from feedline.stores.files import FileSet
from feedline.stores.urls import absolute, is_local, local_path

_ARRAY_CACHE_NBYTES = 1 << 26
"""What `HDF5` and `Zarr` keep of chunks unless told otherwise."""


_MACHINE = "the cache of this machine"


_UNSHARDED = "there are no shards here: each sample is read by itself, in any order at one cost, so take shuffle=True"


_FRAMED = (
    "samples are compressed some at a time: each lot is read once while the chunks of a window, decompressed, fit into"
    " 64 MiB in each process, else again"
)


_TOKENS = (
    "samples are the texts as they were written; LitDataTokens makes windows of their tokens, which lie in the same"
    " chunks, and mix as these do"
)


class Kept(NamedTuple):
    """Shards that are read whole: what is kept of them, the bytes of each as it is kept, and who keeps them."""

    limit_nbytes: int
    nbytes: Sequence[int]
    keeper: str = "each process"


@dataclass(frozen=True, slots=True)
class Shards:
    """Samples in shards, which are called `unit` in their format; without any, `note` says why none are needed.

    `nbytes` are those of each shard as it is stored; of a file with several, divided by samples. Without `kept`, each
    sample is read by itself.
    """

    format: InspectedFormat
    unit: str
    sizes: Sequence[int]
    nbytes: Sequence[int]
    kept: Kept | None = None
    note: str | None = None

    def summary(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "format": self.format,
            "samples": sum(self.sizes) or None,
            "shards": [*self.sizes] if self.unit else [],
            "nbytes": sum(self.nbytes),
            "notes": [self.note] if self.note else [],
        }


def shards_in(format_: InspectedFormat, sources: Sequence[str]) -> Shards:
    """The shards of all sources; MissingExtraError names the package that their format takes."""
    found = _READERS[format_](sources)
    if not sum(found.sizes) and found.note is None:
        raise ArgumentError(f"{', '.join(sources)} hold no samples")
    return found


def of_tars(sizes: Sequence[int], sample_nbytes: Sequence[int]) -> Shards:
    """Tars of which the samples are known: their bytes follow one another."""
    bounds = np.cumsum([0, *sizes]).tolist()
    return Shards(
        InspectedFormat.TAR, "tar", sizes, [sum(sample_nbytes[start:stop]) for start, stop in pairwise(bounds)]
    )


def unsharded(format_: InspectedFormat, samples: int = 0, nbytes: int = 0) -> Shards:
    """Samples that lie each for itself."""
    return Shards(format_, "", [samples] if samples else [], [nbytes] if samples else [], note=_UNSHARDED)


def _parquet(sources: Sequence[str]) -> Shards:
    pyarrow("datasets.Parquet")
    files = StoredFiles(find(sources, "**/*.parquet"))
    footers = Footers(files, place_of("parquet", map(absolute, sources), None))
    footers.summaries()  # brings those of many objects at once
    described = (footers.metadata(number) for number in range(len(files.names)))
    groups = [file.row_group(number) for file in described for number in range(file.num_row_groups)]
    stored = [sum(group.column(at).total_compressed_size for at in range(group.num_columns)) for group in groups]
    kept = Kept(CACHE_NBYTES, [group.total_byte_size for group in groups])
    return Shards(InspectedFormat.PARQUET, "row group", [group.num_rows for group in groups], stored, kept)


def _arrow(sources: Sequence[str]) -> Shards:
    sizes = Arrow(list(sources)).shard_sizes.tolist()
    blobs = find(sources, "**/*.arrow")
    nbytes = _divided(_total(blobs), sizes)
    kept = None if blobs.is_local else Kept(CACHE_NBYTES, nbytes)
    return Shards(InspectedFormat.ARROW, "record batch", sizes, nbytes, kept)


def _records(format_: InspectedFormat, dataset: Callable[..., Any], inside: str, sources: Sequence[str]) -> Shards:
    """Files whose records are found by an index, which is kept on this machine."""
    near = all(is_local(source) for source in sources)
    sizes = dataset(list(sources), index=user_cache("indexes") if near else None).shard_sizes.tolist()
    blobs = find(sources, inside)
    return Shards(format_, "file", sizes, [blobs.info(number).size for number in range(len(blobs))])


def _mds(sources: Sequence[str]) -> Shards:
    sizes, stored, whole = list[int](), list[int](), list[int]()
    zipped = False
    for folder in map(IndexedFolder, sources):
        told = shards_of(folder, {})
        files = folder.files([[each.name for each in (shard.raw, shard.zipped) if each] for shard in told])
        for shard, file in zip(told, files, strict=True):
            sizes.append(shard.samples)
            stored.append(_stored(folder, file))
            whole.append(shard.raw.nbytes)
            zipped = zipped or file.name != shard.raw.name
    return Shards(InspectedFormat.MDS, "shard", sizes, stored, Kept(_room(), whole, _MACHINE) if zipped else None)


def _litdata(sources: Sequence[str]) -> Shards:
    sizes, stored, whole = list[int](), list[int](), list[int]()
    zipped, note = False, None
    for folder in map(IndexedFolder, sources):
        index = index_of(folder)
        shards = index.shards()
        for shard, file in zip(shards, folder.files([[*shard.forms] for shard in shards]), strict=True):
            sizes.append(shard.samples)
            stored.append(_stored(folder, file))
            whole.append(shard.nbytes)
            zipped = zipped or shard.forms[file.name] is not None
        note = _TOKENS if index.tokens else _FRAMED if index.codec and index.wrapped == "batch" else note
    return Shards(
        InspectedFormat.LITDATA, "chunk", sizes, stored, Kept(_room(), whole, _MACHINE) if zipped else None, note
    )


def _arrays(format_: InspectedFormat, dataset: Callable[..., Any], stores: Sequence[str]) -> Shards:
    sizes, stored, whole = list[int](), list[int](), list[int]()
    for store in stores:
        arrays = dataset(store)
        mine = arrays.shard_sizes.tolist()
        sizes += mine
        stored += _divided(_everything(store), mine)
        row_nbytes = _in_memory(arrays[0]) if len(arrays) else 0
        whole += [size * row_nbytes for size in mine]
    if len(sizes) == len(stores):
        return unsharded(format_, sum(sizes), sum(stored))
    return Shards(format_, "chunk", sizes, stored, Kept(_ARRAY_CACHE_NBYTES, whole))


def _hdf5(sources: Sequence[str]) -> Shards:
    return _arrays(InspectedFormat.HDF5, HDF5, find(sources, "**/*.h5").names)


def _npy(sources: Sequence[str]) -> Shards:
    blobs = find(sources, "**/*.npy")
    sizes = [ArrayFile(name).shard_sizes.tolist() for name in blobs.names]
    if blobs.is_local:
        return unsharded(InspectedFormat.NPY, sum(map(sum, sizes)), _total(blobs))
    nbytes = [_divided(blobs.info(number).size, mine) for number, mine in enumerate(sizes)]
    return Shards(InspectedFormat.NPY, "run of rows", [*chain(*sizes)], [*chain(*nbytes)])


def _unknown(format_: InspectedFormat, inside: str, sources: Sequence[str]) -> Shards:
    """Samples whose number only a dataset with more arguments tells."""
    find(sources, inside)
    return unsharded(format_)


_READERS: dict[InspectedFormat, Callable[[Sequence[str]], Shards]] = {
    InspectedFormat.PARQUET: _parquet,
    InspectedFormat.ARROW: _arrow,
    InspectedFormat.TFRECORD: partial(_records, InspectedFormat.TFRECORD, TFRecord, "*.tfrecord*"),
    InspectedFormat.JSONL: partial(_records, InspectedFormat.JSONL, JSONL, "**/*.jsonl"),
    InspectedFormat.CSV: partial(_records, InspectedFormat.CSV, CSV, "**/*.csv"),
    InspectedFormat.LINES: partial(_records, InspectedFormat.LINES, Lines, "**/*.txt"),
    InspectedFormat.MDS: _mds,
    InspectedFormat.LITDATA: _litdata,
    InspectedFormat.HDF5: _hdf5,
    InspectedFormat.ZARR: partial(_arrays, InspectedFormat.ZARR, Zarr),
    InspectedFormat.NPY: _npy,
    InspectedFormat.TOKENS: partial(_unknown, InspectedFormat.TOKENS, "*"),
    InspectedFormat.LMDB: partial(_unknown, InspectedFormat.LMDB, "*"),
}


def _total(blobs: FileSet) -> int:
    return sum(blobs.info(number).size for number in range(len(blobs)))


def _everything(source: str) -> int:
    """The bytes of a file, or of all files of a folder."""
    path = Path(local_path(source))
    if not is_local(source) and not source.endswith(".zarr"):
        return _total(find(source, "*"))
    if not is_local(source):
        return sum(info.size for info in open_store(source).list())
    return sum(each.stat().st_size for each in ([path] if path.is_file() else path.rglob("*")) if each.is_file())


def _divided(nbytes: int, sizes: Sequence[int]) -> list[int]:
    """The bytes of a file over its shards, by their samples."""
    return [nbytes * size // max(sum(sizes), 1) for size in sizes]


def _stored(folder: IndexedFolder, file: Found) -> int:
    return Path(folder.where(file.name)).stat().st_size if file.info is None else file.info.size


def _room() -> int:
    """What the user's cache folder keeps of decompressed shards."""
    folder = Path(user_cache("inflated"))
    folder.mkdir(parents=True, exist_ok=True)
    return Cache(folder).limit_nbytes()


def _in_memory(sample: Any) -> int:
    """Of tensors and texts, which are all that rows of arrays become."""
    return sum(_leaf_nbytes(leaf) for leaf in leaves(sample))


def _leaf_nbytes(leaf: Any) -> int:
    return leaf.nbytes if isinstance(leaf, torch.Tensor) else len(leaf)
