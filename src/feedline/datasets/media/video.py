"""Exact random access to the frames of a video, with PyAV.

`VideoReader` decodes chosen frames: it seeks to the last keyframe before a frame, and identifies each frame by its time
stamp, so that the result never depends on earlier reads. FFmpeg conceals damage; a frame that may refer to a damaged
one is an error here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.file_objects import merge_ranges
from feedline.datasets.media.files import MediaSource
from feedline.datasets.media.frame_table import FrameTable, OpenVideo, naming_damage, pyav, report
from feedline.errors import SampleError

Frames = dict[int, NDArray[np.uint8]]
"""Frames (height, width, 3) in RGB, by number."""


class _FrameRun(NamedTuple):
    """Frames that are decoded after one seek, and their keyframes."""

    numbers: list[int]
    keys: list[int]
    stop: int | None
    """Time stamp of the last packet that the frames need; None if decoding continues after them."""


class _MisledError(SampleError):
    """A seek led to other frames."""


class VideoReader:
    """Decodes chosen frames of one video; for one thread at a time."""

    def __init__(self, source: MediaSource, table: FrameTable, name: str) -> None:
        self._source = source
        self._video = OpenVideo(source, name)
        self._table, self._name = table, name
        self._last_before = table.last_decoded_before()
        self._to_rgb = pyav().video.reformatter.VideoReformatter()
        self._failure = pyav().FFmpegError
        self._coming: Iterator[Any] = iter(())
        self._ahead: deque[Any] = deque()
        """Frames that were decoded to see whether they are damaged."""
        self._damaged: set[int] = set()
        """Time stamps of the damaged frames since decoding began here."""
        self._wanted: frozenset[int] = frozenset()
        self._until = 0
        """Time stamps of the frames to read, and the last of them."""
        self._stop: int | None = None
        """Time stamp of the last packet that is needed before the next seek; None if decoding may continue."""
        self._next: int | None = None
        """The number of the next frame to be decoded; None if it has to seek."""
        self._attempt = 0

    def close(self) -> None:
        self._video.close()

    def read(self, wanted: NDArray[np.int64], then: int | None = None) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Number and pixels of these frames, ascending and distinct.

        A frame may be kept; memory of dropped frames is reused for later ones. `then` is the frame that is probably
        read next: if that read needs a seek, no frame after the wanted frames is decoded. SampleError names a frame
        that cannot be decoded.
        """
        pts = self._table.pts[wanted]
        self._wanted, self._until = frozenset(pts.tolist()), int(pts.max(initial=0))
        keys = np.searchsorted(self._table.keyframes, pts, "right") - 1
        with self._fetched(wanted.tolist(), keys.tolist()):
            for run in self._runs(wanted, keys, then):
                self._stop = run.stop
                for number, key in zip(run.numbers, run.keys, strict=True):
                    yield number, self._frame(number, key)
                if run.stop is not None:
                    self._next = None  # the decoder was drained

    def _runs(self, wanted: NDArray[np.int64], keys: NDArray[np.intp], then: int | None) -> list[_FrameRun]:
        """Divide the frames at the places where decoding has to seek."""
        if not len(wanted):
            return []
        table = self._table
        has_next = then is not None and wanted[-1] < then < len(table.pts)
        behind = np.array([then], np.int64) if has_next else np.empty(0, np.int64)
        following = np.concatenate([wanted[1:], behind])
        starts = table.keyframes[np.searchsorted(table.keyframes, table.pts[following], "right") - 1]
        seeks = table.pts[wanted[: len(following)] + 1] < starts
        parts = np.split(np.arange(len(wanted)), np.flatnonzero(seeks[: len(wanted) - 1]) + 1)
        goes_on = has_next and not seeks[-1]
        stops = [int(table.pts[wanted[part[np.argmax(table.order[wanted[part]])]]]) for part in parts]
        return [
            _FrameRun(wanted[part].tolist(), keys[part].tolist(), None if goes_on and part is parts[-1] else stop)
            for part, stop in zip(parts, stops, strict=True)
        ]

    def _fetched(self, numbers: list[int], keys: list[int]) -> AbstractContextManager[None]:
        """Fetch the bytes of these frames of an object at once.

        Other bytes are read block by block.
        """
        if isinstance(self._source, str):
            return nullcontext()
        firsts, lasts = dict(zip(keys[::-1], numbers[::-1], strict=True)), dict(zip(keys, numbers, strict=True))
        spans = []
        for key, number in lasts.items():
            start, stop = self._table.extent(key, number)
            if start < 0:
                return nullcontext()
            if self._goes_on(firsts[key], key):
                start = max(start, int(self._table.starts[self._next]))
            spans.append((max(0, start - _MARGIN_NBYTES), min(stop + _MARGIN_NBYTES, self._source.nbytes)))
        merged = merge_ranges(spans)
        is_little = sum(stop - start for start, stop in merged) <= _MOST_NBYTES
        return self._source.holding(merged) if is_little else nullcontext()

    def _goes_on(self, number: int, key: int) -> bool:
        """True if decoding reaches this frame without a seek."""
        table = self._table
        return self._next is not None and self._next <= number and bool(table.pts[self._next] >= table.keyframes[key])

    def _frame(self, number: int, key: int) -> NDArray[np.uint8]:
        """A frame of the group that keyframe `key` begins."""
        if self._goes_on(number, key):
            with suppress(SampleError):  # a seek skips frames that are not needed, so its result counts
                return self._pixels(self._decode_until(number), number)
        for attempt in range(self._attempt, _ATTEMPTS):
            with suppress(SampleError):
                return self._read_from(key, attempt, number)
        return self._read_from(key, _ATTEMPTS, number)

    def _read_from(self, key: int, attempt: int, number: int) -> NDArray[np.uint8]:
        self._seek(key, attempt)
        try:
            frame = self._decode_until(number)
        except _MisledError:
            self._reopen()  # only packets in their order are right
            frame = self._decode_until(number)
        self._attempt = attempt
        return self._pixels(frame, number)

    def _seek(self, key: int, attempt: int) -> None:
        """Seek to keyframe `key`, or before it on later attempts.

        Some formats seek by the time of decoding, which is before the time of display. In an open GOP, the decoder may
        need frames of the previous GOP. The attempt that succeeds is kept for the file.
        """
        self._next = None
        video, first = self._video, key - max(0, attempt - 1)
        if first < 0 or (attempt == _ATTEMPTS and first == 0):
            self._reopen()
            return
        place = int(self._table.keyframes[first])
        if attempt:
            place -= max(1, round(_LEAD_S / self._table.time_base))
        try:
            with naming_damage(self._name, video.file):
                video.container.seek(place, stream=video.stream)
        except PermissionError:  # FFmpeg's error if a format has no place before the requested one
            self._reopen()
        else:
            self._begin()

    def _reopen(self) -> None:
        """Decode from the beginning of the file."""
        self._video.close()
        self._video = OpenVideo(self._source, self._name)
        self._begin()

    def _begin(self) -> None:
        self._ahead.clear()
        self._damaged = set()
        self._coming = self._decode()

    def _decode(self) -> Iterator[Any]:
        """Decode from the current place on.

        Unwanted frames are decoded only if others refer to them. Frames that are displayed before the first keyframe
        may refer to frames before that keyframe, which were not decoded: errors about such frames mean nothing. After
        the last packet of a run, the decoder is drained. It delays frames, and would otherwise decode further ones to
        release them.
        """
        first, context, damaged = None, self._video.stream.codec_context, self._damaged
        skips, context.skip_frame = False, "DEFAULT"
        for packet in self._video.container.demux(self._video.stream):
            pts = packet.pts
            self._check_place(packet)
            if skips != (pts is not None and pts < self._until and pts not in self._wanted):
                skips = not skips
                context.skip_frame = "NONREF" if skips else "DEFAULT"
            if first is None and packet.is_keyframe:
                first = pts
            frames, is_last = [], pts is not None and pts == self._stop and not packet.is_discard
            try:
                frames = [*packet.decode(), *(context.decode(None) if is_last else ())]
                is_damaged = packet.is_corrupt
            except self._failure as error:
                if pts is None or (isinstance(error, OSError) and not isinstance(error, ValueError)):
                    raise
                is_damaged = first is not None and pts >= first
            if is_damaged and pts is not None:
                damaged.add(pts)
            damaged.update(frame.pts for frame in frames if frame.is_corrupt and frame.pts is not None)
            yield from frames
            if is_last:
                return

    def _check_place(self, packet: Any) -> None:
        """Raise _MisledError for a packet with the time stamp of another one.

        After a seek, some formats count time stamps from the place that the index of the file gives.
        """
        start = -1 if packet.pts is None else self._table.start_of(packet.pts)
        if packet.pos is not None and min(start, packet.pos) >= 0 and start != packet.pos:
            raise _MisledError(
                f"{self._name} has an index that leads to other frames at"
                f" {float(packet.pts * self._table.time_base):.3f} s: {_REPLACE}"
            )

    def _decode_until(self, number: int) -> Any:
        """Decode up to a frame; SampleError if it is missing or damaged."""
        place = int(self._table.pts[number])
        try:
            while (found := self._take()) is not None and (found.pts is None or found.pts < place):
                pass
            self._look_ahead(number)
        except self._failure as error:
            report(error, self._where(number), self._video.file)
        if found is None or found.pts != place:
            self._next = None
            raise SampleError(f"{self._where(number)} is missing: {_REPLACE}")
        self._next = number + 1 if number + 1 < len(self._table.pts) else None
        bad = min((each for each in self._damaged if self._table.may_refer(number, each)), default=None)
        if bad is not None:
            other = "" if bad == place else f", for it needs that at {float(bad * self._table.time_base):.3f} s"
            raise SampleError(f"{self._where(number)} is damaged{other}: {_REPLACE}")
        return found

    def _take(self) -> Any:
        return self._ahead.popleft() if self._ahead else next(self._coming, None)

    def _look_ahead(self, number: int) -> None:
        """Decode up to the last frame to which this frame may refer.

        Damage of a frame is known when the decoder returns it.
        """
        last = int(self._last_before[number])
        until = int(self._table.pts[last])
        while last > number and not (self._ahead and self._ahead[-1].pts >= until):
            frame = next(self._coming, None)
            if frame is None:
                return
            if frame.pts is not None:
                self._ahead.append(frame)

    def _pixels(self, frame: Any, number: int) -> NDArray[np.uint8]:
        try:
            rgb = self._to_rgb.reformat(frame, format="rgb24", threads=1)
        except self._failure as error:
            report(error, self._where(number), None)
        plane = rgb.planes[0]
        shape, strides = (rgb.height, rgb.width, 3), (plane.line_size, 3, 1)
        pixels: NDArray[np.uint8] = np.ndarray(shape, np.uint8, plane, strides=strides)
        quarter_turns, rest = divmod(frame.rotation, 90)
        if rest:
            raise SampleError(
                f"{self._name} has a rotation of {frame.rotation} degrees, and only quarter turns are supported:"
                f" write it again upright (ffmpeg -i {self._name} out.mp4)"
            )
        return np.rot90(pixels, quarter_turns % 4) if quarter_turns else pixels

    def _where(self, number: int) -> str:
        return f"frame {number} ({float(self._table.pts[number] * self._table.time_base):.3f} s) of {self._name}"


_ATTEMPTS = 2


_MARGIN_NBYTES = 64 << 10
"""More bytes than FFmpeg reads around a packet, for its buffer and the header of the packet."""


_MOST_NBYTES = 64 << 20
"""Most bytes of a video that are fetched at once."""


_LEAD_S = 1
"""More places than those by which any codec reorders frames."""


_REPLACE = "replace the file, or pass on_error='skip' to the loader"
