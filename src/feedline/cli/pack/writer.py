"""One tar shard: the same members give the same bytes, and it appears under its name only when it is whole."""

from __future__ import annotations

import hashlib
import os
import tarfile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from feedline.cli.pack.encode import EncodedSample, Lengths

_BLOCK = tarfile.BLOCKSIZE


_END = bytes(2 * _BLOCK)


_MODIFIED_S = 946_684_800
"""2000-01-01; tar warns of times that are "implausibly old"."""


class Written(NamedTuple):
    """A finished shard: size and checksum of its tar, how many samples, the grids by member name."""

    nbytes: int
    sha256: str
    samples: int
    grids: dict[str, Lengths]


def partial(path: Path) -> Path:
    """The name under which a file is written until it is whole."""
    return path.with_name(f".{path.name}.part")


def encoded(contents: EncodedSample) -> list[bytes]:
    """The members of a sample as pieces of a tar: ustar, with pax headers for names that do not fit."""
    pieces = list[bytes]()
    for member in contents.members:
        pieces += [_header(member.name, len(member.data)), member.data, bytes(-len(member.data) % _BLOCK)]
    return pieces


def _header(name: str, nbytes: int) -> bytes:
    told = tarfile.TarInfo(name)
    told.size, told.mtime, told.mode = nbytes, _MODIFIED_S, 0o644
    return told.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


class ShardWriter:
    """Writes a shard under a temporary name; `finish` gives it its own. A context that is left earlier removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = self.nbytes = 0
        self._grids = dict[str, Lengths]()
        self._digest = hashlib.sha256()
        self._file = partial(path).open("wb", buffering=1 << 20)

    def add(self, contents: EncodedSample, pieces: list[bytes]) -> None:
        """Append a sample; `pieces` are `encoded(contents)`."""
        self._write(pieces)
        self.samples += 1
        self._grids.update((member.name, member.lengths) for member in contents.members if member.lengths is not None)

    def size_with(self, pieces: list[bytes]) -> tuple[int, int]:
        """Samples and bytes of the tar if these pieces were its last."""
        return self.samples + 1, self.nbytes + sum(map(len, pieces)) + len(_END)

    def finish(self) -> Written:
        """End the tar, and let it appear when it is safely on the disk."""
        self._write([_END])
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        partial(self.path).replace(self.path)
        return Written(self.nbytes, self._digest.hexdigest(), self.samples, self._grids)

    def _write(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self._file.write(piece)
            self._digest.update(piece)
            self.nbytes += len(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        partial(self.path).unlink(missing_ok=True)
