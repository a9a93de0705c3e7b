"""Model of a loop, calibrated by its batches, and predicted gains."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple, Self

from feedline.loader.report.context import Context, SendingCost
from feedline.loader.report.measured import WORK, Measured
from feedline.loader.report.replay import (
    INLINE,
    PROCESS,
    SWITCH_S,
    THREAD,
    BatchTimes,
    EngineSetting,
    Machine,
    Task,
    replay,
    replay_step,
)

STAGES = ("sample", *WORK, "decode")
"""Stages that a prediction can remove."""


HOP_S = {INLINE: 0.0, THREAD: 30e-6, PROCESS: 150e-6}
"""Seconds per batch between loop and workers that no stage contains: queues, sockets and wake-ups."""


TRANSPORT = Task(0.0, 100e-6)
"""Assumed time to pack, and to unpack, a batch where it was not measured: see `Context.sending`."""


START_S = 0.1
"""Assumed seconds until the first batch of worker processes, if none have been started yet."""


START_CPU_S = 0.04
"""CPU seconds for the start of a worker process."""


ROBBED = 0.05
"""Share of run delay above which other programs may explain the rest of the time."""


UNKNOWN_GIL = 0.5
"""Assumed share of computing under Python's lock, if no measurement shows it."""


REPLICATES = 12
"""Number of resampled recordings that give the range of a gain."""


BLOCK = 16
"""Consecutive batches that a resampled recording keeps together: a slow moment affects several."""


Change = Callable[[BatchTimes], BatchTimes]


class Gain(NamedTuple):
    """Speed-up of the whole loop, with the range that the recording allows."""

    gain: float
    low: float
    high: float


class Case(NamedTuple):
    """Loop to be replayed, as a change of the present one."""

    setting: EngineSetting
    machine: Machine
    change: Change | None = None

    def period_s(self, batches: Sequence[BatchTimes]) -> float:
        """Seconds from batch to batch."""
        changed = batches if self.change is None else [self.change(batch) for batch in batches]
        return replay(changed, self.setting, self.machine)


