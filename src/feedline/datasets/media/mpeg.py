"""Lengths of MP3 files that do not state their length.

Many encoders write no Xing header. libsndfile then estimates the number of samples from the first frame, and reads
nothing beyond its estimate, which loses most of a file with a variable bit rate. `with_length` counts the frames, and
puts a Xing header in front of them.

Source of the format: ISO/IEC 11172-3, 2.4.1.3 and 2.4.2.3, ISO/IEC 13818-3, ID3v2.4, section 3.1, and the Xing header.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO, NamedTuple

_BIT_RATES = {
    True: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""Bits per second, divided by 1000, of layer III; key: whether the version is 1."""


_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
"""Samples per second by version, in its code."""


_HEADER_NBYTES = 4


_SAME = 0xFFFE0C00
"""Bits of a header that all frames of a file share: sync word, version, layer and rate."""


_ID3_NBYTES = 10


_SEARCHED_NBYTES = 64 << 10
"""Bytes behind the tags in which the first frame must begin."""


class _MpegFrame(NamedTuple):
    """A frame of layer III, by its header."""

    nbytes: int
    samples: int
    places: tuple[int, int]
    """Bytes at which a Xing header begins, without and with a checksum."""

    @classmethod
    def parse(cls, header: int) -> _MpegFrame | None:
        """The frame of a header; None for anything else."""
        version, bit_rate, rate = header >> 19 & 3, header >> 12 & 15, header >> 10 & 3
        is_layer_3 = header >> 21 == 0x7FF and header >> 17 & 3 == 1
        if not is_layer_3 or version == 1 or bit_rate in (0, 15) or rate == 3:
            return None
        is_first, is_mono = version == 3, header >> 6 & 3 == 3
        samples = 1152 if is_first else 576
        thousands = _BIT_RATES[is_first][bit_rate - 1]
        nbytes = samples * 125 * thousands // _RATES[version][rate] + (header >> 9 & 1)
        side = (17 if is_mono else 32) if is_first else (9 if is_mono else 17)
        return cls(nbytes, samples, (_HEADER_NBYTES + side, _HEADER_NBYTES + side + 2))


_SILENCE = 4608
"""Samples of silence in front of a file: a multiple of the number after which a decoder rounds in the same order."""


_DELAY = 529
"""Samples that decoders leave out at the beginning of files with a Xing header."""


LEAD = _SILENCE - _DELAY
"""Samples that a decoder gives before those of the file."""


def with_length(file: BinaryIO, length: int | None = None) -> BinaryIO | None:
    """Put a header with its length before an MP3 file.

    None if the file has such a header. `LEAD` samples precede those of the file. `length` is its number of samples, if
    that is known; otherwise the whole file is read.
    """
    start = skip_tags(file)
    begin = read_part(file, start, _SEARCHED_NBYTES)
    at = _next_frame(begin)
    head = _number(begin[at : at + _HEADER_NBYTES])
    frame = _MpegFrame.parse(head)
    if frame is None or _xing_header(begin[at : at + frame.nbytes], frame):
        return None
    count = _count_frames(read_part(file, start + at), head) if length is None else length // frame.samples
    return io.BufferedReader(Behind(_front(head, frame.samples, count), file, start + at))


def find_more_frames(file: BinaryIO) -> int | None:
    """Place of the first undeclared frame.

    It is behind those that a Xing header declares: decoders leave it out. None without such a frame.
    """
    start = skip_tags(file)
    begin = read_part(file, start, _SEARCHED_NBYTES)
    at = _next_frame(begin)
    head = _number(begin[at : at + _HEADER_NBYTES])
    frame = _MpegFrame.parse(head)
    xing = b"" if frame is None else _xing_header(begin[at : at + frame.nbytes], frame)
    flags = _number(xing[4:8])
    if not flags & _HAS_NBYTES:
        return None
    place = 12 if flags & _HAS_COUNT else 8
    end = start + at + _number(xing[place : place + 4])
    behind = read_part(file, end, _SEARCHED_NBYTES)
    more = _next_frame(behind)
    frame = _MpegFrame.parse(_number(behind[more : more + _HEADER_NBYTES]))
    following = b"" if frame is None else behind[more + frame.nbytes :][:_HEADER_NBYTES]
    is_same = _number(following) & _SAME == head & _SAME  # two frames, because two bytes of a tag may look like one
    return end + more if is_same else None


