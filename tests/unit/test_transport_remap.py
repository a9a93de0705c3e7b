"""Freezing a dataset makes its large arrays part of the frozen file, and nobody can tell but by the memory in use."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feedline.transport import freeze, pages, remap, shared, thaw
from feedline.transport.memory import Piece, take_place
from feedline.transport.pages import Stretches, doubtful

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="nothing is remapped elsewhere"),
    pytest.mark.alone,  # a thread of the test runner that is not seen to wait keeps everything as it is
]

MIB = 1 << 20
PAGE = mmap.PAGESIZE
LARGE = 40 * MIB
"""Always a mapping of its own: glibc's malloc takes up to 32 MiB from its heap, depending on what was freed before."""


@pytest.fixture(autouse=True)
def only_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that earlier tests left in this process are none of these tests' business."""
    earlier = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    frames = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: {k: v for k, v in frames().items() if k not in earlier})


def address_of(memory: Any) -> int:
    return memory.data_ptr() if isinstance(memory, torch.Tensor) else memory.__array_interface__["data"][0]


def file_nbytes(memory: Any) -> int:
    """How much of an array's memory is mapped from an anonymous file."""
    start, found = address_of(memory), 0
    stop = start + memory.nbytes
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "/memfd:" in line:
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                found += max(0, min(stop, high) - max(start, low))
    return found


def is_remapped(memory: Any) -> bool:
    """All of its whole pages are."""
    start = address_of(memory)
    return file_nbytes(memory) == (start + memory.nbytes) // PAGE * PAGE + -start // PAGE * PAGE


def weigh(field: str, pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


@contextmanager
def child(act: Callable[[], object]) -> Iterator[int]:
    """A forked child that has done something, and lives as long as the block."""
    done, ready = os.pipe()
    stay, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go)
            kept = act()
            os.write(ready, b"x")
            os.read(stay, 1)
            del kept
        finally:
            os._exit(0)
    os.close(ready)
    assert os.read(done, 1) == b"x"
    try:
        yield pid
    finally:
        os.close(go)
        os.waitpid(pid, 0)
        os.close(done)
        os.close(stay)


