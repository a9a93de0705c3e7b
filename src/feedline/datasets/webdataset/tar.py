"""Members of a tar file, from ustar, pax and GNU headers.

Members that cannot be read as samples are refused by name. `split` parses a member name into sample key and field.

Source of the format: POSIX.1-2017, pax, "pax Interchange Format", and the GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from feedline.datasets.formats import IMAGE_EXTENSIONS
from feedline.datasets.webdataset.sources import FileSource, TarSource
from feedline.errors import SampleError

_BOOKKEEPING = re.compile(r"__[^/]*__(/|$)")


def split(name: str) -> tuple[str, str] | None:
    """Split a member name into key and field, by WebDataset's rule.

    The key is the path up to the first dot of the base name, the field is the rest in lower case: `train/0001.seg.PNG`
    is field `seg.png` of sample `train/0001`. None for files without an extension, hidden files (`._0001.jpg` of
    macOS) and WebDataset's own bookkeeping (`__name__`), which belong to no sample.
    """
    folder, slash, base = name.rpartition("/")
    stem, _, field = base.partition(".")
    if not stem or not field or _BOOKKEEPING.match(name):
        return None
    return folder + slash + stem, field.lower()


def extension(field: str) -> str:
    """The last part of a field's name: `png` of `seg.png`."""
    return field.rpartition(".")[2]


def is_image(field: str) -> bool:
    """True for fields with the extension of an encoded image."""
    return extension(field) in IMAGE_EXTENSIONS


def unsafe_name_reason(name: str) -> str | None:
    """Reason not to trust a member's name, or None."""
    if name.startswith("/"):
        return "has an absolute path"
    if ".." in name.split("/"):
        return "leads out of its folder with '..'"
    return None


BLOCK = 512
"""Headers and data begin at multiples of this."""


_SIZE_DIGITS = 20  # no file is larger; Python itself refuses to read numbers of thousands of digits


_NOTE_NBYTES = 1 << 20  # far beyond any name; a hostile header may claim more than there is memory


_CHUNK = 1 << 20


_REGULAR, _FOLDERS, _PAX, _LABEL = b"\x0007", b"5D", b"xX", b"V"


_REFUSED = {
    b"1": ("is a hard link, which holds no data", "make the tar anew with --hard-dereference"),
    b"2": ("is a symbolic link, which holds no data", "make the tar anew with --dereference"),
    b"3": ("is a character device", "make the tar anew without it"),
    b"4": ("is a block device", "make the tar anew without it"),
    b"6": ("is a named pipe", "make the tar anew without it"),
    b"S": ("is stored sparsely", "make the tar anew without --sparse"),
    b"M": ("is the continuation of another volume", "make the tar anew as a single volume"),
}


_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}


class ShardError(SampleError):
    """Unusable tar or index; the message names member and remedy."""


class TarMember(NamedTuple):
    """A regular file in a tar, at bytes `[start, start + size)`."""

    name: str
    start: int
    size: int


class Cut(NamedTuple):
    """Truncated member of a tar, its expected end and the actual size."""

    name: str
    wanted: int
    found: int

    def error(self, tar: str) -> ShardError:
        """The error for a truncated tar."""
        return ShardError(
            f"{tar} is truncated: member {self.name!r} ends at byte {self.wanted:,}, the file at {self.found:,} (its "
            f"writer was killed, or still writes). Make or copy it again, or pass allow_truncated=True to read the "
            f"samples before that member"
        )


