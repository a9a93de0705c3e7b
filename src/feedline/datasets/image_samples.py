"""The samples of an `ImageFolder`: paths and classes, held packed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.folder_scan import Details
from feedline.datasets.packed_bytes import PackedBytes
from feedline.rows import one_within


class Samples(Sequence[tuple[str, int]]):
    """`(path, class index)` of each sample, made when looked at; equal to the list that torchvision holds.

    `details` tells what a listing of a store told of each beside its path. Pickles as arrays.
    """

    def __init__(
        self, beginning: str, paths: PackedBytes, targets: NDArray[np.int32], details: Details | None = None
    ) -> None:
        self._beginning = beginning
        self._paths, self._targets = paths, targets
        self.details = details

    def __len__(self) -> int:
        return len(self._targets)

    @overload
    def __getitem__(self, index: int) -> tuple[str, int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, int]]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, int] | list[tuple[str, int]]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = one_within(index, len(self), "ImageFolder.samples")
        return self._beginning + os.fsdecode(self._paths[at]), int(self._targets[at])

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:2]))
        return f"[{shown}{', …' * (len(self) > 2)}]"

    def files(self, places: NDArray[np.int64], folder: bytes) -> list[str]:
        """The paths at these places, which have been checked, as they are read: below `folder`."""
        return [(folder + path).decode("utf-8", "surrogateescape") for path in self._paths.many(places)]

    def targets(self, places: NDArray[np.int64] | slice) -> NDArray[np.int32]:
        """The class indices at these places."""
        return self._targets[places]
