"""What a process of the user's expects to find around it, carried to processes that were not forked from his."""

from __future__ import annotations

import os
import resource
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class Surroundings(NamedTuple):
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
    def here(cls) -> Surroundings:
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
