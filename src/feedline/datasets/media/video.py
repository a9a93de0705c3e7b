"""Exact random access to the frames of a video, with PyAV.

`scan_frames` lists the times and keyframes of a video once, without decoding it. `VideoReader` decodes chosen frames:
it seeks to the last keyframe before one, and knows each frame by its time stamp, so that the result never depends on
what was read before. FFmpeg conceals damage; a frame that may refer to a damaged one is an error here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn

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
    which decoding can begin, also of hidden ones. `order` and `key_order` are their places in the order of decoding.
    `end` is the time stamp at which the last frame ends. `height` and `width` are those that the file declares.
    """

    time_base: Fraction
    end: int
    height: int
    width: int
    pts: NDArray[np.int64]
    keyframes: NDArray[np.int64]
    order: NDArray[np.int64]
    key_order: NDArray[np.int64]

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
        """The rounding of time stamps in seconds: half a unit.

        That is 0.5 ms in Matroska. Units of more than a millisecond are those of formats that count frames,
        which round nothing.
        """
        return max(1e-6, float(self.time_base) / 2) if self.time_base <= _FINE_S else 1e-6

    def pack(self) -> bytes:
        """The table as bytes."""
        base = self.time_base
        head = [base.numerator, base.denominator, self.end, self.height, self.width, len(self.pts)]
        parts = [np.array(head), self.pts, self.order, self.keyframes, self.key_order]
        return np.concatenate(parts).astype("<i8").tobytes()

    @classmethod
    def parse(cls, packed: bytes) -> FrameTable:
        """The table that `pack` made."""
        numbers = np.frombuffer(packed, "<i8")
        numerator, denominator, end, height, width, count = numbers[:6].tolist()
        pts, order, both = np.split(numbers[6:], [count, 2 * count])
        keys, key_order = np.split(both, 2)
        return cls(Fraction(numerator, denominator), end, height, width, pts, keys, order, key_order)

    def last_decoded_before(self) -> NDArray[np.int64]:
        """For each frame, the one shown last of those decoded up to it."""
        earliest_behind = np.minimum.accumulate(self.order[::-1])[::-1]
        last = np.searchsorted(earliest_behind, self.order, "right") - 1
        return np.minimum(last, np.arange(len(self.pts)) + _MOST_REORDERED)

    def may_refer(self, number: int, pts: int) -> bool:
        """True if a frame may need that of time stamp `pts`.

        Codecs forbid that frames behind a keyframe refer to those that are shown before it. After a seek to the
        keyframe, these lack what they refer to, and the decoder's verdict on them means nothing.
        """
        order = self.order[number]
        at = int(np.searchsorted(self.pts, pts))
        is_shown = at < len(self.pts) and self.pts[at] == pts
        place = self.order[at] if is_shown else self.key_order[_last(self.keyframes, pts)]
        key = _last(self.key_order, order)
        if self.pts[number] < self.keyframes[key]:  # shown before the keyframe, it refers to frames before that, too
            return bool(self.key_order[max(0, key - 1)] <= place <= order)
        return bool(self.key_order[key] <= place <= order and pts >= self.keyframes[key])


_MOST_REORDERED = 64
"""More frames than any codec decodes before one that is shown earlier."""


def _last(ascending: NDArray[np.int64], value: int) -> int:
    """The place of the last number up to `value`; else 0."""
    return max(0, int(np.searchsorted(ascending, value, "right")) - 1)


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
    try:
        yield
    except pyav().FFmpegError as error:
        _report(error, what, file)


def _report(error: Any, what: str, file: _BytesFile | None) -> NoReturn:
    """Raise a SampleError; or the error of reading, if that failed."""
    if file is not None and file.failure is not None:
        raise file.failure from None
    if isinstance(error, OSError) and not isinstance(error, ValueError):  # of the file system
        raise error
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
            packets, is_partial = _packets(video)
        context, base = video.stream.codec_context, video.stream.time_base
        height, width, promised = context.height, context.width, _promised_end(video)
        is_partial = is_partial or _ends_early(video)
    finally:
        video.close()
    if any(packet[0] is None for packet in packets):
        raise SampleError(
            f"{name} has no time stamps: write it again with some (ffmpeg -fflags +genpts -i {name} -c copy out.mp4)"
        )
    keys = {at: order for order, (at, is_key, _, _) in enumerate(packets) if is_key}
    first = min(keys, default=None)
    # Frames before the first keyframe refer to frames that were cut off; hidden ones are left out by an edit list.
    shown = {
        at: (order, duration)
        for order, (at, _, is_hidden, duration) in enumerate(packets)
        if not is_hidden and first is not None and at >= first
    }
    if not shown:
        raise SampleError(f"{name} has no video frames: remove it, or pass on_error='skip' to the loader")
    pts, keyframes = np.array(sorted(shown), np.int64), np.array(sorted(keys), np.int64)
    last = shown[int(pts[-1])][1]
    end = int(pts[-1]) + (last or (int(np.median(np.diff(pts))) if len(pts) > 1 else 1))
    if is_partial or (promised is not None and end * base < promised - (end - int(pts[-1])) * base * 3 / 2):
        raise SampleError(
            f"{name} is truncated: it ends after {len(pts)} frames, at {float(end * base):.3f} s, and its header "
            f"promises more. Fetch it again; or keep what there is (ffmpeg -i {name} -c copy out.mkv); or pass "
            "on_error='skip' to the loader"
        )
    order = np.array([shown[int(at)][0] for at in pts], np.int64)
    return FrameTable(base, end, height, width, pts, keyframes, order, np.array([keys[int(at)] for at in keyframes]))


