"""`Files`: the contents of files, one sample each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Decode
from feedline.datasets.file_contents import FileDecoding, Root
from feedline.datasets.files import Pathlike
from feedline.datasets.paths import listed, matching
from feedline.datasets.records import DecodedRecords, Keys
from feedline.datasets.strings import PackedStrings
from feedline.errors import ArgumentError
from feedline.rows import Empty
from feedline.stores import expand, split


class Files(DecodedRecords):
    """The contents of files, one sample each, in the order given; those of a pattern are sorted.

    `paths` are paths, patterns with `*`, `**`, `?`, `[...]` and braces, or addresses of objects in one store. `decode`
    is "bytes", "text", "npy", "image" or a function of the content. `paths` tells the path of each sample.
    """

    def __init__(
        self, paths: Pathlike | Sequence[Pathlike], *, decode: Decode = "bytes", transform: Transform | None = None
    ) -> None:
        root, inside = _located(paths)
        self.root = root
        self.paths = PackedStrings(inside)
        self._decoding = FileDecoding(Root(root), decode, transform)

    def __len__(self) -> int:
        return len(self.paths)

    def _sample(self, at: int, row: int | None) -> Any:
        return self._decoding(self.paths[at], row, partial(self._where, at))

    def _where(self, at: int) -> str:
        return f"{self.root.rstrip('/')}/{self.paths[at]}"

    def _batch(self, places: NDArray[np.int64], empty: Empty, keys: Keys) -> torch.Tensor:
        listed = places.tolist()
        sources = [self.paths[at] for at in listed]
        return self._decoding.batch(sources, keys, empty, lambda row: self._where(listed[row]))


def _located(paths: Pathlike | Sequence[Pathlike]) -> tuple[str, list[str]]:
    """The root that all of them have in common, and the paths below it."""
    given = [os.fspath(path) for path in listed(paths)]
    remote = [path for path in given if "://" in path and not path.startswith("file://")]
    if not remote:
        return "/", [path.lstrip("/") for path in matching(paths, "*")]
    places = [split(address) for address in expand(given)]
    roots = {place.root for place in places}
    if len(roots) > 1:
        raise ArgumentError(f"files lie in one store, not in {', '.join(sorted(roots))}: make a dataset for each")
    return roots.pop(), [place.path for place in places]
