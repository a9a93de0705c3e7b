"""What a process of the user's expects to find around it, carried to processes that were not forked from his.

Processes that die with the process that started them, whatever they are doing and however it ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class ProcessEnvironment(NamedTuple):
    """A picture of the process that took it; picklable with nothing but built-in types and torch's dtypes."""

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
    def here(cls) -> ProcessEnvironment:
        """Those of this process, now."""
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

    def adopt(self) -> None:
        """Make them those of this process."""
        os.environ.clear()
        os.environ.update(self.environment)
        time.tzset()
        with suppress(OSError):  # the directory has been removed since, or is out of reach
            os.chdir(self.directory)
        sys.path[:] = self.path
        sys.argv[:] = self.arguments
        os.umask(self.umask)
        torch.set_default_dtype(self.dtype)
        for limit, values in self.limits.items():
            with suppress(OSError, ValueError):  # raised since, by a privilege that this process lacks
                resource.setrlimit(limit, values)
        with suppress(OSError):  # a cpuset that has changed since
            os.sched_setaffinity(0, self.cpus)
        warnings.filters[:] = self.warnings  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]


def _directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # removed under a running process
        return "/"


def _umask() -> int:
    """Read where reading does not change it: `os.umask` would, for a moment, for every thread."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


_PR_SET_PDEATHSIG = 1


_F_SETSIG = 10


def die_with_parent(parent: int) -> None:
    """Be killed when the parent process ends. Only for children of a single-threaded parent.

    The kernel sends the signal when the *thread* that forked ends, which for a parent with threads may be any time.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_starter() -> None:
    """Be killed when the process that called `multiprocessing.Process.start` ends, from whichever thread it did so.

    multiprocessing gives each process a pipe that its starter holds open; the kernel is asked for SIGKILL, in place of
    its usual SIGIO, when the other end closes. Unlike a thread that waits, this reaches code that never releases the
    GIL, and stopped processes too.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None, "only in a multiprocessing.Process"
    pipe: int = starter.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not starter.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
