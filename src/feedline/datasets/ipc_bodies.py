"""Where the buffers of record batches lie, of which columns are made."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.flatbuffers import Table
from feedline.stores.protocol import Range

CODECS = ("", "lz4", "zstd")
"""What buffers may be compressed with; the first is nothing."""

_NODES, _BUFFERS, _COMPRESSION, _VIEWS = 1, 2, 3, 4
_CODEC, _METHOD = 0, 1
_PAIR, _INT64, _BYTE = struct.Struct("<qq"), struct.Struct("<q"), struct.Struct("<B")
_HEAD = 3
_NOTHING = np.empty(0, np.int64)


class Body(NamedTuple):
    """What a record batch says of its columns: of each part of one, and then of what that part consists of.

    Or of several that are alike: then nodes and buffers have one dimension more, in front.
    """

    codec: int
    """What each buffer is compressed with, a place in `CODECS`."""
    nodes: NDArray[np.int64]
    """Rows of (length, nulls)."""
    views: NDArray[np.int64]
    """Of each part that is made of views, how many buffers of characters follow them."""
    buffers: NDArray[np.int64]
    """Rows of (start, stop) in the file or stream."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The bytes of each buffer."""
        return self.buffers[..., 1] - self.buffers[..., 0]

    @property
    def spans(self) -> list[Range]:
        """The buffers that are not empty."""
        return [(start, stop) for start, stop in self.buffers.tolist() if start < stop]


def body_of(batch: Table, start: int, stop: int) -> Body | None:
    """That of a record batch whose buffers lie in these bytes; None if it can only be read as a whole."""
    codec = 0
    if batch.has(_COMPRESSION):
        compression = batch.table(_COMPRESSION)
        codec = 1 + compression.scalar(_CODEC, _BYTE)
        if codec >= len(CODECS) or compression.scalar(_METHOD, _BYTE) != 0:
            return None
    buffers = np.array(batch.structs(_BUFFERS, _PAIR), np.int64).reshape(-1, 2)
    buffers[:, 1] += buffers[:, 0]
    buffers += start
    nodes = np.array(batch.structs(_NODES, _PAIR), np.int64).reshape(-1, 2)
    views = np.array(batch.structs(_VIEWS, _INT64), np.int64).reshape(-1)
    lies_within = (buffers >= start).all() and (buffers <= stop).all() and (buffers[:, 0] <= buffers[:, 1]).all()
    return Body(codec, nodes, views, buffers) if lies_within and (nodes >= 0).all() and (views >= 0).all() else None


class Bodies:
    """Those of many record batches by number, end to end in one array; None of those that are read as a whole."""

    def __init__(self, sizes: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        self.sizes, self.numbers = sizes, numbers
        self._starts = np.cumsum(sizes) - sizes

    def __reduce__(self) -> tuple[type[Bodies], tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return Bodies, (self.sizes, self.numbers)

    @classmethod
    def of(cls, bodies: Iterable[Body | None]) -> Bodies:
        """These bodies."""
        parts = [_NOTHING if body is None else _packed(body) for body in bodies]
        return cls(np.array([len(part) for part in parts], np.int64), np.concatenate([_NOTHING, *parts]))

    @classmethod
    def of_alike(cls, count: int, groups: Sequence[tuple[NDArray[np.int64], Body]]) -> Bodies:
        """Of so many record batches, those of some as `alike` gives them."""
        parts = [(which, _packed(body)) for which, body in groups]
        sizes = np.zeros(count, np.int64)
        for which, packed in parts:
            sizes[which] = packed.shape[1]
        bodies = cls(sizes, np.empty(sizes.sum(), np.int64))
        for which, packed in parts:
            bodies.numbers[bodies._places(which)] = packed
        return bodies

    @classmethod
    def joined(cls, several: Sequence[Bodies]) -> Bodies:
        """All of these, one after the other."""
        sizes, numbers = zip(*((each.sizes, each.numbers) for each in several), strict=True)
        return cls(np.concatenate(sizes), np.concatenate(numbers))

    def where(self, wanted: NDArray[np.bool_]) -> Bodies:
        """Those that are wanted."""
        return Bodies(self.sizes[wanted], self.numbers[wanted.repeat(self.sizes)])

    def __getitem__(self, number: int) -> Body | None:
        start, size = self._starts[number], self.sizes[number]
        return _unpacked(self.numbers[start : start + size]) if size else None

    def alike(self, which: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], Body]]:
        """These of them in groups of one codec and as many nodes, views and buffers, each group as one body."""
        groups: dict[bytes, list[int]] = {}
        for number in which[self.sizes[which] > 0].tolist():
            start, size = self._starts[number], self.sizes[number]
            head = self.numbers[start : start + _HEAD + self.numbers[start + _HEAD - 1]]
            groups.setdefault(head.tobytes() + size.tobytes(), []).append(number)
        for numbers in groups.values():
            found = np.array(numbers)
            yield found, _unpacked(self.numbers[self._places(found)])

    def _places(self, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of bodies of the same size."""
        return self._starts[which][:, None] + np.arange(self.sizes[which[0]])


def _packed(body: Body) -> NDArray[np.int64]:
    """In the last dimension: codec, how many nodes and views there are, views, nodes, buffers."""
    bodies = body.nodes.shape[:-2]
    head = np.array([body.codec, body.nodes.shape[-2], len(body.views), *body.views], np.int64)
    parts = [
        np.broadcast_to(head, (*bodies, len(head))),
        body.nodes.reshape(*bodies, -1),
        body.buffers.reshape(*bodies, -1),
    ]
    return np.concatenate(parts, axis=-1)


def _unpacked(numbers: NDArray[np.int64]) -> Body:
    bodies, shared = numbers.shape[:-1], numbers.reshape(-1, numbers.shape[-1])[0]
    codec, nodes, views = shared[:_HEAD].tolist()
    first, second = _HEAD + views, _HEAD + views + 2 * nodes
    return Body(
        codec,
        numbers[..., first:second].reshape(*bodies, nodes, 2),
        shared[_HEAD:first],
        numbers[..., second:].reshape(*bodies, -1, 2),
    )
