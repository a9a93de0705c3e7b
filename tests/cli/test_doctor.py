"""`feedline doctor`: each check judges what it is given."""

from __future__ import annotations

import json
import resource
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from feedline.cli import doctor
from feedline.cli.app import app
from feedline.cli.doctor import Finding, Severity


def test_cpus_beyond_the_quota_of_the_cgroup_are_noted() -> None:
    finding = doctor.cpus(affinity=16, usable=3)
    assert finding.verdict is Severity.NOTE
    assert "16 visible, 3 within" in finding.value
    assert "3 workers" in finding.remedy
    assert doctor.cpus(affinity=3, usable=3).verdict is Severity.GOOD


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", "1073741824\n", 1 << 30),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "2147483648\n", 2 << 30),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("other", "", None),
    ],
)
def test_the_memory_limit_of_either_kind_of_cgroup(tmp_path: Path, file: str, text: str, limit: int | None) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert doctor.cgroup_memory(tmp_path) == limit


def test_a_service_that_the_kernel_refuses_is_bad() -> None:
    def refused() -> None:
        raise OSError(38, "Function not implemented")

    finding = doctor.available("memfd", refused, "batches travel in it")
    assert finding.verdict is Severity.BAD
    assert "Function not implemented" in finding.value
    assert "batches travel in it" in finding.remedy


def test_a_low_limit_of_open_files_is_noted_with_the_command() -> None:
    low = doctor.open_files(256, 4096)
    assert (low.verdict, low.value) == (Severity.NOTE, "at most 256")
    assert "ulimit -n 4096" in low.remedy
    assert doctor.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY) == Finding("open files", "no limit")


def test_shared_memory_is_reported_but_never_needed(tmp_path: Path) -> None:
    assert "does not need it" in doctor.shared_memory(tmp_path).value
    assert doctor.shared_memory(tmp_path / "none").verdict is Severity.GOOD


@pytest.mark.parametrize(("verdict", "code"), [(Severity.GOOD, 0), (Severity.NOTE, 0), (Severity.BAD, 1)])
def test_the_exit_code_is_1_only_when_something_is_bad(
    monkeypatch: pytest.MonkeyPatch, verdict: Severity, code: int
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("one", "two", verdict, "three")])
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout) == [{"name": "one", "value": "two", "verdict": verdict.value, "remedy": "three"}]


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_this_machine_is_examined_and_shown_in_narrow_terminals(columns: int) -> None:
    findings = doctor.examine()
    assert {"feedline", "python", "torch", "CPUs", "memory", "memfd", "pidfd"} <= {finding.name for finding in findings}
    screen = StringIO()
    Console(width=columns, file=screen).print(doctor.render(findings))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert any("memfd" in line for line in lines)
