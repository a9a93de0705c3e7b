"""Checks of the machine: CPUs, memory, limits, devices."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from feedline.cli.doctor.findings import Finding, Severity
from feedline.core import numa
from feedline.core.cgroups import Cgroup
from feedline.core.devices import nvml_utilization
from feedline.core.paths import user_cache
from feedline.core.proc import TICK_S, CpuTicks, cpu_ticks, meminfo
from feedline.loader.monitoring.resources import affine_cpus
from feedline.loader.report.stats import share, size

FILES_NEEDED = 1024
"""File descriptors that suffice for dozens of workers."""


OTHERS_CPUS = 0.3
"""CPUs used by other programs that are enough to slow a run."""


THROTTLED_SHARE = 0.05
"""Share of throttled periods above which the quota slows a run."""


SCARCE_MEMORY_SHARE = 0.1
"""Free share of memory below which a run may be killed."""


SAMPLE_S = 0.25
"""Seconds over which the use of the CPUs is measured."""


def headline() -> str:
    """Versions of feedline, Python and torch, and presence of the compiled kernels."""
    free = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else " without a GIL"
    built = "native kernels" if find_spec("feedline._native") else "no native kernels"
    python = f"Python {platform.python_version()}{free}"
    return f"feedline {version('feedline')} · {python} · torch {torch.__version__} · {built}"


def examine() -> list[Finding]:
    """Run all checks, in about `SAMPLE_S`, plus `ANSWER_S` at most for Ray."""
    cgroup = Cgroup.of_process()
    return [
        *kernels(),
        cpus(affine_cpus(), os.cpu_count() or 1, cgroup),
        cpu_load(CpuUse.measure(SAMPLE_S)),
        memory(Memory.read(cgroup)),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        *huge_pages(),
        *locked_memory(*resource.getrlimit(resource.RLIMIT_MEMLOCK)),
        system_call(
            "memfd", lambda: os.close(os.memfd_create("feedline-doctor")), "It carries batches between processes."
        ),
        system_call("pidfd", lambda: os.close(os.pidfd_open(os.getpid())), "It reports the death of a worker at once."),
        shared_memory(),
        cache(Path(user_cache())),
        *ray(),
        *numa_nodes(),
    ]


def kernels() -> Iterator[Finding]:
    """Missing compiled kernels; NumPy and Pillow replace them."""
    if find_spec("feedline._native") is None:
        remedy = "install a C++ compiler, then: pip install --force-reinstall feedline"
        yield Finding("kernels", "not built: same results, but slower", Severity.NOTE, remedy)


def cpus(affinity: int, present: int, cgroup: Cgroup) -> Finding:
    """CPUs of the affinity mask and of the quota, with throttling."""
    quota, throttling = cgroup.cpu_quota(), cgroup.throttling()
    if quota is None or quota >= affinity:
        return Finding("CPUs", f"{affinity} of {present}")
    evidence = f"quota {quota:g} of {affinity} (cgroup {_short(cgroup.cpu[0])})"
    if throttling is not None and throttling.share >= THROTTLED_SHARE:
        evidence += f"; throttled in {share(throttling.share)} of its periods"
        severity = Severity.BAD
    else:
        severity = Severity.NOTE
    workers = max(1, int(quota))
    remedy = (
        f"num_workers={workers} suits this quota; more CPUs: docker run --cpus, Kubernetes limits.cpu, "
        "Slurm --cpus-per-task"
    )
    return Finding("CPUs", evidence, severity, remedy)


class CpuUse(NamedTuple):
    """Use of the CPUs of the affinity mask over a short time."""

    others: float
    """CPUs busy with programs other than this one, or lost to the hypervisor."""
    stolen: float
    """CPUs that the hypervisor gave to other machines."""
    pressure: float | None
    """Share of the last 10 s in which a task waited for a CPU; None if the kernel does not count it."""

    @classmethod
    def measure(cls, duration_s: float) -> CpuUse:
        """Measure for `duration_s`, in which this thread sleeps."""
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        before, began = cpu_ticks(usable) or CpuTicks(), time.monotonic()
        time.sleep(duration_s)
        after, elapsed = cpu_ticks(usable) or CpuTicks(), time.monotonic() - began
        busy, stolen = ((new - old) * TICK_S / elapsed for old, new in zip(before, after, strict=True))
        return cls(busy, stolen, _pressure())


def cpu_load(use: CpuUse) -> Finding:
    """CPUs that other programs or the hypervisor take from a run."""
    pressure = "" if use.pressure is None else f" (CPU pressure {share(use.pressure)})"
    if use.stolen >= OTHERS_CPUS:
        evidence = f"the hypervisor gives {use.stolen:.1f} CPUs to other machines{pressure}"
        return Finding("load", evidence, Severity.NOTE, "measured times will vary; use a machine with dedicated CPUs")
    if use.others >= OTHERS_CPUS:
        evidence = f"other programs use {use.others:.1f} CPUs{pressure}"
        return Finding("load", evidence, Severity.NOTE, "stop them before you measure; top -o %CPU lists them")
    return Finding("load", f"other programs use {use.others:.1f} CPUs")


def _pressure() -> float | None:
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
        return float(some.split("avg10=")[1].split()[0]) / 100
    except (OSError, IndexError, ValueError):
        return None


class Memory(NamedTuple):
    """Memory of the machine or of its control group, in bytes."""

    total: int
    available: int
    limit_is_cgroup: bool
    swap_used: int = 0

    @classmethod
    def read(cls, cgroup: Cgroup) -> Memory:
        """Read the current counters."""
        machine = meminfo()
        total, free = machine["MemTotal"], machine["MemAvailable"]
        swap = machine.get("SwapTotal", 0) - machine.get("SwapFree", 0)
        limit, left = cgroup.memory_limit(), cgroup.memory_available()
        if limit is None or left is None or limit >= total:
            return cls(total, free, False, swap)
        return cls(limit, min(free, left), True, swap)


def memory(state: Memory) -> Finding:
    """Memory that a run may use, and the free part of it."""
    origin = " of the cgroup" if state.limit_is_cgroup else ""
    evidence = f"{size(state.total)}{origin}, {size(state.available)} free"
    if state.available < SCARCE_MEMORY_SHARE * state.total:
        remedy = "stop other programs or raise the limit: the kernel kills workers when memory runs out"
        return Finding("memory", evidence, Severity.BAD, remedy)
    if state.swap_used > SCARCE_MEMORY_SHARE * state.total:
        remedy = "swapped pages slow every worker: use fewer workers or programs"
        return Finding("memory", f"{evidence}; {size(state.swap_used)} swapped out", Severity.NOTE, remedy)
    return Finding("memory", evidence)


def shared_memory(directory: Path = Path("/dev") / "shm") -> Finding:
    """Size of /dev/shm, which torch's loader needs and feedline does not."""
    if not directory.is_dir():
        return Finding("shared memory", "no /dev/shm (not needed)")
    return Finding("shared memory", f"{size(shutil.disk_usage(directory).total)} (not needed)")


