"""Rate at which threads copy memory, alone and together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import inf
from threading import Barrier
from time import thread_time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class CopyRates(NamedTuple):
    """Limits of memory bandwidth."""

    thread_rate: float
    """Bytes per second of a thread that only copies."""
    copiers: float = inf
    """Number of threads that reach this rate at the same time; infinite if all measured threads do."""


@cache
def measure_copy_rates(cpus: int) -> CopyRates:
    """Measure the rates with a thread for each CPU.

    Takes tens of milliseconds. Measures CPU time, which other programs hardly change.
    """
    threads = min(cpus, _MOST_THREADS)
    pairs = [(np.ones(_NBYTES, np.uint8), np.ones(_NBYTES, np.uint8)) for _ in range(_MOST_THREADS)]
    alone = sorted(_NBYTES / _copy_s(*pair) for pair in pairs)[len(pairs) // 2]
    if threads == 1:
        return CopyRates(alone)
    barrier = Barrier(threads)

    def copy(pair: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> float:
        barrier.wait()
        return _REPEATED * _NBYTES / sum(_copy_s(*pair) for _ in range(_REPEATED))

    with ThreadPoolExecutor(threads) as executor:
        try:
            together = sum(executor.map(copy, pairs[:threads]))
        except BaseException:  # for example, a thread cannot be started: the others would wait for it forever
            barrier.abort()
            raise
    copiers = max(together / alone, 1.0)
    return CopyRates(alone, copiers if copiers < _UNLIMITED * threads else inf)


def _copy_s(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
    began_s = thread_time()
    np.copyto(target, source)
    return max(thread_time() - began_s, 1e-6)


_MOST_THREADS = 8


_NBYTES = 8 << 20
"""Bytes of a copy. The copies of all threads together do not fit into caches."""


_REPEATED = 4


_UNLIMITED = 0.9
"""Share of the rate of a single thread that each of several threads must reach to count as unlimited."""
