"""The scripts for a GPU without one: all of them, by their one command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GPU = Path(__file__).parents[2] / "bench" / "gpu"

CONTESTS = ("gpu_prefetch", "gpu_busy", "decode on cpu", "resident on cpu")
CONTESTANTS = (
    "torch, pin thread and prefetcher",
    "feedline, workers",
    "feedline, on the device",
    "by workers",
    "feedline, DeviceDataset",
    "torch, workers and prefetcher",
)


def test_one_command_runs_all_scripts_for_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(GPU / "run.py"), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all scripts ended" in done.stdout
    assert all(name in done.stdout for name in (*CONTESTS, *CONTESTANTS)), done.stdout
    assert "FFCV is left out: " in done.stdout
    versions = [line for line in done.stdout.splitlines() if "feedline" in line and " torch 2" in line]
    assert len(versions) == len(CONTESTS), "each table has its date and versions"
    assert not list(tmp_path.iterdir())


def test_a_script_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "run.py").write_text((GPU / "run.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "gpu" / "prefetch.py").write_text("raise SystemExit(3)", encoding="utf-8")
    for name in ("decode.py", "resident.py"):
        (tmp_path / "gpu" / name).write_text("", encoding="utf-8")
    (tmp_path / "batched_transforms.py").write_text("", encoding="utf-8")
    command = [sys.executable, str(tmp_path / "gpu" / "run.py"), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "resident.py: exit status 0" in done.stdout
    assert "failed: prefetch.py" in done.stdout
