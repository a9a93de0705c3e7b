"""Checks for audio files that are truncated or joined.

libsndfile reads the part that is there, or the first of several files in one, and reports nothing.

Sources of the formats: RIFF (1991), EBU Tech 3306, AIFF-C (1991), the CAF specification, RFC 3533, NIST SPHERE 2.6.
"""

from __future__ import annotations

import io
import math
import re
import struct
from typing import BinaryIO, NamedTuple

from feedline.datasets.media.mpeg import Behind, find_more_frames, read_part, size_of, skip_tags
from feedline.errors import SampleError


class _Sound(NamedTuple):
    """Place of a file's sound, and the field with its size."""

    start: int
    """The first byte of the sound."""
    nbytes: int
    """Bytes that are declared; 0 if they were left open, as before writing into a pipe."""
    field: int = 0
    """The place of the field."""
    format: str = ""
    """Its format, for `struct`."""
    added: int = 0
    """Bytes that the size in the header includes besides."""


def check_whole(file: BinaryIO, name: str) -> bool:
    """Raise SampleError for missing sound, or other sound behind it.

    True for a file that needs `with_size`.
    """
    start = skip_tags(file)
    magic = read_part(file, start, 4)
    if magic == b"OggS":
        _check_pages(file, start, name)
        return False
    sound = _find_sound(file, start, magic)
    if sound is None:
        more = None if magic == b"fLaC" else find_more_frames(file)
        if more is not None:
            raise _joined_error(name, more)
        return False
    present = max(0, size_of(file) - sound.start)
    if sound.nbytes > present:
        raise SampleError(
            f"{name} is truncated: its header declares {sound.nbytes} bytes of sound, but {present} are there. Copy it"
            f" again; or keep these (ffmpeg -i {name} out.flac); or pass on_error='skip' to the loader"
        )
    return not sound.nbytes and present > 0 and bool(sound.format)


def with_size(file: BinaryIO) -> BinaryIO:
    """The file, with its open size filled in.

    The sound ends with the file. libsndfile takes some of the sizes in such headers literally.
    """
    start = skip_tags(file)
    sound = _find_sound(file, start, read_part(file, start, 4))
    assert sound is not None
    front = bytearray(read_part(file, 0, sound.start))
    struct.pack_into(sound.format, front, sound.field, size_of(file) - sound.start + sound.added)
    return io.BufferedReader(Behind(bytes(front), file, sound.start))


def _joined_error(name: str, place: int | None) -> SampleError:
    where = "" if place is None else f" at byte {place}"
    return SampleError(
        f"{name} contains several files, one behind the other: another one begins{where}, which libsndfile leaves out."
        f" Join the sounds (ffmpeg -i {name} out.flac), or pass on_error='skip' to the loader"
    )


class _ChunkLayout(NamedTuple):
    """Chunks of a file, each of them behind a head."""

    head: struct.Struct
    """Identifier and number of bytes."""
    first: int
    """Place of the first chunk."""
    sound: bytes
    """Identifier of the chunk with the sound."""
    multiple: int
    """Chunks begin at multiples of this."""
    with_head: bool = False
    """True if the head is included in the number of bytes."""


_RIFF = _ChunkLayout(struct.Struct("<4sI"), 12, b"data", 2)


_LAYOUTS = {
    b"RIFF": _RIFF,
    b"RF64": _RIFF,
    b"BW64": _RIFF,
    b"RIFX": _ChunkLayout(struct.Struct(">4sI"), 12, b"data", 2),
    b"FORM": _ChunkLayout(struct.Struct(">4sI"), 12, b"SSND", 2),
    b"caff": _ChunkLayout(struct.Struct(">4sQ"), 8, b"data", 1),
    b"riff": _ChunkLayout(
        struct.Struct("<16sQ"), 40, b"data\xf3\xac\xd3\x11\x8c\xd1\0\xc0\x4f\x8e\xdb\x8a", 8, with_head=True
    ),
}
"""WAV, its variants for large files, AIFF, CAF and W64, by their first bytes."""


_MOST_CHUNKS = 10_000


def _find_sound(file: BinaryIO, start: int, magic: bytes) -> _Sound | None:
    if magic in _LAYOUTS:
        return _sound_chunk(file, start, _LAYOUTS[magic])
    if magic in (b".snd", b"dns."):
        order = ">" if magic == b".snd" else "<"
        return _sun_sound(file, start, order)
    return _sphere_sound(file, start) if magic == b"NIST" else None


def _stated(nbytes: int, width: int) -> int:
    """Size in a field of `width` bytes; 0 if open."""
    return 0 if nbytes >> 8 * (width - 2) in _OPEN else nbytes


