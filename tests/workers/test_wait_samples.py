"""The waits of worker threads, sampled while the loop waits."""

from __future__ import annotations

import random
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import pytest

from feedline.core import proc
from feedline.core.proc import ThreadWait
from feedline.workers import wait_samples
from feedline.workers.wait_samples import ProcessSamples, SampleTimes, ThreadSamples


@pytest.mark.skipif(proc._FUTEX != "202", reason="the numbers below are those of x86-64")
@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("running", ThreadWait()),
        ("202 0x7f 0x189 0x0 0x7ffc 0x0 0xffffffff 0x7f 0x7f", ThreadWait()),  # Python's lock
        ("202 0x7f 0x80 0x2 0x0 0x0 0x0 0x7f 0x7f", ThreadWait()),  # its mutex
        ("202 0x7f 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f", ThreadWait(0x7F, is_outside=True)),  # any other
        ("0 0x3 0x7f 0x10 0x0 0x0 0x0 0x7f 0x7f", ThreadWait(is_outside=True)),  # reads a file
        ("-1 0x7f 0x7f", ThreadWait(is_outside=True)),  # touches a page of a mapped file
    ],
)
def test_the_wait_of_a_thread_is_known_by_its_system_call(call: str, found: ThreadWait, tmp_path: Path) -> None:
    task = tmp_path / "self" / "task" / "7"
    task.mkdir(parents=True)
    (task / "syscall").write_text(call)
    assert proc.wait_of_thread(7, tmp_path) == found
    assert proc.wait_of_thread(8, tmp_path) is None


@pytest.mark.skipif(proc._FUTEX != "202", reason="the numbers below are those of x86-64")
@pytest.mark.parametrize(("argument", "found"), [(0x7060, 0x55), (0x7000, 0x7040), (0x9060, 0x7040)])
def test_a_thread_parked_at_a_semaphore_on_its_stack_waits_for_the_lock_of_its_entry(
    argument: int, found: int, tmp_path: Path
) -> None:
    """As for each lock of Python 3.13; an entry has an argument that is on the same stack."""
    task = tmp_path / "self" / "task" / "7"
    task.mkdir(parents=True)
    (task / "syscall").write_text("202 0x7040 0x189 0x0 0x0 0x0 0xffffffff 0x7008 0x7f")
    (tmp_path / "self" / "mem").write_bytes(bytes(0x7030) + struct.pack("QQ", argument, 0x55))
    assert proc.wait_of_thread(7, tmp_path) == ThreadWait(found, is_outside=True)


@contextmanager
def working(number: int, work: Callable[[], None]) -> Iterator[set[int]]:
    """Native ids of threads that do this work again and again."""
    ended, threads = threading.Event(), set[int]()

    def run() -> None:
        threads.add(threading.get_native_id())
        while not ended.is_set():
            work()

    started = [threading.Thread(target=run) for _ in range(number)]
    try:
        for thread in started:
            thread.start()
        while len(threads) < number:
            time.sleep(0.001)
        yield threads
    finally:
        ended.set()
        for thread in started:
            thread.join()