@dataclass(frozen=True)
class Model:
    """Replay of the recorded batches on the machine that explains them."""

    measured: Measured
    context: Context
    machine: Machine
    explained_share: float
    """Share of the waiting that the replay reproduces without fitting, 0 to 1."""
    has_ranges: bool = True
    """False omits the ranges of gains, which take most of the replays."""

    @classmethod
    def of(cls, measured: Measured, context: Context, *, has_ranges: bool = True) -> Self:
        """Calibrate: locks, then CPUs that others leave, then what is left."""
        setting = context.setting
        measured = _with_contention(measured, setting)
        measured, machine = _with_lock(measured, context)
        expected_s = replay(measured.batches, setting, machine)
        if expected_s < 0.97 * measured.period_s and measured.delay_share > ROBBED:
            machine = _with_others(measured, setting, machine)
            expected_s = replay(measured.batches, setting, machine)
        measured, late_s = _with_late_steps(measured, setting, machine, measured.period_s - expected_s)
        missing_s = min(max(measured.period_s - expected_s - late_s, 0.0), measured.wait_s)
        # The run delay of tasks that mostly wait comes after their waiting, where no replay has it; it was measured.
        unknown_s = max(missing_s - measured.delayed_s / max(setting.num_workers, 1), 0.0)
        explained = 1.0 if measured.wait_s <= 0 else min(max(1 - unknown_s / measured.wait_s, 0.0), 1.0)
        if missing_s > 0.01 * measured.period_s:
            machine = _with_latency(measured, setting, machine, machine.latency_s + missing_s)
        return cls(measured, context, machine, explained, has_ranges)

    @property
    def is_throttled(self) -> bool:
        """True if a CPU quota limits the loop."""
        return _is_throttled(self.measured, self.context)

    @property
    def twice_the_cpus(self) -> Machine:
        """The machine with twice the quota."""
        return replace(self.machine, cpus=2 * self.machine.cpus)

    @cached_property
    def present(self) -> Case:
        """The present loop."""
        return Case(self.context.setting, self.machine)

    @cached_property
    def now_s(self) -> float:
        """Seconds from batch to batch in the replay of the present."""
        return self.present.period_s(self.measured.batches)

    def gain(self, case: Case) -> float:
        """Speed-up of the whole loop, start-up included."""
        if case not in self._gains:  # several remedies ask for the same numbers of workers
            after_s = case.period_s(self.measured.batches)
            self._gains[case] = self._epoch_gain(self.now_s, after_s, case.setting)
        return self._gains[case]

    @cached_property
    def _gains(self) -> dict[Case, float]:
        return {}

    def range_of(self, case: Case, other: Case | None = None) -> Gain:
        """The gain with its range, from resampled batches.

        `other` is the same change under another assumption about the machine, which widens the range.
        """
        if not self.has_ranges:
            return Gain(gain := self.gain(case), gain, gain)
        gains = sorted(
            self._epoch_gain(before_s, case.period_s(batches), case.setting) for batches, before_s in self._replicates
        )
        error = 0.02 + min(abs(self.now_s / self.measured.period_s - 1) / 2, 0.2) if self.measured.period_s else 0.02
        gain = self.gain(case)
        edges = [gain, gains[1] * (1 - error), gains[-2] * (1 + error)]
        edges += [] if other is None else [self.gain(other)]
        return Gain(gain, min(edges), max(edges))

    def removal(self, stage: str) -> Case:
        """The loop if a stage took no time."""
        if stage == "latency":
            return Case(self.present.setting, replace(self.machine, latency_s=0.0))
        return self.present._replace(change=lambda batch: batch.without(stage))

    @cached_property
    def removal_gains(self) -> dict[str, float]:
        """Gain for each stage if it took no time."""
        present = [stage for stage in STAGES if self.measured.mean(stage).alone_s > 0]
        return {stage: self.gain(self.removal(stage)) for stage in present}

    @cached_property
    def free_gain(self) -> float:
        """Gain if data took no time: the headroom of the loop."""
        case = Case(self.present.setting, replace(self.machine, latency_s=0.0), BatchTimes.free)
        step_s = case.period_s(self.measured.batches)
        return self.now_s / step_s if step_s > 0 else _MOST_GAIN

    @cached_property
    def data_gain(self) -> float:
        """Speed of the data alone, as a multiple of the loop's."""
        data_s = self.present._replace(change=lambda batch: batch.without("step")).period_s(self.measured.batches)
        return self.now_s / data_s if data_s > 0 else _MOST_GAIN

    def with_setting(self, setting: EngineSetting) -> Case:
        """The loop with other arguments, on the same machine."""
        before = self.present.setting
        if before.method == setting.method:
            return Case(setting, self.machine)
        machine = replace(self.machine, latency_s=HOP_S[setting.method])
        if setting.method == THREAD:
            machine = replace(machine, gil=UNKNOWN_GIL if self.context.fetches_many else 1.0)
        return Case(setting, machine, _change_transport(setting.method, self.context.sending))

    @property
    def startup_s(self) -> float:
        """Start and end of an epoch's workers.

        That is the wait for the first batch, without the building of it.
        """
        first_s = fmean(sum(task.alone_s for task in batch.work.values()) for batch in self.measured.batches)
        return max(self.measured.startup_s - first_s, 0.0) + self.measured.closing_s

    def without_startup(self) -> float:
        """Gain of an epoch whose workers run already."""
        whole_s = self.startup_s + self._epoch_batches * self.now_s
        return whole_s / (self._epoch_batches * self.now_s) if self.now_s > 0 else 1.0

    @property
    def _epoch_batches(self) -> int:
        return max(self.context.epoch_batches or _LONG, 1)

    def _epoch_gain(self, before_s: float, after_s: float, setting: EngineSetting) -> float:
        """Ratio of the times of an epoch, each with its start-up."""
        before_s += self._start_s(self.present.setting) / self._epoch_batches
        after_s += self._start_s(setting) / self._epoch_batches
        return min(before_s / max(after_s, before_s / _MOST_GAIN), _MOST_GAIN)

    def _start_s(self, setting: EngineSetting) -> float:
        """Seconds for the start and the end of an epoch's workers."""
        before = self.present.setting
        if self.context.persistent_workers:
            return 0.0
        if setting.method == before.method:
            further = max(setting.num_workers - before.num_workers, 0) if setting.method == PROCESS else 0
            return self.startup_s + further * self._further_s
        return START_S * self._stretch + setting.num_workers * self._further_s if setting.method == PROCESS else 0.0

    @property
    def _stretch(self) -> float:
        return 1 / max(1 - self.measured.delay_share, _LEAST_SHARE)

    @property
    def _further_s(self) -> float:
        """Seconds for the start of another process."""
        return START_CPU_S * self._stretch / self.context.cpus

    @cached_property
    def _replicates(self) -> list[tuple[list[BatchTimes], float]]:
        """Resampled recordings, each with its period in the present."""
        source = random.Random(0)
        resampled = [_resample(self.measured.batches, source) for _ in range(REPLICATES)]
        return [(batches, self.present.period_s(batches)) for batches in resampled]