class TarWalk:
    """Iterates once over the regular files of an open tar.

    Afterwards `.cut` describes a truncated tar; it is None for a complete one. Folders and volume labels are skipped.
    A tar without its end mark is complete if its last member is.
    """

    def __init__(self, source: TarSource) -> None:
        self.tar = source.name
        self._source = source
        self.cut: Cut | None = None
        self._notes: dict[str, str] = {}  # what pax and GNU headers say of the member that follows them

    def __iter__(self) -> Iterator[TarMember]:
        source, nbytes = self._source, self._source.nbytes
        self._refuse_foreign(source.read(0, 8))
        offset, before = 0, "(none)"
        while offset < nbytes:
            block = source.read(offset, BLOCK)
            if not block.lstrip(b"\0"):
                self._refuse_more(offset, nbytes)
                return
            if len(block) < BLOCK:
                self.cut = Cut(f"after {before}", offset + BLOCK, nbytes)
                return
            kind, size, name = self._header(block, offset)
            start = offset + BLOCK
            if start + size > nbytes:
                self.cut = Cut(name, start + size, nbytes)
                return
            if kind in _REGULAR and not name.endswith("/"):
                yield TarMember(name, start, size)
            elif kind in b"xXL":
                self._note(kind, source.read(start, size), name)
            offset, before = start + -(-size // BLOCK) * BLOCK, name

    def _header(self, block: bytes, offset: int) -> tuple[bytes, int, str]:
        """Parse a header into kind, data size and name; ShardError if refused."""
        if _checksum(block) != _number(block[148:156]):
            raise ShardError(f"{self.tar} is damaged: no tar header at byte {offset:,}. Make or copy the tar again")
        kind, size, name = block[156:157], _number(block[124:136]), _name(block)
        if kind in b"xXgLK":
            self._refuse_long(size, name)
            return kind, size, name
        name, size = self._notes.pop("path", name), self._noted_size(name, size)
        self._notes.clear()
        self._refuse(kind, name, size)
        return kind, 0 if kind == b"5" else size, name

    def _noted_size(self, name: str, size: int) -> int:
        noted = self._notes.get("size", str(size))
        if not noted.removeprefix("-").isdecimal():
            self._bad(name, f"has the size {noted[:_SIZE_DIGITS]!r}")
        if len(noted) > _SIZE_DIGITS:
            self._bad(name, f"has a size of {len(noted):,} digits")
        return int(noted)

    def _refuse(self, kind: bytes, name: str, size: int) -> None:
        if kind in _REFUSED:
            self._bad(name, *_REFUSED[kind])
        if kind not in _REGULAR + _FOLDERS + _LABEL:
            self._bad(name, f"is of the unknown kind {kind!r}")
        if size < 0:
            self._bad(name, "has an impossible size")
        danger = unsafe_name_reason(name)
        if danger is not None:
            self._bad(name, danger, "make the tar anew with relative names, as `tar -C FOLDER -cf X.tar .` does")

    def _refuse_long(self, size: int, name: str) -> None:
        if not 0 <= size <= _NOTE_NBYTES:
            self._bad(name, f"has an extended header of {size:,} bytes")

    def _note(self, kind: bytes, data: bytes, name: str) -> None:
        """Store the fields of an extended header for the next member."""
        if kind in _PAX:
            records = dict(self._records(data, name))
            if any(key.startswith("GNU.sparse.") for key in records):
                self._bad(records.get("GNU.sparse.name", name), *_REFUSED[b"S"])
            self._notes.update((key, records[key]) for key in ("path", "size") if records.get(key))
        elif kind == b"L":
            self._notes["path"] = _text(data)

    def _records(self, data: bytes, name: str) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(data):
            length = data[at : at + 20].partition(b" ")[0]
            stop = at + int(length) if length.isdigit() else at
            key, equals, value = data[at + len(length) + 1 : stop - 1].partition(b"=")
            if not equals or data[stop - 1 : stop] != b"\n":
                self._bad(name, "has a damaged extended header")
            yield key.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")
            at = stop

    def _refuse_foreign(self, begin: bytes) -> None:
        if not begin:
            raise ShardError(f"{self.tar} is empty: a file of 0 bytes is no tar. Make or copy it again")
        for magic, method in _COMPRESSED.items():
            if begin.startswith(magic):
                raise ShardError(
                    f"{self.tar} is compressed with {method}: samples of a compressed tar cannot be read at random. "
                    f"Unpack it to a plain .tar; images in it are compressed already"
                )

    def _refuse_more(self, offset: int, nbytes: int) -> None:
        """ShardError for data after the end mark, where other readers stop."""
        while offset < nbytes:
            chunk = self._source.read(offset, _CHUNK)
            if chunk.strip(b"\0"):
                raise ShardError(
                    f"{self.tar} goes on after its end mark (byte {offset:,}): were tars joined with cat? "
                    f"Join them with `tar --concatenate`, or keep them apart"
                )
            offset += len(chunk) or nbytes

    def _bad(self, name: str, what: str, remedy: str = "make the tar anew") -> NoReturn:
        raise ShardError(f"{self.tar}: member {name!r} {what}; {remedy}")


def members(tar: str | os.PathLike[str], *, allow_truncated: bool = False) -> Iterator[TarMember]:
    """The regular files of a tar, in order.

    ShardError names the member that cannot be read, and a remedy.
    """
    with FileSource(os.fspath(tar)) as source:
        walk = TarWalk(source)
        yield from walk
    if walk.cut is not None and not allow_truncated:
        raise walk.cut.error(walk.tar)


def _checksum(block: bytes) -> int:
    return sum(block) - sum(block[148:156]) + 8 * 32  # the field itself counts as blanks


def _number(field: bytes) -> int:
    """Parse octal digits or GNU's base-256 form; -1 if it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big", signed=False) - (0x80 << 8 * (len(field) - 1)) if field[0] == 0x80 else -1
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8)
    except ValueError:
        return -1


def _name(block: bytes) -> str:
    name = _text(block[:100])
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""  # GNU's own format keeps other things there
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")
