"""Native kernels for permutations and gathers, with NumPy fallbacks."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline.errors import SampleIndexError

Array = NDArray[Any]


Int64s = NDArray[np.int64]


Int32s = NDArray[np.int32]


_ROUNDS = 8


class SlowKernelsWarning(RuntimeWarning):
    """Native kernels are missing: equal results, several times slower."""


native: ModuleType | None


try:
    from feedline import _native
except ImportError:
    native = None
else:
    native = _native


crc32: Callable[[memoryview], int] = getattr(native, "crc32", zlib.crc32)
"""CRC-32 of contiguous bytes, equal to zlib's; the native one releases the GIL."""


def permuted(key: int, length: int, start: int, stop: int) -> Int64s:
    """Return elements [start, stop) of a permutation of `range(length)`; see `rng.permuted`."""
    if native is None:
        _warn_slow()
        return _permuted_numpy(key, length, start, stop)
    out = np.empty(stop - start, np.int64)
    native.permuted(key, length, start, out)
    return out


def permuted_at(key: int, length: int, places: Int64s) -> Int64s:
    """Return the permutation's elements at `places`, each in [0, length)."""
    places = _int64s(places)
    if native is None:
        _warn_slow()
        return _permuted_at_numpy(key, length, places)
    out = np.empty(len(places), np.int64)
    native.permuted_at(key, length, places, out)
    return out


class TimedPart(Protocol):
    """A part of a stage, as kernels see it; see `stage_parts.Part`."""

    @property
    def timed(self) -> bool: ...
    def count(self, nbytes: int) -> None: ...
    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...


_TIMES_PARTS = hasattr(native, "Part")
"""True if the kernels time parts: in Python, a block costs as much as a third of all telemetry of a batch."""


def gather_rows(
    array: Array, indices: Int64s, out: Array | None = None, threads: int = 1, part: TimedPart | None = None
) -> Array:
    """Return `array[indices]`, written into `out` if it is given.

    `out` has shape `(len(indices), *array.shape[1:])` and the array's dtype, and must not overlap `array`. Negative
    indices count from the end. An index out of range raises `IndexError` before anything is written. Releases the
    GIL. `threads` is an upper bound; batches below a megabyte use one thread. Time and bytes count for `part`.
    """
    indices = _int64s(indices)
    if out is None:
        out = np.empty((len(indices), *array.shape[1:]), array.dtype)
    elif out.dtype != array.dtype:
        raise TypeError(f"out has dtype {out.dtype}, the array {array.dtype}")
    if part is not None and not _TIMES_PARTS:
        with _counted_for(part, out.nbytes):
            return gather_rows(array, indices, out, threads)
    if native is None:
        _warn_slow()
    elif not array.dtype.hasobject and native.gather_rows(array, indices, out, threads, part):
        return out
    with _counted_for(part, out.nbytes):
        _gather_rows_numpy(array, indices, out)
    return out


def gather_windows(items: Array, offsets: Int64s, out: Array, threads: int = 1, part: TimedPart | None = None) -> Array:
    """Copy windows of one-dimensional `items` to the rows of `out`.

    Row i is `items[offsets[i] : offsets[i] + out.shape[1]]`. A wider dtype of `out` converts; uint8, uint16, uint32
    and int32 become int64 in the same pass. A window outside of the items raises `IndexError` before
    anything is written. Time and bytes count for `part`.
    """
    if part is not None and not _TIMES_PARTS:
        with _counted_for(part, out.size * items.itemsize):
            return gather_windows(items, offsets, out, threads)
    offsets = _int64s(offsets)
    widen = 0 if items.dtype == out.dtype else _widening(items.dtype, out.dtype)
    if native is None:
        _warn_slow()
    elif (
        widen is not None
        and not items.dtype.hasobject
        and native.gather_windows(items, offsets, out, widen, threads, part)
    ):
        return out
    with _counted_for(part, out.size * items.itemsize):
        _gather_windows_numpy(items, offsets, out)
    return out


def take_planes(images: Array, lines: Int64s, columns: Int64s, fill: Array, out: Array, threads: int = 1) -> Array:
    """Crop, flip and pad the images of a batch, channels first.

    `out[b, c, y, x]` is `images[b, c, lines[b, y], columns[b, x]]`, or `fill[c]` where a line or column is -1. `lines`
    has shape (batch, out height), `columns` (batch, out width), `fill` one item per channel; all have the dtype of
    `images`. Other numbers out of range raise `IndexError` before anything is written. Releases the GIL.
    """
    lines, columns = _int64s(lines), _int64s(columns)
    fill = np.ascontiguousarray(fill, images.dtype)
    if native is None:
        _warn_slow()
    elif native.take_planes(images, lines.ravel(), columns.ravel(), fill, out, threads):
        return out
    _take_planes_numpy(images, lines, columns, fill, out)
    return out


