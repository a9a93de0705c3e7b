"""Memory as on a machine that has been up for a while: full of files that somebody has read.

A virtual machine may give memory that is free back to its host, and then pays for each new page of it, far more than
writing a file costs. Which contestant pays would be a matter of whose turn it is. Where memory is full of clean pages,
the next page is the one that was not used for longest.
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
    """Within the block, the memory that nobody needs holds a file without content, which takes no room on the disk."""
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
