"""Limits and counters of a control group, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class Throttling(NamedTuple):
    """CPU bandwidth counters of a control group since its creation."""

    periods: int
    throttled: int
    """Periods in which the group had used up its quota and was stopped."""

    @property
    def share(self) -> float:
        """Share of periods in which the group was stopped, 0 to 1."""
        return self.throttled / self.periods if self.periods else 0.0

    def since(self, before: Throttling) -> Throttling:
        """The counters since an earlier reading."""
        return Throttling(self.periods - before.periods, self.throttled - before.throttled)


@dataclass(frozen=True, slots=True)
class Cgroup:
    """Control group of a process: its folder per controller, innermost first.

    Limits of ancestors apply too: Slurm, systemd and Kubernetes set them at several levels. The root of the mount,
    which many programs read alone, often has none. A figure is None if no file contains it.
    """

    cpu: tuple[Path, ...] = ()
    memory: tuple[Path, ...] = ()

    @classmethod
    def of_process(cls, proc: Path = _PROC) -> Cgroup:
        """Find the group of this process; empty without cgroups.

        Mounts are read once per group: a process may be moved to another one.
        """
        try:
            return _of_membership((proc / "self" / "cgroup").read_text(), proc)
        except OSError:
            return cls()

    def cpu_quota(self) -> float | None:
        """CPUs that the group may use on average; None without a limit."""
        return min(self._limits(self.cpu, _quota_v2, _quota_v1), default=None)

    def memory_limit(self) -> int | None:
        """Bytes that the group may use; None without a limit."""
        limits = self._limits(self.memory, _bytes_of("memory.max"), _bytes_of("memory.limit_in_bytes"))
        return int(min(limits)) if limits else None

    def memory_used(self) -> int | None:
        """Bytes that the group uses, page cache included."""
        return next(
            (int(used) for folder in self.memory for name in _USED if (used := _number(folder / name)) is not None),
            None,
        )

    def memory_available(self) -> int | None:
        """Bytes that the group may still take; None without a limit.

        They include the page cache that the kernel frees first.
        """
        limit = self.memory_limit()
        return None if limit is None else max(limit - max((self.memory_used() or 0) - self._cache_nbytes(), 0), 0)

    def _cache_nbytes(self) -> int:
        for folder in self.memory:
            counters = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
            for name in ("total_inactive_file", "inactive_file"):  # of version 1, with its subgroups, and of 2
                if name in counters:
                    return int(counters[name])
        return 0

    def oom_kills(self) -> int:
        """Number of processes killed for lack of memory.

        0 if it is unknown.
        """
        for folder in self.memory:
            for name in _OOM_EVENTS:
                events = dict(line.split()[:2] for line in _lines(folder / name))
                if "oom_kill" in events:
                    return int(events["oom_kill"])
        return 0

    def throttling(self) -> Throttling | None:
        """CPU bandwidth counters of the innermost group that has a quota."""
        for folder in self.cpu:
            if _quota_v2(folder) is not None or _quota_v1(folder) is not None:
                counters = dict(line.split()[:2] for line in _lines(folder / "cpu.stat"))
                return Throttling(int(counters.get("nr_periods", 0)), int(counters.get("nr_throttled", 0)))
        return None

    def _limits(self, folders: tuple[Path, ...], *readers: Callable[[Path], float | None]) -> list[float]:
        return [limit for folder in folders for read in readers if (limit := read(folder)) is not None]


@lru_cache(maxsize=1)
def _of_membership(membership: str, proc: Path) -> Cgroup:
    groups = membership.splitlines()
    mounts = (proc / "self" / "mountinfo").read_text().splitlines()
    return Cgroup(cpu=_folders("cpu", groups, mounts), memory=_folders("memory", groups, mounts))


_USED = ("memory.current", "memory.usage_in_bytes")


_OOM_EVENTS = ("memory.events", "memory.oom_control")


_UNLIMITED = 1 << 60
"""Limits of version 1 from this number of bytes on mean no limit: version 1 stores a rounded maximum instead."""


def _folders(controller: str, groups: list[str], mounts: list[str]) -> tuple[Path, ...]:
    """Folders of the group and its ancestors for a controller."""
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root, mount in _mounts(controller if controllers else "", mounts):
            folder = _below(mount, root, path)
            if controllers or (folder / f"{controller}.stat").exists():  # version 1 may have it
                return tuple(_upwards(folder, mount))
    return ()


def _mounts(controller: str, mounts: list[str]) -> Iterator[tuple[str, Path]]:
    """Root and mount point of each hierarchy with the controller.

    An empty name stands for version 2.
    """
    for line in mounts:
        left, _, right = line.partition(" - ")
        kind, *_, options = right.split(" ")
        root, point = (_unescape(word) for word in left.split(" ")[3:5])
        if kind == "cgroup2" if not controller else kind == "cgroup" and controller in options.split(","):
            yield root, Path(point)


def _unescape(word: str) -> str:
    """A path of mountinfo, in which blanks and backslashes are octal."""
    return word.replace("\\040", " ").replace("\\134", "\\")


def _below(mount: Path, root: str, path: str) -> Path:
    """Folder of the group `path` below a mount.

    The mount shows the hierarchy from `root` on.
    """
    # In a container the mount often shows only the container's own group, while `path` begins at the root of the host.
    inside = path.removeprefix(root) if root != "/" else path
    folder = mount / inside.lstrip("/")
    return folder if ".." not in folder.parts and folder.is_dir() else mount


def _upwards(folder: Path, mount: Path) -> Iterator[Path]:
    yield folder
    if folder != mount and mount in folder.parents:
        yield from _upwards(folder.parent, mount)


def _quota_v2(folder: Path) -> float | None:
    words = " ".join(_lines(folder / "cpu.max")).split()
    return None if len(words) != 2 or words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


def _bytes_of(name: str) -> Callable[[Path], float | None]:
    def read(folder: Path) -> float | None:
        limit = _number(folder / name)
        return None if limit is None or limit > _UNLIMITED else limit

    return read


def _number(path: Path) -> int | None:
    """The number in a file; None for "max" or no file."""
    words = _lines(path)
    return int(words[0]) if words and words[0].lstrip("-").isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no such controller here, or not readable in this sandbox
        return []
