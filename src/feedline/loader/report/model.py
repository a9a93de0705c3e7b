"""Model of a loop, calibrated by its batches, and predicted gains."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple, Self

from feedline.loader.report.calibration import ASSUMED_GIL_SHARE, HOP_S, LEAST_SHARE, calibrate, is_throttled
from feedline.loader.report.context import Context, SendingCost
from feedline.loader.report.measured import BUILD_STAGES, TURN, Measured
from feedline.loader.report.replay import PROCESS, THREAD, BatchTimes, EngineSetting, Machine, Task, replay

STAGES = ("sample", *BUILD_STAGES, "receive", "copy", "device_decode", "device_transform")
"""Stages that a prediction can remove."""


TRANSPORT = Task(0.0, 100e-6)
"""Assumed time to pack, and to unpack, a batch where it was not measured: see `Context.sending`."""


START_S = 0.1
"""Assumed seconds until the first batch of worker processes, if none have been started yet."""


START_CPU_S = 0.04
"""CPU seconds for the start of a worker process."""


REPLICATES = 6
"""Number of resampled recordings; their least and greatest gain are the range.

Five sevenths of further recordings are expected to lie within it, as between the second least and the second greatest
of twelve, which would take twice as long.
"""


BLOCK = 16
"""Consecutive batches that a resampled recording keeps together: a slow moment affects several."""


TimesChange = Callable[[BatchTimes], BatchTimes]


class Gain(NamedTuple):
    """Speed-up of the whole loop, with the range that the recording allows."""

    gain: float
    low: float
    high: float


class Case(NamedTuple):
    """Loop to be replayed, as a change of the present one."""

    setting: EngineSetting
    machine: Machine
    change: TimesChange | None = None

    def apply(self, batches: Sequence[BatchTimes]) -> Sequence[BatchTimes]:
        """The batches with the change."""
        return batches if self.change is None else [self.change(batch) for batch in batches]


@dataclass(frozen=True)
class Model:
    """Replay of the recorded batches on the machine that explains them."""

    measured: Measured
    machine: Machine
    explained_share: float
    """See `Calibration`."""
    context: Context
    has_ranges: bool = True
    """False omits the ranges of gains, which take most of the replays."""

    @classmethod
    def of(cls, measured: Measured, context: Context, *, has_ranges: bool = True) -> Self:
        """The model of a recorded loop; see `calibrate`."""
        return cls(*calibrate(measured, context), context, has_ranges)

    @property
    def is_throttled(self) -> bool:
        """True if a CPU quota limits the loop."""
        return is_throttled(self.measured, self.context)

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
        return self._period_s(self.present, self.measured.batches)

    @cached_property
    def are_steps_crowded(self) -> bool:
        """True if threads of the steps wait for CPUs that workers have."""
        measured, context = self.measured, self.context
        is_crowded = context.step_threads + context.num_workers > context.cpus
        is_late = measured.step_threads_delay_s > _DELAYED_SHARE * measured.step_s > 0
        return context.step_threads > 1 and is_crowded and is_late and self.present.setting.method == PROCESS

    def _period_s(self, case: Case, batches: Sequence[BatchTimes]) -> float:
        """Seconds from batch to batch."""
        changed = case.apply(batches)
        if self.are_steps_crowded and (case.change is not None or case.setting.method != PROCESS):
            changed = self._relieve_steps(batches, changed, has_workers=case.setting.method == PROCESS)
        return replay(changed, case.setting, case.machine)

    def _relieve_steps(
        self, batches: Sequence[BatchTimes], changed: Sequence[BatchTimes], *, has_workers: bool
    ) -> Sequence[BatchTimes]:
        """Batches whose steps are as much faster as workers compute less."""
        before_s, after_s = (sum(batch.whole_work.cpu_s for batch in each) for each in (batches, changed))
        left = min(after_s / before_s, 1.0) if before_s and has_workers else 0.0
        fastest_s = self.measured.fastest_step_s

        def relieved(before: BatchTimes, after: BatchTimes) -> BatchTimes:
            more_s = before.step.alone_s - fastest_s
            if after.step != before.step or more_s <= 0:
                return after
            return after.with_step(fastest_s + left * more_s, before.step.width)

        return list(map(relieved, batches, changed))

    def gain(self, case: Case) -> float:
        """Speed-up of the whole loop, start-up included."""
        if case not in self._gains:  # several remedies ask for the same numbers of workers
            after_s = self._period_s(case, self.measured.batches)
            self._gains[case] = self._epoch_gain(self.now_s, after_s, case.setting)
        return self._gains[case]

    @cached_property
    def _gains(self) -> dict[Case, float]:
        return {}

    def range_of(self, case: Case, *others: Case) -> Gain:
        """The gain with its range, from resampled batches.

        `others` are the same change under other assumptions about the machine, which widen the range.
        """
        if not self.has_ranges:
            return Gain(gain := self.gain(case), gain, gain)
        gains = [
            self._epoch_gain(before_s, self._period_s(case, batches), case.setting)
            for batches, before_s in self._replicates
        ]
        error = 0.02 + min(abs(self.now_s / self.measured.period_s - 1) / 2, 0.2) if self.measured.period_s else 0.02
        gain = self.gain(case)
        edges = [gain, min(gains) * (1 - error), max(gains) * (1 + error)]
        edges += map(self.gain, others)
        return Gain(gain, min(edges), max(edges))

    def removal(self, stage: str) -> Case:
        """The loop if a stage took no time.

        The stage "latency" stands for `Machine.latency_s`.
        """
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
        case = Case(self.present.setting, replace(self.machine, latency_s=0.0), BatchTimes.only_step)
        step_s = self._period_s(case, self.measured.batches)
        return self.now_s / step_s if step_s > 0 else _MOST_GAIN

    @cached_property
    def lock_gain(self) -> float:
        """Gain if workers had no lock in common."""
        return self.gain(self.unlocked(self.present)) if self.measured.mean("fetch").held_s else 1.0

    @property
    def is_locked(self) -> bool:
        """True if a lock of workers is worth naming."""
        return self.lock_gain >= _LEAST_LOCK_GAIN

    @staticmethod
    def unlocked(case: Case) -> Case:
        """The case, in which workers have no lock in common."""
        return case._replace(change=BatchTimes.without_exclusion)

    @cached_property
    def data_gain(self) -> float:
        """Speed of the data alone, as a multiple of the loop's."""
        case = self.present._replace(change=lambda batch: batch.without("step"))
        data_s = self._period_s(case, self.measured.batches)
        return self.now_s / data_s if data_s > 0 else _MOST_GAIN

    def with_setting(self, setting: EngineSetting) -> Case:
        """The loop with other arguments.

        With another kind of pool, the costs of transport, of wake-ups and of Python's lock change, too.
        """
        before, machine = (
            self.present.setting,
            replace(self.machine, cpus=min(self.machine.cpus, self.cpus_together(WORTH_EXPECTED))),
        )
        if before.method == setting.method:
            return Case(setting, machine)
        machine = replace(machine, latency_s=HOP_S[setting.method])
        if setting.method == THREAD:
            machine = replace(machine, gil_share=ASSUMED_GIL_SHARE if self.context.fetches_many else 1.0)
        transport = _change_transport(setting.method, self.context.sending)
        if before.method == THREAD:  # each process has the locks of threads for itself
            return Case(setting, machine, lambda batch: transport(batch.without_exclusion()))
        return Case(setting, machine, transport)

    def cpus_together(self, worth: float) -> float:
        """CPUs that compute together, each worth a share of one alone.

        As many as compute now are as fast as they are now.
        """
        return max(worth * self.context.cpus, self.measured.concurrency)

    @property
    def startup_s(self) -> float:
        """Seconds for the start and the end of an epoch's workers.

        The start is the wait for the first batch, without the time of listing the order and of building the batch.
        """
        first_s = fmean(sum(task.alone_s for task in batch.work.values()) for batch in self.measured.batches)
        return max(self.measured.startup_s - self.measured.listing_s - first_s, 0.0) + self.measured.closing_s

    def without_startup(self) -> float:
        """Gain of an epoch whose workers run already."""
        epoch_s = self.measured.listing_s + self._epoch_batches * self.now_s
        return (self.startup_s + epoch_s) / epoch_s if epoch_s > 0 else 1.0

    @property
    def _epoch_batches(self) -> int:
        return max(self.context.epoch_batches or _ASSUMED_EPOCH_BATCHES, 1)

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
            return self.startup_s + further * self._worker_start_s
        return (
            START_S * self._stretch + setting.num_workers * self._worker_start_s if setting.method == PROCESS else 0.0
        )

    @property
    def _stretch(self) -> float:
        return 1 / max(1 - self.measured.delay_share, LEAST_SHARE)

    @property
    def _worker_start_s(self) -> float:
        """Seconds for the start of one more worker process."""
        return START_CPU_S * self._stretch / self.context.cpus

    @cached_property
    def _replicates(self) -> list[tuple[list[BatchTimes], float]]:
        """Resampled recordings, each with its period in the present."""
        source = random.Random(0)
        resampled = [_resample(self.measured.batches, source) for _ in range(REPLICATES)]
        return [(batches, self._period_s(self.present, batches)) for batches in resampled]


