"""Samples grouped by class: for each class an endless order of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from feedline.errors import ArgumentError
from feedline.rng import derive
from feedline.samplers import arguments
from feedline.samplers.draws import reshuffled
from feedline.samplers.order import Indices


class Classes:
    """The indices of each class among `labels` (any values with an order, which numbers the classes)."""

    def __init__(self, labels: Any) -> None:
        self.labels = arguments.vector("labels", labels)
        try:
            self.names, numbers = np.unique(self.labels, return_inverse=True)
        except TypeError as error:
            raise ArgumentError(f"labels must be of one kind, so that they can be ordered: {error}") from None
        self.sizes: Indices = np.bincount(numbers).astype(np.int64)
        self._members: Indices = numbers.argsort(kind="stable").astype(np.int64)
        self._firsts = np.cumsum(self.sizes) - self.sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def draws(self, key: int, number: int, start: int, stop: int) -> Indices:
        """Draws [start, stop) of class `number`: all its indices in random order, again and again in new orders."""
        size, first = int(self.sizes[number]), int(self._firsts[number])
        return self._members[first + reshuffled(derive(key, number), size, start, stop)]
