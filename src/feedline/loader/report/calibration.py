"""Calibration of a model by recorded batches.

It finds the machine parameters with which a replay takes as long as the batches did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from feedline.loader.report.context import Context
from feedline.loader.report.measured import BUILD_STAGES, Measured
from feedline.loader.report.replay import (
    INLINE,
    PROCESS,
    SWITCH_S,
    THREAD,
    BatchTimes,
    EngineSetting,
    Machine,
    Task,
    lock_wait_s,
    replay,
    replay_late,
    replay_step,
)

HOP_S = {INLINE: 0.0, THREAD: 30e-6, PROCESS: 150e-6}
"""Seconds per batch between loop and workers that no stage contains: queues, sockets and wake-ups."""


PREEMPTED_SHARE = 0.05
"""Share of run delay above which other programs may explain the rest of the time."""


ASSUMED_GIL_SHARE = 0.5
"""Assumed share of computing under Python's lock, if no measurement shows it."""


LEAST_SHARE = 0.2
"""Lower bound for the share of time in which a starting process runs."""


class Calibration(NamedTuple):
    """Batches to be replayed, and the machine that explains their period."""

    measured: Measured
    machine: Machine
    explained_share: float
    """Share of the waiting that the replay reproduces without fitting, 0 to 1."""


def calibrate(measured: Measured, context: Context) -> Calibration:
    """Explain the waiting of recorded batches.

    Locks come first, then workers that keep their CPUs, then CPUs that other programs leave; a wait for each batch
    explains the rest.
    """
    setting = context.setting
    measured = _with_contention(measured, setting)
    measured, machine = _with_lock(measured, context)
    measured, machine = _with_late_loop(measured, setting, machine)
    measured = _with_whole_exclusion(measured, setting, machine)
    expected_s = replay(measured.batches, setting, machine)
    if expected_s < 0.97 * measured.period_s and measured.delay_share > PREEMPTED_SHARE:
        machine = _with_others(measured, setting, machine)
        expected_s = replay(measured.batches, setting, machine)
    measured, late_s = _with_late_steps(measured, setting, machine, measured.period_s - expected_s)
    missing_s = min(max(measured.period_s - expected_s - late_s, 0.0), measured.wait_s)
    # The run delay of tasks that mostly wait comes after their waiting, where no replay has it; it was measured.
    unknown_s = max(missing_s - measured.delayed_s / max(setting.num_workers, 1), 0.0)
    explained = 1.0 if measured.wait_s <= 0 else min(max(1 - unknown_s / measured.wait_s, 0.0), 1.0)
    if missing_s > 0.01 * measured.period_s:
        machine = _with_latency(measured, setting, machine)
    return Calibration(measured, machine, explained)


def _with_contention(measured: Measured, setting: EngineSetting) -> Measured:
    """Separate waiting for a lock of other workers from other waiting.

    The waiting shows for how long a batch holds the lock: see `lock_wait_s`. Batches differ by their luck in the queue
    for the lock, so the other waiting counts as equal.
    """
    workers, waited = setting.num_workers, measured.contended_share
    fetch = measured.mean("fetch")
    if setting.method == INLINE or workers < 2 or waited < CONTENDED or not fetch.wait_s:
        return measured
    built_s = sum(measured.mean(stage).alone_s for stage in BUILD_STAGES)
    lock_s = min(waited * built_s, fetch.wait_s)
    alone_s = sum(batch.whole_work.alone_s for batch in measured.batches) / len(measured.batches) - lock_s
    left_s, held_s = fetch.wait_s - lock_s, _held_s(workers, lock_s, alone_s)

    def separated(batch: BatchTimes) -> BatchTimes:
        task = batch.work.get("fetch", Task())
        return replace(batch, work={**batch.work, "fetch": task._replace(wait_s=left_s, held_s=held_s)})

    return replace(measured, batches=tuple(map(separated, measured.batches)))


def _held_s(workers: int, waited_s: float, alone_s: float) -> float:
    """Time with a lock that makes a batch wait for `waited_s`."""
    _, held_s = _narrow(0.0, alone_s, lambda held_s: lock_wait_s(workers, held_s, alone_s) < waited_s)
    return held_s


