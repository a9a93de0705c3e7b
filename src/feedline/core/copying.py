"""Rate at which threads copy memory, alone and together."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from math import inf
from statistics import fmean, median
from threading import Barrier
from time import perf_counter, thread_time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Pair = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Source and target of a copy."""


class CopyRates(NamedTuple):
    """Limits of memory bandwidth."""

    thread_rate: float
    """Bytes per second of a thread that only copies."""
    copiers: float = inf
    """Number of threads that reach this rate at the same time; infinite if no limit was seen."""


@cache
def measure_copy_rates(cpus: int) -> CopyRates:
    """Measure the rates with a thread for each CPU.

    Takes tens of milliseconds. Measures CPU time, which other programs hardly change. Copies of one thread and of all
    take turns. No copy finds its bytes in a cache: a pair is copied again after many others.
    """
    threads = min(cpus, _MOST_THREADS)
    pairs = deque((np.ones(_NBYTES, np.uint8), np.ones(_NBYTES, np.uint8)) for _ in range(_PAIRS))
    alone, together = list[float](), list[float]()
    with ThreadPoolExecutor(threads) as executor:
        while len(alone) < _MOST_TURNS and min(len(alone), len(together)) < _LEAST_TURNS:
            alone.append(_NBYTES / _copy(pairs[threads]).cpu_s)
            copies = _copy_together(executor, list(islice(pairs, threads)))
            if _overlap(copies):
                together.append(sum(_NBYTES / copy.cpu_s for copy in copies))
            pairs.rotate(-threads - 1)
    copiers = max(median(together) / median(alone), 1.0) if threads > 1 and together else inf
    # More threads than were measured may have a limit or not. Where there are no more CPUs, they never copy at once.
    is_unlimited = threads < cpus and copiers >= _UNLIMITED * threads
    return CopyRates(median(alone), inf if is_unlimited else copiers)


class _TimedCopy(NamedTuple):
    began_s: float
    ended_s: float
    cpu_s: float


def _copy(pair: Pair) -> _TimedCopy:
    source, target = pair
    began_s, began_cpu_s = perf_counter(), thread_time()
    np.copyto(target, source)
    cpu_s = max(thread_time() - began_cpu_s, 1e-6)
    return _TimedCopy(began_s, perf_counter(), cpu_s)


def _copy_together(executor: ThreadPoolExecutor, pairs: list[Pair]) -> list[_TimedCopy]:
    """Copy all pairs, each in its own thread, at the same time."""
    barrier = Barrier(len(pairs))

    def copy(pair: Pair) -> _TimedCopy:
        barrier.wait()
        return _copy(pair)

    try:
        return list(executor.map(copy, pairs))
    except BaseException:  # for example, a thread cannot be started: the others would wait for it forever
        barrier.abort()
        raise


def _overlap(copies: list[_TimedCopy]) -> bool:
    """True if all copies ran at the same time.

    Busy CPUs interrupt some, or begin them late.
    """
    elapsed_s = max(copy.ended_s for copy in copies) - min(copy.began_s for copy in copies)
    return elapsed_s < _OVERLAPPING * fmean(copy.cpu_s for copy in copies)


_MOST_THREADS = 8


_NBYTES = 4 << 20
"""Bytes of a copy."""


_PAIRS = 2 * (_MOST_THREADS + 1)
"""Number of pairs: no turn uses those of the turn before it. All of them do not fit into caches."""


_LEAST_TURNS, _MOST_TURNS = 7, 30
"""Turns that give a median, and turns after which it is made of fewer: busy CPUs leave few with overlapping copies."""


_OVERLAPPING = 1.3
"""Most time from the first start to the last end of copies that overlap, as a multiple of their mean CPU time."""


_UNLIMITED = 0.9
"""Share of the rate of a single thread that each of several threads must reach to count as unlimited."""