def cache(folder: Path) -> Finding:
    """Free space and access of the default folder of caches."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(present, os.W_OK | os.X_OK) or not present.is_dir():
        remedy = (
            "indexes are built again in each process, and caches of stores need a folder: set XDG_CACHE_HOME to a"
            " writable one, in Kubernetes an emptyDir"
        )
        return Finding("cache", f"{folder} cannot be written to", Severity.NOTE, remedy)
    return Finding("cache", f"{size(shutil.disk_usage(present).free)} free")


LEAST_OBJECT_STORE_NBYTES = 1 << 30
"""Bytes of /dev/shm below which Ray's object store holds few batches."""


ANSWER_S = 2.0
"""Longest wait for the head of a Ray cluster."""


def ray(directory: Path = Path("/dev") / "shm") -> Iterator[Finding]:
    """Ray's cluster and object store, if Ray is installed."""
    if find_spec("ray") is None:
        return
    address = os.environ.get("RAY_ADDRESS", "")
    evidence = (
        f"{version('ray')}, {f'cluster {address}' if address else 'RAY_ADDRESS is not set: a cluster of this machine'}"
    )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal() and (trouble := _refusal(host, int(port))):
        remedy = "start it, or correct RAY_ADDRESS; needed for worker_method='ray' only"
        yield Finding("Ray", f"{evidence} does not answer ({trouble})", Severity.NOTE, remedy)
    else:
        yield Finding("Ray", evidence)
    store = shutil.disk_usage(directory).total if directory.is_dir() else 0
    if store < LEAST_OBJECT_STORE_NBYTES:
        remedy = "for worker_method='ray' only: docker --shm-size, or an emptyDir with medium: Memory on /dev/shm"
        yield Finding("Ray store", f"{size(store)} in /dev/shm; Ray uses the disk instead", Severity.NOTE, remedy)


