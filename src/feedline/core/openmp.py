"""Threads of GNU OpenMP, which a forked process would wait for."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

_SOFT = 1
"""`omp_pause_soft`: settings are kept, and the threads start again when they are needed."""


_FORKED_WITHOUT_EXEC = 0x40
"""PF_FORKNOEXEC, in the flags of a process; some sandboxes show none."""


_IMPORTED_BY = os.getpid()


def end_openmp_threads() -> None:
    """End the OpenMP threads of the calling thread, before it forks.

    A child has the list of these threads, but not the threads. torch's operations on several threads would wait for
    them in the child for ever, and so do other libraries that use GNU OpenMP. They start again with the next
    operation. Nothing in a process that was itself forked: its own list may be of threads that it does not have.
    """
    if not _was_forked():
        for library in _gnu_openmp(len(sys.modules)):
            library.omp_pause_resource_all(_SOFT)


def _was_forked() -> bool:
    try:
        flags = int(Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[6])
    except (OSError, IndexError, ValueError):
        return True
    return os.getpid() != _IMPORTED_BY or bool(flags & _FORKED_WITHOUT_EXEC)


@lru_cache(maxsize=1)
def _gnu_openmp(_modules: int) -> Sequence[ctypes.CDLL]:
    """The loaded copies of GNU OpenMP that can end their threads.

    Each wheel may bring one. `_modules` is the number of imported modules: further ones may have loaded others.
    """
    libraries = []
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
        for path in sorted(paths):
            with suppress(OSError):
                libraries.append(ctypes.CDLL(path, os.RTLD_NOLOAD))
    return [library for library in libraries if hasattr(library, "omp_pause_resource_all")]
