"""Batches never pass through /dev/shm: one megabyte of it is as good as any."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).with_name("shm_training.py")
IN_A_SMALL_SHM = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec"
WITHIN_S = 180


def in_a_small_shm(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a mount namespace of its own whose /dev/shm holds one megabyte."""
    inner = ["sh", "-c", f'{IN_A_SMALL_SHM} "$@"', "sh", *command]
    return subprocess.run(["unshare", "--mount", *inner], capture_output=True, text=True, timeout=WITHIN_S, check=False)


def may_unshare() -> bool:
    return shutil.which("unshare") is not None and in_a_small_shm("true").returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="a mount namespace of its own needs root")
def test_large_batches_with_a_dev_shm_of_one_megabyte() -> None:
    done = in_a_small_shm(sys.executable, "-W", "ignore:This DataLoader will create", str(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{12 * 256 * 3 * 224 * 224} bytes\n"
