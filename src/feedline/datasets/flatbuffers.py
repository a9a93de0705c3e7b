"""Tables of FlatBuffers, in which Arrow writes its metadata."""

from __future__ import annotations

import struct

UINT8, UINT16, UINT32 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I")


INT16, INT32, INT64 = struct.Struct("<h"), struct.Struct("<i"), struct.Struct("<q")


class DamagedError(Exception):
    """Damage in an Arrow file or its FlatBuffers, described by the text."""


class FlatTable:
    """A table in a FlatBuffer, its fields by number.

    The format is described at https://flatbuffers.dev/internals. An offset out of the buffer raises `struct.error`.
    """

    def __init__(self, buffer: memoryview, at: int) -> None:
        self.buffer, self.at = buffer, at
        self._fields = at - unpack(INT32, buffer, at)

    @classmethod
    def root(cls, buffer: memoryview) -> FlatTable:
        return cls(buffer, unpack(UINT32, buffer, 0))

    def place(self, field: int) -> int | None:
        """Offset of a field in the buffer, None if missing."""
        entry = 4 + 2 * field
        if entry + 2 > unpack(UINT16, self.buffer, self._fields):
            return None
        offset = unpack(UINT16, self.buffer, self._fields + entry)
        return self.at + offset if offset else None

    def scalar(self, field: int, form: struct.Struct) -> int:
        """A number; 0, the default in Arrow, if missing."""
        at = self.place(field)
        return 0 if at is None else unpack(form, self.buffer, at)

    def table(self, field: int) -> FlatTable | None:
        at = self.place(field)
        return None if at is None else FlatTable(self.buffer, at + unpack(UINT32, self.buffer, at))

    def required(self, field: int) -> FlatTable:
        table = self.table(field)
        if table is None:
            raise DamagedError("a table of its metadata is missing")
        return table

    def vector(self, field: int, nbytes: int) -> tuple[int, int]:
        """Offset and number of the elements, which have `nbytes` each."""
        at = self.place(field)
        if at is None:
            return 0, 0
        at += unpack(UINT32, self.buffer, at) + 4
        count = unpack(UINT32, self.buffer, at - 4)
        if at + count * nbytes > len(self.buffer):
            raise DamagedError("a vector of its metadata is cut short")
        return at, count

    def tables(self, field: int) -> list[FlatTable]:
        at, count = self.vector(field, 4)
        places = range(at, at + 4 * count, 4)
        return [FlatTable(self.buffer, place + unpack(UINT32, self.buffer, place)) for place in places]


def unpack(form: struct.Struct, buffer: memoryview, at: int) -> int:
    """A number of a buffer; struct.error outside of it."""
    # Python would count a negative offset from the end, and return an unrelated number.
    if at < 0:
        raise struct.error("an offset points out of the buffer")
    value: int = form.unpack_from(buffer, at)[0]
    return value