def _refusal(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        return str(error)
    return ""


def system_call(name: str, use: Callable[[], object], purpose: str) -> Finding:
    """Availability of a system call.

    `use` makes the call. `purpose` is a sentence with the reason why feedline needs the call.
    """
    try:
        use()
    except (AttributeError, OSError) as error:
        remedy = (
            f"{purpose} Needs Linux 5.3 or later and a seccomp profile that allows it; "
            "worker_method='thread' works without it"
        )
        return Finding(name, f"not available ({error})", Severity.BAD, remedy)
    return Finding(name, "")


def open_files(soft: int, hard: int) -> Finding:
    """Limit on the open files of one process."""
    if soft == resource.RLIM_INFINITY or soft >= FILES_NEEDED:
        return Finding("open files", "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    if hard == resource.RLIM_INFINITY or hard > soft:
        wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
        return Finding("open files", f"{soft:,}", Severity.NOTE, f"many shards may need more: ulimit -n {wanted}")
    remedy = (
        "open_files=64 of a dataset needs fewer; the limit is raised in limits.conf, LimitNOFILE= or docker --ulimit"
    )
    return Finding("open files", f"{soft:,}, and the hard limit is no higher", Severity.NOTE, remedy)


def huge_pages(folder: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> Iterator[Finding]:
    """Setting of transparent huge pages; a note if allocations may stall."""
    chosen = {name: _chosen(folder / name) for name in ("enabled", "defrag")}
    if chosen["enabled"] is None:
        return
    if chosen["enabled"] == chosen["defrag"] == "always":
        evidence = "always, with defrag=always: allocations stall, and a page that a worker changes costs 2 MiB"
        yield Finding("huge pages", evidence, Severity.NOTE, f"echo madvise > {folder / 'defrag'}")
    else:
        yield Finding("huge pages", str(chosen["enabled"]))


def _chosen(path: Path) -> str | None:
    """The word in brackets, as in "always [madvise] never"."""
    try:
        found = re.search(r"\[([\w+]+)\]", path.read_text())
    except OSError:
        return None
    return None if found is None else found[1]


LEAST_LOCKED_NBYTES = 1 << 30
"""Bytes of locked memory that network cards with RDMA need."""


def locked_memory(soft: int, hard: int, cards: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    """Limit on locked memory, if it is too small for RDMA cards."""
    if not cards.is_dir() or soft == resource.RLIM_INFINITY or soft >= LEAST_LOCKED_NBYTES:
        return
    names = ", ".join(sorted(card.name for card in cards.iterdir()))
    raised = "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else "memlock in limits.conf"
    evidence = f"{size(soft)}, too little for the RDMA of {names}"
    yield Finding("memlock", evidence, Severity.NOTE, f"{raised}, or docker --ulimit memlock=-1")


def numa_nodes(root: Path = numa.SYS) -> Iterator[Finding]:
    """Number of NUMA nodes, if there are several."""
    nodes = numa.nodes(root)
    if len(nodes) > 1:
        evidence = f"{len(nodes)} nodes: memory of another node is slower"
        remedy = "DataLoader(device=fl.Delivery(..., numa='auto')), or numactl --cpunodebind=N --membind=N"
        yield Finding("NUMA", evidence, Severity.NOTE, remedy)


def cuda(root: Path = numa.SYS) -> Iterator[Finding]:
    """CUDA devices, one finding each, with their NUMA nodes; initializes CUDA."""
    if not torch.cuda.is_available():
        yield Finding("CUDA", "none: batches stay on the CPU")
    for i in range(torch.cuda.device_count()):
        node = _describe_node(torch.device("cuda", i), root)
        use, problem = nvml_utilization(i)
        evidence = f"{torch.cuda.get_device_name(i)}{node}, "
        if use is not None:
            yield Finding(f"cuda:{i}", f"{evidence}in use for {share(use)} of the latest second")
        else:
            remedy = "pip install nvidia-ml-py, and check nvidia-smi: reports then show the use of the GPU"
            yield Finding(f"cuda:{i}", f"{evidence}its use is unknown ({problem})", Severity.NOTE, remedy)


def _describe_node(device: torch.device, root: Path) -> str:
    nodes, node = numa.nodes(root), numa.node_of(device, root)
    if len(nodes) < 2 or node is None:
        return ""
    return f", on NUMA node {node} with {len(nodes.get(node, ()))} CPUs"


def _short(folder: Path) -> str:
    """Last two folders of a control group's path."""
    return "/" + "/".join(folder.parts[-2:])
