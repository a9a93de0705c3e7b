"""`Files`: the contents of files, one sample each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.dataset import Keys, TransformFunction
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike
from feedline.core.tensors import Allocator, as_indices, normalize_indices
from feedline.datasets.base import DecodedRecords
from feedline.datasets.content_digest import digest_below
from feedline.datasets.decoding import Decode
from feedline.datasets.file_root import FileDecoder, FileRoot
from feedline.datasets.paths import listed, matching
from feedline.datasets.strings import PackedStrings
from feedline.errors import ArgumentError
from feedline.stores import Cache, CachedStore, ObjectRange, expand, join, split
from feedline.stores.links import unsigned
from feedline.stores.urls import is_local, local_path


class Files(DecodedRecords):
    """The contents of files, one sample each.

    Samples keep the order of `paths`; the files of a pattern are sorted. `paths` are paths, patterns with `*`, `**`,
    `?`, `[...]` and braces, or addresses of objects in one store. A folder, or in a store an address that ends with
    `/`, stands for the files in it. `decode` is "bytes", "text", "npy", "image" or a function of the content.
    `transform(value)` or `transform(value, rng)` is applied to the result. The attribute `paths` has the path of each
    sample below `root`. Objects are kept in the folder `cache`, if one is given; `options` are passed to `open_store`.

    SampleError names a file that cannot be decoded.
    """

    def __init__(
        self,
        paths: Pathlike | Sequence[Pathlike],
        *,
        decode: Decode = "bytes",
        transform: TransformFunction | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        root, inside = _locate(paths, options)
        self.root = root
        self._sources = PackedStrings(inside)
        named = [unsigned(path) for path in inside]
        self.paths = self._sources if named == inside else PackedStrings(named)
        self._decoder: FileDecoder = FileDecoder(FileRoot(root, cache=cache, options=options), decode, transform)

    @property
    def listing_fingerprint(self) -> str:
        """Digest of the ordered file names, checked by saved loader states."""
        return digest_of(self.paths)

    @property
    def content_fingerprint(self) -> str:
        """Digest of the current file versions, for cached results.

        Takes a `stat` of each file, or a listing of the store.
        """
        return digest_below(self._decoder.root, list(self._sources))

    def __len__(self) -> int:
        return len(self.paths)

    def _sample(self, at: int, row: int | None) -> Any:
        return self._decoder(self._sources[at], row, partial(self._where, at))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices; objects are fetched concurrently."""
        places = normalize_indices(as_indices(indices), len(self), "Files").tolist()
        with self._decoder.root.fetching([self._sources[at] for at in places]) as fetched:
            return [
                self._decoder(source, row, partial(self._where, at))
                for row, (at, source) in enumerate(zip(places, fetched, strict=True))
            ]

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Cache and byte range of every read for these samples."""
        places = normalize_indices(indices, len(self), "Files")
        return self._decoder.root.ranges([self._sources[at] for at in places.tolist()])

    def _where(self, at: int) -> str:
        return join(self.root, self.paths[at])

    def _batch(self, places: NDArray[np.int64], allocate: Allocator, keys: Keys | None) -> torch.Tensor:
        listed = places.tolist()
        sources = [self._sources[at] for at in listed]
        return self._decoder.batch(sources, keys, allocate, lambda row: self._where(listed[row]))


def _locate(paths: Pathlike | Sequence[Pathlike], options: Mapping[str, Any] | None) -> tuple[str, list[str]]:
    """Split into a common root and the paths below it."""
    given = [os.fspath(path) for path in listed(paths)]
    if all(is_local(path) for path in given):
        return "/", [path.lstrip("/") for path in matching([local_path(path) for path in given], "*")]
    meant = [f"{address}*" if address.endswith("/") else address for address in given]
    places = [split(address) for address in expand(meant, options=options)]
    roots = {place.root for place in places}
    if len(roots) > 1:
        raise ArgumentError(
            f"all files must be in one store, but are in {', '.join(sorted(roots))}: create one dataset for each"
        )
    return roots.pop(), [place.path for place in places]
