"""Statistics of a loader, derived figures, and their form in text."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from feedline.core.histogram import REORDER, add_counts, quantile_s
from feedline.core.store_metrics import StoreStatistics
from feedline.core.telemetry import CPU, LOCK, MAIN, NBYTES, PARTS, PLACES, RUN_DELAY, STEP_THREADS_DELAY, SWITCHES
from feedline.core.wrapping import columns, printable, wrap

_FLAT = (
    "batches", "samples", "samples_per_s", "batches_per_s", "wait_share", "wait_s", "step_s", "epoch", "position",
    "ready", "restarts", "skipped", "in_flight_nbytes", "worker_nbytes", "padding_share", "throttled_share",
    "read_nbytes_per_sample", "delivered_nbytes_per_sample",
    "decode_cpu_share",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of one stage."""

    count: int
    """Number of spans: one per batch, more where a batch is built in parts."""
    total_s: float
    """Sum over all workers; may exceed the wall time."""
    median_s: float
    """Median of the recent spans."""
    max_s: float
    workers: tuple[int, ...]
    """Numbers of the workers that the stage ran on; -1 is the training process."""
    cpu_s: float | None = None
    """Seconds of `total_s` on a CPU, estimated from the spans whose CPU time was measured; None if none was."""
    histogram: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """Numbers of spans per bin, with the bounds of `feedline.core.histogram`."""

    def quantile_s(self, share: float) -> float:
        """Quantile in seconds, exact to a tenth; 0.99 is the 99th percentile."""
        return min(quantile_s(self.histogram, share), self.max_s)

    def plus(self, other: StageTimes) -> StageTimes:
        """The times of both; the median is that of `self`."""
        return StageTimes(
            count=self.count + other.count,
            total_s=self.total_s + other.total_s,
            median_s=self.median_s,
            max_s=max(self.max_s, other.max_s),
            workers=tuple(sorted({*self.workers, *other.workers})),
            cpu_s=None if self.cpu_s is None or other.cpu_s is None else self.cpu_s + other.cpu_s,
            histogram=add_counts([times.histogram for times in (self, other) if times.histogram]),
        )

    @property
    def mean_s(self) -> float:
        """Mean seconds per span."""
        return self.total_s / self.count if self.count else 0.0

    @property
    def in_workers(self) -> bool:
        """True if the stage ran on workers."""
        return self.workers[-1:] > (MAIN,)


