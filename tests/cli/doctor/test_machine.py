"""`feedline doctor`: each check of the machine judges what it is given."""

from __future__ import annotations

import json
import os
import resource
import socket
from io import StringIO
from pathlib import Path

import pytest
from diagonals import diagonal
from rich.console import Console
from typer.testing import CliRunner

from feedline.cli.app import app
from feedline.cli.doctor import command, machine
from feedline.cli.doctor.findings import Finding, Marks, Severity, closing_line, render
from feedline.cli.doctor.machine import CpuUse, Memory
from feedline.core.cgroups import Cgroup
from feedline.core.proc import cpu_ticks


def group(folder: Path, quota: str = "max", throttled: int = 0) -> Cgroup:
    """A group of version 2 with this quota."""
    (folder / "cpu.max").write_text(f"{quota} 100000\n")
    (folder / "cpu.stat").write_text(f"nr_periods 100\nnr_throttled {throttled}\n")
    return Cgroup(cpu=(folder,))


@pytest.mark.parametrize(
    ("quota", "throttled", "severity", "evidence"),
    [
        ("max", 0, Severity.GOOD, "16 of 32"),
        ("150000", 0, Severity.NOTE, "quota 1.5 of 16"),
        ("300000", 31, Severity.BAD, "throttled in 31 % of its periods"),
    ],
)
def test_a_quota_below_the_cpus_is_shown_with_its_throttling(
    tmp_path: Path, quota: str, throttled: int, severity: Severity, evidence: str
) -> None:
    finding = machine.cpus(16, 32, group(tmp_path, quota, throttled))
    assert (finding.severity, evidence in finding.evidence) == (severity, True)
    if severity is not Severity.GOOD:
        assert f"num_workers={int(quota) // 100_000}" in finding.remedy


@pytest.mark.parametrize(
    ("use", "severity", "text"),
    [
        (CpuUse(0.1, 0.0, 0.02), Severity.GOOD, "0.1 CPUs"),
        (CpuUse(1.3, 0.0, 0.78), Severity.NOTE, "other programs use 1.3 CPUs (CPU pressure 78 %)"),
        (CpuUse(1.3, 0.9, None), Severity.NOTE, "the hypervisor gives 0.9 CPUs"),
    ],
)
def test_other_load_is_measured(use: CpuUse, severity: Severity, text: str) -> None:
    finding = machine.cpu_load(use)
    assert (finding.severity, text in finding.evidence) == (severity, True)


def test_load_of_this_machine_is_between_none_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(machine, "cpu_ticks", lambda cpus: asked.append(cpus) or cpu_ticks(cpus))
    use = CpuUse.measure(0.05)
    assert asked == [os.sched_getaffinity(0)] * 2
    assert use.others >= 0
    assert use.pressure is None or 0 <= use.pressure <= 1


@pytest.mark.parametrize(
    ("state", "severity"),
    [
        (Memory(10 << 30, 8 << 30, False), Severity.GOOD),
        (Memory(10 << 30, 1 << 28, True), Severity.BAD),
        (Memory(10 << 30, 8 << 30, False, 4 << 30), Severity.NOTE),
    ],
)
def test_memory_left_and_swapped(state: Memory, severity: Severity) -> None:
    assert machine.memory(state).severity is severity


def test_the_limit_of_a_group_replaces_the_memory_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{1 << 26}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 25}\n")
    state = Memory.read(Cgroup(memory=(tmp_path,)))
    assert state[:3] == (1 << 26, 1 << 25, True)
    (tmp_path / "memory.stat").write_text(f"anon 4\ninactive_file {1 << 24}\nactive_file 8\n")
    state = Memory.read(Cgroup(memory=(tmp_path,)))
    assert state.available == (1 << 25) + (1 << 24), "the kernel frees page cache first"
    assert not Memory.read(Cgroup()).limit_is_cgroup


def test_a_service_that_the_kernel_refuses_is_bad() -> None:
    def refused() -> None:
        raise OSError(38, "Function not implemented")

    finding = machine.system_call("memfd", refused, "It carries batches.")
    assert finding.severity is Severity.BAD
    assert "Function not implemented" in finding.evidence
    assert "It carries batches." in finding.remedy


def test_a_low_limit_of_open_files_is_noted_with_what_can_raise_it() -> None:
    assert "ulimit -n 4096" in machine.open_files(256, 4096).remedy
    fixed = machine.open_files(256, 256)
    assert "ulimit -n 256" not in fixed.remedy
    assert "LimitNOFILE=" in fixed.remedy
    assert machine.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY) == Finding("open files", "no limit")


def test_shared_memory_is_reported_but_never_needed(tmp_path: Path) -> None:
    assert "not needed" in machine.shared_memory(tmp_path).evidence
    assert machine.shared_memory(tmp_path / "none").severity is Severity.GOOD


