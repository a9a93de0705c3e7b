"""The columns of an Arrow schema, and what of a record batch belongs to those that are chosen."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from feedline.datasets.flatbuffers import Table
from feedline.datasets.ipc_bodies import Body
from feedline.datasets.ipc_layout import schema_in
from feedline.datasets.kinds import pyarrow

_INT64 = struct.Struct("<q")
_FIELDS = 1
_DICTIONARY, _CHILDREN = 4, 5
_ID = 0


class Part(NamedTuple):
    """A column or a part of one: what has a length of its own in a record batch."""

    kind: Any
    """The Arrow type of what is stored."""
    buffers: int
    """How many it has itself, not counting those of characters behind views."""
    is_view: bool = False
    parts: tuple[Part, ...] = ()
    """What it consists of."""
    dictionary: Dictionary | None = None
    extensions: tuple[Any, ...] = ()
    """The extension types that are stored like this, each as the one before it."""

    def all(self) -> Iterator[Part]:
        """The part itself, and what it consists of, in the order of the format."""
        yield self
        for part in self.parts:
            yield from part.all()

    def widths(self, times: int = 1) -> Iterator[int | None]:
        """The bits that a row has in each buffer if it has so many of this part; None where that depends on the row."""
        if not self.buffers:  # nulls, or runs
            yield None
            return
        yield times  # validity
        if not self.parts:
            has_width = self.buffers == 2 and not self.is_view and self.dictionary is None
            yield times * self.kind.bit_width if has_width else None
        elif hasattr(self.kind, "list_size"):
            yield from self.parts[0].widths(times * self.kind.list_size)
        else:
            for part in self.parts:
                yield from part.widths(times) if self.buffers == 1 else [None]

    def dictionaries(self) -> Iterator[int]:
        """The numbers of all dictionaries that it takes."""
        for part in self.all():
            if part.dictionary is not None:
                yield part.dictionary.number
                yield from part.dictionary.values.dictionaries()


class Dictionary(NamedTuple):
    """What the numbers in a column stand for."""

    number: int
    values: Part


class Columns:
    """Some columns of a schema.

    `chosen` are they by name, `dictionaries` the numbers of those that they take, and `widths` the bits that a row has
    in each of their buffers: None where rows differ.
    """

    def __init__(self, schema: bytes, names: Sequence[str]) -> None:
        arrow = pyarrow("datasets.Arrow")
        fields = arrow.ipc.read_schema(arrow.py_buffer(schema))
        numbers = _numbers(schema_in(schema).tables(_FIELDS))
        columns = [(field.name, _part(arrow.types, field.type, numbers)) for field in fields]
        self.chosen = {name: part for name, part in columns if name in names}
        self.are_all = len(self.chosen) == len(columns)
        self.dictionaries = frozenset(number for part in self.chosen.values() for number in part.dictionaries())
        self.widths = _known([bits for part in self.chosen.values() for bits in part.widths()])
        parts = [(name in names, part) for name, column in columns for part in column.all()]
        self._wanted = np.array([wanted for wanted, _ in parts], np.bool_)
        self._buffers = np.array([part.buffers for _, part in parts], np.int64)
        self._is_view = np.array([part.is_view for _, part in parts], np.bool_)
        # pyarrow 18 reads views, but makes no arrays of their buffers
        self._can_be_made = hasattr(arrow.DataType, "has_variadic_buffers") or not self._is_view[self._wanted].any()

    def of(self, body: Body) -> Body | None:
        """What belongs to these columns; None if the record batch has to be read as a whole.

        Validity is left out of what has no nulls.
        """
        parts, count = body.nodes.shape[-2], body.buffers.shape[-2]
        if not self._can_be_made or parts != len(self._wanted) or len(body.views) != self._is_view.sum():
            return None
        counts = self._buffers.copy()
        counts[self._is_view] += body.views
        if counts.sum() != count:
            return None
        nodes, buffers = body.nodes[..., self._wanted, :], body.buffers.copy()
        has_validity = self._wanted & (counts > 0)
        validity = (counts.cumsum() - counts)[has_validity]
        starts, stops = buffers[..., validity, 0], buffers[..., validity, 1]
        buffers[..., validity, 1] = np.where(body.nodes[..., has_validity, 1] == 0, starts, stops)
        views = body.views[self._wanted[self._is_view]]
        return Body(body.codec, nodes, views, buffers[..., self._wanted.repeat(counts), :])


def _known(widths: Sequence[int | None]) -> list[int] | None:
    known = [bits for bits in widths if bits is not None]
    return known if len(known) == len(widths) else None


def _part(types: Any, kind: Any, numbers: Iterator[int]) -> Part:
    """The numbers are those of dictionaries still to come."""
    if hasattr(kind, "storage_type"):
        stored = _part(types, kind.storage_type, numbers)
        return stored._replace(extensions=(*stored.extensions, kind))
    if types.is_dictionary(kind):
        number = next(numbers)
        return Part(kind, 2, dictionary=Dictionary(number, _part(types, kind.value_type, numbers)))
    parts = tuple(_part(types, kind.field(at).type, numbers) for at in range(kind.num_fields))
    is_view = types.is_string_view(kind) or types.is_binary_view(kind)
    return Part(kind, _buffers(types, kind), is_view, parts)


def _buffers(types: Any, kind: Any) -> int:
    """How many a record batch has of this type, which are those in memory but for validity that there cannot be."""
    has_validity = not (types.is_null(kind) or types.is_union(kind) or types.is_run_end_encoded(kind))
    return int(kind.num_buffers) - (0 if has_validity else 1)


def _numbers(fields: Sequence[Table]) -> Iterator[int]:
    """Of the dictionaries of these fields, and of those within them."""
    for field in fields:
        if field.has(_DICTIONARY):
            yield field.table(_DICTIONARY).scalar(_ID, _INT64)
        yield from _numbers(field.tables(_CHILDREN))