def _with_whole_exclusion(measured: Measured, setting: EngineSetting, machine: Machine) -> Measured:
    """The recording, in which a limiting lock is always held.

    The times between two stages of a worker are missing in the time for which a batch holds the lock. No lack of CPUs
    and no other wait explains them: the lock is in use meanwhile.
    """
    held_s = measured.mean("fetch").held_s
    if not _IN_USE * measured.period_s < held_s < measured.period_s:
        return measured
    if replay(measured.batches, setting, machine) >= measured.period_s:
        return measured

    def is_short(factor: float) -> bool:
        return replay(_with_held(measured, factor).batches, setting, machine) < measured.period_s

    _, factor = _narrow(1.0, measured.period_s / held_s, is_short)
    return _with_held(measured, factor)


def _with_held(measured: Measured, factor: float) -> Measured:
    def held(batch: BatchTimes) -> BatchTimes:
        work = {stage: task._replace(held_s=factor * task.held_s) for stage, task in batch.work.items()}
        return replace(batch, work=work)

    return replace(measured, batches=tuple(map(held, measured.batches)))


CONTENDED = 0.02
"""Share of the workers' time below which samples of waiting for a lock are chance."""


def _with_lock(measured: Measured, context: Context) -> tuple[Measured, Machine]:
    """Separate waiting for Python's lock, or a quota, from other waiting.

    A resource that is in use nearly all the time explains the waiting of tasks that compute. The replay then derives
    this waiting from the computing alone, for any number of tasks.
    """
    setting = context.setting
    takes = max(measured.step_waits / SWITCHES_PER_TAKE, 1.0)
    copiers = inf if context.copy_rates is None else context.copy_rates.copiers
    machine = Machine(context.cpus, ASSUMED_GIL_SHARE, takes, HOP_S[setting.method], copiers)
    used = measured.concurrency
    if is_throttled(measured, context):
        measured = _only_computing(measured)
        # What the loop computes outside all stages takes a part of the quota, too.
        return measured, _with_cpus(measured, setting, machine, LEAST_SHARE * context.cpus)
    if setting.method != THREAD or context.cpus <= 1:
        return measured, machine
    if used > 1.2:  # the lock is held by one thread at a time, so a part of the work does without it
        return measured, replace(machine, gil_share=min(ASSUMED_GIL_SHARE, 1 / used))
    if _mostly_waits(measured):
        return measured, replace(machine, gil_share=1.0)
    if not _waits_for_lock(measured, setting):
        return measured, machine
    if measured.outside_share is None:
        measured, machine = _only_computing(measured), replace(machine, gil_share=1.0)
    else:
        measured = _waiting_outside(measured)
        machine = _with_held_share(measured, setting, machine)
    return _with_locked_steps(measured, setting, machine), machine


def _with_held_share(measured: Measured, setting: EngineSetting, machine: Machine) -> Machine:
    """The machine with the largest `gil_share` whose replay is not too slow.

    A replay may take `_SLOWER` times the measured period. Its steps do not wait, because a part of their waiting is for
    the lock.
    """
    batches = [replace(batch, step=batch.step._replace(wait_s=0.0)) for batch in measured.batches]
    machines = [replace(machine, gil_share=share) for share in (1.0, 0.85, 0.7)]
    fast = (each for each in machines if replay(batches, setting, each) <= _SLOWER * measured.period_s)
    return next(fast, replace(machine, gil_share=ASSUMED_GIL_SHARE))


_SLOWER = 1.1
"""Ratio of a replay to the measured period above which the replay is too slow."""


def is_throttled(measured: Measured, context: Context) -> bool:
    """True if a quota is used up, and mostly by this loop."""
    return context.throttled and measured.concurrency > _MOST_OF_QUOTA * context.cpus


def _mostly_waits(measured: Measured) -> bool:
    """True if worker threads mostly wait for files or servers."""
    work = [measured.mean(stage) for stage in BUILD_STAGES]
    wait_s = sum(task.wait_s for task in work)
    if measured.outside_share is not None:  # many threads that compute wait for the lock as long as others for servers
        wait_s = min(wait_s, _outside_s(measured))
    return wait_s > sum(task.cpu_s for task in work) / _LOCKED


def _waits_for_lock(measured: Measured, setting: EngineSetting) -> bool:
    """True if worker threads wait for Python's lock, and not for files."""
    work = [measured.mean(stage) for stage in BUILD_STAGES]
    wait_s, cpu_s = sum(task.wait_s for task in work), sum(task.cpu_s for task in work)
    if measured.outside_share is not None and wait_s - _outside_s(measured) > _UNSEEN * (wait_s + cpu_s):
        return True
    if measured.lock_share is not None:
        return measured.lock_share > _OFTEN
    if setting.num_workers < 2:
        return False
    # The lock is also in use while its holder is ready to run, and others have the CPUs.
    held = measured.concurrency + measured.delayed_s / measured.period_s
    return held > _IN_USE and wait_s > _LOCKED * cpu_s


