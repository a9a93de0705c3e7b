"""Epochs out of loaders that never end one, or would pay for a start at each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any


class Slices:
    """Each call gives the next `batches` of the stream, after it has thrown away the `ahead` that were ready before.

    So what was prepared while nobody asked is not counted, and as much is prepared again by the end. `ahead` is how
    many come at once after a pause, as measured for the pinned version.
    """

    def __init__(self, stream: Iterator[Any], batches: int, ahead: int) -> None:
        self.stream, self.batches, self.ahead = stream, batches, ahead

    def __call__(self) -> Iterator[Any]:
        for _ in range(self.ahead):
            next(self.stream)
        return islice(self.stream, self.batches)
