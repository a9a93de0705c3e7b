"""The guard against debris finds all kinds of it, and accepts what may stay."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import debris
import pytest
from debris import DebrisGuard

from feedline.workers.process import fork_server


@pytest.fixture
def guard() -> DebrisGuard:
    return DebrisGuard()


def found(guard: DebrisGuard) -> list[str]:
    """The debris, without much time to go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(debris, "GRACE_S", 0.05)
        return guard.debris()


def test_a_test_without_resources_leaves_no_debris(guard: DebrisGuard) -> None:
    guard.check()


def test_a_process_is_found(guard: DebrisGuard) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert any(line.startswith(f"process {child.pid} (") for line in found(guard))
    guard.check()


def test_a_thread_is_found(guard: DebrisGuard) -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="straggler")
    thread.start()
    assert "thread straggler" in found(guard)
    leave.set()
    thread.join()
    guard.check()


def test_a_descriptor_is_found_even_under_a_number_that_was_used_before(tmp_path: Path) -> None:
    before = os.open(tmp_path, os.O_RDONLY)
    guard = DebrisGuard()
    os.close(before)
    after = os.open(__file__, os.O_RDONLY)
    assert after == before
    with pytest.raises(AssertionError, match=rf"left behind:\ndescriptor {after} -> {re.escape(__file__)}$"):
        guard.check()
    os.close(after)


def test_a_name_in_dev_shm_is_found(guard: DebrisGuard) -> None:
    name = Path(f"/dev/shm/feedline-test-{os.getpid()}")
    name.touch()
    assert str(name) in found(guard)
    name.unlink()


def test_a_name_in_dev_shm_that_goes_at_once_is_no_debris() -> None:
    guard = DebrisGuard()
    name = Path(f"/dev/shm/feedline-test-{os.getpid()}")
    name.touch()
    threading.Timer(0.1, name.unlink).start()
    guard.check()


def test_names_that_others_create_and_unlink_in_turn_are_no_debris(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as names of other test processes, which may exist at any time."""
    others = (f"sem.{number}" for number in itertools.count())
    monkeypatch.setattr(debris, "shared_names", lambda: {"ours before", next(others)})
    monkeypatch.setattr(debris, "_names_mapped_elsewhere", set)
    assert debris.left_names({"ours before"}) == set()


def test_a_name_that_goes_while_maps_are_read_is_no_debris(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"sem.0", "sem.1"}

    def unlink_while_reading() -> set[str]:
        names.remove("sem.0")
        return set()

    monkeypatch.setattr(debris, "GRACE_S", 0.0)
    monkeypatch.setattr(debris, "shared_names", lambda: set(names))
    monkeypatch.setattr(debris, "_names_mapped_elsewhere", unlink_while_reading)
    assert debris.left_names(set()) == {"sem.1"}


SHARE = """
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=1)
print(segment.name, flush=True)
input()
segment.unlink()
"""


def test_memory_shared_by_a_child_is_debris(guard: DebrisGuard) -> None:
    with _sharing([sys.executable, "-c", SHARE]) as name:
        assert f"/dev/shm/{name}" in found(guard)
    guard.check()


def test_memory_shared_by_another_process_is_no_debris(guard: DebrisGuard) -> None:
    orphan = 'exec 3<&0; "$0" -c "$1" <&3 &'
    with _sharing(["sh", "-c", orphan, sys.executable, SHARE]) as name:
        assert (Path("/dev/shm") / name).exists()
        assert f"/dev/shm/{name}" not in found(guard)


@contextlib.contextmanager
def _sharing(command: list[str]) -> Iterator[str]:
    """The name of memory that a process shares until the block ends."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        print(file=process.stdin, flush=True)
        process.stdout.read()


def test_allowed_resources_may_stay(guard: DebrisGuard) -> None:
    reader, writer = os.pipe()
    guard.allowed_descriptors.append(lambda fd, target: target.startswith("pipe:"))
    guard.check()
    os.close(reader)
    os.close(writer)


def test_the_fork_server_may_stay() -> None:
    fork_server.stop()
    guard = DebrisGuard()
    fork_server.start()
    guard.check()
