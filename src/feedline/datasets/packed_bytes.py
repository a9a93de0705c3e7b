"""Many short strings of bytes in two arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PackedBytes:
    """An immutable sequence of byte strings in one buffer: 8 bytes each, plus their own; 0 each where all are as long.

    Pickles as arrays, out of band where the pickler can.
    """

    def __init__(self, offsets: NDArray[np.int64], buffer: NDArray[np.uint8]) -> None:
        self.offsets, self.buffer = offsets, buffer
        lengths = np.diff(offsets)
        width = int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0
        self._fixed: NDArray[Any] | None = buffer.view(f"V{width}") if width else None

    @classmethod
    def of(cls, strings: Iterable[bytes]) -> PackedBytes:
        """The strings, one after the other."""
        offsets, buffer = array("q", [0]), bytearray()
        for text in strings:
            buffer += text
            offsets.append(len(buffer))
        return cls(np.frombuffer(offsets, np.int64), np.frombuffer(buffer, np.uint8))

    @property
    def nbytes(self) -> int:
        """The memory, or the mapping, behind all strings."""
        return int(self.offsets.nbytes + self.buffer.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, at: int) -> bytes:
        """The string at a place that has been checked."""
        start, stop = self.offsets[at : at + 2].tolist()
        return bytes(self.buffer.data[start:stop])

    def many(self, places: NDArray[np.int64]) -> list[bytes]:
        """The strings at these places, which have been checked."""
        if self._fixed is not None:
            found: list[bytes] = self._fixed[places].tolist()
            return found
        buffer = self.buffer.data
        spans = zip(self.offsets[places].tolist(), self.offsets[places + 1].tolist(), strict=True)
        return [bytes(buffer[start:stop]) for start, stop in spans]