def made(nbytes: int = LARGE) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).random(nbytes // 4, np.float32)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_array_is_counted_once_for_both_processes() -> None:
    before = weigh("Pss")
    dataset = {"x": made(64 * MIB)}

    def read() -> Any:
        assert frozen.fd is not None
        thawed = thaw(frozen.fd, frozen.skeleton)
        thawed["x"].sum()
        return thawed

    with freeze(dataset) as frozen, child(read) as pid:
        dataset["x"].sum()
        assert 60 * MIB < weigh("Pss") + weigh("Pss", pid) - before < 96 * MIB


def two_of_one_base() -> list[Any]:
    base = made()
    return [base[: len(base) // 3], base[len(base) // 2 :]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [made()],
        lambda: [made(LARGE + 4)],
        lambda: [made().reshape(-1, 1024).T],
        lambda: [torch.randn(LARGE // 4)],
        lambda: [torch.randn(LARGE // 4).numpy()],
        lambda: [torch.from_numpy(made())],
        lambda: [torch.nn.Parameter(torch.randn(1024, LARGE // 4096)).data],
        lambda: [torch.randn(LARGE // 2)[:, None][LARGE // 4 :]],
        lambda: [made(), torch.randn(LARGE // 4)],
        two_of_one_base,
    ],
    ids=[
        "array",
        "odd size",
        "transposed",
        "tensor",
        "array of a tensor",
        "tensor of an array",
        "parameter",
        "second half",
        "array and tensor",
        "two of one base",
    ],
)
def test_values_stay(make: Callable[[], list[Any]]) -> None:
    things = make()
    copies = [np.copy(thing.numpy() if isinstance(thing, torch.Tensor) else thing) for thing in things]
    with freeze(things) as frozen:
        assert all(is_remapped(thing) for thing in things)
        assert frozen.matches(things)
        thawed = thaw(frozen.fd, frozen.skeleton)
    for thing, copy, arrived in zip(things, copies, thawed, strict=True):
        np.testing.assert_array_equal(thing, copy)
        np.testing.assert_array_equal(arrived, copy)


def test_a_dataset_lives_on_when_all_is_closed() -> None:
    tensor = torch.arange(LARGE // 8)
    freeze(tensor).close()
    assert is_remapped(tensor)
    tensor += 1
    assert tensor[0] == 1
    assert tensor.sum() == len(tensor) * (len(tensor) + 1) // 2


def test_nobody_sees_what_the_other_writes() -> None:
    x = made()
    copy = x.copy()
    with freeze(x) as frozen:
        before, after = thaw(frozen.fd, frozen.skeleton), thaw(frozen.fd, frozen.skeleton)
        np.testing.assert_array_equal(before, copy)
        x[:] = 7
        np.testing.assert_array_equal(before, copy)
        np.testing.assert_array_equal(after, copy)
        before[:] = 8
        np.testing.assert_array_equal(after, copy)
        assert (x == 7).all()


def test_arrays_are_sliced_resized_and_freed_as_before() -> None:
    before = weigh("Pss_Shmem")
    x = made()
    copy = x.copy()
    freeze(x).close()
    part = x[1000:-1000].copy()
    np.testing.assert_array_equal(part, copy[1000:-1000])
    x.resize(2 * len(copy), refcheck=False)
    np.testing.assert_array_equal(x[: len(copy)], copy)
    assert not x[len(copy) :].any()
    freeze(x).close()
    assert is_remapped(x)
    x.resize(len(copy) // 2, refcheck=False)
    np.testing.assert_array_equal(x, copy[: len(x)])
    del x
    assert weigh("Pss_Shmem") - before < MIB


def test_the_memory_goes_with_the_array() -> None:
    x, tensor = made(), torch.randn(LARGE // 4)
    freeze([x, tensor]).close()
    before, in_files = weigh("Rss"), weigh("Pss_Shmem")
    del x, tensor
    assert before - weigh("Rss") > 1.9 * LARGE
    assert in_files - weigh("Pss_Shmem") > 1.9 * LARGE


def test_a_second_freeze_takes_the_place_of_the_first() -> None:
    x = made()
    in_files = weigh("Pss_Shmem")
    with freeze(x) as first:
        x[5] = 3
        assert not first.matches(x)
        with freeze(x) as second:
            assert is_remapped(x)
            assert second.matches(x)
            assert not second.matches(first)
            assert thaw(second.fd, second.skeleton)[5] == 3
    assert x[5] == 3
    assert weigh("Pss_Shmem") - in_files < 1.1 * LARGE


def test_matching_is_by_content() -> None:
    x = made()
    with freeze(x) as frozen:
        assert frozen.matches(x)
        assert frozen.matches(x.copy())
        x[7 * MIB] += 1
        assert not frozen.matches(x)
        x[7 * MIB] -= 1
        assert frozen.matches(made())
        assert frozen.matches(x) == np.array_equal(x, made())
    assert not frozen.matches(x)


def test_matching_does_not_depend_on_where_things_lie() -> None:
    block = np.zeros(8 * MIB, np.uint8)
    with freeze(block[16 : 16 + 4 * MIB]) as frozen:
        assert frozen.matches(block[1040 : 1040 + 4 * MIB])
        assert not frozen.matches(block[1040 : 1056 + 4 * MIB])


def test_pages_that_are_the_files_own_are_not_compared() -> None:
    x = made()
    with freeze(x) as frozen:
        assert frozen.fd is not None
        whole = Piece(address_of(x) % PAGE, address_of(x), x.nbytes)
        assert nbytes_of(doubtful(frozen.fd, [whole])) < 2 * PAGE
        elsewhere = whole._replace(offset=whole.offset + PAGE)
        assert list(doubtful(frozen.fd, [elsewhere])) == [elsewhere]
        x[PAGE] = 0
        assert list(doubtful(frozen.fd, [whole])) == [whole]
        half = x.nbytes // 2
        first, second = whole._replace(nbytes=half), Piece(whole.offset + half, whole.address + half, half)
        assert list(doubtful(frozen.fd, [first])) == [first]
        assert nbytes_of(doubtful(frozen.fd, [second])) < 2 * PAGE


def nbytes_of(pieces: Iterator[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)


def test_small_arrays_and_those_of_the_heap_are_left_alone() -> None:
    del (block := [np.ones(31 * MIB, np.uint8)])[0]  # from now on malloc takes what is smaller from its heap
    assert not block
    things = [np.ones(4 * MIB, np.uint8), torch.ones(2 * MIB), np.ones(MIB - 1, np.uint8)]
    with freeze(things) as frozen:
        assert not any(map(file_nbytes, things))
        assert frozen.matches(things)


def test_memory_of_others_is_left_alone() -> None:
    block = bytearray(LARGE)
    things = [np.frombuffer(block, np.uint8), np.frombuffer(bytes(LARGE), np.uint8)]
    freeze(things).close()
    assert not any(map(file_nbytes, things))


def test_locked_memory_is_left_alone() -> None:
    x = made()
    page = ctypes.c_void_p(address_of(x) // PAGE * PAGE + 10 * PAGE)
    assert ctypes.CDLL(None).mlock(page, ctypes.c_size_t(PAGE)) == 0
    freeze(x).close()
    assert file_nbytes(x) == 0


def test_pinned_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, tensor = made(), torch.ones(LARGE // 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() // PAGE == 1 + address_of(x) // PAGE)
    freeze([x, tensor]).close()
    assert file_nbytes(x) == 0
    assert is_remapped(tensor)


def test_an_array_that_changes_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.zeros(LARGE, np.uint8), np.zeros(LARGE, np.uint8)
    sealed_file = shared.sealed_file

    def interrupted(nbytes: int, pieces: list[Piece]) -> int:
        fd = sealed_file(nbytes, pieces)
        x[-2 * PAGE] = 5
        return fd

    monkeypatch.setattr(shared, "sealed_file", interrupted)
    with freeze([x, y]) as frozen:
        assert not any(thing.any() for thing in thaw(frozen.fd, frozen.skeleton))
    assert np.flatnonzero(x).tolist() == [LARGE - 2 * PAGE]
    assert is_remapped(y)


def test_threads_that_wait_are_no_hindrance() -> None:
    things = [made(), torch.ones(LARGE // 4)]
    condition, started = threading.Condition(), threading.Event()

    def wait() -> None:
        with condition:
            started.set()
            condition.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    with condition:  # it waits, as it has released the condition
        pass
    freeze(things).close()
    with condition:
        condition.notify()
    thread.join()
    assert all(map(is_remapped, things))


def test_what_a_thread_may_be_writing_to_is_left_alone() -> None:
    x, fixed, tensor = made(), made(), torch.ones(LARGE // 4)
    fixed.flags.writeable = False
    queue: SimpleQueue[None] = SimpleQueue()
    thread = threading.Thread(target=queue.get)  # native code that has unlocked the interpreter
    thread.start()
    freeze([x, fixed, tensor]).close()
    queue.put(None)
    thread.join()
    assert is_remapped(fixed)
    assert file_nbytes(x) == file_nbytes(tensor) == 0


def test_without_proc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Any:
        raise FileNotFoundError("/proc")

    monkeypatch.setattr(remap, "plain_memory", missing)
    monkeypatch.setattr(pages, "_mapped_from", missing)
    x = made()
    with freeze(x) as frozen:
        assert file_nbytes(x) == 0
        assert frozen.matches(x)
        x[0] = 2
        assert not frozen.matches(x)


def test_what_cannot_be_mapped_stays() -> None:
    x = made()
    assert not take_place(-1, Piece(0, -(-address_of(x) // PAGE) * PAGE, PAGE))
    np.testing.assert_array_equal(x, made())


@given(st.lists(st.integers(1, 5), max_size=20), st.integers(0, 60), st.integers(1, 10))
def test_stretches_cover_what_was_added(steps: list[int], start: int, length: int) -> None:
    stretches, known, at = Stretches(), set[int](), 0
    for number, step in enumerate(steps):
        if number % 3:
            stretches.add(at, at + step)
            known.update(range(at, at + step))
        at += step
    assert stretches.cover(start, start + length) == known.issuperset(range(start, start + length))
