"""Writing one tar shard, reproducibly and atomically."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from feedline.cli.pack.encode import EncodedSample, Lengths
from feedline.core.paths import Replacement

_BLOCK = tarfile.BLOCKSIZE


_END = bytes(2 * _BLOCK)


_MODIFIED_S = 946_684_800
"""Modification time of all members: 2000-01-01. tar warns of "implausibly old" times."""


class WrittenShard(NamedTuple):
    """A finished shard, with the grids of JPEGs by member name."""

    nbytes: int
    sha256: str
    samples: int
    grids: dict[str, Lengths]


def tar_blocks(sample: EncodedSample) -> list[bytes]:
    """Headers, contents and padding of all members of a sample.

    The format is ustar, with pax headers for long names.
    """
    blocks = list[bytes]()
    for member in sample.members:
        blocks += [_header(member.name, len(member.data)), member.data, bytes(-len(member.data) % _BLOCK)]
    return blocks


def _header(name: str, nbytes: int) -> bytes:
    # The defaults of TarInfo have no owner and no group; the bytes must not depend on the user and the time.
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = nbytes, _MODIFIED_S, 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


class ShardWriter:
    """Writes a shard under a temporary name, until `finish` renames it.

    Leaving the block without `finish` removes the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = self.nbytes = 0
        self._grids = dict[str, Lengths]()
        self._digest = hashlib.sha256()
        self._replacement = Replacement(path, durable=True, buffer_nbytes=1 << 20)

    def add(self, sample: EncodedSample, blocks: list[bytes]) -> None:
        """Append a sample; `blocks` are `tar_blocks(sample)`."""
        self._write(blocks)
        self.samples += 1
        self._grids.update((member.name, member.lengths) for member in sample.members if member.lengths is not None)

    def size_with(self, blocks: list[bytes]) -> tuple[int, int]:
        """Samples and bytes of the tar if it ends after these blocks."""
        return self.samples + 1, self.nbytes + sum(map(len, blocks)) + len(_END)

    def finish(self) -> WrittenShard:
        """End the tar, and rename it after its data is durable."""
        self._write([_END])
        self._replacement.finish()
        return WrittenShard(self.nbytes, self._digest.hexdigest(), self.samples, self._grids)

    def _write(self, blocks: list[bytes]) -> None:
        for block in blocks:
            self._replacement.file.write(block)
            self._digest.update(block)
            self.nbytes += len(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replacement.discard()