@dataclass(frozen=True, slots=True)
class SlowBatch:
    """Batch that took long to build."""

    stage: str
    """Its longest stage."""
    seconds: float
    """Seconds of that stage."""
    worker: int
    epoch: int
    number: int
    """Place in the epoch, from 0."""
    indices: Any = ()
    """The indices of its samples; empty for an iterable dataset."""
    address: str = ""
    """Address of its first sample, if the dataset has `address`."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a loader over all its epochs, returned by `loader.stats()`.

    Sums never restart. `since_epoch` has the same figures for the current epoch.
    """

    batches: int = 0
    """Batches received by the loop."""
    samples: int = 0
    """Samples in these batches; 0 if their number is unknown."""
    wall_s: float = 0.0
    """Seconds of waiting and computing, `wait_s + step_s`; those of a step count once it has ended."""
    wait_s: float = 0.0
    """Seconds the loop waited for batches, the current wait included."""
    startup_s: float = 0.0
    """Seconds of `wait_s` before the first batch, those in `iter(loader)` included."""
    closing_s: float = 0.0
    """Seconds from the end of an epoch until its workers had ended; not part of `wall_s`."""
    step_s: float = 0.0
    """Seconds of the loop's own work on its batches."""
    step_cpu_s: float | None = None
    """CPU seconds of that work; may exceed `step_s` where several threads compute. None if not measured."""
    run_delay_s: float = 0.0
    """Seconds in which the loop or a worker was ready to run while other programs used the CPUs."""
    lock_s: float | None = None
    """Mean seconds until a worker thread that has released Python's lock has it again; None without such threads."""
    loop_lock_s: float | None = None
    """The same for the thread of the loop, before its step; None without worker threads."""
    lock_share: float | None = None
    """Share of requests for Python's lock that found it in use, 0 to 1: the larger one of worker threads and loop; None
    without worker threads.
    """
    step_waits: float = 0.0
    """Mean number of times that a step stopped to wait: for a device, a file, a lock."""
    others_cpus: float | None = None
    """CPUs that other programs used during the epoch, of those that this process may use; None if not known."""
    stages: Mapping[str, StageTimes] = field(default_factory=dict)
    """Times of the stages that ran: "sample", "fetch", "collate", "serialize", "receive" and others."""
    loop: Mapping[str, StageTimes] = field(default_factory=dict)
    """Times of the loop: "wait" for a batch, and "step" between batches."""
    in_flight_nbytes: int = 0
    """Bytes of batches in flight, or still held by the loop."""
    arena_nbytes: int = 0
    """Bytes of transport memory of the workers."""
    copied_nbytes: int = 0
    """Bytes copied to the device, or to page-locked memory."""
    staged_nbytes: int = 0
    """Part of `copied_nbytes` first copied on the host, because it was not in page-locked memory."""
    copy_s: float = 0.0
    """Seconds the device spent on copies."""
    hidden_copy_s: float = 0.0
    """Part of `copy_s` in which the loop did not wait for copies."""
    device_decode_s: float = 0.0
    """Seconds of decoding images on the device, the transforms of `DecodeOnDevice` included."""
    hidden_device_decode_s: float = 0.0
    """Part of `device_decode_s` in which the loop did not wait for images."""
    decoded_on_device: int = 0
    """Images of `DecodeOnDevice` that this process has sent to an accelerator."""
    decode_fallbacks: int = 0
    """Part of `decoded_on_device` that the CPU had to decode."""
    decoded_by_workers: int = 0
    """Images of `DecodeOnDevice` that workers decoded as their `cpu_share`."""
    restarts: int = 0
    """Workers that died and were replaced."""
    skipped: int = 0
    """Samples that failed and were left out or replaced."""
    latest_skipped: tuple[tuple[int, int, Any], ...] = ()
    """Epoch, position in its order, and index of the latest of these samples, at most eight."""
    workers: int = 0
    """Live workers."""
    stores: StoreStatistics = field(default_factory=StoreStatistics)
    """Requests, retries, bytes and cache hits of all stores of this process and its workers."""
    epoch: int = 0
    """Number of the current epoch, from 0."""
    position: int = 0
    """Batches of the current epoch that the loop has received, those before a resume included."""
    length: int | None = None
    """Batches of an epoch on this rank; None if unknown."""
    ready: int = 0
    """Complete batches that waited for the loop at its latest request."""
    in_flight: int = 0
    """Requests whose batch the loop has not received."""
    slowest: tuple[SlowBatch, ...] = ()
    """The batches with the longest stages, longest first."""
    worker_nbytes: int = 0
    """Resident memory of the worker processes, shared pages included, in bytes."""
    worker_growth_nbytes: float | None = None
    """Growth of `worker_nbytes` per epoch; None before the end of the second epoch, and without worker processes."""
    read_nbytes: float | None = None
    """Mean bytes of files and objects that a batch has read; None if no file or store of feedline was read."""
    delivered_nbytes: float | None = None
    """Mean bytes of the tensors and arrays of a batch; None before the first batch was counted."""
    padding_share: float | None = None
    """Share of padding in batches with a mask or lengths, 0 to 1; None if there are none.

    Counting takes at most a hundredth of the time: in fast loops, of some of these batches.
    """
    uneven_share: float | None = None
    """Part of `padding_share` that batches of equally long samples would not have; None if there are none."""
    throttled_share: float | None = None
    """Share of the periods in which the CPU quota of the process's group was used up, since the first iteration; None
    without a quota.
    """
    contended_share: float | None = None
    """Share of the workers' time spent waiting for a lock that another worker holds, 0 to 1, from samples; None if
    unknown. Python's lock does not count.
    """
    outside_share: float | None = None
    """Share of the time of worker threads spent waiting for files, networks and their own threads, 0 to 1, from
    samples; None if unknown, and without worker threads.
    """
    step_outside_share: float | None = None
    """Share of the waits of the loop's own work that are not for Python's lock, 0 to 1, from samples; None if unknown,
    and without worker threads.
    """
    gpu_utilization: float | None = None
    """Share of the latest second of the loop in which its GPU computed, 0 to 1, by NVML; None if unknown."""
    since_epoch: Stats | None = None
    """The same figures since the current epoch began in this process; None before the first epoch."""

    def plus_loop(self, other: Stats) -> Stats:
        """The figures, with batches, samples and times of both loops."""
        sums = ("batches", "samples", "wall_s", "wait_s", "startup_s", "closing_s", "step_s", "run_delay_s")
        return replace(
            self,
            stages=_plus(self.stages, other.stages),
            loop=_plus(self.loop, other.loop),
            **{name: getattr(self, name) + getattr(other, name) for name in sums},
        )

    def __str__(self) -> str:
        """The main figures, wrapped for the terminal; `repr` has all."""
        amount = f"{count(self.batches, 'batch')}, {count(self.samples, 'sample')} in {seconds(self.wall_s)}"
        lines = [f"{amount}: {self.samples_per_s:,.0f} samples/s"]
        lines.append(f"waited {seconds(self.wait_s)} ({share(self.wait_share)}), the step took {seconds(self.step_s)}")
        for stage, times in self.stages.items():
            lines.append(f"{stage}: mean {seconds(times.mean_s)}, 99th percentile {seconds(times.quantile_s(0.99))}")
        if self.decode_cpu_share is not None:
            lines.append(f"images decoded by the CPU: {share(self.decode_cpu_share)}")
        if self.restarts or self.skipped:
            lines.append(f"{count(self.restarts, 'restart')} of workers, {count(self.skipped, 'sample')} skipped")
        width = columns()
        wrapped = [piece for line in lines for piece in wrap(line, width, subsequent_indent="  ")]
        return printable("\n".join(wrapped), getattr(sys.stdout, "encoding", None))

    @property
    def decode_cpu_share(self) -> float | None:
        """Share of the images of `DecodeOnDevice` that the CPU decoded.

        These are the images of the workers, and fallbacks. 0 to 1; None if no image was counted.
        """
        images = self.decoded_on_device + self.decoded_by_workers
        return (self.decoded_by_workers + self.decode_fallbacks) / images if images else None

    def flat(self, prefix: str = "feedline/") -> dict[str, float]:
        """Figures by name, for loggers of metrics.

        Figures without a value are left out.
        """
        numbers = {name: getattr(self, name) for name in _FLAT}
        for stage, times in {**self.stages, **self.loop}.items():
            name = re.sub(r"\W+", "_", stage)  # "read s3://bucket"
            numbers[f"{name}_mean_s"] = times.mean_s
            numbers[f"{name}_p99_s"] = times.quantile_s(0.99)
        return {prefix + name: float(number) for name, number in numbers.items() if number is not None}

    @property
    def samples_per_s(self) -> float:
        """Samples per second of wall time."""
        return self.samples / self.wall_s if self.wall_s else 0.0

    @property
    def batches_per_s(self) -> float:
        """Batches per second of wall time."""
        return self.batches / self.wall_s if self.wall_s else 0.0

    @property
    def read_nbytes_per_sample(self) -> float | None:
        """Mean bytes that a sample has read; None if unknown."""
        return self._per_sample(self.read_nbytes)

    @property
    def delivered_nbytes_per_sample(self) -> float | None:
        """Mean bytes of tensors and arrays per sample; None if unknown."""
        return self._per_sample(self.delivered_nbytes)

    def _per_sample(self, nbytes: float | None) -> float | None:
        return None if nbytes is None or not self.samples else nbytes * self.batches / self.samples

    @property
    def wait_share(self) -> float:
        """Waiting time as a share of the wall time, 0 to 1."""
        return self.wait_s / self.wall_s if self.wall_s else 0.0


