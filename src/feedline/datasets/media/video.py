"""Exact random access to the frames of a video, with PyAV.

`scan_frames` lists the times and keyframes of a video once, without decoding it. `VideoReader` decodes chosen frames:
it seeks to the last keyframe before one, and knows each frame by its time stamp, so that the result never depends on
what was read before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.datasets.media.files import Source
from feedline.errors import SampleError

WHAT = "datasets.Clips"


_FINE_S = Fraction(1, 1000)


Frames = dict[int, NDArray[np.uint8]]
"""Frames (height, width, 3) in RGB, by number."""


@dataclass(frozen=True, slots=True)
class FrameTable:
    """The frames of a video in the order of their display.

    `pts`: the time stamp of each, in units of `time_base` seconds, int64. `keyframes`: the time stamps of those at
    which decoding can begin, also of hidden ones. `end` is the time stamp at which the last frame
    ends. `height` and `width` are those that the file declares.
    """

    time_base: Fraction
    end: int
    height: int
    width: int
    pts: NDArray[np.int64]
    keyframes: NDArray[np.int64]

    @property
    def seconds(self) -> NDArray[np.float64]:
        """The time of each frame, from the start that the file declares."""
        return self.pts * self.time_base.numerator / self.time_base.denominator

    @property
    def end_s(self) -> float:
        """The time at which the last frame ends."""
        return self.end * self.time_base.numerator / self.time_base.denominator

    @property
    def rounding_s(self) -> float:
        """What time stamps may be rounded by: half a unit, such as 0.5 ms in Matroska.

        Units of more than a millisecond are those of formats that count frames, which round nothing.
        """
        return max(1e-6, float(self.time_base) / 2) if self.time_base <= _FINE_S else 1e-6

    def pack(self) -> bytes:
        """The table as bytes."""
        base = self.time_base
        head = [base.numerator, base.denominator, self.end, self.height, self.width, len(self.pts)]
        return np.concatenate([np.array(head, "<i8"), self.pts, self.keyframes]).astype("<i8").tobytes()

    @classmethod
    def parse(cls, packed: bytes) -> FrameTable:
        """The table that `pack` made."""
        numbers = np.frombuffer(packed, "<i8")
        numerator, denominator, end, height, width, count = numbers[:6].tolist()
        return cls(Fraction(numerator, denominator), end, height, width, numbers[6 : 6 + count], numbers[6 + count :])


def pyav() -> Any:
    """The module `av`; MissingExtraError without it."""
    return optional.load("av", "video", WHAT)


class _BytesFile:
    """A file object for PyAV, which takes bytes only."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self.failure: Exception | None = None

    def read(self, size: int) -> bytes:
        try:
            return bytes(self._file.read(size))
        except Exception as error:
            self.failure = error  # FFmpeg reports no more than that reading failed
            raise


@contextmanager
def _damage(what: str, file: _BytesFile | None = None) -> Iterator[None]:
    """Turn errors of FFmpeg about the content of a file into SampleErrors."""
    av = pyav()
    try:
        yield
    except av.FFmpegError as error:
        if file is not None and file.failure is not None:
            raise file.failure from None
        if isinstance(error, OSError) and not isinstance(error, ValueError):  # of the file system
            raise
        raise SampleError(
            f"{what} cannot be decoded ({type(error).__name__}: {error.strerror}): the file is damaged or not a video;"
            " replace it, or pass on_error='skip' to the loader"
        ) from error


class OpenVideo:
    """A video opened with PyAV: container, and the video stream."""

    def __init__(self, source: Source, name: str) -> None:
        self.name = name
        self.file = None if isinstance(source, str) else _BytesFile(source)
        if self.file is not None:
            self.file.seek(0)
        target = f"file:{source}" if self.file is None else self.file  # no other protocol by a file's name
        with _damage(name, self.file):
            self.container = pyav().open(target, metadata_errors="ignore")
        streams = [each for each in self.container.streams.video if not _is_cover(each)]
        if not streams:
            self.close()
            raise SampleError(
                f"{name} has no video stream: remove it from the dataset, or pass on_error='skip' to the loader"
            )
        self.stream = streams[0]
        if self.stream.codec_context is None:
            self.close()
            raise SampleError(
                f"{name} has a codec that this FFmpeg cannot decode: convert it (ffmpeg -i {name} -c:v libx264 out.mp4)"
            )
        for other in self.container.streams:
            if other is not self.stream:
                other.discard = pyav().stream.Discard.all
        # Workers are many already: threads of each decoder would only compete.
        self.stream.codec_context.thread_count = 1
        self.stream.codec_context.thread_type = "NONE"

    def close(self) -> None:
        self.container.close()


def _is_cover(stream: Any) -> bool:
    return bool(stream.disposition & type(stream.disposition).attached_pic)