@contextmanager
def switching_often() -> Iterator[None]:
    """Let a thread that computes give up Python's lock soon, so that the samples take less time."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def shares_of(number: int, work: Callable[[], None]) -> tuple[float, float]:
    """Contended and outside share of threads, over a hundred samples."""
    with working(number, work) as threads, switching_often():
        samples = ThreadSamples(threads)
        while samples._number < 100 * number:
            time.sleep(0.02 * random.random())
            samples.take()
        contended, outside = samples.contended_share, samples.outside_share
    assert contended is not None
    assert outside is not None
    return contended, outside


def test_threads_that_share_a_lock_wait_for_it_and_its_holder_for_a_file() -> None:
    lock = threading.Lock()

    def hold() -> None:
        with lock:
            time.sleep(0.002)

    contended, outside = shares_of(4, hold)
    assert 0.5 < contended < 0.9  # one of four has it
    assert 0.02 < outside < 0.5  # a thread that has slept waits for a CPU, too


def test_threads_with_locks_of_their_own_do_not_contend() -> None:
    """As a thread that waits for helpers of its own, which will release it."""

    kept = threading.local()

    def wait_long() -> None:
        if not hasattr(kept, "done"):  # kept, so that no two threads have a lock at one address in turn
            kept.done = threading.Lock()
        kept.done.acquire(timeout=0)
        helper = threading.Timer(0.005, kept.done.release)
        helper.start()
        kept.done.acquire()
        helper.join()

    contended, outside = shares_of(3, wait_long)
    assert contended < 0.2
    assert outside > 0.5


def test_threads_that_compute_wait_for_nothing_outside() -> None:
    contended, outside = shares_of(3, lambda: [sum(range(1000)) for _ in range(20)] and None)
    assert contended < 0.05
    assert outside < 0.1


def step_share(step: Callable[[], object]) -> float:
    """Share of waits outside of a step next to two threads that compute, over fifty samples."""

    samples = ThreadSamples(set())

    def build() -> None:
        sum(range(2000))
        samples._step_due_s = 0.0
        samples.take_of_step()

    with switching_often(), working(2, build):
        samples.begin_step()
        while samples._steps < 50:
            step()
        samples.end_step()
    assert samples.step_outside_share is not None
    return samples.step_outside_share


def test_a_step_that_sleeps_waits_outside() -> None:
    assert step_share(lambda: time.sleep(0.05)) > 0.5


def test_a_step_that_computes_waits_for_the_lock_of_python_only() -> None:
    assert step_share(lambda: sum(range(2000))) < 0.1


def test_a_loop_that_waits_for_a_batch_has_no_step() -> None:
    samples = ThreadSamples(set())
    for _ in range(20):
        samples.take_of_step()
    samples.begin_step()
    samples.end_step()
    samples.take_of_step()
    assert samples._steps == 0
    assert samples.step_outside_share is None


def test_few_samples_are_unknown_and_short_waits_are_left_alone() -> None:
    samples = ThreadSamples({threading.get_native_id()})
    assert samples.contended_share is None
    assert samples.outside_share is None
    assert samples.next_s() == inf, "the usual wait is not known"
    for _ in range(50):
        samples.add_wait(0.0001)
    assert samples.next_s() == inf, "too short to be divided"


@pytest.mark.parametrize(
    ("waits_s", "step_s"),
    [([0.8], 0.05), ([0.001, 0.04], 0.002), ([0.01], 0.01), ([0.003, 0.003, 0.1], 0.0)],
    ids=["long", "short and long", "as long as steps", "bursts"],
)
def test_samples_are_spread_evenly_over_the_time_of_all_waits(
    waits_s: list[float], step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of several workers may arrive in pairs: a long wait then follows a short one."""
    now_s = 100.0
    monkeypatch.setattr(wait_samples, "monotonic", lambda: now_s)
    monkeypatch.setattr(wait_samples, "thread_time", lambda: now_s)
    times, found = SampleTimes(), list[float]()
    times.add_wait(100.0)
    while len(found) < 400:
        before_s = 0.0
        for wait_s in waits_s:
            began_s, ended_s = now_s, now_s + wait_s
            while (sample_s := times.next_s()) < ended_s:
                now_s = sample_s
                found.append(before_s + sample_s - began_s)
                times._end_sample(now_s)
            times.add_wait(wait_s)
            before_s += wait_s
            now_s = ended_s + step_s
    whole_s = sum(waits_s)
    for share in (0.25, 0.5, 0.75):
        assert sum(place < share * whole_s for place in found) / len(found) == pytest.approx(share, abs=0.06)


def test_samples_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(wait_samples, "monotonic", lambda: now_s)
    monkeypatch.setattr(wait_samples, "thread_time", lambda: now_s)
    times = SampleTimes()
    times.add_wait(100.0)
    for _ in range(20):
        began_s = now_s = times.next_s()
        now_s += 0.001  # with many workers
        times._end_sample(began_s)
        assert times.next_s() - now_s >= 0.2


def test_processes_that_wait_are_counted_and_another_number_of_them_starts_from_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait_samples, "waits_for_lock", {1: True, 2: False, 3: True, 4: None}.get)
    samples = ProcessSamples()
    for _ in range(8):
        assert samples.contended_share is None
        samples.take([1, 2, 4], 4)  # 4 has ended
    assert samples.contended_share == 0.5
    for _ in range(16):
        samples.take([3], 2)
    assert samples.contended_share == 1.0
