"""Vectorized random numbers with random access by (key, position)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from feedline.core.kernels import uniform
from feedline.core.rng import derive, permuted

_SORTED = 512
"""Longest permutation made by sorting, all passes in one call."""


def exponential(key: int, start: int, stop: int) -> NDArray[np.float64]:
    """Numbers [start, stop) of the standard exponential stream of `key`.

    The bits are the same on every machine. The logarithm uses IEEE's exact operations only: the logarithms of C
    libraries and vector units differ in the last bit, which would swap neighbors in an order sorted by it.
    """
    fraction, exponent = np.frexp(1.0 - uniform(key, start, stop))
    ratio = (fraction - 1.0) / (fraction + 1.0)
    square, series = ratio * ratio, np.zeros_like(ratio)
    for odd in range(35, 0, -2):  # log x = 2 (r + r**3/3 + r**5/5 + ...), r = (x - 1)/(x + 1), here |r| <= 1/3
        series = series * square + 1.0 / odd
    return -(2.0 * ratio * series + exponent * 0.6931471805599453)


def permutations(key: int, length: int, first: int, last: int) -> NDArray[np.int64]:
    """Random permutations [first, last) of `range(length)`, one per row."""
    draws = uniform(key, first * length, last * length).reshape(last - first, length)
    return draws.argsort(axis=1, kind="stable").astype(np.int64, copy=False)


def endless_permutation(key: int, length: int, start: int, stop: int) -> NDArray[np.int64]:
    """Elements [start, stop) of an endless, reshuffled order of `range(length)`.

    Each run of `length` elements is a random permutation.
    """
    first, last = start // length, -(-stop // length)
    if length <= _SORTED:
        return permutations(key, length, first, last).ravel()[start - first * length : stop - first * length]
    spans = ((p, max(start - p * length, 0), min(stop - p * length, length)) for p in range(first, last))
    parts = [permuted(derive(key, p), length, low, high) for p, low, high in spans]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
