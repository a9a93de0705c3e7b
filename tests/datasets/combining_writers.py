"""`combining_writers.py FOLDER COUNT`: fills a CachedMap until it is done or killed; prints "begun" once it works."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from feedline.datasets import Arrays, CachedMap


def heavy(row: Any) -> Any:
    """Large enough that a kill often interrupts a write."""
    return {"row": row, "block": np.full(50_000, row.item(), np.int64)}


def cached(folder: str, count: int) -> CachedMap:
    """The same cache in every process."""
    return CachedMap(Arrays(np.arange(count)), heavy, folder)


if __name__ == "__main__":
    dataset = cached(sys.argv[1], int(sys.argv[2]))
    dataset[0]
    print("begun", flush=True)
    dataset.fill()