def skip_tags(file: BinaryIO) -> int:
    """The byte behind the ID3 tags at the beginning."""
    start = 0
    while (tag := read_part(file, start, _ID3_NBYTES))[:3] == b"ID3" and len(tag) == _ID3_NBYTES:
        nbytes = sum((byte & 0x7F) << shift for byte, shift in zip(tag[6:], (21, 14, 7, 0), strict=True))
        has_footer = tag[5] & 0x10
        start += _ID3_NBYTES + nbytes + (_ID3_NBYTES if has_footer else 0)
    return start


def _next_frame(data: bytes) -> int:
    """Place of the first frame that another frame or the end follows."""
    at = 0
    while at >= 0:
        header = _number(data[at : at + _HEADER_NBYTES])
        frame = _MpegFrame.parse(header)
        if frame is not None:
            following = _number(data[at + frame.nbytes : at + frame.nbytes + _HEADER_NBYTES])
            if following & _SAME == header & _SAME or at + frame.nbytes >= len(data):
                return at
        at = data.find(b"\xff", at + 1)
    return len(data)


def _xing_header(data: bytes, frame: _MpegFrame) -> bytes:
    """Xing header of a frame, and all behind it, if any."""
    return next((data[at:] for at in frame.places if data[at : at + 4] in (b"Xing", b"Info")), b"")


_HAS_COUNT, _HAS_NBYTES = 1, 2
"""Flags of a Xing header: it has the numbers of frames and of bytes."""


def _count_frames(data: bytes, head: int) -> int:
    """Number of complete frames like that of header `head`."""
    count = at = 0
    while at + _HEADER_NBYTES <= len(data):
        header = _number(data[at : at + _HEADER_NBYTES])
        frame = _MpegFrame.parse(header) if header & _SAME == head & _SAME else None
        if frame is None:  # a tag, or damage, behind which decoders look for the next frame
            at = data.find(b"\xff", at + 1)
            if at < 0:
                break
        else:
            at += frame.nbytes
            count += at <= len(data)
    return count


def _front(head: int, samples: int, count: int) -> bytes:
    """A Xing header and silence, for frames like that of `head`."""
    header = head & ~0xF200 | 0x10000 | 9 << 12  # without checksum and padding, and with room for a Xing header
    frame = _MpegFrame.parse(header)
    assert frame is not None
    silence = header.to_bytes(4, "big").ljust(frame.nbytes, b"\0")
    silent = _SILENCE // samples
    stated = b"Xing" + _HAS_COUNT.to_bytes(4, "big") + (count + silent).to_bytes(4, "big")
    at = frame.places[0]
    return silence[:at] + stated + silence[at + len(stated) :] + silence * silent


def read_part(file: BinaryIO, start: int, nbytes: int = -1) -> bytes:
    """The bytes from `start` on, fewer at the end of the file."""
    file.seek(min(start, size_of(file)))
    return bytes(file.read(nbytes))


def size_of(file: BinaryIO) -> int:
    """The bytes of a file."""
    file.seek(0, io.SEEK_END)  # gives None for a mapping before Python 3.13
    return file.tell()


def _number(header: bytes) -> int:
    return int.from_bytes(header, "big") if len(header) == _HEADER_NBYTES else 0


class Behind(io.RawIOBase):
    """The bytes of a file from `start` on, behind other bytes."""

    def __init__(self, front: bytes, file: BinaryIO, start: int) -> None:
        super().__init__()
        self._front, self._file, self._start = front, file, start
        self._nbytes = len(front) + size_of(file) - start
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = max(0, offset + (0, self._at, self._nbytes)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        if self._at < len(self._front):
            data = self._front[self._at : self._at + len(buffer)]
        else:
            data = read_part(self._file, self._start + self._at - len(self._front), len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
