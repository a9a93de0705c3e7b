"""Files and objects from their beginning to their end, in parts that fit into memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from feedline.cancelling import DaemonPool
from feedline.stores.blobs import Blob, LocalBlob
from feedline.stores.coalescing import joined

_PART_NBYTES = 8 << 20
_AHEAD = 4


def parts(blob: Blob) -> Iterator[memoryview]:
    """The content in order; of an object, the next parts are on their way while one is worked on."""
    spans = [(at, min(at + _PART_NBYTES, blob.nbytes)) for at in range(0, blob.nbytes, _PART_NBYTES)]
    if isinstance(blob, LocalBlob):
        yield from blob.read(spans)
        return
    coming: deque[Future[list[memoryview]]] = deque()
    with DaemonPool(_AHEAD, "feedline-stream") as pool:
        for span in spans:
            if len(coming) == _AHEAD:
                yield coming.popleft().result()[0]
            coming.append(pool.submit(blob.read, [span]))
        while coming:
            yield coming.popleft().result()[0]


class Stream:
    """Bytes that are taken one after the other, however they come."""

    def __init__(self, coming: Iterator[memoryview]) -> None:
        self._coming = coming
        self._part, self._at = memoryview(b""), 0

    def take(self, nbytes: int) -> memoryview:
        """The next bytes, which must be there: a view where they lie in one part."""
        stop = self._at + nbytes
        if stop <= len(self._part):
            taken = self._part[self._at : stop]
            self._at = stop
            return taken
        pieces = [self._part[self._at :]]
        missing = stop - len(self._part)
        while missing:
            self._part = next(self._coming)
            self._at = min(missing, len(self._part))
            pieces.append(self._part[: self._at])
            missing -= self._at
        return joined(pieces)
