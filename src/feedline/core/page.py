"""Page of figures that a loop writes and other processes read.

A page is a memfd: it has no name, needs no cleanup, and ends with its process, even after `kill -9`. Readers reach it
through `/proc/PID/fd`, which has the permissions of a debugger: the same user, or root. Nothing is locked, so a reader
can read the page of a loop that hangs, and a writer never waits for a reader.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from feedline.core.descriptors import opened
from feedline.core.kernels import native
from feedline.core.proc import stat_of

NAME = "feedline-page"
"""Name of the memory in `/proc/PID/fd`."""


_MAGIC = 0x666565646C696E31


_WORDS = 64


_MAGIC_WORD, PHASE_START, BATCHES, _PUBLISHED = range(4)


_SLOT_NBYTES = 1 << 17


_NBYTES = 8 * _WORDS + 2 * _SLOT_NBYTES


_SLOT = struct.Struct("<qqq")
"""Number of the publication, length and checksum of its JSON text."""


_ATTEMPTS = 100


class PageContent(NamedTuple):
    """One reading of a page."""

    phase_start_ns: int
    """Time at which the loop began to compute, in ns of CLOCK_MONOTONIC. If it waits for a batch, the negative of the
    time at which the wait began. 0 if it does neither.
    """
    batches: int
    figures: Mapping[str, Any]
    """The latest publication. The number of batches is at least as recent."""


class PageWords:
    """Words of 64 bits at the start of a page.

    They may be assigned at any time: the processor stores them at once. Once released, all are 0, and assignments do
    nothing.
    """

    def __init__(self, memory: memoryview[int]) -> None:
        self._words: memoryview[int] = memory

    def __getitem__(self, place: int) -> int:
        return self._words[place]

    def __setitem__(self, place: int, value: int) -> None:
        self._words[place] = value

    def release(self) -> None:
        """Detach from the memory. Idempotent."""
        # The view itself is not released, because another thread may be writing a word at this moment.
        self._words = memoryview(bytearray(8 * _WORDS)).cast("q")


def _words_of(memory: mmap.mmap | bytearray) -> PageWords:
    view = memoryview(memory).cast("b")[: 8 * _WORDS].cast("q")
    return native.PageWords(view) if native is not None and hasattr(native, "PageWords") else PageWords(view)


as_json = json.JSONEncoder(separators=(",", ":")).encode
"""Returns JSON values as text."""


class Page:
    """A page and its only writer.

    `words[PHASE_START]` and `words[BATCHES]` may be assigned at any time. A page that is not `shared` has words of its
    own and publishes nothing. The same holds for every page on systems without memfd.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.inode = 0
        self._memory = self._map() if shared and hasattr(os, "memfd_create") else None
        self.words = _words_of(bytearray(8 * _WORDS) if self._memory is None else self._memory)
        self.words[_MAGIC_WORD] = _MAGIC

    def _map(self) -> mmap.mmap:
        with opened(os.memfd_create, NAME, os.MFD_CLOEXEC) as memory:
            os.pwrite(memory.fd, struct.pack("q", _MAGIC), 8 * _MAGIC_WORD)  # first: readers go by the size
            os.truncate(memory.fd, _NBYTES)
            self.inode = os.fstat(memory.fd).st_ino
            return mmap.mmap(memory.fd, _NBYTES)  # it has a descriptor of its own, by which readers find the page

    def publish(self, figures: Mapping[str, Any], others: str = "{}") -> None:
        """Replace the published figures: JSON values, at most 128 KiB as text.

        `others` is a JSON object with further figures; `figures` then has at least one. Larger figures are left out,
        with a note in their place.
        """
        text = as_json(figures).encode()
        if others != "{}":
            text = text[:-1] + b"," + others[1:].encode()
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
        """Release the memory. Idempotent."""
        self._memory = None
        self.words.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PageReader:
    """Reader of a page of another process, or of this one.

    Raises OSError if the descriptor cannot be opened, ValueError if it is not a page.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "rb") as file:
            self._memory = mmap.mmap(file.fileno(), _NBYTES, prot=mmap.PROT_READ)
        self._words = memoryview(self._memory).cast("q")[:_WORDS]
        if self._words[_MAGIC_WORD] != _MAGIC:
            raise ValueError(
                f"{path} is not a page of this version of feedline: use the version of the training script"
            )

    def read(self) -> PageContent:
        """The current content; empty figures before the first publication."""
        words = self._words
        for _ in range(_ATTEMPTS):
            number = words[_PUBLISHED]
            figures = self._figures(number)
            if figures is not None:
                return PageContent(words[PHASE_START], words[BATCHES], figures)
        raise ValueError("the page changed during every attempt to read it; try again")

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


_PROC = Path("/proc")


class FoundPage(NamedTuple):
    """A page in a process that is running."""

    pid: int
    path: Path
    inode: int


def find_pages(pid: int | None = None) -> list[FoundPage]:
    """The pages of one process, or of all.

    Processes whose descriptors may not be read are left out. A process forked from a training process inherits its
    pages: each is listed once, for the oldest process.
    """
    pids = [pid] if pid is not None else sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    found: dict[int, tuple[int, FoundPage]] = {}
    for each in pids:
        for page in _pages_of(each):
            stat = stat_of(each)
            started = 1 << 62 if stat is None else stat.start_ticks
            if page.inode not in found or started < found[page.inode][0]:
                found[page.inode] = (started, page)
    return sorted(page for _, page in found.values())


def _pages_of(pid: int) -> Iterator[FoundPage]:
    # A process that has ended since then, or of another user.
    with suppress(OSError):
        for entry in os.scandir(_PROC / str(pid) / "fd"):
            with suppress(OSError):
                stat = entry.stat()
                is_page = str(Path(entry.path).readlink()).startswith(f"/memfd:{NAME} ")
                if is_page and stat.st_size >= _NBYTES:  # a smaller one is being made
                    yield FoundPage(pid, Path(entry.path), stat.st_ino)
