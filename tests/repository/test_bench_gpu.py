"""The scripts for a GPU without one, and the command that runs them all."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import Preloaded
from undisturbed import ATTEMPTS

GPU = Path(__file__).parents[2] / "bench" / "gpu"

CONTESTS = (
    "gpu_prefetch", "gpu_busy", "training on a GPU, images/s", "training on a GPU, share of the limit",
    "decoders of JPEGs on cpu", "decode on cpu", "resident on cpu",
)  # fmt: skip
CONTESTANTS = (
    "torch, pin thread and prefetcher",
    "feedline, uint8 to the device",
    "feedline, decoded on the device",
    "feedline, workers",
    "feedline, on the device",
    "feedline, on the device and by workers",
    "feedline, DeviceDataset",
    "torch, workers and prefetcher",
)


AS_A_COMMAND = """
import os, runpy, sys
os.environ |= {variables!r}
sys.argv, sys.path[0] = {command!r}, os.path.dirname({command[0]!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.nightly
def test_each_script_for_a_gpu_checks_itself_without_one(preloaded: Preloaded, tmp_path: Path) -> None:
    """The scripts of `run.py` in forks; the next test runs the command itself, on scripts that do nothing."""
    run = runpy.run_path(str(GPU / "run.py"))
    printed, scripts = "", dict[str, str]()
    for command in run["commands"]("cpu"):
        variables = run["environment"]() if "batched_transforms" in command[0] else {}
        if variables is not None:
            script = scripts[Path(command[0]).stem] = AS_A_COMMAND.format(variables=variables, command=command)
            code, output = preloaded.run_code(script, tmp_path)
            assert code == 0, output
            printed += output
    assert all(name in printed for name in (*CONTESTS, *CONTESTANTS)), printed
    assert "FFCV is left out: " in printed
    named = "step of 0.1 copies: copy; predicted "
    again = (preloaded.run_code(scripts["bus"], tmp_path)[1] for _ in range(1, ATTEMPTS))  # without other programs
    assert named in printed or any(named in output for output in again), printed
    versions = [line for line in printed.splitlines() if "feedline" in line and " torch 2" in line]
    assert len(versions) == len(CONTESTS), "each table has its date and versions"
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "script.log"}


@pytest.mark.parametrize(
    ("first", "code", "last"), [("", 0, "all scripts ended"), ("raise SystemExit(3)", 1, "failed: prefetch.py")]
)
def test_one_command_runs_all_scripts_and_none_that_fails_stops_the_others(
    first: str, code: int, last: str, tmp_path: Path
) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "run.py").write_text((GPU / "run.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "gpu" / "prefetch.py").write_text(first, encoding="utf-8")
    for name in ("gpu/training.py", "gpu/decode.py", "gpu/resident.py", "gpu/bus.py", "batched_transforms.py"):
        (tmp_path / name).write_text("", encoding="utf-8")
    command = [sys.executable, str(tmp_path / "gpu" / "run.py"), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "decode.py: exit status 0" in done.stdout
    assert "resident.py: exit status 0" in done.stdout
    assert done.stdout.splitlines()[-1] == last