def _with_locked_steps(measured: Measured, setting: EngineSetting, machine: Machine) -> Measured:
    """The recording, with steps without their waits for Python's lock.

    Samples tell them apart. Without samples, a replay with the lock gives the measured steps. Where some steps never
    stop, none waits for anything else.
    """
    if measured.step_outside_share is not None:
        return _scale_steps(measured, measured.step_outside_share)
    if _some_never_stop(measured):
        own_s, waited_s = _beyond_lock_s(measured, setting), measured.mean("step").wait_s
        return _scale_steps(measured, min(own_s / waited_s, 1.0)) if waited_s else measured
    if replay_step(measured.batches, setting, machine) <= measured.step_s:
        return measured

    def is_long(without_s: float) -> bool:
        batches = [batch.with_longer_step(-without_s) for batch in measured.batches]
        return replay_step(batches, setting, machine) > measured.step_s

    without_s, _ = _narrow(0.0, measured.mean("step").wait_s, is_long)
    return _with_shorter_steps(measured, without_s)


def _some_never_stop(measured: Measured) -> bool:
    """True if steps may do without a wait.

    A step that sleeps stops each time. False where the kernel does not count waits.
    """
    waits = sorted(number for number, _ in measured.step_stops)
    return len(waits) >= _LEAST_STEPS and waits[int(_SELDOM * len(waits))] == 0 < waits[-1]


def _beyond_lock_s(measured: Measured, setting: EngineSetting) -> float:
    """Mean waiting of a step beyond that for the lock.

    Such as that of the few steps that read a result from a device. One wait for the lock takes as long as in a replay.
    """
    longest_s = SWITCH_S * (setting.num_workers + 1) / 2
    beyond_s = [max(waited_s - number * longest_s, 0.0) for number, waited_s in measured.step_stops if number]
    return sum(beyond_s) / len(measured.step_stops)


def _scale_steps(measured: Measured, factor: float) -> Measured:
    batches = (
        replace(batch, step=batch.step._replace(wait_s=factor * batch.step.wait_s)) for batch in measured.batches
    )
    return replace(measured, batches=tuple(batches))


_LEAST_STEPS = 8
"""Number of steps from which some of them show what a step may do without."""


_SELDOM = 0.1
"""Share of steps that may stop less often than the others, such as the last ones of an epoch."""


SWITCHES_PER_TAKE = 3.0
"""Waits that the kernel counts where a step waits for a device, and then for Python's lock.

The second wait counts as two: the thread asks for the lock again after one interval.
"""


_UNSEEN = 0.2
"""Share of building spent in waits beyond `outside_share`, above which these are waits for Python's lock."""


_OFTEN = 0.3
"""Share of requests that find Python's lock in use, above which workers count as waiting for the lock."""


_MOST_OF_QUOTA = 0.5
"""Share of a used-up quota that the stages must have used for the quota to be the limit."""


_IN_USE = 0.8
"""Share of the time above which a resource counts as always in use."""


_LOCKED = 0.2
"""Smallest ratio of waiting to CPU time, and of CPU time to waiting, at which a thread may wait for the lock rather
than for a file.
"""


def _waiting_outside(measured: Measured) -> Measured:
    """The recording, with waits for files, networks and own threads only."""
    waited_s = sum(measured.mean(stage).wait_s for stage in BUILD_STAGES)
    return _scale_waits(measured, min(_outside_s(measured) / waited_s, 1.0)) if waited_s else measured


def _outside_s(measured: Measured) -> float:
    """Seconds per batch of waiting for files, networks and own threads."""
    built_s = sum(measured.mean(stage).alone_s for stage in BUILD_STAGES)
    if measured.mean("fetch").held_s:  # the wait for a lock that workers share has been separated
        built_s /= max(1 - measured.contended_share, LEAST_SHARE)
    return (measured.outside_share or 0.0) * built_s


def _only_computing(measured: Measured) -> Measured:
    return _scale_waits(measured, 0.0)


def _scale_waits(measured: Measured, factor: float) -> Measured:
    def scaled(batch: BatchTimes) -> BatchTimes:
        work = {stage: task._replace(wait_s=factor * task.wait_s) for stage, task in batch.work.items()}
        return replace(batch, work=work)

    return replace(measured, batches=tuple(map(scaled, measured.batches)))


