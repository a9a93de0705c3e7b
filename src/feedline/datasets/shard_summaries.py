"""Sample and byte counts of shards, for any format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from feedline.core.paths import user_cache
from feedline.core.tree import leaves
from feedline.datasets.formats import Format, KeptShards, ShardSummary, load
from feedline.datasets.inflated import default_cache
from feedline.datasets.paths import find
from feedline.errors import ArgumentError
from feedline.stores import Cache, ObjectNotFoundError, open_store
from feedline.stores.files import FileSet
from feedline.stores.urls import is_local, scheme_of, split

_UNSHARDED = (
    "there are no shards here: each sample is read separately, and any order costs the same, so pass shuffle=True"
)


def summarize(format_: Format, sources: Sequence[str]) -> ShardSummary:
    """The shards of sources of one format; MissingExtraError names a missing package."""
    own = load(format_.summarize)
    summary = _summarize_files(format_, sources) if own is None else own(sources)
    if not sum(summary.sizes) and summary.note is None:
        raise ArgumentError(f"{', '.join(sources)} hold no samples")
    return summary


def _summarize_files(format_: Format, sources: Sequence[str]) -> ShardSummary:
    # Inspecting files of this machine must not write indexes next to them.
    are_local = all(scheme_of(source) == "file" for source in sources)
    index_dir = user_cache("indexes") if are_local else None
    sizes = format_.dataset(list(sources), index_dir=index_dir).shard_sizes.tolist()
    files = find(sources, format_.pattern)
    return ShardSummary(format_.unit, sizes, [files.info(number).size for number in range(len(files))])


def unsharded(samples: int = 0, nbytes: int = 0) -> ShardSummary:
    """Samples without shards."""
    return ShardSummary("", [samples] if samples else [], [nbytes] if samples else [], note=_UNSHARDED)


def uncounted(sources: Sequence[str]) -> ShardSummary:
    """Uncounted samples without shards; checks that the sources exist."""
    find(sources, "*")
    return unsharded()


class StoredShard(NamedTuple):
    """A shard of an indexed folder; `nbytes` are those decompressed."""

    samples: int
    stored_nbytes: int
    nbytes: int
    is_compressed: bool


def summarize_folders(unit: str, shards: Iterable[StoredShard], note: str | None = None) -> ShardSummary:
    """Shards of indexed folders; compressed ones are decompressed whole."""
    listed = list(shards)
    kept = None
    if any(shard.is_compressed for shard in listed):
        kept = KeptShards(_cache_nbytes(), [shard.nbytes for shard in listed], "the cache of this machine")
    sizes, stored = [shard.samples for shard in listed], [shard.stored_nbytes for shard in listed]
    return ShardSummary(unit, sizes, stored, kept, note)


def summarize_arrays(dataset: Callable[[str], Any], stores: Sequence[str], cache_nbytes: int) -> ShardSummary:
    """Rows of arrays in chunks, kept decoded within `cache_nbytes`."""
    sizes, stored, whole = list[int](), list[int](), list[int]()
    for store in stores:
        arrays = dataset(store)
        own = arrays.shard_sizes.tolist()
        sizes += own
        stored += divided(_all_nbytes(store), own)
        row_nbytes = _sample_nbytes(arrays[0]) if len(arrays) else 0
        whole += [size * row_nbytes for size in own]
    if len(sizes) == len(stores):
        return unsharded(sum(sizes), sum(stored))
    return ShardSummary("chunk", sizes, stored, KeptShards(cache_nbytes, whole))


def total_nbytes(files: FileSet) -> int:
    """The bytes of all files."""
    return sum(files.info(number).size for number in range(len(files)))


def divided(nbytes: int, sizes: Sequence[int]) -> list[int]:
    """The bytes of a file, divided in proportion to samples."""
    return [nbytes * size // max(sum(sizes), 1) for size in sizes]


def _all_nbytes(source: str) -> int:
    """The bytes of a file, or of all files of a folder."""
    path = Path(source.removeprefix("file://"))
    if not is_local(source):
        root, object_path = split(source)
        try:
            return open_store(root).size(object_path)
        except ObjectNotFoundError:
            return sum(info.size for info in open_store(source).list())
    return sum(each.stat().st_size for each in ([path] if path.is_file() else path.rglob("*")) if each.is_file())


def _cache_nbytes() -> int:
    """The limit of the user's cache folder for decompressed shards."""
    folder = default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    return Cache(folder).limit_nbytes()


def _sample_nbytes(sample: Any) -> int:
    """The bytes of the tensors and texts of a sample."""
    return sum(leaf.nbytes if isinstance(leaf, torch.Tensor) else len(leaf) for leaf in leaves(sample))
