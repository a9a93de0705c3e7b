"""The guard against debris sees all kinds of it, and knows what may stay."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import debris
from debris import DebrisGuard
from feedline.workers import nursery


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> DebrisGuard:
    monkeypatch.setattr(debris, "GRACE_S", 0.05)
    return DebrisGuard()


def test_nothing_is_debris_of_nothing(guard: DebrisGuard) -> None:
    guard.check()


def test_a_process_is_found(guard: DebrisGuard) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = guard.debris()
        assert any(line.startswith(f"process {child.pid} (") for line in found)
    guard.check()


def test_a_thread_is_found(guard: DebrisGuard) -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="straggler")
    thread.start()
    with pytest.raises(AssertionError, match="thread straggler"):
        guard.check()
    leave.set()
    thread.join()
    guard.check()


def test_a_descriptor_is_found_even_under_a_number_that_was_used_before(tmp_path: Path) -> None:
    before = os.open(tmp_path, os.O_RDONLY)
    guard = DebrisGuard()
    os.close(before)
    after = os.open(__file__, os.O_RDONLY)
    assert after == before
    assert guard.debris() == [f"descriptor {after} -> {__file__}"]
    os.close(after)


def test_a_name_in_dev_shm_is_found(guard: DebrisGuard) -> None:
    name = Path(f"/dev/shm/feedline-test-{os.getpid()}")
    name.touch()
    assert str(name) in guard.debris()
    name.unlink()


def test_what_is_allowed_may_stay(guard: DebrisGuard) -> None:
    reader, writer = os.pipe()
    guard.allowed_descriptors.append(lambda fd, target: target.startswith("pipe:"))
    guard.check()
    os.close(reader)
    os.close(writer)


def test_the_nursery_may_stay() -> None:
    nursery.stop()
    guard = DebrisGuard()
    nursery.start()
    guard.check()
