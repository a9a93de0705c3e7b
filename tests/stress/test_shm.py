"""Batches never pass through /dev/shm, of which one megabyte is enough, and loaders need no root privileges."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from preloaded import Preloaded

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).with_name("shm_training.py")
CONTAINED = Path(__file__).with_name("container_training.py")
WITHIN_S = 180


CONTAINER = """
mount --make-rprivate /
mount -t tmpfs -o size=64k tmpfs /dev/shm
mount -t tmpfs tmpfs "$XDG_CACHE_HOME"
mount -t tmpfs tmpfs "$TMPDIR"
mount -o remount,bind,ro /
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""
"""A read-only root, two volumes, and no capabilities: without them, root is an ordinary user."""


def in_a_container(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in what `deploy/kubernetes/pod.yaml` describes, as far as namespaces alone can."""
    volumes = {name: folder / name for name in ("XDG_CACHE_HOME", "TMPDIR", "HOME")}
    for volume in volumes.values():
        volume.mkdir()
    isolated = ["unshare", "--mount", "--ipc", "--uts", "sh", "-ec", CONTAINER, "sh", *command]
    environment = {**os.environ, **{name: str(volume) for name, volume in volumes.items()}}
    return subprocess.run(
        isolated, capture_output=True, text=True, timeout=WITHIN_S, check=False, env=environment, cwd="/"
    )


def may_contain() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return (
            may_unshare()
            and shutil.which("setpriv") is not None
            and in_a_container(Path(folder), "true").returncode == 0
        )


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="a mount namespace of its own needs root")
def test_large_batches_with_a_dev_shm_of_one_megabyte(preloaded: Preloaded, tmp_path: Path) -> None:
    code = preloaded.run(SCRIPT, log := tmp_path / "output.log", WITHIN_S)
    assert (code, log.read_text()) == (0, f"{12 * 64 * 3 * 224 * 224} bytes\n")


@pytest.mark.skipif(not may_contain(), reason="namespaces of its own need root")
def test_a_run_in_a_hardened_container() -> None:
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        check_hardened_container(Path(folder))


def check_hardened_container(folder: Path) -> None:
    shards = folder / "shards"
    shards.mkdir()
    for number in range(2):
        with tarfile.open(shards / f"{number}.tar", "w") as tar:
            for name in ("a.cls", "b.cls"):
                info = tarfile.TarInfo(name)
                info.size = 1
                tar.addfile(info, io.BytesIO(b"1"))
    warnings = "-Wignore:This DataLoader will create"
    done = in_a_container(folder, sys.executable, warnings, str(CONTAINED), str(shards))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "writable": [], "capabilities": 0, "equal": [True] * 3, "samples": 4, "indexed": True,
        "temporary": str(folder / "TMPDIR"), "services": ["good", "good"], "cache": "good",
    }  # fmt: skip