def _with_late_loop(measured: Measured, setting: EngineSetting, machine: Machine) -> tuple[Measured, Machine]:
    """Separate the loop's waiting for CPUs from other waiting.

    A loop that is woken while workers have all CPUs waits for one. A replay with the returned machine waits as long as
    the loop did, as far as its workers can be the reason; steps are shorter by their part of it.
    """
    if setting.method == INLINE or measured.late_s < _LEAST_LATE * measured.period_s:
        return measured, machine
    machine = replace(machine, step_wakes=measured.step_waits)
    late = replay_late(measured.batches, setting, replace(machine, slice_s=MOST_SLICE_S))
    wanted_s, low, high = min(measured.late_s, _REACHED * late.whole_s), 0.0, MOST_SLICE_S
    for _ in range(_STEPS):
        within_s = measured.late_s * late.step_s / late.whole_s if late.whole_s else 0.0
        batches = _with_shorter_steps(measured, within_s).batches
        late = replay_late(batches, setting, replace(machine, slice_s=(low + high) / 2))
        low, high = ((low + high) / 2, high) if late.whole_s < wanted_s else (low, (low + high) / 2)
    return replace(measured, batches=batches), replace(machine, slice_s=low)


def _with_shorter_steps(measured: Measured, seconds: float) -> Measured:
    """The batches with shorter steps.

    Workers may delay every step, but other programs leave some alone: steps do not become shorter than the fastest.
    """
    least_s = measured.fastest_step_s if (measured.others_cpus or 0.0) > _OTHERS_CPUS else 0.0

    def shorter(batch: BatchTimes) -> BatchTimes:
        return batch.with_longer_step(-min(seconds, max(batch.step.alone_s - least_s, 0.0)))

    return replace(measured, batches=tuple(map(shorter, measured.batches)))


_OTHERS_CPUS = 0.25
"""CPUs in use by other programs from which they are a reason for late steps."""


MOST_SLICE_S = 0.006
"""Longest time for which a scheduler lets a task compute while another one has been woken."""


_LEAST_LATE = 0.02
"""Share of a batch's time below which waiting for CPUs after wake-ups does not matter."""


_REACHED = 0.9
"""Share of the longest possible waiting for CPUs that is looked for, where the measured one is not possible."""


def _with_others(measured: Measured, setting: EngineSetting, machine: Machine) -> Machine:
    """The machine with as many CPUs as explain the period.

    They are at least those that other programs do not use.
    """
    others = machine.cpus if measured.others_cpus is None else measured.others_cpus
    return _with_cpus(measured, setting, machine, max(machine.cpus / 20, machine.cpus - others))


def _with_cpus(measured: Measured, setting: EngineSetting, machine: Machine, low: float) -> Machine:
    """The machine with the fewest CPUs above `low` that explain the period."""

    def is_long(cpus: float) -> bool:
        return replay(measured.batches, setting, replace(machine, cpus=cpus)) > measured.period_s

    _, cpus = _narrow(low, machine.cpus, is_long)
    return replace(machine, cpus=cpus)


def _with_late_steps(
    measured: Measured, setting: EngineSetting, machine: Machine, missing_s: float
) -> tuple[Measured, float]:
    """Steps that take as long as measured, and the seconds added.

    A step that sleeps is woken late if other tasks have the CPUs. That is not waiting for data.
    """
    late_s = min(missing_s, measured.step_s - replay_step(measured.batches, setting, machine))
    if measured.step_outside_share is not None:  # a step that hardly sleeps is not woken late
        late_s *= measured.step_outside_share
    if late_s <= 0:
        return measured, 0.0
    return replace(measured, batches=tuple(batch.with_longer_step(late_s) for batch in measured.batches)), late_s


def _with_latency(measured: Measured, setting: EngineSetting, machine: Machine) -> Machine:
    """The machine with a wait per batch that gives the measured period.

    Workers may hide most of such a wait. It is no longer than the measured delivery, whatever is then missing.
    """

    def is_short(latency_s: float) -> bool:
        return replay(measured.batches, setting, replace(machine, latency_s=latency_s)) < measured.period_s

    most_s = machine.latency_s + (measured.wait_s if measured.delivery_s is None else measured.delivery_s)
    latency_s, _ = _narrow(machine.latency_s, most_s, is_short)
    return replace(machine, latency_s=latency_s)


def _narrow(low: float, high: float, is_low: Callable[[float], bool]) -> tuple[float, float]:
    """The interval in which `is_low` changes, after bisections."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if is_low(middle):
            low = middle
        else:
            high = middle
    return low, high


_STEPS = 9
"""Bisections: the last interval is a 500th of the first."""
