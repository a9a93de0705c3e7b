"""Sums of ORC's run-length encoded integers, native or by NumPy.

Both versions of the encoding: https://orc.apache.org/specification/ORCv1/.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core import kernels
from feedline.core.kernels import MASK64

_WIDTHS = (*range(1, 25), 26, 28, 30, 32, 40, 48, 56, 64)
"""Width in bits by the code of five bits in a header."""


class RunLengthSums(NamedTuple):
    """Sums of the integers of a stream; zeros for none."""

    integers: int
    least: int
    greatest: int
    total: int
    """The sum of the positive integers, at most 2**63 - 1."""


def run_length_sums(data: bytes, version: int, *, signed: bool) -> RunLengthSums:
    """Sums of encoded integers, which are computed modulo 2**64 as int64.

    ValueError for a damaged run, and for one that ends too early. Releases the GIL.
    """
    if kernels.native is None:
        return _run_length_sums_numpy(data, version, signed=signed)
    found = kernels.native.run_length_sums(data, version, signed)
    if found is None:
        raise ValueError("a run of integers is damaged")
    return RunLengthSums(*found)


def _run_length_sums_numpy(data: bytes, version: int, *, signed: bool) -> RunLengthSums:
    values = run_length_values(data, version, signed=signed).tolist()
    if not values:
        return RunLengthSums(0, 0, 0, 0)
    total = sum(value for value in values if value > 0)
    return RunLengthSums(len(values), min(values), max(values), min(total, np.iinfo(np.int64).max))


def run_length_values(data: bytes, version: int, *, signed: bool) -> NDArray[np.int64]:
    """The encoded integers; errors as those of `run_length_sums`."""
    runs, parts = _Runs(data, signed), [np.empty(0, np.uint64)]
    while runs.at < len(data):
        parts.append(runs.of_version_1() if version == 1 else runs.of_version_2())
    return np.concatenate(parts).view(np.int64)


class _Runs:
    """The runs of a stream, one after the other, modulo 2**64."""

    def __init__(self, data: bytes, signed: bool) -> None:
        self._data, self._signed, self.at = data, signed, 0

    def of_version_1(self) -> NDArray[np.uint64]:
        head = self._bytes(1)[0]
        if head >= 0x80:
            return np.array([self._varint(signed=self._signed) for _ in range(0x100 - head)], np.uint64)
        delta = int.from_bytes(self._bytes(1), signed=True)
        return _progression(self._varint(signed=self._signed), delta, head + 3)

    def of_version_2(self) -> NDArray[np.uint64]:
        head = self._bytes(1)[0]
        if head < 0x40:
            value = int.from_bytes(self._bytes((head >> 3) + 1))
            return np.full((head & 7) + 3, _unzigzag(value) if self._signed else value, np.uint64)
        count, code = ((head & 1) << 8 | self._bytes(1)[0]) + 1, head >> 1 & 31
        if head < 0x80:
            values = self._packed(count, _WIDTHS[code])
            one = np.uint64(1)
            return values >> one ^ (np.uint64(0) - (values & one)) if self._signed else values
        return self._patched(count, _WIDTHS[code]) if head < 0xC0 else self._deltas(count, _WIDTHS[code] if code else 0)

    def _patched(self, count: int, width: int) -> NDArray[np.uint64]:
        first, second = self._bytes(2)
        nbytes, patch_width, gap_width, patches = (first >> 5) + 1, _WIDTHS[first & 31], (second >> 5) + 1, second & 31
        if not patches or width == 64 or patch_width + gap_width > 64:
            raise ValueError("the header of a run with patches is damaged")
        base, sign = int.from_bytes(self._bytes(nbytes)), 1 << 8 * nbytes - 1
        values = self._packed(count, width)
        place = 0
        listed = self._packed(patches, min(each for each in _WIDTHS if each >= patch_width + gap_width)).tolist()
        for number, each in enumerate(listed):
            # The gap is relative to the place of the patch before. An empty patch divides a long gap.
            gap, patch = each >> patch_width, each & (1 << patch_width) - 1
            place += gap
            if place >= count or (number and not gap) or (number == patches - 1 and not patch):
                raise ValueError("a list of patches is damaged")
            values[place] |= np.uint64(patch << width & MASK64)
        return values + np.uint64((sign - base if base & sign else base) & MASK64)

    def _deltas(self, count: int, width: int) -> NDArray[np.uint64]:
        first, step = self._varint(signed=self._signed), self._varint(signed=True)
        if not width:
            return _progression(first, step, count)
        if count < 2:
            raise ValueError("a run of deltas is too short")
        rest = self._packed(count - 2, width)
        steps = np.concatenate((np.array([first, step], np.uint64), np.uint64(0) - rest if step >> 63 else rest))
        return np.cumsum(steps, dtype=np.uint64)

    def _varint(self, *, signed: bool) -> int:
        value = 0
        for shift in range(0, 70, 7):
            octet = self._bytes(1)[0]
            value |= (octet & 0x7F) << shift
            if octet < 0x80:
                value &= MASK64
                return _unzigzag(value) if signed else value
        raise ValueError("a varint has more than ten bytes")

    def _packed(self, count: int, width: int) -> NDArray[np.uint64]:
        """Integers of `width` bits, the highest bit first.

        The last byte is filled up.
        """
        bits = np.unpackbits(np.frombuffer(self._bytes((count * width + 7) // 8), np.uint8))[: count * width]
        whole = np.zeros((count, 64), np.uint8)
        whole[:, 64 - width :] = bits.reshape(count, width)
        return np.packbits(whole).view(">u8").astype(np.uint64)

    def _bytes(self, nbytes: int) -> bytes:
        found = self._data[self.at : self.at + nbytes]
        if len(found) < nbytes:
            raise ValueError("the integers end within a run")
        self.at += nbytes
        return found


def _progression(first: int, step: int, count: int) -> NDArray[np.uint64]:
    return np.uint64(first) + np.uint64(step & MASK64) * np.arange(count, dtype=np.uint64)


def _unzigzag(value: int) -> int:
    return value >> 1 ^ (-(value & 1) & MASK64)
