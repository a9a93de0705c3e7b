"""Table of a video's frames, made with PyAV without decoding."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.datasets.media.audio_checks import last_page
from feedline.datasets.media.files import MediaSource
from feedline.datasets.media.mpeg import read_part, size_of
from feedline.errors import SampleError

WHAT = "datasets.Clips"


_FINE_S = Fraction(1, 1000)


@dataclass(frozen=True, slots=True)
class FrameTable:
    """The frames of a video in the order of their display.

    `pts`: the time stamp of each, in units of `time_base` seconds, int64. `keyframes`: the time stamps of those at
    which decoding can begin, also of hidden ones. `order` and `key_order` are their places in the order of decoding.
    `end` is the time stamp at which the last frame ends. `height` and `width` are those that the file declares.
    `starts` and `stops` are the bytes of each frame in the file, `key_starts` those at which keyframes begin; -1 if
    unknown.
    """

    time_base: Fraction
    end: int
    height: int
    width: int
    pts: NDArray[np.int64]
    keyframes: NDArray[np.int64]
    order: NDArray[np.int64]
    key_order: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    key_starts: NDArray[np.int64]

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

        That is 0.5 ms in Matroska. Formats with units of more than a millisecond count frames, without rounding.
        """
        return max(1e-6, float(self.time_base) / 2) if self.time_base <= _FINE_S else 1e-6

    def pack(self) -> bytes:
        """The table as bytes."""
        base = self.time_base
        head = [base.numerator, base.denominator, self.end, self.height, self.width, len(self.pts)]
        each, keys = [self.pts, self.order, self.starts, self.stops], [self.keyframes, self.key_order, self.key_starts]
        parts = [np.array(head), *each, *keys]
        return np.concatenate(parts).astype("<i8").tobytes()

    @classmethod
    def parse(cls, packed: bytes) -> FrameTable:
        """The table that `pack` wrote."""
        numbers = np.frombuffer(packed, "<i8")
        numerator, denominator, end, height, width, count = numbers[:6].tolist()
        each, both = np.split(numbers[6:], [4 * count])
        pts, order, starts, stops = each.reshape(4, count)
        keys, key_order, key_starts = both.reshape(3, -1)
        base = Fraction(numerator, denominator)
        return cls(base, end, height, width, pts, keys, order, key_order, starts, stops, key_starts)

    def extent(self, key: int, number: int) -> tuple[int, int]:
        """Byte range from keyframe `key` to frame `number`.

        (-1, -1) if it is unknown. A few later frames are included, because a decoder reads them before it returns the
        frame.
        """
        last = self.order[number] + _DECODED_BEHIND
        stops = self.stops[(self.order >= self.key_order[key]) & (self.order <= last)]
        start, stop = int(self.key_starts[key]), int(stops.max(initial=-1))
        return (start, stop) if 0 <= start < stop else (-1, -1)

    def start_of(self, pts: int) -> int:
        """First byte of the frame at a time stamp; -1 if unknown."""
        at = int(np.searchsorted(self.pts, pts))
        return int(self.starts[at]) if at < len(self.pts) and self.pts[at] == pts else -1

    def last_decoded_before(self) -> NDArray[np.int64]:
        """By frame, the last shown of the frames decoded up to it."""
        earliest_behind = np.minimum.accumulate(self.order[::-1])[::-1]
        last = np.searchsorted(earliest_behind, self.order, "right") - 1
        return np.minimum(last, np.arange(len(self.pts)) + _MOST_REORDERED)

    def may_refer(self, number: int, pts: int) -> bool:
        """True if a frame may need the frame of time stamp `pts`.

        Codecs forbid that frames after a keyframe refer to frames that are shown before the keyframe. After a seek to
        the keyframe, the reference frames of those shown before it are missing, and the decoder's errors about them
        mean nothing.
        """
        order = self.order[number]
        at = int(np.searchsorted(self.pts, pts))
        is_shown = at < len(self.pts) and self.pts[at] == pts
        place = self.order[at] if is_shown else self.key_order[_last(self.keyframes, pts)]
        key = _last(self.key_order, order)
        if self.pts[number] < self.keyframes[key]:  # shown before the keyframe: refers to earlier ones, too
            return bool(self.key_order[max(0, key - 1)] <= place <= order)
        return bool(self.key_order[key] <= place <= order and pts >= self.keyframes[key])


