"""A guard that reports what a test left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from feedline.workers.process import fork_server

GRACE_S = 60.0
"""Seconds that a process may take to end after a request to end."""


@dataclass
class DebrisGuard:
    """Resources of this process at one moment, to find later ones that stayed.

    Add to `allowed_*` what may stay: predicates over a child process, a thread, or a descriptor and its target.
    """

    children: set[psutil.Process] = field(default_factory=lambda: set(_children()))
    threads: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))
    descriptors: dict[int, str] = field(default_factory=lambda: _descriptors())
    names: set[str] = field(default_factory=lambda: shared_names())
    allowed_children: list[Callable[[psutil.Process], bool]] = field(default_factory=lambda: [_is_fork_server])
    allowed_threads: list[Callable[[threading.Thread], bool]] = field(default_factory=list)
    allowed_descriptors: list[Callable[[int, str], bool]] = field(default_factory=lambda: [_leads_to_fork_server])

    def debris(self) -> list[str]:
        """One line for everything that is new, not allowed, and did not end within `GRACE_S`."""
        gc.collect()
        children = [c for c in _children() if c not in self.children and not any(ok(c) for ok in self.allowed_children)]
        _, children = psutil.wait_procs(children, GRACE_S)
        threads = [t for t in threading.enumerate() if t not in self.threads]
        threads = [t for t in threads if not any(ok(t) for ok in self.allowed_threads)]
        for thread in threads:
            thread.join(GRACE_S)
        return [
            *(f"process {_describe(child)}" for child in children),
            *(f"thread {thread.name}" for thread in threads if thread.is_alive()),
            *(f"descriptor {fd} -> {target}" for fd, target in self._new_descriptors()),
            *(f"/dev/shm/{name}" for name in sorted(left_names(self.names))),
        ]

    def check(self) -> None:
        """Fail the test with a list of the debris, if there is any."""
        debris = self.debris()
        assert not debris, "left behind:\n" + "\n".join(debris)

    def _new_descriptors(self) -> list[tuple[int, str]]:
        new = [(fd, target) for fd, target in _descriptors().items() if self.descriptors.get(fd) != target]
        return [(fd, target) for fd, target in new if not any(ok(fd, target) for ok in self.allowed_descriptors)]


def shared_names() -> set[str]:
    """Names in /dev/shm, except those of other programs that run at the same time: PostgreSQL's, and `tempfile`'s."""
    folder = Path("/dev/shm")
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if not name.startswith(("PostgreSQL.", "tmp"))}


def left_names(before: set[str]) -> set[str]:
    """The names in /dev/shm that were not there before and stay for `GRACE_S`.

    The folder is shared by the whole machine: a semaphore that another process creates and unlinks may be seen in
    between, and a name that a foreign process has mapped is foreign, too.
    """
    end = time.monotonic() + GRACE_S
    new = shared_names() - before
    while new and time.monotonic() < end:
        time.sleep(0.01)
        new &= shared_names()  # later names belong to others: the test has ended
    # Reading the maps of all processes takes seconds on a busy machine, and another process may unlink its names then.
    return (new - _names_mapped_elsewhere()) & shared_names() if new else new


def _names_mapped_elsewhere() -> set[str]:
    ours = {os.getpid(), *(child.pid for child in _children())}
    names: set[str] = set()
    for process in psutil.process_iter():
        if process.pid not in ours:
            with contextlib.suppress(psutil.Error, OSError):
                names.update(Path(entry.path).name for entry in process.memory_maps() if "/dev/shm/" in entry.path)
    return names


def _children() -> list[psutil.Process]:
    """All descendants that are alive or not yet waited for."""
    return psutil.Process().children(recursive=True)


def _descriptors() -> dict[int, str]:
    targets = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return targets


_NAMES = {"feedline-forks", Path(sys.executable).name, "python", "python3"}
"""Names of a fork server, the second before it has set its own."""


def _is_fork_server(process: psutil.Process) -> bool:
    """The helper that lives as long as the training process, and its branches; zygotes may not stay."""
    try:
        is_ours = os.getpid() in {parent.pid for parent in process.parents()}
        return is_ours and "feedline.workers.process.fork_server" in process.cmdline() and process.name() in _NAMES
    except psutil.NoSuchProcess:
        return False


def _leads_to_fork_server(fd: int, _target: str) -> bool:
    living = fork_server._servers._by_pid.get(os.getpid())
    return living is not None and any(fd == end._socket.fileno() for end in (living, *living._branches))


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline()) or process.name()}"
    except psutil.NoSuchProcess:
        return str(process.pid)
