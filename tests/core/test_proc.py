"""CPU time and memory of process trees."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from feedline.core import proc


def test_cpu_and_memory_of_children_count() -> None:
    program = "import time; sum(range(10**7)); x = bytearray(50_000_000); print(flush=True); time.sleep(60)"
    cpu = proc.tree_cpu_s(os.getpid())
    memory = proc.tree_nbytes(os.getpid())
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in proc.descendants(os.getpid())
        assert proc.tree_cpu_s(os.getpid()) > cpu + 0.01
        assert proc.tree_nbytes(os.getpid()) > memory + 40_000_000
        child.kill()
    assert proc.tree_cpu_s(1 << 30) == proc.tree_nbytes(1 << 30) == 0


@pytest.mark.skipif(proc._FUTEX != "202", reason="the numbers below are those of x86-64")
@pytest.mark.parametrize(
    ("call", "waits"),
    [
        ("running", False),
        ("202 0x7f 0x109 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", True),  # a semaphore of multiprocessing
        ("202 0x7f 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", False),  # a lock of threads
        ("202 0x7f 0x109 0x0 0x7ffc 0x0 0xffffffff 0x7f 0x7f", False),  # with a limit
        ("73 0x3 0x2 0x0 0x0 0x0 0x0 0x7f 0x7f", True),
        ("72 0x3 0x7 0x7f 0x0 0x0 0x0 0x7f 0x7f", True),
        ("72 0x3 0x6 0x7f 0x0 0x0 0x0 0x7f 0x7f", False),  # does not wait
        ("230 0x1 0x1 0x7f 0x0 0x0 0x0 0x7f 0x7f", False),  # sleeps
    ],
)
def test_a_wait_for_another_process_is_known_by_its_system_call(call: str, waits: bool, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "syscall").write_text(call)
    assert proc.waits_for_lock(7, tmp_path) is waits
    assert proc.waits_for_lock(8, tmp_path) is None


def test_a_process_that_waits_for_a_file_lock_is_seen(tmp_path: Path) -> None:
    program = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX)"
    path = tmp_path / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with subprocess.Popen([sys.executable, "-S", "-c", program, path]) as child:
            while not proc.waits_for_lock(child.pid):
                assert child.poll() is None
                time.sleep(0.005)
            fcntl.flock(file, fcntl.LOCK_UN)