def test_a_cache_folder_that_cannot_be_written_to_is_noted(tmp_path: Path) -> None:
    assert machine.cache(tmp_path / "none" / "feedline").severity is Severity.GOOD
    (tmp_path / "file").touch()
    found = machine.cache(tmp_path / "file" / "feedline")
    assert (found.severity, found.evidence) == (Severity.NOTE, f"{tmp_path}/file/feedline cannot be written to")
    assert "XDG_CACHE_HOME" in found.remedy


def test_ray_is_reported_with_its_cluster_and_the_memory_of_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (found,) = machine.ray(tmp_path)
    assert (found.severity, "a cluster of this machine" in found.evidence) == (Severity.GOOD, True)
    found, store = machine.ray(tmp_path / "none")
    assert (store.name, store.severity) == ("Ray store", Severity.NOTE)
    assert "--shm-size" in store.remedy
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{port}")
        assert next(machine.ray(tmp_path)).severity is Severity.GOOD
    refused = next(machine.ray(tmp_path))
    assert refused.severity is Severity.NOTE
    assert f"127.0.0.1:{port} does not answer" in refused.evidence
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    assert list(machine.ray(tmp_path)) == []


def test_several_numa_nodes_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine.torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(machine.torch.cuda, "utilization", lambda _: 42)
    monkeypatch.setattr(machine.numa, "node_of", lambda *_: 1)
    used = "in use for 42 % of the latest second"
    for node in range(2):
        assert list(machine.numa_nodes(tmp_path)) == []
        assert list(machine.cuda(tmp_path))[-1].evidence == f"a GPU, {used}"
        folder = tmp_path / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{4 * node}-{4 * node + 3}")
    assert "2 nodes" in next(machine.numa_nodes(tmp_path)).evidence
    assert list(machine.cuda(tmp_path))[-1].evidence == f"a GPU, on NUMA node 1 with 4 CPUs, {used}"


def test_a_gpu_without_nvml_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def utilization(_: int) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed.")

    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine.torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(machine.torch.cuda, "utilization", utilization)
    found = list(machine.cuda(tmp_path))[-1]
    assert found.severity is Severity.NOTE
    assert found.evidence == "a GPU, its use is unknown (nvidia-ml-py does not seem to be installed)"
    assert "pip install nvidia-ml-py" in found.remedy


@pytest.mark.parametrize(("severity", "code"), [(Severity.GOOD, 0), (Severity.NOTE, 0), (Severity.BAD, 1)])
def test_the_exit_code_is_1_only_when_something_is_bad(
    monkeypatch: pytest.MonkeyPatch, severity: Severity, code: int
) -> None:
    monkeypatch.setattr(machine, "examine", lambda: [Finding("one", "two", severity, "three")])
    monkeypatch.setattr(machine, "cuda", list)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code
    expected = {"name": "one", "evidence": "two", "severity": severity.value, "remedy": "three"}
    assert json.loads(result.stdout) == {"machine": [expected], "loader": []}


def test_cuda_is_initialized_after_the_workers_of_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a GPU needs CUDA, which forked workers cannot use."""
    calls = list[str]()
    monkeypatch.setattr(machine, "examine", lambda: calls.append("machine") or [])
    monkeypatch.setattr(machine, "cuda", lambda: calls.append("cuda") or [])
    monkeypatch.setattr(command.targets, "load", lambda _: calls.append("target"))
    monkeypatch.setattr(command.loader_checks, "examine", lambda *_, **__: calls.append("loader") or [])
    command.run("train.py:loader")
    assert calls == ["machine", "target", "loader", "cuda"]


FINDINGS = [
    Finding("CPUs", "quota 1 of 2 (cgroup /slurm/job_42)", Severity.BAD, "num_workers=1, or ask for more of them"),
    Finding("a", "is well"),
    Finding("load", "other programs use 1.3 CPUs · 50 µs", Severity.NOTE),
    *(Finding(f"check {number}", "passed" * (number % 3)) for number in range(12)),
]


@pytest.mark.parametrize(("width", "marks"), diagonal([40, 60, 80], list(Marks)))
def test_every_line_fits_and_trouble_comes_first(width: int, marks: Marks) -> None:
    text = render(FINDINGS[1:] + FINDINGS[:1], width, marks).plain
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(marks.sign(Severity.BAD))
    assert lines[-1].startswith(marks.sign(Severity.GOOD))
    for finding in FINDINGS:
        assert finding.name in text
    if marks is Marks.ASCII:
        text.encode("ascii")


def test_the_closing_line_counts() -> None:
    assert closing_line(FINDINGS) == "1 finding stops or slows a run, 1 finding is worth a look."
    assert closing_line(FINDINGS[1:2]) == "Nothing to change."


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_this_machine_is_examined_and_shown_in_any_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    screen = StringIO()
    console = Console(width=80, file=screen)
    monkeypatch.setattr(Console, "encoding", encoding)
    command.run(None, console=console)
    text = screen.getvalue()
    text.encode(encoding)
    for name in ("feedline", "CPUs", "memory", "memfd", "pidfd", "open files"):
        assert name in text
