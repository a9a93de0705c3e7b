"""Arrow arrays of the buffers of record batches, without a copy but of what is compressed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from feedline.datasets.ipc_bodies import CODECS, Body
from feedline.datasets.ipc_columns import Dictionary, Part
from feedline.datasets.ipc_layout import DamagedError, dictionary_in
from feedline.datasets.kinds import pyarrow

Bytes = memoryview | bytes


def arrays_of(
    parts: Iterable[Part], body: Body, data: Iterable[Bytes], dictionaries: Sequence[memoryview] = ()
) -> list[Any]:
    """One for each column, of types that samples can hold. `data` are the buffers of the body, in its order.

    `dictionaries` are the messages of those that the columns take. What does not fit together is a DamagedError, an
    IndexError, or one of Arrow's own errors.
    """
    making = _Making(body, data, _Dictionaries(dictionaries))
    return [making.array(part) for part in parts]


class _Dictionaries:
    """The values of dictionaries, made when they are first asked for: some are part of others."""

    def __init__(self, messages: Iterable[memoryview]) -> None:
        self._found: dict[int, list[tuple[Body, list[memoryview]]]] = {}
        for message in messages:
            number, body = dictionary_in(message)
            buffers = [message[start:stop] for start, stop in body.buffers.tolist()]
            self._found.setdefault(number, []).append((body, buffers))
        self._made: dict[int, Any] = {}

    def values(self, wanted: Dictionary) -> Any:
        """All values as one array; a dictionary may have come in several messages."""
        if wanted.number not in self._made:
            found = self._found.get(wanted.number)
            if found is None:
                raise DamagedError(f"there is no dictionary {wanted.number}")
            parts = [_Making(body, data, self).array(wanted.values) for body, data in found]
            self._made[wanted.number] = _arrow().concat_arrays(parts) if len(parts) > 1 else parts[0]
        return self._made[wanted.number]


class _Making:
    """Arrays of what a body has, one after the other."""

    def __init__(self, body: Body, data: Iterable[Bytes], dictionaries: _Dictionaries) -> None:
        self._nodes, self._views, self._data = deque(body.nodes.tolist()), deque(body.views.tolist()), deque(data)
        self._codec, self._dictionaries = CODECS[body.codec], dictionaries

    def array(self, part: Part) -> Any:
        """The next one, which is this part."""
        array = self._stored(part)
        for extension in part.extensions:
            array = _arrow().ExtensionArray.from_storage(extension, array)
        return array

    def _stored(self, part: Part) -> Any:
        arrow = _arrow()
        length, nulls = self._nodes.popleft()
        count = part.buffers + (self._views.popleft() if part.is_view else 0)
        # nulls and runs have no validity, not even an empty one
        validity, *others = [self._buffer() for _ in range(count)] if count else [None]
        buffers = [validity or None, *others]
        if part.dictionary is None:
            children = [self.array(each) for each in part.parts]
            return arrow.Array.from_buffers(part.kind, length, buffers, nulls, children=children)
        places = arrow.Array.from_buffers(part.kind.index_type, length, buffers, nulls)
        values = self._dictionaries.values(part.dictionary)
        return arrow.DictionaryArray.from_arrays(places, values, ordered=part.kind.ordered)

    def _buffer(self) -> Any:
        data = memoryview(self._data.popleft())
        if self._codec and data:
            nbytes = int.from_bytes(data[:8], "little", signed=True)
            data = data[8:]
            if nbytes != -1:  # it was not worth compressing
                return _arrow().decompress(data, nbytes, self._codec)
        return _arrow().py_buffer(data)


def _arrow() -> Any:
    return pyarrow("datasets.Arrow")