_LONG = 1_000_000
"""Assumed number of batches of an epoch of unknown length."""


_MOST_GAIN = 1000.0


_LEAST_SHARE = 0.2
"""Lower bound for the share of time in which a starting process runs."""


def _with_contention(measured: Measured, setting: EngineSetting) -> Measured:
    """Separate waiting for a lock of other workers from other waiting.

    Workers that often wait for each other keep the lock in use: one of n holds it at any time, so a batch holds it for
    an n-th of its time.
    """
    workers, waited = setting.num_workers, measured.contended_share
    fetch = measured.mean("fetch")
    if setting.method != PROCESS or workers < 2 or waited < CONTENDED or not fetch.wait_s:
        return measured
    built_s = sum(measured.mean(stage).alone_s for stage in WORK)
    lock_s = min(waited * built_s, fetch.wait_s)
    left, held = 1 - lock_s / fetch.wait_s, 1 / workers

    def separated(batch: BatchTimes) -> BatchTimes:
        task = batch.work.get("fetch", Task())
        whole_s = sum(each.alone_s for each in batch.work.values())
        return replace(
            batch, work={**batch.work, "fetch": task._replace(wait_s=left * task.wait_s, held_s=held * whole_s)}
        )

    return replace(measured, batches=tuple(map(separated, measured.batches)))


CONTENDED = 0.15
"""Share of the workers' time in which they wait for a lock from which it counts as always in use."""


def _with_lock(measured: Measured, context: Context) -> tuple[Measured, Machine]:
    """Separate waiting for Python's lock, or a quota, from other waiting.

    A resource that is in use nearly all the time explains the waiting of tasks that compute. The replay then derives
    this waiting from the computing alone, for any number of tasks.
    """
    setting = context.setting
    takes = max(measured.step_waits / SWITCHES_PER_TAKE, 1.0)
    machine = Machine(context.cpus, UNKNOWN_GIL, takes, HOP_S[setting.method])
    used = measured.concurrency
    if _is_throttled(measured, context):
        measured = _only_computing(measured)
        # What the loop computes outside all stages takes a part of the quota, too.
        return measured, _with_cpus(measured, setting, machine, _LEAST_SHARE * context.cpus)
    if setting.method != THREAD or context.cpus <= 1:
        return measured, machine
    if used > 1.2:  # the lock is held by one thread at a time, so a part of the work does without it
        return measured, replace(machine, gil=min(UNKNOWN_GIL, 1 / used))
    if not _waits_for_lock(measured, setting):
        return measured, machine
    machine = replace(machine, gil=1.0)
    measured = _only_computing(measured)
    return _with_locked_steps(measured, setting, machine), machine


def _is_throttled(measured: Measured, context: Context) -> bool:
    """True if a quota stops the loop, which uses most of it."""
    return context.throttled and measured.concurrency > _MOST_OF_QUOTA * context.cpus


def _waits_for_lock(measured: Measured, setting: EngineSetting) -> bool:
    """True if worker threads wait for Python's lock, and not for files."""
    work = [measured.mean(stage) for stage in WORK]
    wait_s, cpu_s = sum(task.wait_s for task in work), sum(task.cpu_s for task in work)
    if wait_s > cpu_s / _LOCKED:
        return False
    if measured.lock_s is not None or measured.loop_lock_s is not None:
        # With n threads, the probe of a worker waits for n - 1 others.
        workers = setting.num_workers / 2
        return (measured.lock_s or 0.0) > _HELD * SWITCH_S * workers or (measured.loop_lock_s or 0.0) > _HELD * SWITCH_S
    if setting.num_workers < 2:
        return False
    # The lock is also in use while its holder is ready to run, and others have the CPUs.
    held = measured.concurrency + measured.delayed_s / measured.period_s
    return held > _IN_USE and wait_s > _LOCKED * cpu_s