def mixture_blocks(counts: Int64s, first: int, keys: tuple[int, int]) -> Int32s:
    """Dataset of each position in blocks of a mixture.

    Each block is a circle. A dataset with n draws divides it into n equal parts, with one draw at a random place in
    each. The first part of each dataset begins at a random place: datasets with the same boundaries would alternate.

    `counts`, int64 (blocks, datasets): the positions of a dataset in a block. `first` is the number of the first block.
    `keys` are the key of the places in the parts and the key of the beginnings. From each, a block derives its own key
    by its number.
    """
    counts = _int64s(counts)
    if native is None:
        _warn_slow()
        return np.concatenate([_mixture_block_numpy(row, first + n, keys) for n, row in enumerate(counts)])
    owners = np.empty(int(counts.sum()), np.int32)
    native.mixture_blocks(counts.ravel(), counts.shape[1], first, *keys, owners)
    return owners


def interleave(owners: Int32s, parts: Int64s, counts: Int64s, shifts: Int64s) -> Int64s:
    """Elements of several parts, one after the other, by their owners.

    `parts` has `counts[d]` elements of each owner d, in the order of owners. The n-th position of owner d gets its n-th
    element plus `shifts[d]`.
    """
    starts = np.concatenate([[0], np.cumsum(counts)])
    if native is None:
        _warn_slow()
        return _interleave_numpy(owners, parts, starts, shifts)
    out = np.empty(len(owners), np.int64)
    native.interleave(np.ascontiguousarray(owners, np.int32), _int64s(parts), starts, _int64s(shifts), out)
    return out


MASK64 = (1 << 64) - 1


GOLDEN = 0x9E3779B97F4A7C15
"""Increment of the counter of splitmix64."""


