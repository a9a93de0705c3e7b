"""Page of figures that a loop writes and other processes read.

A page is a memfd: it has no name, needs no cleaning up, and is gone with its process, even after `kill -9`. Readers
reach it through `/proc/PID/fd`, whose permissions are those of a debugger: the same user, or root. Nothing is locked,
so a reader can look at a loop that hangs, and a writer never waits for a reader.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, MutableSequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

NAME = "feedline-page"
"""Name of the memory in `/proc/PID/fd`."""


_MAGIC = 0x666565646C696E31


_WORDS = 64


_MAGIC_WORD, SINCE, BATCHES, _PUBLISHED = range(4)


_SLOT_NBYTES = 1 << 17


_NBYTES = 8 * _WORDS + 2 * _SLOT_NBYTES


_SLOT = struct.Struct("<qqq")
"""Number of the publication, length and checksum of its JSON text."""


_ATTEMPTS = 100


class PageContent(NamedTuple):
    """One reading of a page."""

    since_ns: int
    """Since when the loop computes, in ns on CLOCK_MONOTONIC; negative: since when it waits for a batch; 0: neither."""
    batches: int
    figures: Mapping[str, Any]
    """What was published last; the number of batches is never older than it."""


class Page:
    """A page and its only writer.

    `words[SINCE]` and `words[BATCHES]` may be assigned at any time: the processor stores 64 bits at
    once. Read `words` for each assignment, as `close` replaces it. A page that is not `shared` has no memory, and
    publishes nothing; so has each page where the system has no memfd.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self._memory: mmap.mmap | None = None
        self.words: MutableSequence[int] | memoryview[int] = [0] * _WORDS
        self.inode = 0
        if shared and hasattr(os, "memfd_create"):
            self._memory = memory = self._map()
            self.words = memoryview(memory).cast("q")[:_WORDS]
            self.words[_MAGIC_WORD] = _MAGIC

    def _map(self) -> mmap.mmap:
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.truncate(fd, _NBYTES)
            self.inode = os.fstat(fd).st_ino
            return mmap.mmap(fd, _NBYTES)  # it has a descriptor of its own, by which readers find the page
        finally:
            os.close(fd)

    def publish(self, figures: Mapping[str, Any]) -> None:
        """Replace the published figures: JSON values, at most 128 KiB as text.

        Larger ones are left out, with a note in their place.
        """
        text = json.dumps(figures, separators=(",", ":")).encode()
        if len(text) > _SLOT_NBYTES - _SLOT.size:
            text = json.dumps({"problem": f"the figures take {len(text)} bytes, more than the page has"}).encode()
        memory = self._memory
        if memory is None:
            return
        number = self.words[_PUBLISHED] + 1
        start = _start(number)
        # A reader that is still reading the slot of the publication before the last one notices its new number.
        _SLOT.pack_into(memory, start, 0, 0, 0)
        memory[start + _SLOT.size : start + _SLOT.size + len(text)] = text
        _SLOT.pack_into(memory, start, number, len(text), zlib.crc32(text))
        self.words[_PUBLISHED] = number

    def close(self) -> None:
        """Give up the memory. Idempotent.

        It and its descriptor end with the last assignment to its words.
        """
        # Not closed here: another thread may just be writing a word.
        self._memory, self.words = None, [0] * _WORDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PageReader:
    """Reader of a page of another process, or of this one.

    Raises OSError if the descriptor cannot be opened, ValueError if it is no page.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "rb") as file:
            self._memory = mmap.mmap(file.fileno(), _NBYTES, prot=mmap.PROT_READ)
        self._words = memoryview(self._memory).cast("q")[:_WORDS]
        if self._words[_MAGIC_WORD] != _MAGIC:
            raise ValueError(f"{path} is not a page of this version of feedline")

    def read(self) -> PageContent:
        """The current content; empty figures before the first publication."""
        words = self._words
        for _ in range(_ATTEMPTS):
            number = words[_PUBLISHED]
            figures = self._figures(number)
            if figures is not None:
                return PageContent(words[SINCE], words[BATCHES], figures)
        raise ValueError("the page was written each time it was read")

    def _figures(self, number: int) -> Mapping[str, Any] | None:
        """The publication of a number; None if it has been overwritten."""
        if not number:
            return {}
        start = _start(number)
        found, length, checksum = _SLOT.unpack_from(self._memory, start)
        text = self._memory[start + _SLOT.size : start + _SLOT.size + length]
        if found != number or zlib.crc32(text) != checksum:
            return None
        figures: Mapping[str, Any] = json.loads(text)
        return figures

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start(number: int) -> int:
    return 8 * _WORDS + (number & 1) * _SLOT_NBYTES


class FoundPage(NamedTuple):
    """A page in a process that is running."""

    pid: int
    path: Path
    inode: int


def find_pages(pid: int | None = None, proc: Path = Path("/proc")) -> list[FoundPage]:
    """The pages of one process, or of all.

    Processes whose descriptors may not be read are left out. A process forked from a training process inherits its
    pages: each is listed once, for the oldest process.
    """
    pids = [pid] if pid is not None else sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())
    found: dict[int, tuple[int, FoundPage]] = {}
    for each in pids:
        for page in _pages_of(each, proc):
            started = _start_time(each, proc)
            if page.inode not in found or started < found[page.inode][0]:
                found[page.inode] = (started, page)
    return sorted(page for _, page in found.values())


def _pages_of(pid: int, proc: Path) -> Iterator[FoundPage]:
    # A process that has ended meanwhile, or belongs to another user.
    with suppress(OSError):
        for entry in os.scandir(proc / str(pid) / "fd"):
            with suppress(OSError):
                if str(Path(entry.path).readlink()).startswith(f"/memfd:{NAME} "):
                    yield FoundPage(pid, Path(entry.path), entry.stat().st_ino)


def _start_time(pid: int, proc: Path) -> int:
    with suppress(OSError, IndexError, ValueError):
        # The name of a program, in brackets, may contain blanks.
        return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    return 1 << 62