_DECODED_BEHIND = 4


_MOST_REORDERED = 64
"""More frames than any codec decodes before a frame that is shown earlier."""


def _last(ascending: NDArray[np.int64], value: int) -> int:
    """The place of the last number up to `value`; 0 without one."""
    return max(0, int(np.searchsorted(ascending, value, "right")) - 1)


def pyav() -> Any:
    """The module `av`; MissingExtraError without it."""
    return optional.load("av", "video", WHAT)


def ffmpeg_build() -> str:
    """Versions of PyAV and FFmpeg, and the number of codecs."""
    av = pyav()
    return f"{av.__version__} {av.library_versions} {len(av.codecs_available)}"


def any_metadata() -> dict[str, Any]:
    """Arguments of `av.open` that accept texts of any encoding."""
    return {"metadata_errors": "ignore"} if int(pyav().__version__.split(".")[0]) < 19 else {}


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
            self.failure = error  # FFmpeg reports only that a read failed
            raise


@contextmanager
def naming_damage(what: str, file: _BytesFile | None = None) -> Iterator[None]:
    """Turn errors of FFmpeg about the content of a file into SampleErrors."""
    try:
        yield
    except pyav().FFmpegError as error:
        report(error, what, file)


def report(error: Any, what: str, file: _BytesFile | None) -> NoReturn:
    """Raise a SampleError, or the error of a failed read."""
    if file is not None and file.failure is not None:
        raise file.failure from None
    if isinstance(error, OSError) and not isinstance(error, ValueError):
        # Demuxers of FFmpeg have errors of the file system for damage, too, but name no file.
        if error.errno != errno.EIO and file is None and error.filename not in _NO_FILE:
            raise error
        _check_readable(error.filename)
    raise SampleError(
        f"{what} cannot be decoded ({type(error).__name__}: {error.strerror}): the file is damaged or not a video;"
        " replace it, or pass on_error='skip' to the loader"
    ) from error


_NO_FILE = None, "<none>"


def _check_readable(target: str | None) -> None:
    """Raise the OSError of a local file that cannot be read.

    FFmpeg has the same error for some truncated files.
    """
    if target not in _NO_FILE:
        with open(target.removeprefix("file:"), "rb", buffering=0) as file:
            while file.read(_READ_NBYTES):
                pass


_READ_NBYTES = 8 << 20


class OpenVideo:
    """A video opened with PyAV: container, and the video stream."""

    def __init__(self, source: MediaSource, name: str) -> None:
        self.name = name
        self.file = None if isinstance(source, str) else _BytesFile(source)
        if self.file is not None:
            self.file.seek(0)
        target = f"file:{source}" if self.file is None else self.file  # a file's name must not select another protocol
        with naming_damage(name, self.file):
            self.container = pyav().open(target, **any_metadata())
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
        # There are already many workers: threads of each decoder would only compete.
        self.stream.codec_context.thread_count = 1
        self.stream.codec_context.thread_type = "NONE"

    def close(self) -> None:
        self.container.close()


def _is_cover(stream: Any) -> bool:
    return bool(stream.disposition & type(stream.disposition).attached_pic)


