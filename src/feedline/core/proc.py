"""Figures of processes, process trees and memory, from /proc."""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")

TICK_S = 1 / (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)
"""Seconds of a tick, the unit of CPU times in /proc."""


_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class ProcessStat(NamedTuple):
    """A process at one moment."""

    state: str
    """The kernel's letter: R runs, S sleeps, D waits for a disk or a file server, T is stopped."""
    cpu_ticks: int
    """CPU time of its threads, in ticks."""
    reaped_ticks: int
    """CPU time of children that it has waited for, in ticks."""
    start_ticks: int
    """Time of its start, in ticks since the boot of the machine."""
    resident_nbytes: int
    """Resident memory, shared pages included."""


def stat_of(pid: int, proc: Path = _PROC) -> ProcessStat | None:
    """Read /proc/PID/stat, or None where it cannot be read."""
    try:
        # The name of a program, in brackets, may contain blanks.
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        ticks = [int(field) for field in fields[11:15]]
        return ProcessStat(fields[0], sum(ticks[:2]), sum(ticks[2:]), int(fields[19]), int(fields[21]) * _PAGE_NBYTES)
    except (OSError, IndexError, ValueError):
        return None


# Numbers of the system calls futex, flock and fcntl. On other machines nothing compares equal.
_FUTEX, _FLOCK, _FCNTL = {"x86_64": ("202", "73", "72"), "aarch64": ("98", "32", "25")}.get(
    platform.machine(), (None, None, None)
)


_FUTEX_PRIVATE, _FUTEX_COMMAND, _FUTEX_WAIT = 128, 127, 0


_SET_LOCK_AND_WAIT = (7, 38)
"""F_SETLKW, F_OFD_SETLKW."""


def waits_for_lock(pid: int, proc: Path = _PROC) -> bool | None:
    """True if a process waits for a lock that other processes share.

    Only its main thread counts. None where the kernel does not show system calls.
    """
    call = _system_call(f"{proc}/{pid}/syscall")
    if call is None:
        return None
    if len(call) < 5:  # it computes
        return False
    if call[0] == _FUTEX:
        # Threads wait for each other in private memory, and idle processes with a limit.
        return not int(call[2], 16) & _FUTEX_PRIVATE and int(call[4], 16) == 0
    return call[0] == _FLOCK or (call[0] == _FCNTL and int(call[2], 16) in _SET_LOCK_AND_WAIT)


def _system_call(path: str) -> list[str] | None:
    """Number and arguments of a thread's system call.

    None where the kernel does not show it.
    """
    # `Path.read_text` takes five times as long, and samples take a fixed share of the time: more samples are better.
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, _CALL_NBYTES).decode().split()
        finally:
            os.close(file)
    except OSError:
        return None


_CALL_NBYTES = 4096
"""More than the kernel writes on a system call."""


class ThreadWait(NamedTuple):
    """Wait of a thread of this process."""

    address: int = 0
    """Address of the lock for which it waits without a limit; 0 for none."""
    is_outside: bool = False
    """True if it waits for something other than Python's lock: a file, a network, a timer, a lock."""


def wait_of_thread(thread: int, proc: Path = _PROC) -> ThreadWait | None:
    """The wait of the thread with this native id.

    None where the kernel does not show system calls.
    """
    call = _system_call(f"{proc}/self/task/{thread}/syscall")
    if call is None:
        return None
    if _FUTEX is None or call[0] == "running":
        return ThreadWait()
    if call[0] != _FUTEX:  # -1 is a page of a file
        return ThreadWait(is_outside=True)
    # A wait for Python's lock has a limit, after which the lock is requested from its holder. Mutexes of C, one of
    # which guards that lock, are held only briefly.
    if int(call[4], 16) or int(call[2], 16) & _FUTEX_COMMAND == _FUTEX_WAIT:
        return ThreadWait()
    address, stack = int(call[1], 16), int(call[-2], 16)
    if 0 <= address - stack < _WAITER_NBYTES:
        address = _parked_at(address, proc) or address
    return ThreadWait(address, is_outside=True)


_WAITER_NBYTES = 4096
"""Bytes of its stack in which a waiting thread keeps its semaphore and its entry in CPython's parking lot."""


def _parked_at(semaphore: int, proc: Path) -> int | None:
    """Address of the lock for which a thread is parked, or None.

    Locks of Python 3.13 and later park it at a semaphore on its stack. In CPython's `struct wait_entry`, an argument of
    the waiter, which is also on its stack, and the address of the lock precede the semaphore.
    """
    try:
        # Not through a pointer: the thread may have ended, and its stack with it.
        with open(proc / "self" / "mem", "rb", buffering=0) as memory:
            argument, lock = struct.unpack("QQ", os.pread(memory.fileno(), 16, semaphore - 16))
    except (OSError, struct.error):
        return None
    return lock if 0 < argument - semaphore < _WAITER_NBYTES else None


class CpuTicks(NamedTuple):
    """Ticks since the boot of the machine, summed over CPUs."""

    busy: int = 0
    """Ticks in which CPUs computed, or in which the hypervisor gave them to other machines."""
    stolen: int = 0
    """Ticks in which the hypervisor gave CPUs to other machines."""


def cpu_ticks(cpus: Collection[int] | None = None) -> CpuTicks | None:
    """Read /proc/stat for some CPUs, or for all.

    None where it cannot be read.
    """
    names = {"cpu"} if cpus is None else {f"cpu{cpu}" for cpu in cpus}
    busy = stolen = 0
    try:
        for line in (_PROC / "stat").read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(" ")
            if name in names:
                user, nice, system, _, _, irq, softirq, steal = map(int, rest.split()[:8])
                busy, stolen = busy + user + nice + system + irq + softirq + steal, stolen + steal
    except (OSError, ValueError):
        return None
    return CpuTicks(busy, stolen)


def meminfo(proc: Path = _PROC) -> dict[str, int]:
    """Fields of /proc/meminfo in bytes.

    Where the file is missing, all memory of the machine counts as free.
    """
    try:
        lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
        return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
    except (OSError, IndexError, ValueError):
        total = _PAGE_NBYTES * os.sysconf("SC_PHYS_PAGES")
        return {"MemTotal": total, "MemAvailable": total}


def descendants(pid: int) -> Iterator[int]:
    """The process, its children, and their descendants."""
    yield pid
    for task in _list(_PROC / str(pid) / "task"):
        for child in _read(task / "children").split():
            yield from descendants(int(child))


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of the process tree, reaped children included."""
    return sum(map(_own_cpu_s, descendants(pid)))


def tree_nbytes(pid: int) -> int:
    """Memory of the process tree, shared pages counted once."""
    return sum(map(_own_nbytes, descendants(pid)))


def _own_cpu_s(pid: int) -> float:
    stat = stat_of(pid)
    return 0.0 if stat is None else (stat.cpu_ticks + stat.reaped_ticks) * TICK_S


def _own_nbytes(pid: int) -> int:
    for line in _read(_PROC / str(pid) / "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _list(folder: Path) -> list[Path]:
    with suppress(OSError):  # the process has ended
        return list(folder.iterdir())
    return []


def _read(path: Path) -> str:
    with suppress(OSError):  # the process has ended, or this kernel does not show it
        return path.read_text()
    return ""
