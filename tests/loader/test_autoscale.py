"""The worker count follows the wait of the loop."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from feedline.core.dataset import BatchRead, Traits
from feedline.core.telemetry import Span
from feedline.loader.autoscale import EVERY, Autoscale, kind_by_measurement
from feedline.loader.builder import BatchBuilder
from feedline.workers import PoolKind
from feedline.workers.registry import INLINE, PROCESSES, THREADS


def observe(tuner: Autoscale, work_ns: int, wait_ns: int, step_ns: int) -> int | None:
    spans = [Span("fetch", 0, work_ns), Span("wait", 0, wait_ns), Span("step", 0, step_ns)]
    decisions = [tuner.observe(spans) for _ in range(EVERY)]
    assert decisions[:-1] == [None] * (EVERY - 1)
    return decisions[-1]


def test_a_waiting_loop_gets_a_worker_more_until_the_ceiling() -> None:
    tuner = Autoscale(workers=1, ceiling=3)
    assert [observe(tuner, 100, 50, 50) for _ in range(3)] == [2, 3, None]


def test_idle_workers_leave_but_never_the_last() -> None:
    tuner = Autoscale(workers=3, ceiling=4)
    assert [observe(tuner, 50, 0, 100) for _ in range(3)] == [2, 1, None]


def test_a_fed_loop_with_busy_workers_is_left_alone() -> None:
    assert observe(Autoscale(workers=2, ceiling=4), 150, 1, 100) is None


class Cheap:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Sleepy(Cheap):
    """Releases the GIL, as input and output and native decoders do."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return index


class Shared(Cheap):
    """Says that threads can share the work on a batch; what two of them gain here does not matter then."""

    lock = threading.Lock()

    traits = Traits(supports_threads=True)

    def read_batch(self, request: BatchRead) -> torch.Tensor:
        with self.lock:
            time.sleep(0.002)
        return request.allocate((len(request.indices),), torch.int64).copy_(torch.from_numpy(request.indices))


@pytest.mark.alone  # compares how long two threads take
@pytest.mark.parametrize(
    ("dataset", "thread_safe", "expected"),
    [
        (Cheap(), True, INLINE),
        (Sleepy(), True, THREADS),
        (Sleepy(), False, PROCESSES),
        (Shared(), True, THREADS),
    ],
)
def test_the_method_comes_from_a_measurement(dataset: Cheap, thread_safe: bool, expected: PoolKind) -> None:
    assert kind_by_measurement(BatchBuilder(dataset), 8, None, thread_safe) == expected
