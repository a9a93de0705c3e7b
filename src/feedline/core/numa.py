"""NUMA nodes of the machine and of its devices, read from sysfs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

SYS = Path("/sys")

Cpus = frozenset[int]


class Placement(NamedTuple):
    """CPUs for the workers of one training process, on one node."""

    node: int
    cpus: Cpus
    ranks: int
    """Training processes of this machine that share the node."""


def nodes(root: Path = SYS) -> dict[int, Cpus]:
    """CPUs of each node that has any; empty without sysfs."""
    found = {}
    for folder in sorted(root.glob("devices/system/node/node[0-9]*")):
        cpus = parse_cpus(_text(folder / "cpulist"))
        if cpus:
            found[int(folder.name.removeprefix("node"))] = cpus
    return found


def parse_cpus(text: str) -> Cpus:
    """The CPUs of a list of the kernel, such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def node_of(device: torch.device, root: Path = SYS) -> int | None:
    """The node of a device; None if it is not known."""
    address = pci_address(device)
    number = _text(root / "bus" / "pci" / "devices" / address / "numa_node").strip() if address else ""
    return int(number) if number and int(number) >= 0 else None


def pci_address(device: torch.device) -> str | None:
    """The PCI address of a CUDA device, such as "0000:3b:00.0"; else None."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    seen: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0"
    except AttributeError:  # older torch
        return None


def placement(device: torch.device, root: Path = SYS, environment: Mapping[str, str] = os.environ) -> Placement | None:
    """CPUs on the node of a device, shared with other local ranks.

    Rank r of a machine, LOCAL_RANK, is assumed to use device r. None if placement has no benefit: with one node, for a
    device without a node, or if this process may not use the node's CPUs.
    """
    known = nodes(root)
    if len(known) < 2 or not hasattr(os, "sched_getaffinity"):
        return None
    node = node_of(device, root)
    allowed = sorted(known.get(-1 if node is None else node, frozenset()) & os.sched_getaffinity(0))
    if node is None or not allowed:
        return None
    ranks, rank = _ranks_on(node, device.type, root, environment)
    mine = share(allowed, rank, ranks)
    return Placement(node, mine, ranks) if mine else None


def share(cpus: Sequence[int], rank: int, ranks: int) -> Cpus:
    """The consecutive CPUs of a rank, as equal in number as possible."""
    return frozenset(cpus[rank * len(cpus) // ranks : (rank + 1) * len(cpus) // ranks])


def _ranks_on(node: int, kind: str, root: Path, environment: Mapping[str, str]) -> tuple[int, int]:
    """Number of local ranks on the node, and this rank's place."""
    try:
        local, world = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):  # not started by torchrun
        return 1, 0
    there = [rank for rank in range(world) if _node_of_rank(kind, rank, root) == node]
    return (len(there), there.index(local)) if local in there else (1, 0)


def _node_of_rank(kind: str, rank: int, root: Path) -> int | None:
    try:
        return node_of(torch.device(kind, rank), root)
    except (RuntimeError, AssertionError):  # this process does not see the device
        return None


@contextmanager
def on_cpus(cpus: Cpus | None) -> Iterator[None]:
    """Start threads and processes of the block on these CPUs.

    With None, nothing changes.
    """
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
