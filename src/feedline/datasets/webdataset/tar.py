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
from feedline.datasets.inflated import OPENERS, Opener
from feedline.datasets.signatures import recognize
from feedline.datasets.webdataset.sources import TarSource
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
    """Reason why a member's name is unsafe, or None."""
    if name.startswith("/"):
        return "has an absolute path"
    if ".." in name.split("/"):
        return "points out of its folder with '..'"
    return None


BLOCK = 512
"""Headers and data begin at multiples of this."""


_SIZE_DIGITS = 20  # more digits than any file size has; Python refuses to parse thousands of digits


_NOTE_NBYTES = 1 << 20  # longer than any name; a hostile header may claim a length that does not fit into memory


_CHUNK = 1 << 20


_REGULAR, _FOLDERS, _PAX, _LABEL, _NOTES = b"\x0007", b"5D", b"xX", b"V", b"xXgLK"


_REFUSED = {
    b"1": ("is a hard link, which holds no data", "re-create the tar with --hard-dereference"),
    b"2": ("is a symbolic link, which holds no data", "re-create the tar with --dereference"),
    b"3": ("is a character device", "re-create the tar without it"),
    b"4": ("is a block device", "re-create the tar without it"),
    b"6": ("is a named pipe", "re-create the tar without it"),
    b"S": ("is stored sparsely", "re-create the tar without --sparse"),
    b"M": ("continues another volume", "re-create the tar as one volume"),
}


_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}


_SHORT_ENDINGS = {".tgz": ".gz", ".tzst": ".zst", ".tbz2": ".bz2", ".tbz": ".bz2", ".txz": ".xz"}


def opener_of(name: str) -> Opener | None:
    """Opener for compressed tars of this name; None for plain ones."""
    ending = os.path.splitext(name)[1].lower()  # noqa: PTH122 - of an address, too
    return OPENERS.get(_SHORT_ENDINGS.get(ending, ending))


CLASSES = "classes.json"
"""The file next to the shards of `feedline pack` with the list of class names that labels index."""


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
            f"writer was killed, or is still writing). Create or copy it again, or pass allow_truncated=True to read "
            f"the samples before that member"
        )