def _with_locked_steps(measured: Measured, setting: EngineSetting, machine: Machine) -> Measured:
    """Steps without their waits for the lock.

    A replay with the lock gives the measured ones.
    """
    low, high = 0.0, measured.mean("step").wait_s
    if replay_step(measured.batches, setting, machine) <= measured.step_s:
        return measured
    for _ in range(_STEPS):
        middle = (low + high) / 2
        batches = [batch.later(-middle) for batch in measured.batches]
        if replay_step(batches, setting, machine) > measured.step_s:
            low = middle
        else:
            high = middle
    return replace(measured, batches=tuple(batch.later(-low) for batch in measured.batches))


SWITCHES_PER_TAKE = 3.0
"""Waits that the kernel counts where a step waits for a device, and then for Python's lock.

The second wait is two: it asks for the lock after one interval.
"""


_HELD = 0.15
"""Share of the longest wait for Python's lock from which a probe shows that others compute with it."""


_MOST_OF_QUOTA = 0.5
"""Share of a used-up quota that the stages must have used for the quota to be the limit."""


_IN_USE = 0.8
"""Share of the time above which a resource counts as always in use."""


_LOCKED = 0.2
"""Largest ratio of waiting to CPU time, and of CPU time to waiting, at which a thread may wait for the lock rather than
for a file.
"""


def _only_computing(measured: Measured) -> Measured:
    batches = tuple(
        replace(batch, work={stage: task._replace(wait_s=0.0) for stage, task in batch.work.items()})
        for batch in measured.batches
    )
    return replace(measured, batches=batches)


def _with_others(measured: Measured, setting: EngineSetting, machine: Machine) -> Machine:
    """The machine with as many CPUs as explain the period.

    It has at least those that others do not use.
    """
    others = machine.cpus if measured.others_cpus is None else measured.others_cpus
    return _with_cpus(measured, setting, machine, max(machine.cpus / 20, machine.cpus - others))


def _with_cpus(measured: Measured, setting: EngineSetting, machine: Machine, low: float) -> Machine:
    """The machine with the CPUs that explain the period.

    They are at least `low`.
    """
    high = machine.cpus
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if replay(measured.batches, setting, replace(machine, cpus=middle)) > measured.period_s:
            low = middle
        else:
            high = middle
    return replace(machine, cpus=high)


def _with_late_steps(
    measured: Measured, setting: EngineSetting, machine: Machine, missing_s: float
) -> tuple[Measured, float]:
    """Steps that take as long as measured, and the seconds added.

    A step that sleeps is woken late if other tasks have the CPUs. That is not waiting for data.
    """
    free = [batch.free() for batch in measured.batches]
    late_s = min(missing_s, measured.step_s - replay(free, setting, replace(machine, latency_s=0.0)))
    if late_s <= 0:
        return measured, 0.0
    return replace(measured, batches=tuple(batch.later(late_s) for batch in measured.batches)), late_s


def _with_latency(measured: Measured, setting: EngineSetting, machine: Machine, most_s: float) -> Machine:
    """The machine with a wait per batch that gives the measured period."""
    low, high = machine.latency_s, 2 * most_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if replay(measured.batches, setting, replace(machine, latency_s=middle)) < measured.period_s:
            low = middle
        else:
            high = middle
    return replace(machine, latency_s=low)


_STEPS = 9
"""Bisections: the last interval is a 500th of the first."""


def _change_transport(method: str, sending: SendingCost | None) -> Change:
    """Change of a batch that comes from another kind of pool."""

    def change(batch: BatchTimes) -> BatchTimes:
        work = {stage: task for stage, task in batch.work.items() if stage != "encode"}
        if method == PROCESS:
            packing, unpacking = sending or (TRANSPORT, TRANSPORT)
            return replace(batch, work={**work, "encode": packing}, decode=unpacking)
        return replace(batch, work=work, decode=Task())

    return change


def _resample(batches: Sequence[BatchTimes], source: random.Random) -> list[BatchTimes]:
    """Blocks of batches, drawn with replacement."""
    number = len(batches)
    starts = (source.randrange(number) for _ in range(0, number, BLOCK))
    return [batches[(start + step) % number] for start in starts for step in range(min(BLOCK, number))]
