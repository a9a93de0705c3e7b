"""Model of a loop, calibrated by its batches, and predicted gains."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple, Self

from feedline.loader.report.context import Context
from feedline.loader.report.measured import WORK, Measured
from feedline.loader.report.replay import INLINE, PROCESS, THREAD, BatchTimes, EngineSetting, Machine, Task, replay

STAGES = ("sample", *WORK, "decode")
"""Stages that a prediction can remove."""


HOP_S = {INLINE: 0.0, THREAD: 30e-6, PROCESS: 150e-6}
"""Seconds per batch between loop and workers that no stage contains: queues, sockets and wake-ups."""


TRANSPORT = Task(0.0, 100e-6)
"""Packing, and also unpacking, of a batch that was never sent between processes."""


START_S = 0.1
"""Seconds until the first batch of worker processes, where none were started yet."""


START_CPU_S = 0.04
"""CPU seconds for the start of a worker process."""


ROBBED = 0.05
"""Share of run delay from which other programs may explain what the model does not."""


UNKNOWN_GIL = 0.5
"""Share of computing under Python's lock where nothing shows it."""


REPLICATES = 12
"""Resampled recordings of which the spread of a gain comes."""


BLOCK = 16
"""Batches in a row that a replicate keeps together: a slow moment hits several."""


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
    """Share of the waiting that the replay gives without any fitting, 0 to 1."""
    has_ranges: bool = True
    """False: gains have no range, which takes most of the replays."""

    @classmethod
    def of(cls, measured: Measured, context: Context, *, has_ranges: bool = True) -> Self:
        """Calibrate: lock, then CPUs that others leave, then what is left."""
        setting = context.setting
        measured, machine = _with_lock(measured, context)
        expected_s = replay(measured.batches, setting, machine)
        if expected_s < 0.97 * measured.period_s and measured.delay_share > ROBBED:
            machine = _with_others(measured, setting, machine)
            expected_s = replay(measured.batches, setting, machine)
        measured, late_s = _with_late_steps(measured, setting, machine, measured.period_s - expected_s)
        missing_s = min(max(measured.period_s - expected_s - late_s, 0.0), measured.wait_s)
        explained = 1.0 if measured.wait_s <= 0 else min(max(1 - missing_s / measured.wait_s, 0.0), 1.0)
        if missing_s > 0.01 * measured.period_s:
            machine = _with_hop(measured, setting, machine, machine.hop_s + missing_s)
        return cls(measured, context, machine, explained, has_ranges)

    @cached_property
    def present(self) -> Case:
        """The loop as it is."""
        return Case(self.context.setting, self.machine)

    @cached_property
    def now_s(self) -> float:
        """Seconds from batch to batch in the replay of the present."""
        return self.present.period_s(self.measured.batches)

    def gain(self, case: Case) -> float:
        """Speed-up of the whole loop, start-up included."""
        return self._weighed(self.now_s, case.period_s(self.measured.batches), case.setting)

    def range_of(self, case: Case, other: Case | None = None) -> Gain:
        """The gain with its range, from resampled batches.

        `other` is the same change under another assumption about the machine, which widens the range.
        """
        if not self.has_ranges:
            return Gain(gain := self.gain(case), gain, gain)
        gains = sorted(
            self._weighed(before_s, case.period_s(batches), case.setting) for batches, before_s in self._replicates
        )
        error = 0.02 + min(abs(self.now_s / self.measured.period_s - 1) / 2, 0.2) if self.measured.period_s else 0.02
        gain = self.gain(case)
        edges = [gain, gains[1] * (1 - error), gains[-2] * (1 + error)]
        edges += [] if other is None else [self.gain(other)]
        return Gain(gain, min(edges), max(edges))

    def removal(self, stage: str) -> Case:
        """The loop if a stage took no time."""
        if stage == "hop":
            return Case(self.present.setting, replace(self.machine, hop_s=0.0))
        return self.present._replace(change=lambda batch: batch.without(stage))

    @cached_property
    def removal_gains(self) -> dict[str, float]:
        """Gain for each stage if it took no time."""
        present = [stage for stage in STAGES if self.measured.mean(stage).alone_s > 0]
        return {stage: self.gain(self.removal(stage)) for stage in present}

    @cached_property
    def free_gain(self) -> float:
        """Gain if data took no time: the headroom of the loop."""
        case = Case(self.present.setting, replace(self.machine, hop_s=0.0), BatchTimes.free)
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
        machine = replace(self.machine, hop_s=HOP_S[setting.method])
        if setting.method == THREAD:
            machine = replace(machine, gil=UNKNOWN_GIL if self.context.many_at_once else 1.0)
        return Case(setting, machine, _transported(setting.method))

    @property
    def startup_s(self) -> float:
        """Wait for the first batch, without the building of it."""
        first_s = fmean(sum(task.alone_s for task in batch.work.values()) for batch in self.measured.batches)
        return max(self.measured.startup_s - first_s, 0.0)

    def without_startup(self) -> float:
        """Gain of an epoch whose workers run already."""
        whole_s = self.startup_s + self._epoch_batches * self.now_s
        return whole_s / (self._epoch_batches * self.now_s) if self.now_s > 0 else 1.0

    @property
    def _epoch_batches(self) -> int:
        return max(self.context.epoch_batches or _LONG, 1)

    def _weighed(self, before_s: float, after_s: float, setting: EngineSetting) -> float:
        """Ratio of the times of an epoch, each with its start-up."""
        startup_s = 0.0 if self.context.persistent_workers else self.startup_s
        after_s += self._start_s(setting) / self._epoch_batches
        startup_s /= self._epoch_batches
        return min((startup_s + before_s) / max(startup_s + after_s, before_s / _MOST_GAIN), _MOST_GAIN)

    def _start_s(self, setting: EngineSetting) -> float:
        """Seconds of an epoch that the start of further processes takes."""
        if setting.method != PROCESS or self.context.persistent_workers:
            return 0.0
        stretch = 1 / max(1 - self.measured.delay_share, _LEAST_SHARE)
        further_s = START_CPU_S * stretch / self.context.cpus
        if self.present.setting.method != PROCESS:
            return START_S * stretch + setting.num_workers * further_s
        return max(setting.num_workers - self.present.setting.num_workers, 0) * further_s

    @cached_property
    def _replicates(self) -> list[tuple[list[BatchTimes], float]]:
        """Resampled recordings, each with its period in the present."""
        source = random.Random(0)
        resampled = [_resampled(self.measured.batches, source) for _ in range(REPLICATES)]
        return [(batches, self.present.period_s(batches)) for batches in resampled]