_OTHER_CLOCKS = (RUN_DELAY, STEP_THREADS_DELAY, LOCK, PARTS)


def _plus(times: Mapping[str, StageTimes], others: Mapping[str, StageTimes]) -> dict[str, StageTimes]:
    both = {stage: each.plus(others[stage]) if stage in others else each for stage, each in times.items()}
    return {**others, **both}


def is_wall(stage: str) -> bool:
    """True for stages on the wall clock."""
    return stage not in _OTHER_CLOCKS and not stage.endswith((CPU, SWITCHES, NBYTES, PLACES))


def is_block(stage: str) -> bool:
    """True for stages that follow each other, or nest, in their worker."""
    return is_wall(stage) and stage != REORDER


_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def seconds(value: float) -> str:
    """A duration with its unit: "1.2 s", "80 ms", "350 µs"."""
    for unit, name in _UNITS:
        if value >= 0.995 * unit:
            return f"{_digits(value / unit)} {name}"
    return "0 s" if value <= 0 else "under 1 µs"


def share(value: float) -> str:
    """A share in percent; below 10 % with one decimal."""
    percent = 100 * value
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def size(nbytes: float) -> str:
    """Bytes in the largest unit with a value of at least one."""
    for unit, name in _SIZES:
        if nbytes >= unit:
            return f"{_digits(nbytes / unit)} {name}"
    return f"{nbytes:.0f} bytes"


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 worker", "2,000 workers", "no worker"."""
    if number == 1:
        return f"1 {noun}"
    if not number:
        return f"no {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('tch') else 's'}"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"
