"""Epochs of loaders whose streams are endless, or whose epochs are slow to start."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any


class Slices:
    """Each call returns the next `batches` of the stream, after it drops the `ahead` batches that were ready.

    Batches that were prepared between calls are not counted, and as many are prepared again by the end. `ahead` is the
    number of batches that are ready after a pause, measured for the pinned version.
    """

    def __init__(self, stream: Iterator[Any], batches: int, ahead: int) -> None:
        self.stream, self.batches, self.ahead = stream, batches, ahead

    def __call__(self) -> Iterator[Any]:
        for _ in range(self.ahead):
            next(self.stream)
        return islice(self.stream, self.batches)
