"""Checks of ORC stripes before pyarrow reads them.

pyarrow's reader trusts the lengths of strings and lists and the scales of decimals. With damaged ones it allocates or
copies memory without a limit, which ends the process, or does not return.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from math import inf

from feedline.core.run_lengths import RunLengthSums, run_length_sums
from feedline.datasets import protobuf
from feedline.datasets.tables.orc_layout import HEADER_NBYTES, DamagedORCError, ORCLayout, ORCType, stripe_streams
from feedline.stores.base import Range

_PRESENT, _DATA, _LENGTH, _DICTIONARY, _SECONDARY = 0, 1, 2, 3, 5
"""Kinds of streams."""


_FEW_ITEMS = 1 << 24
"""So many items of lists are allocated even if the file does not have them: their reader then notices that."""


_LARGEST_SCALE = 100
"""Scales are at most 38. pyarrow divides by ten as often as a negative one, as an unsigned number, is too large."""


_RUN_OF_BYTES = 65
"""Most bytes that a byte of a stream of bytes stands for: 130 by two."""


_NBYTES: dict[int, int] = {ORCType.FLOAT: 4, ORCType.DOUBLE: 8, ORCType.DECIMAL: 1}
"""Least size of a value in a stream without runs."""


_BYTES: dict[int, int] = {ORCType.BOOLEAN: 8, ORCType.BYTE: 1}
"""Values in a byte of a stream of bytes."""

Read = Callable[[int, int], bytes | memoryview]


def check_stripe(layout: ORCLayout, stripe: int, fields: Mapping[int, str], read: Read) -> None:
    """Raise DamagedORCError for lengths and scales that pyarrow's reader does not survive.

    `fields` are the names of the fields that it will read. `read(start, stop)` gives bytes of the file: the footer of
    the stripe, and all lengths and scales of these fields.
    """
    chosen = {
        column: name
        for field, name in fields.items()
        for column in range(layout.fields[field][0], layout.fields[field][1] + 1)
    }
    checked = {column: name for column, name in chosen.items() if layout.types[column][0] in _CHECKS}
    if not checked:
        return
    try:
        streams = _StripeStreams(layout, stripe, read)
        for column, name in checked.items():
            problem = _CHECKS[layout.types[column][0]](streams, column)
            if problem:
                raise DamagedORCError(f"column {name!r} {problem}")
    except (ValueError, LookupError, OverflowError, zlib.error) as error:
        raise DamagedORCError(f"its streams are damaged: {error}") from error


class _StripeStreams:
    """The streams of a stripe by column and kind."""

    def __init__(self, layout: ORCLayout, stripe: int, read: Read) -> None:
        self.layout, self._read = layout, read
        at, footer, stop, _ = layout.stripes[stripe].tolist()
        found, self._encodings = stripe_streams(layout.inflate(bytes(read(footer, stop))))
        self._places: dict[tuple[int, int], Range] = {}
        for kind, column, nbytes in found.tolist():
            self._places.setdefault((column, kind), (at, at + nbytes))
            at += nbytes
        if at > footer:
            raise DamagedORCError(f"the streams of stripe {stripe} are longer than the stripe")

    def words(self, column: int) -> int | None:
        """The size of a column's dictionary, or None."""
        encoding = protobuf.by_number(self._encodings[column])
        return encoding.get(2, 0) if encoding.get(1, 0) & 1 else None

    def sums(self, column: int, kind: int, *, signed: bool = False) -> RunLengthSums:
        """Sums of the integers of a stream, or zeros."""
        start, stop = self._places.get((column, kind), (0, 0))
        version = 2 if protobuf.by_number(self._encodings[column]).get(1, 0) & 2 else 1
        return run_length_sums(self.layout.inflate(bytes(self._read(start, stop))), version, signed=signed)

    def nbytes(self, column: int, kind: int) -> int | None:
        """Most bytes of a stream without compression, or None."""
        if (column, kind) not in self._places:
            return None
        at, stop = self._places[column, kind]
        if not self.layout.codec:
            return stop - at
        nbytes = 0
        while at < stop:
            header = int.from_bytes(self._read(at, at + HEADER_NBYTES), "little")
            nbytes += header >> 1 if header & 1 else self.layout.block_nbytes
            at += HEADER_NBYTES + (header >> 1)
        return nbytes

    def count(self, column: int) -> float:
        """Most values that the streams of a column have."""
        kind, members = self.layout.types[column]
        bits = self.nbytes(column, _PRESENT)
        if bits is not None:
            return bits * _RUN_OF_BYTES * 8
        if kind == ORCType.STRUCT:
            return min((self.count(each) for each in members), default=inf)
        if kind in _BYTES:
            return (self.nbytes(column, _DATA) or 0) * _RUN_OF_BYTES * _BYTES[kind]
        if kind in _NBYTES:
            return (self.nbytes(column, _DATA) or 0) // _NBYTES[kind]
        has_lengths = kind in _LISTS or (kind in _STRINGS and self.words(column) is None)
        return self.sums(column, _LENGTH if has_lengths else _DATA).integers


def _problem_of_strings(streams: _StripeStreams, column: int) -> str:
    words, lengths = streams.words(column), streams.sums(column, _LENGTH)
    if words is not None and words > lengths.integers:
        return f"claims a dictionary of {words} words, and has {lengths.integers}"
    nbytes = streams.nbytes(column, _DATA if words is None else _DICTIONARY) or 0
    return _problem_of_lengths(lengths, nbytes, "bytes")


def _problem_of_lists(streams: _StripeStreams, column: int) -> str:
    lengths = streams.sums(column, _LENGTH)
    if lengths.least >= 0 and lengths.total <= _FEW_ITEMS:
        return ""
    return _problem_of_lengths(lengths, min(map(streams.count, streams.layout.types[column][1])), "items")


def _problem_of_lengths(lengths: RunLengthSums, most: float, what: str) -> str:
    if lengths.least < 0:
        return f"claims a length of {lengths.least} {what}"
    return f"claims {lengths.total} {what}, and has at most {most}" if lengths.total > most else ""


def _problem_of_scales(streams: _StripeStreams, column: int) -> str:
    scales = streams.sums(column, _SECONDARY, signed=True)
    if scales.least >= 0 and scales.greatest <= _LARGEST_SCALE:
        return ""
    return f"claims decimals of scales from {scales.least} to {scales.greatest}"


_STRINGS = (ORCType.STRING, ORCType.BINARY, ORCType.VARCHAR, ORCType.CHAR)
_LISTS = (ORCType.LIST, ORCType.MAP)
_CHECKS: dict[int, Callable[[_StripeStreams, int], str]] = {
    **dict.fromkeys(_STRINGS, _problem_of_strings),
    **dict.fromkeys(_LISTS, _problem_of_lists),
    ORCType.DECIMAL: _problem_of_scales,
}
"""Functions that describe the problem of a column, or give ""."""
