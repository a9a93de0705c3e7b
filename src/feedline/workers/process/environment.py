"""Process environment that workers take over, and their death with their parent."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class ProcessEnvironment(NamedTuple):
    """Working directory, environment variables, limits and the like of a process.

    Pickles with built-in types and torch's dtypes only: it is unpickled before the user's modules can be imported.
    """

    environment: dict[str, str]
    directory: str
    path: list[str]
    arguments: list[str]
    umask: int
    dtype: torch.dtype
    limits: dict[int, tuple[int, int]]
    cpus: set[int]
    warnings: list[Any]

    @classmethod
    def capture(cls) -> ProcessEnvironment:
        """Capture the environment of this process."""
        return cls(
            environment=dict(os.environ),
            directory=_directory(),
            path=list(sys.path),
            arguments=list(sys.argv),
            umask=_umask(),
            dtype=torch.get_default_dtype(),
            limits={limit: resource.getrlimit(limit) for limit in _LIMITS},
            cpus=os.sched_getaffinity(0),
            warnings=[entry for entry in warnings.filters if entry[2].__module__ == "builtins"],
        )

    def apply(self) -> None:
        """Make this the environment of the calling process."""
        os.environ.clear()
        os.environ.update(self.environment)
        time.tzset()
        with suppress(OSError):  # the directory was removed, or is not accessible
            os.chdir(self.directory)
        sys.path[:] = self.path
        sys.argv[:] = self.arguments
        os.umask(self.umask)
        torch.set_default_dtype(self.dtype)
        for limit, values in self.limits.items():
            with suppress(OSError, ValueError):  # it was raised with a privilege that this process lacks
                resource.setrlimit(limit, values)
        with suppress(OSError):  # the cpuset has changed
            os.sched_setaffinity(0, self.cpus)
        warnings.filters[:] = self.warnings  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]


def _directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # removed under a running process
        return "/"


def _umask() -> int:
    """Umask of this process, read without changing it."""
    # os.umask can only be read by setting it, which other threads would see.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


# Looked up here: a process that was forked while another thread loaded a library could wait forever for the loader.
_LIBC = ctypes.CDLL(None, use_errno=True)
_prctl = getattr(_LIBC, "prctl", None)
_mallopt = getattr(_LIBC, "mallopt", None) if hasattr(_LIBC, "gnu_get_libc_version") else None


_PR_SET_PDEATHSIG = 1


_F_SETSIG = 10


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_NBYTES, _MAPPED_NBYTES = 256 << 20, 32 << 20
"""Limit on freed memory that a process keeps, and size from which an array gets its own mapping (glibc's maximum)."""


_CHOSEN = re.compile(r"malloc[_.](trim_threshold|top_pad|mmap_threshold|mmap_max)")
"""Name of one of malloc's parameters: a variable, or a part of `GLIBC_TUNABLES`."""


@cache
def is_allocator_set() -> bool:
    """True if environment variables set parameters of malloc.

    The result is cached: malloc reads the environment only when a process begins.
    """
    return _CHOSEN.search(" ".join(os.environ).lower() + os.environ.get("GLIBC_TUNABLES", "")) is not None


def keep_freed_memory() -> None:
    """Let this process reuse the memory of freed arrays.

    By default, glibc returns the arrays of a batch to the system once they are freed, and the system clears each page
    again for the next batch. At most 256 MiB are kept. Without effect where the user has set malloc's parameters, or
    the C library is another one.
    """
    if _mallopt is not None and not is_allocator_set():
        _mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES)
        _mallopt(_M_MMAP_THRESHOLD, _MAPPED_NBYTES)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    Only for children of a single-threaded parent: the kernel sends the signal when the *thread* that forked ends.
    """
    assert _prctl is not None
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_starter() -> None:
    """Have the kernel kill this process when its multiprocessing parent ends.

    The parent may have called `multiprocessing.Process.start` from any thread.
    """
    # The starter holds the other end of this pipe open. The kernel sends SIGKILL, in place of its usual SIGIO, when it
    # closes. Unlike a waiting thread, this also ends code that never releases the GIL, and stopped processes.
    starter = multiprocessing.parent_process()
    assert starter is not None, "only in a multiprocessing.Process"
    pipe: int = starter.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not starter.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