_ASSUMED_EPOCH_BATCHES = 1_000_000
"""Assumed number of batches of an epoch of unknown length."""


_MOST_GAIN = 1000.0


_LEAST_LOCK_GAIN = 1.1
"""Gain without a lock of workers below which other limits are named."""


WORTH_EXPECTED = 0.85
"""Speed of a CPU while all others compute, too, as a share of its speed alone.

Between 1, and that of two threads of one core: see `feedline.loader.report.doubts.WORTH_TOGETHER`.
"""


_DELAYED_SHARE = 0.1
"""Share of a step for which its threads are ready but have no CPU, from which they slow it down."""


def _change_transport(method: str, sending: SendingCost | None) -> TimesChange:
    """Change of a batch that comes from another kind of pool."""

    def change(batch: BatchTimes) -> BatchTimes:
        work = {stage: task for stage, task in batch.work.items() if stage not in (TURN, "serialize")}
        if method == PROCESS:
            packing, unpacking = sending or (TRANSPORT, TRANSPORT)
            return replace(batch, work={**work, "serialize": packing}, receive=unpacking)
        return replace(batch, work=work, receive=Task())

    return change


def _resample(batches: Sequence[BatchTimes], source: random.Random) -> list[BatchTimes]:
    """Blocks of batches, drawn with replacement."""
    number = len(batches)
    starts = (source.randrange(number) for _ in range(0, number, BLOCK))
    return [batches[(start + step) % number] for start in starts for step in range(min(BLOCK, number))]