def scan_frames(source: MediaSource, name: str) -> FrameTable:
    """List the frames of a video; SampleError without any."""
    video = OpenVideo(source, name)
    try:
        with naming_damage(name, video.file):
            packets, is_partial = _packets(video)
            is_partial = is_partial or _lacks_end(source)
        context, base = video.stream.codec_context, video.stream.time_base
        height, width, promised = context.height, context.width, _promised_end(video)
        is_partial = is_partial or _ends_early(video)
    finally:
        video.close()
    if any(packet[0] is None for packet in packets):
        raise SampleError(
            f"{name} has no time stamps: add them with a copy (ffmpeg -fflags +genpts -i {name} -c copy out.mp4)"
        )
    _check_order(packets, name, base)
    keys = {packet[0]: order for order, packet in enumerate(packets) if packet[1]}
    first = min(keys, default=None)
    # Frames before the first keyframe refer to frames that were cut off; an edit list leaves out hidden frames.
    shown = {
        at: (order, duration)
        for order, (at, _, is_hidden, duration, _) in enumerate(packets)
        if not is_hidden and first is not None and at >= first
    }
    if not shown:
        raise SampleError(f"{name} has no video frames: remove it, or pass on_error='skip' to the loader")
    pts, keyframes = np.array(sorted(shown), np.int64), np.array(sorted(keys), np.int64)
    last = shown[int(pts[-1])][1]
    end = int(pts[-1]) + (last or (int(np.median(np.diff(pts))) if len(pts) > 1 else 1))
    if is_partial or (promised is not None and end * base < promised - (end - int(pts[-1])) * base * 3 / 2):
        raise SampleError(
            f"{name} is truncated: it ends after {len(pts)} frames, at {float(end * base):.3f} s, but its header "
            f"declares more. Fetch it again; or keep these frames (ffmpeg -i {name} -c copy out.mkv); or pass "
            "on_error='skip' to the loader"
        )
    order = np.array([shown[int(at)][0] for at in pts], np.int64)
    key_order = np.array([keys[int(at)] for at in keyframes], np.int64)
    places = np.array([packet[4] for packet in packets], np.int64)
    starts, stops = places[order].T
    return FrameTable(base, end, height, width, pts, keyframes, order, key_order, starts, stops, places[key_order, 0])


_Packet = tuple[int, bool, bool, int, tuple[int, int]]


def _packets(video: OpenVideo) -> tuple[list[_Packet], bool]:
    """Each packet, and True if the last one is truncated.

    A packet consists of time stamp, "is a keyframe", "is hidden", duration, and byte range, (-1, -1) if unknown.
    """
    packets, is_cut = [], False
    for packet in video.container.demux(video.stream):
        if packet.size:
            place = packet.pos if packet.pos is not None else -1
            bytes_at = (place, place + packet.size) if place >= 0 else (-1, -1)
            packets.append((packet.pts, packet.is_keyframe, packet.is_discard, packet.duration or 0, bytes_at))
            is_cut = packet.is_corrupt
    return packets, is_cut


def _check_order(packets: Sequence[_Packet], name: str, time_base: Fraction) -> None:
    """Raise SampleError for time stamps that do not identify a frame."""
    keys = [packet[0] for packet in packets if packet[1]]
    shown = Counter(packet[0] for packet in packets if not packet[2])
    before = next((late for late, pts in pairwise(keys) if pts <= late), None)
    twice = next((pts for pts, count in shown.items() if count > 1), before)
    if twice is not None:
        raise SampleError(
            f"{name} has several frames at one time stamp, or time stamps that go back, after"
            f" {float(twice * time_base):.3f} s, as files have that cat has joined. Write it again"
            f" (ffmpeg -i {name} out.mp4), or pass on_error='skip' to the loader"
        )


def _lacks_end(source: MediaSource) -> bool:
    """True for a Matroska or Ogg file without its end.

    Other formats have no end, or are listed by an index.
    """
    with open(source, "rb") if isinstance(source, str) else nullcontext(source) as opened:
        file = cast("BinaryIO", opened)
        begin = read_part(file, 0, _BEGIN_NBYTES)
        if begin.startswith(b"OggS"):
            return last_page(file) is None
        return begin.startswith(_EBML) and _segment_end(begin) > size_of(file)


_BEGIN_NBYTES = 4096


_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
"""Identifiers of the header of a Matroska file, and of all that follows it."""


def _segment_end(begin: bytes) -> int:
    """Declared end of a Matroska file; 0 in live streams."""
    at, nbytes = _element_size(begin, len(_EBML))
    at = begin.find(_SEGMENT, at + nbytes)
    if at < 0:
        return 0
    at, nbytes = _element_size(begin, at + len(_SEGMENT))
    return at + nbytes if nbytes else 0


def _element_size(data: bytes, at: int) -> tuple[int, int]:
    """Place behind a size of EBML, and the size, or 0."""
    width = 9 - data[at].bit_length() if at < len(data) else 0
    bits = 7 * width
    nbytes = int.from_bytes(data[at : at + width], "big") & (1 << bits) - 1
    return at + width, 0 if nbytes == (1 << bits) - 1 else nbytes


def _ends_early(video: OpenVideo) -> bool:
    """True if the index lists packets after the end of the file."""
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
