"""Nodes of CPUs and devices, from a made-up sysfs, and the CPUs of each rank."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import feedline as fl
from feedline.core import numa
from feedline.core.numa import node_of, nodes, on_cpus, parse_cpus, placement, share

GPUS = {0: ("0000:3b:00.0", 0), 1: ("0000:86:00.0", 1), 2: ("0000:af:00.0", 1), 3: ("0000:d8:00.0", -1)}


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes with four CPUs each, and four GPUs, the last of them on no node."""
    for node, cpus in enumerate(("0-1,4-5\n", "2-3,6-7\n")):
        folder = tmp_path / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    for address, node in GPUS.values():
        place = tmp_path / "bus" / "pci" / "devices" / address
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


def properties(device: torch.device) -> SimpleNamespace:
    bus = int(GPUS[device.index][0].split(":")[1], 16)
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


def test_nodes_and_devices_are_found(sysfs: Path) -> None:
    assert nodes(sysfs) == {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}
    assert [node_of(torch.device("cuda", number), sysfs) for number in GPUS] == [0, 1, 1, None]
    assert node_of(torch.device("cpu"), sysfs) is None
    assert parse_cpus("0-2,7,9-9\n") == {0, 1, 2, 7, 9}
    assert parse_cpus("") == frozenset()


def test_a_process_alone_has_the_node_of_its_device(sysfs: Path) -> None:
    assert placement(torch.device("cuda", 1), sysfs, {}) == (1, {2, 3, 6, 7}, 1)
    assert placement(torch.device("cuda", 3), sysfs, {}) is None


def test_ranks_divide_the_node_that_they_share(sysfs: Path) -> None:
    places = [
        placement(torch.device("cuda", rank), sysfs, {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"})
        for rank in range(3)
    ]
    assert places == [(0, {0, 1, 4, 5}, 1), (1, {2, 3}, 2), (1, {6, 7}, 2)]


def test_cpus_that_the_process_may_not_use_are_left_out(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert placement(torch.device("cuda", 1), sysfs, {}) == (1, {2}, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert placement(torch.device("cuda", 1), sysfs, {}) is None


def test_shares_are_disjoint_and_complete() -> None:
    for ranks in (1, 2, 3, 5):
        parts = [share(range(10), rank, ranks) for rank in range(ranks)]
        assert sorted(cpu for part in parts for cpu in part) == list(range(10))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_node_is_left_alone(tmp_path: Path) -> None:
    assert nodes(tmp_path) == {}
    assert placement(torch.device("cpu"), tmp_path, {}) is None
    assert fl.Delivery("cpu", numa="auto").cpus is None
    with pytest.raises(fl.errors.ArgumentError, match="give 'auto' or None"):
        fl.Delivery("cpu", numa="node1")  # type: ignore[arg-type]


class Where(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(sum(1 << cpu for cpu in os.sched_getaffinity(0)))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be divided")
@pytest.mark.parametrize("method", ["thread", "process"])
def test_workers_start_on_the_cpus_of_the_node(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    cpu = max(before)
    monkeypatch.setattr("feedline.loader.device.delivery.placement", lambda _: numa.Placement(1, frozenset({cpu}), 1))
    delivery = fl.Delivery("cpu", numa="auto")
    with fl.DataLoader(Where(), 2, num_workers=1, worker_method=method, device=delivery) as loader:
        seen = torch.cat(list(loader)).tolist()
    assert seen == [1 << cpu] * 4
    assert os.sched_getaffinity(0) == before


def test_affinity_returns_after_an_error() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="inside"), on_cpus(frozenset({min(before)})):
        raise ValueError("inside")
    assert os.sched_getaffinity(0) == before