def scan_frames(source: Source, name: str) -> FrameTable:
    """List the frames of a video; SampleError without any."""
    video = OpenVideo(source, name)
    try:
        with _damage(name, video.file):
            packets = [
                (packet.pts, packet.is_keyframe, packet.is_discard, packet.duration or 0)
                for packet in video.container.demux(video.stream)
                if packet.size
            ]
        context, base = video.stream.codec_context, video.stream.time_base
        height, width = context.height, context.width
    finally:
        video.close()
    if any(packet[0] is None for packet in packets):
        raise SampleError(
            f"{name} has no time stamps: write it again with some (ffmpeg -fflags +genpts -i {name} -c copy out.mp4)"
        )
    keys = np.unique(np.array([at for at, is_key, _, _ in packets if is_key], np.int64))
    # Frames before the first keyframe refer to frames that were cut off; hidden ones are left out by an edit list.
    shown = {at: duration for at, _, hidden, duration in packets if not hidden and len(keys) and at >= keys[0]}
    if not shown:
        raise SampleError(f"{name} has no video frames: remove it, or pass on_error='skip' to the loader")
    pts = np.array(sorted(shown), np.int64)
    last = shown[int(pts[-1])]
    end = int(pts[-1]) + (last or (int(np.median(np.diff(pts))) if len(pts) > 1 else 1))
    return FrameTable(base, end, height, width, pts, keys)


def _decoded(video: OpenVideo) -> Iterator[Any]:
    """Decode from the present place on.

    Frames that are displayed before the first keyframe may refer to frames before it, which were not decoded: their
    errors mean nothing.
    """
    first = None
    for packet in video.container.demux(video.stream):
        if first is None and packet.is_keyframe:
            first = packet.pts
        try:
            frames = packet.decode()
        except pyav().FFmpegError:
            if first is None or (packet.pts is not None and packet.pts < first):
                continue
            raise
        yield from frames


class VideoReader:
    """Decodes chosen frames of one video; for one thread at a time."""

    def __init__(self, source: Source, table: FrameTable, name: str) -> None:
        self._source = source
        self._video = OpenVideo(source, name)
        self._table, self._name = table, name
        self._to_rgb = pyav().video.reformatter.VideoReformatter()
        self._coming: Iterator[Any] = iter(())
        self._next: int | None = None
        """The number of the frame that decoding comes to next; None if it has to seek."""
        self._attempt = 0

    def close(self) -> None:
        self._video.close()

    def read(self, wanted: NDArray[np.int64], kept: Frames | None = None) -> Frames:
        """The frames of these numbers, ascending and distinct.

        Those that are in `kept` are not decoded again. SampleError names a frame that cannot be decoded.
        """
        found = {}
        for number in wanted.tolist():
            held = None if kept is None else kept.get(number)
            found[number] = self._frame(number) if held is None else held
        return found

    def _frame(self, number: int) -> NDArray[np.uint8]:
        pts, keys = self._table.pts, self._table.keyframes
        key = int(np.searchsorted(keys, pts[number], "right")) - 1
        attempt = self._attempt
        if self._next is None or self._next > number or pts[self._next] < keys[key]:
            self._seek(key, attempt)
        while True:
            try:
                frame = self._decode_until(number)
                self._attempt = attempt
                return self._pixels(frame, number)
            except SampleError:
                attempt += 1
                if attempt > _ATTEMPTS:
                    raise
                self._seek(key, attempt)

    def _seek(self, key: int, attempt: int) -> None:
        """Seek to keyframe `key`, or before it on later attempts.

        Some formats seek by the time of decoding, which is before that of display; and in an open GOP
        the decoder may ask for frames of the one before. What a file needs is tried once.
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
            with _damage(self._name, video.file):
                video.container.seek(place, stream=video.stream)
        except PermissionError:  # by this name FFmpeg reports that a format has no place before the one asked for
            self._reopen()
        else:
            self._coming = _decoded(video)

    def _reopen(self) -> None:
        """Decode from the very beginning."""
        self._video.close()
        self._video = OpenVideo(self._source, self._name)
        self._coming = _decoded(self._video)

    def _decode_until(self, number: int) -> Any:
        """Decode up to a frame; SampleError if it is missing or damaged."""
        place = int(self._table.pts[number])
        with _damage(self._where(number), self._video.file):
            found = next((frame for frame in self._coming if frame.pts is not None and frame.pts >= place), None)
        if found is None or found.pts != place:
            self._next = None
            raise SampleError(f"{self._where(number)} is missing: {_REPLACE}")
        self._next = number + 1 if number + 1 < len(self._table.pts) else None
        if found.is_corrupt:
            raise SampleError(f"{self._where(number)} is damaged: {_REPLACE}")
        return found

    def _pixels(self, frame: Any, number: int) -> NDArray[np.uint8]:
        with _damage(self._where(number)):
            rgb = self._to_rgb.reformat(frame, format="rgb24", threads=1)
        plane = rgb.planes[0]
        shape, strides = (rgb.height, rgb.width, 3), (plane.line_size, 3, 1)
        pixels: NDArray[np.uint8] = np.ndarray(shape, np.uint8, plane, strides=strides)
        quarter_turns, rest = divmod(frame.rotation, 90)
        if rest:
            raise SampleError(
                f"{self._name} is to be shown turned by {frame.rotation} degrees, and only quarter turns are supported:"
                f" write it again upright (ffmpeg -i {self._name} out.mp4)"
            )
        return np.rot90(pixels, quarter_turns % 4) if quarter_turns else pixels

    def _where(self, number: int) -> str:
        return f"frame {number} ({self._table.seconds[number]:.3f} s) of {self._name}"


_ATTEMPTS = 2


_LEAD_S = 1
"""More than any codec reorders frames by."""


_REPLACE = "replace the file, or pass on_error='skip' to the loader"