_LONG = 1_000_000
"""Batches of an epoch of unknown length."""


_MOST_GAIN = 1000.0


_LEAST_SHARE = 0.2
"""Least share of its computing time for which a starting process is taken to run."""


def _with_lock(measured: Measured, context: Context) -> tuple[Measured, Machine]:
    """Separate waiting for Python's lock, or a quota, from other waiting.

    A resource that is in use nearly all the time explains the waiting of those who compute: the replay computes it
    from the computing alone, and for any other number of them.
    """
    setting = context.setting
    machine = Machine(context.cpus, UNKNOWN_GIL, HOP_S[setting.method])
    used = measured.concurrency
    if context.throttled and used > _IN_USE * context.cpus:
        return _only_computing(measured), machine
    if setting.method != THREAD or setting.num_workers < 2 or context.cpus <= 1:
        return measured, machine
    # The lock is also in use while its holder is ready to run, and others have the CPUs.
    held = used + measured.delayed_s / measured.period_s
    if used > 1.2:  # the lock is held by one thread at a time, so a part of the work does without it
        return measured, replace(machine, gil=min(UNKNOWN_GIL, 1 / used))
    work = [measured.mean(stage) for stage in WORK]
    wait_s, cpu_s = sum(task.wait_s for task in work), sum(task.cpu_s for task in work)
    if held > _IN_USE and _LOCKED * cpu_s < wait_s < cpu_s / _LOCKED:
        return _only_computing(measured), replace(machine, gil=1.0)
    return measured, machine


_IN_USE = 0.8
"""Share of the time from which a resource counts as in use all the time."""


_LOCKED = 0.2
"""Waiting per CPU time, and its inverse, between which a thread may wait for the lock rather than for a file."""


def _only_computing(measured: Measured) -> Measured:
    batches = tuple(
        replace(batch, work={stage: task._replace(wait_s=0.0) for stage, task in batch.work.items()})
        for batch in measured.batches
    )
    return replace(measured, batches=batches)


def _with_others(measured: Measured, setting: EngineSetting, machine: Machine) -> Machine:
    """The machine with as many CPUs as explain the period."""
    low, high = machine.cpus / 20, machine.cpus
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

    A step that sleeps is woken late where others have the CPUs; that is no waiting for data.
    """
    free = [batch.free() for batch in measured.batches]
    late_s = min(missing_s, measured.step_s - replay(free, setting, replace(machine, hop_s=0.0)))
    if late_s <= 0:
        return measured, 0.0
    batches = tuple(
        replace(batch, step=batch.step._replace(wait_s=batch.step.wait_s + late_s)) for batch in measured.batches
    )
    return replace(measured, batches=batches), late_s


def _with_hop(measured: Measured, setting: EngineSetting, machine: Machine, most_s: float) -> Machine:
    """The machine with a wait per batch that gives the measured period."""
    low, high = machine.hop_s, 2 * most_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if replay(measured.batches, setting, replace(machine, hop_s=middle)) < measured.period_s:
            low = middle
        else:
            high = middle
    return replace(machine, hop_s=low)


_STEPS = 9
"""Bisections: the last interval is a 500th of the first."""


def _transported(method: str) -> Change:
    """Change of a batch that comes from another kind of pool."""

    def change(batch: BatchTimes) -> BatchTimes:
        work = {stage: task for stage, task in batch.work.items() if stage != "encode"}
        if method == PROCESS:
            return replace(batch, work={**work, "encode": TRANSPORT}, decode=TRANSPORT)
        return replace(batch, work=work, decode=Task())

    return change


def _resampled(batches: Sequence[BatchTimes], source: random.Random) -> list[BatchTimes]:
    """Blocks of batches, drawn with replacement."""
    number = len(batches)
    starts = (source.randrange(number) for _ in range(0, number, BLOCK))
    return [batches[(start + step) % number] for start in starts for step in range(min(BLOCK, number))]
