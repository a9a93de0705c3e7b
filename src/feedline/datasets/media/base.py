"""Base class of datasets of media clips, and their open decoders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import PerProcess
from feedline.core.dataset import TransformFunction
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike
from feedline.core.sample_transform import SampleTransform
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.tensors import normalize_index, normalize_indices
from feedline.datasets.base import GroupedRecords
from feedline.datasets.media.files import FileDescriptions, MediaFiles, Piece
from feedline.errors import SampleError, note
from feedline.stores import ObjectNotFoundError
from feedline.stores.cache import CachedStore, ObjectRange
from feedline.stores.files import Extent


class Closable(Protocol):
    def close(self) -> None: ...


D = TypeVar("D", bound=Closable)


_WHOLE_NBYTES = 8 << 20
"""Most bytes of a file that is prefetched as a whole, before its clips."""


def sampling_of(sampling: str | None, length: float | None) -> str:
    """`sampling`; by default "random", or "whole" without a length."""
    return sampling or ("whole" if length is None else "random")


class MediaClips(GroupedRecords, Generic[D]):
    """Clips of media files, read by decoders of type `D`.

    Subclasses define the description of a file (`_describe`, parsed by `parse`), its number of clips (`_count`), its
    decoder (`_open`) and `_read_samples`. `library` names version and build of the decoder's library. At most
    `most_open` decoders stay open in a process.
    """

    _clip = "clip"
    """Word for a clip in addresses."""

    def __init__(
        self,
        media: MediaFiles,
        kind: str,
        library: str,
        parse: Callable[[bytes], Any],
        index_dir: Pathlike | None,
        most_open: int,
        transform: TransformFunction | None,
    ) -> None:
        self._media = media
        self._known = FileDescriptions(media, kind, library, index_dir, self._describe, parse)
        self.paths = media.files.names
        """The path or address of each file."""
        self.classes = media.classes
        """Names of the labels; empty if labels are numbers, or absent."""
        self._offsets = ShardOffsets(self._counts())
        self._decoders: Decoders[D] = Decoders(self._open, most_open)
        self._step = SampleTransform(transform)

    def _describe(self, number: int) -> bytes:
        """The description of a file; SampleError for a damaged one."""
        raise NotImplementedError

    def _open(self, number: int) -> D:
        """A new decoder of a file."""
        raise NotImplementedError

    @property
    def _fixed_count(self) -> int | None:
        """Clips of every piece; None if their number depends on the length."""
        raise NotImplementedError

    def _count(self, piece: Piece, known: Any) -> int:
        """Clips of a piece, from the description of its file."""
        raise NotImplementedError

    def _counts(self) -> list[int]:
        """Clips of each piece; 1 for a damaged file."""
        entries = self._known.collect()
        if self._fixed_count is not None:
            return [self._fixed_count] * len(self._media.pieces)
        counts = []
        for piece in self._media.pieces:
            try:
                counts.append(self._count(piece, self._known.parsed(entries[piece.file])))
            except SampleError:
                counts.append(1)
        return counts

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Clips per file or row of the manifest, int64.

        For `samplers.ShardShuffled`.
        """
        return self._offsets.sizes

    @property
    def targets(self) -> list[int | None]:
        """The label of each clip."""
        labels = [piece.label for piece in self._media.pieces]
        return [label for label, count in zip(labels, self._offsets.sizes.tolist(), strict=True) for _ in range(count)]

    @property
    def listing_fingerprint(self) -> str:
        """Digest of file names and clip counts, checked by saved loader states."""
        return digest_of(self.paths, [*self._offsets.sizes.tolist(), *(piece.file for piece in self._media.pieces)])

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Cache and byte range of each small file.

        Small files are fetched as a whole; the ranges of other files are not known before they are read.
        """
        if self._media.files.is_local:
            return []
        rows = [self._offsets.one(at)[0] for at in normalize_indices(indices, len(self), type(self).__name__).tolist()]
        numbers = sorted({self._media.pieces[row].file for row in rows})
        extents = [Extent(number, 0, self._media.files.info(number).size) for number in numbers]
        return self._media.files.ranges([each for each in extents if each.stop <= _WHOLE_NBYTES])

    def address(self, index: int) -> tuple[str, str]:
        """The file of a clip, and its number in that file."""
        row, clip = self._offsets.one(normalize_index(index, len(self), type(self).__name__))
        return self.paths[self._media.pieces[row].file], f"{self._clip} {clip}"

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Add the file to errors that do not name it."""
        try:
            yield
        except FileNotFoundError as error:
            kind = ObjectNotFoundError if isinstance(error, ObjectNotFoundError) else FileNotFoundError
            raise kind(
                f"{name} does not exist: it was moved or deleted; restore it, or pass on_error='skip' to the loader"
            ) from error
        except OSError as error:
            note(error, f"feedline: {name}")
            raise


class Decoders(Generic[D]):
    """Decoders of numbered files, opened by `opening(number)`.

    At most `most` stay open in each process while no thread uses them; the least recently used one is closed. A forked
    process opens its own decoders, and does not use those of its parent. Pickles without them.
    """

    def __init__(self, opening: Callable[[int], D], most: int) -> None:
        self._opening, self._most = opening, most
        self._idle: PerProcess[_Idle[D]] = PerProcess(partial(_Idle, most))

    @contextmanager
    def use(self, number: int) -> Iterator[D]:
        """The decoder of a file, for exclusive use by this thread."""
        idle = self._idle()
        decoder = idle.take(number) or self._opening(number)
        try:
            yield decoder
        except BaseException:
            decoder.close()
            raise
        idle.give(number, decoder)

    def open_count(self) -> int:
        """The number of idle decoders of this process."""
        return len(self._idle().entries)

    def __getstate__(self) -> tuple[Callable[[int], D], int]:
        return self._opening, self._most

    def __setstate__(self, state: tuple[Callable[[int], D], int]) -> None:
        self._opening, self._most = state
        self._idle = PerProcess(partial(_Idle, self._most))


class _Idle(Generic[D]):
    """Open decoders that no thread uses, by number of the file."""

    # Not an `LRUCache`: a decoder has a position, so a thread takes it out for its own use and returns it. Two threads
    # may have decoders of the same file, and a dropped decoder is closed.
    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self.entries: list[tuple[int, D]] = []  # the most recently used decoder is the last

    def take(self, number: int) -> D | None:
        with self._lock:
            for at, (each, decoder) in enumerate(self.entries):
                if each == number:
                    del self.entries[at]
                    return decoder
        return None

    def give(self, number: int, decoder: D) -> None:
        with self._lock:
            self.entries.append((number, decoder))
            spare = self.entries.pop(0)[1] if len(self.entries) > self._most else None
        if spare is not None:
            spare.close()
