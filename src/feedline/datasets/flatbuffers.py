"""Reading FlatBuffers, the few parts of them that Arrow's messages need (https://flatbuffers.dev/internals)."""

from __future__ import annotations

import struct

_UINT16, _UINT32, _INT32 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i")


class Table:
    """A table in a buffer; its fields go by the number under which the schema lists them.

    What leads out of the buffer raises `struct.error`.
    """

    def __init__(self, buffer: memoryview, at: int) -> None:
        self._buffer, self._at = buffer, at
        self._fields = at - _unpack(_INT32, buffer, at)

    @classmethod
    def root(cls, buffer: memoryview) -> Table:
        """The table that the whole buffer is."""
        return cls(buffer, _unpack(_UINT32, buffer, 0))

    def has(self, field: int) -> bool:
        """Whether it is written."""
        return self._place(field) is not None

    def scalar(self, field: int, form: struct.Struct) -> int:
        """A number; 0, which is the default of all that Arrow has, where it is not written."""
        at = self._place(field)
        return 0 if at is None else _unpack(form, self._buffer, at)

    def table(self, field: int) -> Table:
        """A table within this one; `struct.error` where there is none."""
        at = self._place(field)
        if at is None:
            raise struct.error("a table is missing")
        return Table(self._buffer, at + _unpack(_UINT32, self._buffer, at))

    def tables(self, field: int) -> list[Table]:
        """A vector of tables."""
        at = self._place(field)
        if at is None:
            return []
        at += _unpack(_UINT32, self._buffer, at) + 4
        places = range(at, at + 4 * _unpack(_UINT32, self._buffer, at - 4), 4)
        return [Table(self._buffer, place + _unpack(_UINT32, self._buffer, place)) for place in places]

    def structs(self, field: int, form: struct.Struct) -> list[tuple[int, ...]]:
        """A vector of structs, or of numbers."""
        at = self._place(field)
        if at is None:
            return []
        at += _unpack(_UINT32, self._buffer, at)
        count = _unpack(_UINT32, self._buffer, at)
        data = self._buffer[at + 4 : at + 4 + count * form.size]
        if len(data) != count * form.size:
            raise struct.error("a vector goes on after its buffer")
        return list(form.iter_unpack(data))

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > _unpack(_UINT16, self._buffer, self._fields):
            return None
        offset = _unpack(_UINT16, self._buffer, self._fields + entry)
        return self._at + offset if offset else None


def _unpack(form: struct.Struct, buffer: memoryview, at: int) -> int:
    if at < 0:
        raise struct.error("an offset leads out of the buffer")
    value: int = form.unpack_from(buffer, at)[0]
    return value
