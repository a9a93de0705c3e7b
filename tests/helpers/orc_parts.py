"""ORC files in their parts, which can be changed and put together again with sizes that fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from feedline.datasets import protobuf
from feedline.datasets.tables.orc_layout import _inflater

PRESENT, DATA, LENGTH, DICTIONARY_DATA, SECONDARY, ROW_INDEX = 0, 1, 2, 3, 5, 6

_BLOCK_NBYTES = 1 << 15
"""At most the block size of each writer of the tests, and less than the largest size of a header."""


Fields = list[tuple[int, int, Any]]
"""Number, wire type and value of the fields of a message; see `protobuf.fields`."""


@dataclass
class Stream:
    kind: int
    column: int
    content: bytes


@dataclass
class Stripe:
    streams: list[Stream]
    encodings: list[dict[int, int]]
    rest: Fields
    """The other fields of the footer."""
    rows: int


class ORCParts:
    """The stripes of a file, and the fields of its footer and postscript. Other parts stay as they are."""

    def __init__(self, data: bytes) -> None:
        script_at = len(data) - 1 - data[-1]
        self.script = list(protobuf.fields(data[script_at:-1]))
        script = protobuf.by_number(data[script_at:-1])
        self._codec = script.get(2, 0)
        self._unpacked = _inflater(self._codec)
        footer_at = script_at - script[1]
        self._metadata = data[footer_at - script.get(5, 0) : footer_at]
        self.footer = list(protobuf.fields(self._unpacked(data[footer_at:script_at])))
        self.stripes = [
            self._stripe(data, protobuf.by_number(value)) for number, _, value in self.footer if number == 3
        ]

    def _stripe(self, data: bytes, found: dict[int, Any]) -> Stripe:
        at = found.get(1, 0)
        stop = at + found.get(2, 0) + found.get(3, 0)
        stripe = Stripe([], [], [], found.get(5, 0))
        for field in protobuf.fields(self._unpacked(data[stop : stop + found.get(4, 0)])):
            values = protobuf.by_number(field[2]) if field[0] in (1, 2) else {}
            if field[0] == 1:
                content = self._unpacked(data[at : at + values.get(3, 0)])
                stripe.streams.append(Stream(values.get(1, 0), values.get(2, 0), content))
                at += values.get(3, 0)
            elif field[0] == 2:
                stripe.encodings.append(values)
            else:
                stripe.rest.append(field)
        return stripe

    def joined(self) -> bytes:
        """The file of these parts."""
        parts, described, at = [b"ORC"], [], 3
        for stripe in self.stripes:
            packed = [self._packed(stream.content) for stream in stripe.streams]
            index = sum(
                len(data) for stream, data in zip(stripe.streams, packed, strict=True) if stream.kind >= ROW_INDEX
            )
            footer = self._packed(_stripe_footer(stripe, map(len, packed)))
            nbytes = sum(map(len, packed))
            described.append(encoded(enumerate_fields([at, index, nbytes - index, len(footer), stripe.rows])))
            parts += [*packed, footer]
            at += nbytes + len(footer)
        footer = self._packed(
            encoded([*((3, 2, each) for each in described), *(field for field in self.footer if field[0] != 3)])
        )
        script = encoded([(number, kind, len(footer) if number == 1 else value) for number, kind, value in self.script])
        return b"".join([*parts, self._metadata, footer, script, bytes([len(script)])])

    def _packed(self, data: bytes) -> bytes:
        """Blocks that are marked as not compressed."""
        if not self._codec:
            return data
        blocks = [data[at : at + _BLOCK_NBYTES] for at in range(0, len(data), _BLOCK_NBYTES)]
        return b"".join((len(block) << 1 | 1).to_bytes(3, "little") + block for block in blocks)


def _stripe_footer(stripe: Stripe, sizes: Iterable[int]) -> bytes:
    streams = [
        encoded(enumerate_fields([stream.kind, stream.column, nbytes]))
        for stream, nbytes in zip(stripe.streams, sizes, strict=True)
    ]
    encodings = [encoded([(number, 0, value) for number, value in each.items()]) for each in stripe.encodings]
    return encoded([*((1, 2, each) for each in streams), *((2, 2, each) for each in encodings), *stripe.rest])


def enumerate_fields(values: Iterable[int]) -> Fields:
    """Numbers as the first fields of a message."""
    return [(number, 0, value) for number, value in enumerate(values, start=1)]


def encoded(fields: Iterable[tuple[int, int, Any]]) -> bytes:
    """A message with these fields."""
    parts = []
    for number, kind, value in fields:
        parts.append(varint(number << 3 | kind))
        if kind == 0:
            parts.append(varint(value))
        else:
            parts += [varint(len(value)), value] if kind == 2 else [value]
    return b"".join(parts)


def varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