def mix64(z: int) -> int:
    """The mixing function of splitmix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


def mix64_each(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` of every number."""
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def unit_floats(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) of the 53 upper bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(key: int, start: int, stop: int) -> NDArray[np.float64]:
    """Numbers [start, stop) of the uniform stream of `key`.

    Each is a multiple of 2**-53 in [0, 1), by splitmix64 with a counter.
    """
    first = key + (start + 1) * GOLDEN & MASK64
    return unit_floats(mix64_each(np.arange(stop - start, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(first)))


_WIDEN = {np.dtype(name): number for number, name in enumerate(("uint8", "uint16", "int32", "uint32"), start=1)}
"""Values of `enum class Widen` in native/gather.h."""


def _widening(source: np.dtype[Any], target: np.dtype[Any]) -> int | None:
    number = _WIDEN.get(source) if target == np.int64 else None
    if number is None and not np.can_cast(source, target):
        raise TypeError(f"out has dtype {target}, which does not hold every {source}")
    return number


def check_int64(values: NDArray[Any]) -> None:
    """Raise `SampleIndexError` for unsigned numbers that int64 would make negative."""
    if values.dtype.kind == "u" and values.size and (largest := values.max()) > np.iinfo(np.int64).max:
        raise SampleIndexError(f"index {largest} is out of range: indices are below 2**63")


_INT64 = np.dtype(np.int64)


def _int64s(values: NDArray[Any]) -> Int64s:
    if values.dtype is not _INT64 and values.dtype != _INT64:  # by identity, which nearly all have
        check_int64(values)
        values = values.astype(np.int64, casting="same_kind")
    return np.ascontiguousarray(values)


@cache
def _warn_slow() -> None:
    warnings.warn(
        "feedline runs without its native kernels: results are the same, but shuffling and gathering are several times"
        " slower. Install a C++ compiler and the Python headers, then reinstall feedline.",
        SlowKernelsWarning,
        stacklevel=3,
    )


def _permuted_numpy(key: int, length: int, start: int, stop: int) -> Int64s:
    return _permuted_at_numpy(key, length, np.arange(start, stop, dtype=np.int64))


def _permuted_at_numpy(key: int, length: int, places: Int64s) -> Int64s:
    _check_range(places, 0, length, f"place {{}} is out of range for {length} permuted elements")
    bits = max(8, (length - 1).bit_length())
    low_bits = bits // 2
    high_bits = bits - low_bits
    keys = _round_keys(key)
    out = places.astype(np.uint64)
    todo = np.arange(len(out))
    values = out
    # Cycle walking: the network permutes a power of two, and values of at least `length` go through it again.
    while len(todo):
        high, low = values >> np.uint64(low_bits), values & np.uint64((1 << low_bits) - 1)
        widths = [high_bits, low_bits]
        for round_key in keys:
            mask = np.uint64((1 << widths[0]) - 1)
            high, low = low, (high ^ _hash32(low, round_key)) & mask
            widths.reverse()
        values = high << np.uint64(low_bits) | low
        out[todo] = values
        outside = values >= length
        todo, values = todo[outside], values[outside]
    return out.astype(np.int64)


def _round_keys(key: int) -> list[int]:
    return [mix64(key + number * GOLDEN & MASK64) & 0xFFFFFFFF for number in range(1, _ROUNDS + 1)]


def _hash32(x: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    # A bijective mix with low bias; constants from C. Wellons, "Prospecting for hash functions", 2018.
    mask = np.uint64(0xFFFFFFFF)
    x = (x + np.uint64(key)) & mask
    x = (x ^ x >> np.uint64(16)) * np.uint64(0x7FEB352D) & mask
    x = (x ^ x >> np.uint64(15)) * np.uint64(0x846CA68B) & mask
    return x ^ x >> np.uint64(16)


def _mixture_block_numpy(counts: Int64s, number: int, keys: tuple[int, int]) -> Int32s:
    jitter_key, begin_key = (mix64((key ^ number) + GOLDEN & MASK64) for key in keys)
    size = int(counts.sum())
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    within = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = uniform(begin_key, 0, len(counts))[owner]
    places = ((within + uniform(jitter_key, 0, size)) / counts[owner] + begin) % 1.0
    return owner[places.argsort(kind="stable")]


def _interleave_numpy(owners: Int32s, parts: Int64s, starts: Int64s, shifts: Int64s) -> Int64s:
    out = np.empty(len(owners), np.int64)
    for owner, shift in enumerate(shifts.tolist()):
        out[owners == owner] = parts[starts[owner] : starts[owner + 1]] + shift
    return out


@contextmanager
def _counted_for(part: TimedPart | None, nbytes: int) -> Iterator[None]:
    """Count a block and its bytes, as the kernels do."""
    if part is None or not part.timed:
        yield
        return
    with part:
        part.count(nbytes)
        yield


def _gather_rows_numpy(array: Array, indices: Int64s, out: Array) -> None:
    if out.shape != (len(indices), *array.shape[1:]):
        raise ValueError(f"out has shape {out.shape}, the result {(len(indices), *array.shape[1:])}")
    _check_range(indices, -len(array), len(array), f"index {{}} is out of range for {len(array)} rows")
    if array.flags.c_contiguous and array.flags.aligned:
        # "wrap" takes negative indices and writes directly to `out`; "raise" would copy through a buffer.
        np.take(array, indices, axis=0, out=out, mode="wrap")
    else:
        out[...] = array[indices]  # np.take would copy the whole array first


def _gather_windows_numpy(items: Array, offsets: Int64s, out: Array) -> None:
    if items.ndim != 1 or out.ndim != 2 or len(out) != len(offsets):
        raise ValueError(
            "windows need items of one axis, and one row of out per offset:"
            f" got items {items.shape}, {len(offsets)} offsets and out {out.shape}"
        )
    window = out.shape[1]
    _check_range(offsets, 0, len(items) - window + 1, f"window {{}} is out of range for {len(items)} items")
    if len(offsets) and window:
        out[...] = np.lib.stride_tricks.sliding_window_view(items, window)[offsets]


def _take_planes_numpy(images: Array, lines: Int64s, columns: Int64s, fill: Array, out: Array) -> None:
    for name, values, length in (("line", lines, images.shape[2]), ("column", columns, images.shape[3])):
        _check_range(values.ravel(), -1, length, f"{name} {{}} is out of range for {length} {name}s")
    if not out.size:
        return
    outside = (lines < 0)[:, None, :, None] | (columns < 0)[:, None, None, :]
    batch, channels = (np.arange(length) for length in images.shape[:2])
    if images.shape[2] and images.shape[3]:
        at = batch[:, None, None, None], channels[:, None, None]
        out[...] = images[(*at, lines[:, None, :, None], columns[:, None, None, :])]
    np.copyto(out, fill[:, None, None], where=outside)


def _check_range(values: Int64s, low: int, high: int, message: str) -> None:
    outside = (values < low) | (values >= high)
    if outside.any():
        raise IndexError(message.format(values[outside.argmax()]))
