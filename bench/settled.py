"""Memory as on a machine that has run for some time: full of pages of files.

A virtual machine may return free memory to its host. A new page then costs far more than writing a file, and the order
of turns would determine which contestant pays. In memory full of clean pages, the next page is the
least recently used one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MOST = 64 << 30
_CHUNK = 16 << 20


@contextmanager
def settled(folder: Path) -> Iterator[None]:
    """Within the block, free memory is filled with the pages of a sparse file, which takes no disk space."""
    path = folder / "holes"
    nbytes = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _MOST)
    with path.open("wb") as file:
        file.truncate(nbytes)
    try:
        with path.open("rb", buffering=0) as file:
            chunk = bytearray(_CHUNK)
            while file.readinto(chunk):
                pass
        yield
    finally:
        path.unlink()