_OPEN = (0x7F00, 0x7FFF, 0x8000, 0xFFFF)
"""The highest two bytes of sizes, besides 0, that FFmpeg, SoX, GStreamer, arecord and LAME write into pipes."""


def _sound_chunk(file: BinaryIO, start: int, layout: _ChunkLayout) -> _Sound | None:
    at, large, added = start + layout.first, None, layout.head.size if layout.with_head else 0
    width = layout.head.size - len(layout.sound)
    for _ in range(_MOST_CHUNKS):
        head = read_part(file, at, layout.head.size)
        if len(head) < layout.head.size:
            break
        kind, nbytes = layout.head.unpack(head)
        at += layout.head.size
        if kind == layout.sound:
            nbytes = max(0, _stated(nbytes, width) - added)
            if not nbytes and large is not None:
                return large._replace(start=at)
            is_closed = not nbytes and _is_closed(file, start, layout)
            return _Sound(at, nbytes, at - width, "" if is_closed else layout.head.format[0] + "IQ"[width // 8], added)
        if kind == b"ds64":
            nbytes_of_sound = int.from_bytes(read_part(file, at + 8, 8), "little")
            large = _Sound(0, _stated(nbytes_of_sound, 8), at + 8, "<Q")
        at += max(0, nbytes - added + (added - nbytes) % layout.multiple)
    return None


def _is_closed(file: BinaryIO, start: int, layout: _ChunkLayout) -> bool:
    """True if the header has the size of the whole file.

    A sound of 0 bytes is then empty, not open.
    """
    _, nbytes = layout.head.unpack(read_part(file, start, layout.head.size))
    return bool(nbytes + (0 if layout.with_head else layout.head.size) == size_of(file) - start)


def _sun_sound(file: BinaryIO, start: int, order: str) -> _Sound | None:
    head = read_part(file, start + 4, 8)
    if len(head) < 8:
        return None
    place, nbytes = struct.unpack(f"{order}II", head)
    return _Sound(start + place, _stated(nbytes, 4), start + 8, f"{order}I")


def _sphere_sound(file: BinaryIO, start: int) -> _Sound | None:
    head = read_part(file, start, 1024).decode("latin-1")
    values = {field: int(value) for field, value in re.findall(r"^(\w+) -i (\d+)$", head, re.MULTILINE)}
    shape = [values.get(field, 0) for field in ("sample_count", "channel_count", "sample_n_bytes")]
    nbytes = re.match(r"NIST_1A\n *(\d+)\n", head)
    return None if nbytes is None else _Sound(start + int(nbytes[1]), math.prod(shape))


def _check_pages(file: BinaryIO, start: int, name: str) -> None:
    """Check the last page of an Ogg file.

    It must be whole, and belong to one of the streams at the beginning. All streams of a file begin before the second
    page of any of them.
    """
    data, serials, at = read_part(file, start, _BEGIN_NBYTES), set[bytes](), 0
    while (page := _OggPage.parse(data[at : at + _PAGE_HEAD_NBYTES])) is not None and page.is_first:
        serials.add(page.serial)
        at += page.nbytes
    last = last_page(file, start)
    if last is None:
        raise SampleError(
            f"{name} is truncated: its last page is not whole. Copy it again; or keep what is there (ffmpeg"
            f" -i {name} -c copy out.ogg); or pass on_error='skip' to the loader"
        )
    if last.serial not in serials:
        raise _joined_error(name, None)


def last_page(file: BinaryIO, start: int = 0) -> _OggPage | None:
    """The last page of an Ogg file; None unless it is whole.

    Programs that record until they are stopped do not mark it as the end of its stream.
    """
    tail = read_part(file, max(start, size_of(file) - 2 * _MOST_PAGE_NBYTES))
    data = tail[max(0, tail.rfind(b"OggS")) :]
    page = _OggPage.parse(data)
    if page is None or page.nbytes > len(data):
        return None
    behind = data[page.nbytes :]
    return None if behind and b"OggS".startswith(behind) else page


_BEGIN_NBYTES = 4096
"""Bytes that contain the first page of each stream. To search all of a file would take as long as to read it."""


_PAGE_HEAD_NBYTES = 27 + 255


_MOST_PAGE_NBYTES = 27 + 255 + 255 * 255


class _OggPage(NamedTuple):
    """A page of an Ogg file."""

    is_first: bool
    serial: bytes
    nbytes: int

    @classmethod
    def parse(cls, data: bytes) -> _OggPage | None:
        """The page at the beginning of `data`, if any."""
        if data[:4] != b"OggS" or len(data) < 27 + (data[26] if len(data) > 26 else 1):
            return None
        lengths = data[27 : 27 + data[26]]
        return cls(bool(data[5] & 2), data[14:18], 27 + len(lengths) + sum(lengths))
