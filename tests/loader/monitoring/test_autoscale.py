"""The worker count follows the model of the loop."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from simulated_pipeline import Pipeline

from feedline.core.dataset import BatchRead, Traits
from feedline.loader.building.builder import BatchBuilder
from feedline.loader.monitoring.autoscale import LEAST_INTERVAL_NS, Autoscale, kind_by_measurement
from feedline.workers import PoolKind
from feedline.workers.registry import INLINE, PROCESSES, THREADS


def decided(pipeline: Pipeline, tuner: Autoscale) -> int | None:
    """The first decision about a simulated loop."""
    recent = pipeline.run().recent
    decisions = [tuner.observe(spans) for _ in range(4) for spans in recent]
    return next((decision for decision in decisions if decision is not None), None)


def settled(pipeline: Pipeline, ceiling: int = 32) -> int:
    """The number of workers at which the count stays."""
    tuner = Autoscale(pipeline.workers, ceiling, replace(pipeline.context(), round_robin=False))
    for _ in range(8):
        found = decided(replace(pipeline, workers=tuner.workers), tuner)
        if found is None:
            break
    return tuner.workers


WAITING = Pipeline(fetch=(40, 1), step=(5, 1), workers=2, prefetch=2, cpus=2, batches=90)


def test_samples_that_wait_get_more_workers_than_there_are_cpus() -> None:
    assert 6 <= settled(WAITING) <= 12


def test_the_ceiling_holds() -> None:
    assert settled(WAITING, ceiling=3) == 3


def test_samples_that_compute_get_as_many_workers_as_the_cpus_serve() -> None:
    assert settled(replace(WAITING, fetch=(0, 30), workers=1)) <= 3


def test_idle_workers_leave_but_never_the_last() -> None:
    assert settled(replace(WAITING, fetch=(2, 1), step=(20, 1), workers=8)) == 1


def test_one_decision_doubles_or_halves_at_most() -> None:
    tuner = Autoscale(2, 32, WAITING.context())
    assert decided(WAITING, tuner) == 4


def test_decisions_become_rare_while_nothing_changes() -> None:
    fed = replace(WAITING, fetch=(4, 1), step=(20, 1), workers=1)
    tuner = Autoscale(1, 32, fed.context())
    for _ in range(4):
        assert decided(fed, tuner) is None
    assert tuner._interval_ns > 2 * LEAST_INTERVAL_NS


class VirtualTime:
    """A clock that advances only when a thread sleeps by it."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.together = threading.Barrier(2, timeout=60)

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        """Advance the clock once for both threads of a pool, which must sleep at the same time."""
        if threading.current_thread() is threading.main_thread() or self.together.wait() == 0:
            self.now_ns += int(seconds * 1e9)

    def occupy(self, seconds: float) -> None:
        """Advance the clock for each thread separately."""
        self.now_ns += int(seconds * 1e9)


CLOCK = VirtualTime()


class Cheap:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Sleepy(Cheap):
    """Releases the GIL, as input and output and native decoders do."""

    def __getitem__(self, index: int) -> int:
        CLOCK.sleep(0.002)
        return index


class Busy(Cheap):
    """Holds the GIL."""

    lock = threading.Lock()

    def __getitem__(self, index: int) -> int:
        with self.lock:
            CLOCK.occupy(0.002)
        return index


class Shared(Cheap):
    """Declares that threads can share the work on a batch; the gain of two threads does not matter then."""

    traits = Traits(supports_threads=True)

    def read_batch(self, request: BatchRead) -> torch.Tensor:
        CLOCK.occupy(0.002)
        return request.allocate((len(request.indices),), torch.int64).copy_(torch.from_numpy(request.indices))


@pytest.mark.parametrize(
    ("dataset", "thread_safe", "expected"),
    [
        (Cheap(), True, INLINE),
        (Sleepy(), True, THREADS),
        (Sleepy(), False, PROCESSES),
        (Busy(), True, PROCESSES),
        (Shared(), True, THREADS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Cheap) else None,
)
def test_the_method_comes_from_a_measurement(
    monkeypatch: pytest.MonkeyPatch, dataset: Cheap, thread_safe: bool, expected: PoolKind
) -> None:
    monkeypatch.setattr("feedline.loader.monitoring.autoscale.perf_counter_ns", CLOCK)
    assert kind_by_measurement(BatchBuilder(dataset), 8, None, thread_safe) == expected
