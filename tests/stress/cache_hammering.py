"""`cache_hammering.py FOLDER KILLS`: several processes read through one cache and are killed at random moments.

The objects are not stored: any range of them can be computed. Standard output: the results as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from feedline import stores
from feedline.stores.cache.locks import AccountFile

OBJECTS, SIZE, PIECE, LIMIT = 6, 400_000, 30_000, 900_000
PROCESSES = 3
_BLOCK = 1 << 12


def content(path: str, start: int, stop: int) -> bytes:
    """The bytes of an object, computed from its path."""
    first, last = start // _BLOCK, -(-stop // _BLOCK)
    blocks = b"".join(hashlib.shake_128(f"{path} {block}".encode()).digest(_BLOCK) for block in range(first, last))
    return blocks[start - first * _BLOCK : stop - first * _BLOCK]


class Made:
    """A store of objects that are computed when they are read."""

    url = "made://objects"

    def info(self, path: str) -> stores.ObjectInfo:
        return stores.ObjectInfo(path, SIZE, "v1")

    def size(self, path: str) -> int:
        return SIZE

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        return memoryview(content(path, start, SIZE if stop is None else stop))

    def read_many(
        self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None
    ) -> list[memoryview]:
        return [self.read(path, start, stop) for start, stop in ranges]

    def list(self, prefix: str = "") -> Iterator[stores.ObjectInfo]:
        return (self.info(f"object-{number}") for number in range(OBJECTS))


def reader(folder: str) -> stores.CachedStore:
    return stores.CachedStore(Made(), stores.Cache(folder, limit=LIMIT, piece_nbytes=PIECE))


def check(store: stores.CachedStore, dice: random.Random) -> str:
    """The fault of one random read; "" for none."""
    path, start = f"object-{dice.randrange(OBJECTS)}", dice.randrange(SIZE)
    ranges = [(start, min(SIZE, start + dice.randrange(100_000))), (0, dice.randrange(1000))]
    found = store.read_many(path, ranges)
    wrong = [span for span, data in zip(ranges, found, strict=True) if data != content(path, *span)]
    return f"{path} {wrong}" if wrong else ""


def hammer(folder: str, seed: int, sink: int) -> None:
    """Read forever, and print one letter for each read."""
    dice, store = random.Random(seed), reader(folder)
    while True:
        wrong = check(store, dice)
        os.write(sink, b"W" if wrong else b".")


def forked(folder: str, seed: int, sink: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            hammer(folder, seed, sink)
        finally:
            os.write(sink, b"E")
            os._exit(1)
    return child


def taken_nbytes(folder: str) -> int:
    """The bytes of all files, each counted once although some move; under the lock, none is added or removed."""
    sizes: dict[int, int] = {}
    root = Path(folder, "v1")
    with AccountFile(root / "size-account").locked():
        for path in [*(root / "temporary").iterdir(), *(root / "objects").rglob("*")]:
            with suppress(FileNotFoundError):
                status = path.stat()
                sizes[status.st_ino] = 0 if path.is_dir() else status.st_size
    return sum(sizes.values())


def main(folder: str, kills: int) -> None:
    dice, seen, most = random.Random(7), Counter[str](), 0
    listen, sink = os.pipe()
    children = [forked(folder, seed, sink) for seed in range(PROCESSES)]
    try:
        for turn in range(kills):
            for _ in range(dice.randrange(8)):  # some reads happen before a process dies
                seen[os.read(listen, 1).decode()] += 1
            place = dice.randrange(PROCESSES)
            os.kill(children[place], signal.SIGKILL)
            os.waitpid(children[place], 0)
            most = max(most, taken_nbytes(folder))
            children[place] = forked(folder, PROCESSES + turn, sink)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    print(json.dumps({"seen": seen, "most_nbytes": most}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