class TarWalk:
    """Iterates once over the regular files of an open tar.

    Afterwards `.cut` describes a truncated tar; it is None for a complete one. `.cut_name` is the name of the truncated
    member, or None where its header is missing, too. Folders and volume labels are skipped. A tar without an end mark
    is complete if it ends with the padding of its last member.
    """

    def __init__(self, source: TarSource) -> None:
        self.tar = source.name
        self._source = source
        self.cut: Cut | None = None
        self.cut_name: str | None = None
        self._notes: dict[str, str] = {}  # fields of pax and GNU headers for the next member

    def __iter__(self) -> Iterator[TarMember]:
        source, nbytes = self._source, self._source.nbytes
        self._check_format(source.read(0, 8))
        offset, before, is_noted = 0, "(none)", False
        while offset < nbytes:
            block = source.read(offset, BLOCK)
            if not block.lstrip(b"\0"):
                self._check_end(offset, nbytes)
                if not is_noted:
                    return
                nbytes = offset  # zeros in place of a member, as of a copy into allocated space
                break
            if len(block) < BLOCK:
                self._check_is_tar(block, offset)
                self._cut_header(before, offset, nbytes)
                return
            kind, size, name = self._header(block, offset)
            is_header = kind in _NOTES
            start = offset + BLOCK
            # Checked before any member is yielded: views past the end of a mapping are shorter, without an error.
            if start + size > nbytes:
                self.cut = Cut(f"after {before}" if is_header else name, start + size, nbytes)
                self.cut_name = None if is_header else name
                return
            if kind in _REGULAR and not name.endswith("/"):
                yield TarMember(name, start, size)
            elif kind in b"xXL":
                self._note(kind, source.read(start, size), name)
            offset = start + -(-size // BLOCK) * BLOCK
            # A global header may be the last one.
            before, is_noted = (before, is_noted or kind != b"g") if is_header else (name, False)
        if is_noted:
            self._cut_header(before, offset, nbytes)
        elif offset > nbytes:  # in the padding of a member, after which others may have been
            self.cut = Cut(before, offset, nbytes)

    def _cut_header(self, before: str, offset: int, nbytes: int) -> None:
        """Record that the header at `offset`, after member `before`, is truncated."""
        self.cut = Cut(f"after {before}", offset + BLOCK, nbytes)
        self.cut_name = self._notes.get("path")

    def _header(self, block: bytes, offset: int) -> tuple[bytes, int, str]:
        """Parse a header into kind, data size and name; ShardError if refused."""
        if _number(block[148:156]) not in _checksums(block):
            self._check_is_tar(block, offset)
            raise ShardError(f"{self.tar} is damaged: no tar header at byte {offset:,}. Create or copy the tar again")
        kind, size, name = block[156:157], _number(block[124:136]), _name(block)
        if kind in _NOTES:
            self._check_note_size(size, name)
            return kind, size, name
        name, size = self._notes.pop("path", name), self._noted_size(name, size)
        self._notes.clear()
        self._check_member(kind, name, size)
        return kind, 0 if kind == b"5" else size, name

    def _noted_size(self, name: str, size: int) -> int:
        # pax states a size that does not fit into the header's field; the header then has a wrong size.
        noted = self._notes.get("size", str(size))
        if not noted.removeprefix("-").isdecimal():
            self._raise(name, f"has the size {noted[:_SIZE_DIGITS]!r}")
        if len(noted) > _SIZE_DIGITS:
            self._raise(name, f"has a size of {len(noted):,} digits")
        return int(noted)

    def _check_member(self, kind: bytes, name: str, size: int) -> None:
        if kind in _REFUSED:
            self._raise(name, *_REFUSED[kind])
        if kind not in _REGULAR + _FOLDERS + _LABEL:
            self._raise(name, f"is of the unknown kind {kind!r}")
        if size < 0:
            self._raise(name, "has an impossible size")
        danger = unsafe_name_reason(name)
        if danger is not None:
            self._raise(name, danger, "re-create the tar with relative names, as `tar -C FOLDER -cf X.tar .` does")

    def _check_note_size(self, size: int, name: str) -> None:
        if not 0 <= size <= _NOTE_NBYTES:
            self._raise(name, f"has an extended header of {size:,} bytes")

    def _note(self, kind: bytes, data: bytes, name: str) -> None:
        """Store the fields of an extended header for the next member."""
        if kind in _PAX:
            records = dict(self._records(data, name))
            if any(key.startswith("GNU.sparse.") for key in records):
                self._raise(records.get("GNU.sparse.name", name), *_REFUSED[b"S"])
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
                self._raise(name, "has a damaged extended header")
            yield key.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")
            at = stop

    def _check_format(self, begin: bytes) -> None:
        if not begin:
            raise ShardError(f"{self.tar} is empty, which is not a valid tar. Create or copy it again")
        for magic, method in _COMPRESSED.items():
            if begin.startswith(magic):
                raise ShardError(
                    f"{self.tar} is compressed with {method}: a compressed tar has no random access to samples. "
                    f"Decompress it to a plain .tar, or give it a name that says so, such as x.tar.gz: TarShards then "
                    f"decompresses it once"
                )

    def _check_is_tar(self, block: bytes, offset: int) -> None:
        """Raise ShardError if the first block is of another format."""
        found = None if offset else recognize(block)
        # The remaining part of a header of a truncated tar is a name, which is text.
        is_foreign = found is not None and found.dataset != "TarShards"
        if found is not None and is_foreign and not (len(block) < BLOCK and found.may_be_text):
            raise ShardError(f"{self.tar} is {found.what}, not a tar; {found.remedy}")

    def _check_end(self, offset: int, nbytes: int) -> None:
        """Raise ShardError for data after the end mark, where other readers stop."""
        while offset < nbytes:
            chunk = self._source.read(offset, _CHUNK)
            if chunk.strip(b"\0"):
                raise ShardError(
                    f"{self.tar} continues after its end mark (byte {offset:,}), as if tars were joined with cat. "
                    f"Join them with `tar --concatenate`, or keep them separate"
                )
            offset += len(chunk) or nbytes

    def _raise(self, name: str, what: str, remedy: str = "re-create the tar") -> NoReturn:
        raise ShardError(f"{self.tar}: member {name!r} {what}; {remedy}")


def members(tar: str | os.PathLike[str], *, allow_truncated: bool = False) -> Iterator[TarMember]:
    """The regular files of a tar, in order.

    ShardError names the member that cannot be read, and a remedy.
    """
    with TarSource.at(tar) as source:
        walk = TarWalk(source)
        yield from walk
    if walk.cut is not None and not allow_truncated:
        raise walk.cut.error(walk.tar)


def _checksums(block: bytes) -> tuple[int, int]:
    """Sum of the bytes, and that of old writers with signed bytes."""
    counted = block[:148] + b" " * 8 + block[156:]  # the checksum field itself counts as blanks
    unsigned = sum(counted)
    return unsigned, unsigned - 256 * sum(byte > 0x7F for byte in counted) if not counted.isascii() else unsigned


def _number(field: bytes) -> int:
    """Parse octal digits or GNU's base-256 form; -1 if it is neither."""
    # GNU marks sizes of 8 GiB and more, which octal digits cannot hold, by the highest bit. A negative number has all
    # bits of the first byte set, and is refused like any other invalid number.
    if field[0] & 0x80:
        return int.from_bytes(field, "big", signed=False) - (0x80 << 8 * (len(field) - 1)) if field[0] == 0x80 else -1
    digits = field.strip(b" \0")
    try:
        return int(digits or b"0", 8)
    except ValueError:
        return -1


def _name(block: bytes) -> str:
    name = _text(block[:100])
    prefix = (
        _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    )  # the GNU format uses these bytes for other fields
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")