def _packets(video: OpenVideo) -> tuple[list[tuple[int, bool, bool, int]], bool]:
    """Each packet, and True if the last one is cut.

    A packet is its time stamp, "is a keyframe", "is hidden", and its duration.
    """
    packets, is_cut = [], False
    for packet in video.container.demux(video.stream):
        if packet.size:
            packets.append((packet.pts, packet.is_keyframe, packet.is_discard, packet.duration or 0))
            is_cut = packet.is_corrupt
    return packets, is_cut


def _ends_early(video: OpenVideo) -> bool:
    """True if the index lists packets behind the end of the file."""
    nbytes = video.container.size
    return nbytes > 0 and any(entry.pos + entry.size > nbytes for entry in video.stream.index_entries)


def _promised_end(video: OpenVideo) -> Fraction | None:
    """The end in seconds that the header declares; None without one."""
    names = video.container.format.name.split(",")
    text = video.stream.metadata.get("DURATION", "")
    if "matroska" in names and text.count(":") == 2:
        hours, minutes, seconds = map(Fraction, text.rstrip("\0 ").split(":"))
        return 3600 * hours + 60 * minutes + seconds
    if ("matroska" in names or "flv" in names) and len(video.container.streams) == 1 and video.container.duration:
        return Fraction(video.container.duration, pyav().time_base)
    return None


class VideoReader:
    """Decodes chosen frames of one video; for one thread at a time."""

    def __init__(self, source: Source, table: FrameTable, name: str) -> None:
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
        self._next: int | None = None
        """The number of the frame that decoding comes to next; None if it has to seek."""
        self._attempt = 0

    def close(self) -> None:
        self._video.close()

    def read(self, wanted: NDArray[np.int64], kept: Frames | None = None) -> Frames:
        """The frames of these numbers, ascending and distinct.

        Those that are in `kept` are not decoded again. SampleError names a frame that cannot be decoded.
        """
        found = {number: kept[number] for number in wanted.tolist() if number in kept} if kept else {}
        missing = [number for number in wanted.tolist() if number not in found]
        if missing:
            pts = self._table.pts[missing]
            self._wanted, self._until = frozenset(pts.tolist()), int(pts[-1])
            keys = np.searchsorted(self._table.keyframes, pts, "right") - 1
            for number, key in zip(missing, keys.tolist(), strict=True):
                found[number] = self._frame(number, key)
        return found

    def _frame(self, number: int, key: int) -> NDArray[np.uint8]:
        """A frame of the group that keyframe `key` begins."""
        pts, keys = self._table.pts, self._table.keyframes
        if self._next is not None and self._next <= number and pts[self._next] >= keys[key]:
            with suppress(SampleError):  # what a seek finds is the verdict: it passes over frames that are not needed
                return self._pixels(self._decode_until(number), number)
        for attempt in range(self._attempt, _ATTEMPTS):
            with suppress(SampleError):
                return self._read_from(key, attempt, number)
        return self._read_from(key, _ATTEMPTS, number)

    def _read_from(self, key: int, attempt: int, number: int) -> NDArray[np.uint8]:
        self._seek(key, attempt)
        frame = self._decode_until(number)
        self._attempt = attempt
        return self._pixels(frame, number)

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
            self._begin()

    def _reopen(self) -> None:
        """Decode from the very beginning."""
        self._video.close()
        self._video = OpenVideo(self._source, self._name)
        self._begin()

    def _begin(self) -> None:
        self._ahead.clear()
        self._damaged = set()
        self._coming = self._decode()

    def _decode(self) -> Iterator[Any]:
        """Decode from the present place on.

        Frames that are not wanted are decoded only if others refer to them. Frames that are displayed before the first
        keyframe may refer to frames before it, which were not decoded: their errors mean nothing.
        """
        first, context, damaged = None, self._video.stream.codec_context, self._damaged
        skips, context.skip_frame = False, "DEFAULT"
        for packet in self._video.container.demux(self._video.stream):
            pts = packet.pts
            if skips != (pts is not None and pts < self._until and pts not in self._wanted):
                skips = not skips
                context.skip_frame = "NONREF" if skips else "DEFAULT"
            if first is None and packet.is_keyframe:
                first = pts
            frames = []
            try:
                frames = packet.decode()
                is_damaged = packet.is_corrupt
            except self._failure as error:
                if pts is None or (isinstance(error, OSError) and not isinstance(error, ValueError)):
                    raise
                is_damaged = first is not None and pts >= first
            if is_damaged and pts is not None:
                damaged.add(pts)
            for frame in frames:
                if frame.is_corrupt and frame.pts is not None:
                    damaged.add(frame.pts)
                yield frame

    def _decode_until(self, number: int) -> Any:
        """Decode up to a frame; SampleError if it is missing or damaged."""
        place = int(self._table.pts[number])
        try:
            while (found := self._take()) is not None and (found.pts is None or found.pts < place):
                pass
            self._look_ahead(number)
        except self._failure as error:
            _report(error, self._where(number), self._video.file)
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
        """Decode up to the last frame that this one may refer to.

        Damage shows when a frame comes out.
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
            _report(error, self._where(number), None)
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
        return f"frame {number} ({float(self._table.pts[number] * self._table.time_base):.3f} s) of {self._name}"


_ATTEMPTS = 2


_LEAD_S = 1
"""More than any codec reorders frames by."""


_REPLACE = "replace the file, or pass on_error='skip' to the loader"
