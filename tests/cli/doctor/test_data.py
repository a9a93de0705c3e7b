"""`feedline doctor`: files, threads and random numbers of a dataset, examined in this process."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sqlite3
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from feedline.cli.doctor import data, machine
from feedline.cli.doctor.findings import Finding, Severity
from feedline.cli.doctor.loader import (
    SampleProbe,
    errors,
    examine,
    fork_hazards,
    held_generators,
    held_handles,
    slow_storage,
)


class Sound(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index))


class Unsafe(Sound):
    """A position that all threads share, like that of an open file."""

    position = 0

    def __getitem__(self, index: int) -> Any:
        self.position = index
        time.sleep(0.001)
        return torch.tensor(self.position)


class UnsafeLabel(Unsafe):
    """The shared position, next to an equal image."""

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.zeros(2), "label": int(super().__getitem__(index))}


class Refusing(Unsafe):
    busy = False

    def __getitem__(self, index: int) -> Any:
        if self.busy:
            raise RuntimeError("used by two threads")
        self.busy = True
        try:
            return super().__getitem__(index)
        finally:
            self.busy = False


class Random(Sound):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(3)


class Copied(Sound):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.rng.random(3))


class Short(Sound):
    def __getitem__(self, index: int) -> Any:
        if index >= 10:
            raise IndexError("list index out of range")
        return super().__getitem__(index)


class OnDisk(Sound):
    def __init__(self, paths: list[Path]) -> None:
        self.shards = paths


def severities(findings: Any) -> dict[str, Severity]:
    return {finding.name: finding.severity for finding in findings}


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Sound(), {"threads": Severity.GOOD}), (Unsafe(), {"threads": Severity.NOTE}),
        (UnsafeLabel(), {"threads": Severity.NOTE}), (Refusing(), {"threads": Severity.NOTE}), (Random(), {}),
    ],
    ids=["sound", "unsafe", "unsafe label", "refusing", "random"],
)  # fmt: skip
def test_datasets_that_threads_cannot_share_are_found(dataset: Any, expected: dict[str, Severity]) -> None:
    assert severities(data.threads(DataLoader(dataset))) == expected


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [(Sound(), {}), (Random(), {"random": Severity.GOOD}), (Copied(), {"random": Severity.BAD})],
    ids=["none", "own", "copied"],
)
def test_workers_that_draw_alike_are_found(dataset: Any, expected: dict[str, Severity]) -> None:
    state = torch.get_rng_state()
    assert severities(data.random_numbers(DataLoader(dataset, num_workers=2))) == expected
    assert torch.equal(torch.get_rng_state(), state)


class Computing(Sound):
    def __getitem__(self, index: int) -> Any:
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            pass
        return super().__getitem__(index)


BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


def test_samples_that_other_programs_hold_up_do_not_wait_for_storage() -> None:
    cpus = os.sched_getaffinity(0)
    cpu = min(cpus)
    with ExitStack() as programs:
        for _ in range(3):
            busy = subprocess.Popen([sys.executable, "-c", BUSY, str(cpu)], stdout=subprocess.PIPE)
            programs.enter_context(busy)
            programs.callback(busy.kill)
            assert busy.stdout is not None
            busy.stdout.readline()
        os.sched_setaffinity(0, {cpu})
        programs.callback(os.sched_setaffinity, 0, cpus)
        samples = SampleProbe.read(DataLoader(Computing(), 4))
    assert np.mean(samples.wall_s) > 0.008  # most of it for a CPU
    assert list(slow_storage(samples)) == []


def test_a_wrong_length_is_named_as_such() -> None:
    (found,) = errors(SampleProbe.read(DataLoader(Short(), 4)))
    assert (found.name, found.severity) == ("length", Severity.BAD)
    assert "index 10 raises IndexError" in found.evidence


def test_files_are_compared_with_memory_and_their_disk_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.tar" for number in range(3)]
    for path in paths:
        path.write_bytes(bytes(1 << 20))
    paths[0].with_name("0.tar.index").touch()
    found = {finding.name: finding for finding in data.files(OnDisk(paths))}
    assert found["files"].evidence.startswith("3 files, 3.0 MiB: they fit into the page cache")
    assert "2 of 3 tar shards have no index" in found["index"].evidence
    paths[1].rename(paths[1].with_name("1.tar.gz"))
    found = {finding.name: finding for finding in data.files(OnDisk([paths[0], tmp_path / "1.tar.gz"]))}
    assert "1 of 2 tar shards have no index next to them (1.tar.gz)" in found["index"].evidence
    (tmp_path / "1.tar.gz").rename(paths[1])
    monkeypatch.setattr(data, "meminfo", lambda: {"MemAvailable": 1 << 20})
    monkeypatch.setattr(data, "SLOW_EPOCH_S", 0.0)
    found = {finding.name: finding for finding in data.files(OnDisk(paths))}
    assert found["files"].severity is Severity.NOTE
    assert "every epoch reads the disk" in found["files"].evidence
    assert "to read them all" in found["files"].evidence
    assert list(data.files(Sound())) == []
    assert data.disk_rate([tmp_path / "missing"]) == 0


@pytest.mark.parametrize("text", ["word " * 100 + "see page/two", "either/or " * 60, "a/\0b"])
def test_texts_are_no_files(text: str) -> None:
    assert list(data.files(OnDisk([text] * 3))) == []


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class ByName(Sound):
    def __getitem__(self, key: Any) -> Any:
        return {"a": torch.zeros(2), "b": torch.ones(2)}[key]


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (Unsized(), {"sampler": list(range(10))}), (ByName(), {"sampler": ["a", "b"]}),
        (ByName(), {"batch_sampler": [["a"], ["b", "a"]]}),
        (Sound(), {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(0)}),
    ],
    ids=["no length", "names", "batches of names", "generator"],
)  # fmt: skip
def test_a_loader_is_examined_with_the_keys_of_its_sampler(dataset: Any, arguments: Any) -> None:
    findings = examine(DataLoader(dataset, **arguments))
    noted = {finding.name for finding in findings if finding.severity is not Severity.GOOD}
    assert noted <= {"storage", "slow"}, findings  # by a busy machine
    assert {"threads", "2 workers", "speed"} <= {finding.name for finding in findings}


def test_a_dataset_whose_length_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> int:
        raise OSError("no index")

    loader = DataLoader(Sound(), 4)
    monkeypatch.setattr(Sound, "__len__", fails)
    assert any("OSError: no index" in finding.evidence for finding in examine(loader))


class Holding(Sound):
    def __init__(self, value: Any) -> None:
        self.value = value


def opened(folder: Path) -> Iterator[Any]:
    """One handle of each kind."""
    yield (folder / "a").open("w")
    yield socket.socket()
    yield sqlite3.connect(":memory:")
    yield h5py.File(folder / "c.h5", "w")
    yield lmdb.open(str(folder / "d"))


AROUND: dict[str, Callable[[Any], Any]] = {
    "alone": lambda value: value, "list": lambda value: [value], "dict": lambda value: {"train": (1, value)},
    "nested": lambda value: [{0: value}], "object": lambda value: [Holding(deque([value]))],
    "torch": lambda value: ConcatDataset([Subset(Holding(value), [0])]),
}  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
def test_open_handles_and_generators_are_found_in_containers_until_they_are_closed(tmp_path: Path, around: str) -> None:
    for handle in opened(tmp_path):
        dataset = Holding(AROUND[around](handle))
        (found,) = held_handles(dataset)
        assert found.severity is Severity.BAD
        assert found.evidence.startswith("open when workers start: Holding.value")
        handle.close()
        assert list(held_handles(dataset)) == [], handle
    (found,) = held_generators(Holding(AROUND[around](np.random.default_rng(0))))
    assert found.severity is Severity.BAD


@pytest.mark.parametrize(
    "make", [np.random.default_rng, np.random.RandomState, lambda seed: torch.Generator().manual_seed(seed)]
)
def test_a_generator_from_which_no_sample_is_drawn_is_no_finding(make: Callable[[int], Any]) -> None:
    class Draws(Sound):
        rng = None

        def __getitem__(self, index: int) -> torch.Tensor:
            drawn = torch.rand(1, generator=self.rng) if isinstance(self.rng, torch.Generator) else self.rng.normal()
            return super().__getitem__(index) + drawn

    ordered, drawing = Sound(), Draws()
    ordered.rng, drawing.rng = make(0), make(0)
    assert not list(held_generators(ordered, [0, 1]))
    (found,) = held_generators(drawing, [0, 1])
    assert found.severity is Severity.BAD


def test_a_file_watcher_is_a_hazard_of_forks() -> None:
    loader = DataLoader(Sound(), num_workers=1)
    assert not any("inotify" in finding.evidence for finding in fork_hazards(loader))
    descriptor = ctypes.CDLL(None).inotify_init()
    try:
        assert any("inotify" in finding.evidence for finding in fork_hazards(loader))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("enabled", "defrag", "severity"),
    [
        ("[always] madvise never", "[always] defer", Severity.NOTE),
        ("always [madvise] never", "[always]", Severity.GOOD),
    ],
)
def test_huge_pages_that_stall_are_noted(tmp_path: Path, enabled: str, defrag: str, severity: Severity) -> None:
    (tmp_path / "enabled").write_text(enabled)
    (tmp_path / "defrag").write_text(defrag)
    assert severities(machine.huge_pages(tmp_path)) == {"huge pages": severity}
    assert list(machine.huge_pages(tmp_path / "missing")) == []


def test_locked_memory_matters_where_there_is_rdma(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    (found,) = machine.locked_memory(1 << 16, 1 << 16, tmp_path)
    assert isinstance(found, Finding)
    assert "mlx5_0" in found.evidence
    assert list(machine.locked_memory(resource.RLIM_INFINITY, resource.RLIM_INFINITY, tmp_path)) == []
    assert list(machine.locked_memory(1 << 16, 1 << 16, tmp_path / "none")) == []
