"""Limits of the process's own control group and of its ancestors, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from feedline.core.cgroups import Cgroup, Throttling
from feedline.loader.monitoring.resources import affine_cpus, usable_cpus


class Machine:
    """A /proc and a cgroup file system below a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mounted = folder / "proc", folder / "sys fs"
        (self.proc / "self").mkdir(parents=True)

    def join(self, membership: str, mounts: str) -> Cgroup:
        """The group of a process with this /proc/self/cgroup, after these mounts."""
        (self.proc / "self" / "cgroup").write_text(membership)
        (self.proc / "self" / "mountinfo").write_text(mounts.replace("MOUNT", str(self.mounted).replace(" ", "\\040")))
        return Cgroup.of_process(proc=self.proc)

    def write(self, file: str, text: str) -> None:
        path = self.mounted / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


V2 = "31 23 0:28 / MOUNT rw - cgroup2 cgroup2 rw\n"


V1 = (
    "32 31 0:29 / MOUNT/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / MOUNT/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / MOUNT/unified rw - cgroup2 cgroup2 rw\n"
)


def test_a_nested_group_of_version_2_has_its_own_quota_and_those_above(machine: Machine) -> None:
    machine.write("cpu.stat", "usage_usec 1\n")
    machine.write("job/cpu.max", "400000 100000\n")
    machine.write("job/step/cpu.max", "150000 100000\n")
    machine.write("job/step/task/cpu.max", "max 100000\n")
    for folder in ("job", "job/step", "job/step/task"):
        machine.write(f"{folder}/cpu.stat", "usage_usec 9\nnr_periods 200\nnr_throttled 50\nthrottled_usec 7\n")
        machine.write(f"{folder}/memory.stat", "")
    machine.write("job/memory.max", "2000\n")
    machine.write("job/step/task/memory.max", "max\n")
    machine.write("job/step/task/memory.current", "700\n")
    cgroup = machine.join("0::/job/step/task\n", V2)
    assert cgroup.cpu_quota() == 1.5
    assert (cgroup.memory_limit(), cgroup.memory_used()) == (2000, 700)
    assert cgroup.throttling() == Throttling(200, 50)
    assert Throttling(200, 50).share == 0.25
    assert usable_cpus(cgroup) == 1


def test_a_nested_group_of_version_1(machine: Machine) -> None:
    machine.write("cpu,cpuacct/slurm/job_42/cpu.cfs_quota_us", "300000\n")
    machine.write("cpu,cpuacct/slurm/job_42/cpu.cfs_period_us", "100000\n")
    machine.write("cpu,cpuacct/slurm/job_42/cpu.stat", "nr_periods 10\nnr_throttled 1\nthrottled_time 5\n")
    machine.write("memory/slurm/job_42/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("memory/slurm/memory.limit_in_bytes", "4096\n")
    membership = "8:memory:/slurm/job_42\n3:cpu,cpuacct:/slurm/job_42\n0::/\n"
    cgroup = machine.join(membership, V1)
    assert (cgroup.cpu_quota(), cgroup.memory_limit()) == (3.0, 4096)
    assert cgroup.throttling() == Throttling(10, 1)


def test_a_container_sees_its_own_group_as_the_root_of_the_mount(machine: Machine) -> None:
    machine.write("cpu.max", "200000 100000\n")
    machine.write("cpu.stat", "usage_usec 1\n")
    mounts = "31 23 0:28 /docker/abc MOUNT rw - cgroup2 cgroup2 rw\n"
    assert machine.join("0::/docker/abc\n", mounts).cpu_quota() == 2.0
    assert machine.join("0::/../other\n", mounts).cpu_quota() == 2.0


def test_without_limits_or_files_every_figure_is_none(machine: Machine, tmp_path: Path) -> None:
    for cgroup in (machine.join("0::/\n", V2), Cgroup.of_process(proc=tmp_path / "none"), Cgroup()):
        assert cgroup.cpu_quota() is cgroup.memory_limit() is cgroup.memory_used() is cgroup.throttling() is None
        assert usable_cpus(cgroup) == affine_cpus()


def test_a_version_1_quota_of_minus_one_is_no_limit(machine: Machine) -> None:
    machine.write("cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    machine.write("cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert machine.join("3:cpu,cpuacct:/\n", V1).cpu_quota() is None


@pytest.mark.parametrize(
    ("membership", "mounts", "file", "text", "kills"),
    [
        ("0::/job\n", V2, "job/memory.events", "low 0\noom 3\noom_kill 2\n", 2),
        ("0::/job\n", V2, "memory.events", "oom_kill 5\n", 5),
        ("3:cpu:/x\n9:memory:/job\n0::/\n", V1, "memory/job/memory.oom_control", "under_oom 0\noom_kill 4\n", 4),
        ("9:memory:/job\n", V1, "memory/memory.oom_control", "oom_kill 1\n", 1),
        ("0::/job\n", V2, "elsewhere/memory.events", "oom_kill 5\n", 0),
        ("", V2, "memory.events", "oom_kill 5\n", 0),
    ],
    ids=["group", "root", "hybrid", "version 1", "another group", "no group"],
)
def test_out_of_memory_kills_are_counted(
    machine: Machine, membership: str, mounts: str, file: str, text: str, kills: int
) -> None:
    machine.write("memory.stat", "")
    machine.write(str(Path(file).with_name("memory.stat")), "")
    machine.write(file, text)
    assert machine.join(membership, mounts).oom_kills() == kills


def test_the_group_of_this_process_can_be_read() -> None:
    limit = Cgroup.of_process().memory_limit()
    assert limit is None or limit > 0


def test_files_that_cannot_be_read_are_as_if_they_were_not_there(tmp_path: Path) -> None:
    for name in ("cpu.max", "cpu.stat", "memory.max", "memory.events"):
        (tmp_path / name).mkdir()  # reading it fails even for root
    group = Cgroup(cpu=(tmp_path,), memory=(tmp_path,))
    figures = (group.cpu_quota(), group.throttling(), group.memory_limit(), group.memory_used())
    assert figures == (None, None, None, None)
