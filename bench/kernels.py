"""The native kernels compared with NumPy: gathering rows and windows, and permuting numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from feedline.core import kernels
from harness import Contest

CALLS = 500
SEED = 0


def new_indices(high: int, batch: int) -> Callable[[], NDArray[np.int64]]:
    """New indices for each call, many more rows than fit into a cache."""
    rng = np.random.default_rng(SEED)
    batches = cycle([rng.integers(0, high, batch) for _ in range(4000)])
    return lambda: next(batches)


def repeat(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def rows(name: str, array: NDArray[np.generic], batch: int) -> None:
    """Shuffled rows into a reused batch."""
    out = np.empty((batch, *array.shape[1:]), array.dtype)
    indices = new_indices(len(array), batch)
    contest = Contest(name, unit="batches/s", baseline="np.take")
    contest.add("np.take", repeat(lambda: np.take(array, indices(), axis=0, out=out, mode="clip")), CALLS)
    contest.add("array[indices]", repeat(lambda: array[indices()]), CALLS)
    contest.add("gather_rows", repeat(lambda: kernels.gather_rows(array, indices(), out)), CALLS)
    contest.run().publish()


def windows(name: str, items: NDArray[np.uint16], batch: int, window: int) -> None:
    """Windows at any offset, as int64."""
    out = np.empty((batch, window), np.int64)
    offsets = new_indices(len(items) - window, batch)
    view = np.lib.stride_tricks.sliding_window_view(items, window)
    contest = Contest(name, unit="batches/s", baseline="sliding view, astype")
    contest.add("sliding view, astype", repeat(lambda: view[offsets()].astype(np.int64)), CALLS)
    contest.add("gather_windows", repeat(lambda: kernels.gather_windows(items, offsets(), out)), CALLS)
    contest.run().publish()


def permutation(length: int, count: int = 200_000) -> None:
    """The order of an epoch; np.random.permutation has to build all of it at once."""
    contest = Contest(f"kernels permutation of {length:.0e}", unit="million indices/s", baseline="_permuted_numpy")
    contest.add("_permuted_numpy", lambda: kernels._permuted_numpy(SEED, length, 0, count), count / 1e6)
    contest.add("permuted", lambda: kernels.permuted(SEED, length, 0, count), count / 1e6)
    if length <= 10_000_000:
        contest.add("Generator.permutation", lambda: np.random.default_rng(SEED).permutation(length), length / 1e6)
    contest.run().publish()


if __name__ == "__main__":
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(0, 50_000, 400 << 20, np.uint16)
    rows("kernels tokens 64 x 1024 x uint16", tokens.reshape(-1, 1024), 64)
    rows("kernels table 1024 x 100 x float32", rng.random((1_000_000, 100), np.float32), 1024)
    rows("kernels labels 1024 x int64", rng.integers(0, 1000, 5_000_000), 1024)
    windows("kernels windows 64 x 1024 uint16 to int64", tokens, 64, 1024)
    permutation(1_000_000)
    permutation(10**12)
