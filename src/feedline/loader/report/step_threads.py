"""Threads of the steps, which compete with workers for CPUs.

All of them work on each operator of torch, and wait for the last one. If workers have the CPU of one, the others wait
for it, most of that time by computing in vain: steps take up to ten times as long as alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from feedline.loader.report.doubts import WORTH_TOGETHER
from feedline.loader.report.measured import MULTITHREADED_CPUS
from feedline.loader.report.model import Case, Model
from feedline.loader.report.remedy import LEAST_GAIN, Advice
from feedline.loader.report.replay import INLINE, PROCESS, BatchTimes, Task
from feedline.loader.report.stats import Stats, count, seconds

_DELAYED_SHARE = 0.1
"""Share of a step for which its threads are ready but have no CPU, from which they slow it down."""


def are_delayed(model: Model) -> bool:
    """True if threads of the steps wait for CPUs that workers have."""
    measured, context = model.measured, model.context
    is_crowded = context.step_threads + context.num_workers > context.cpus
    is_late = measured.step_threads_delay_s > _DELAYED_SHARE * measured.step_s > 0
    return context.step_threads > 1 and is_crowded and is_late and model.present.setting.method == PROCESS


def fewer_step_threads(model: Model, _: Stats) -> Iterator[Advice]:
    """Fewer threads for the step, where workers have their CPUs."""
    if not are_delayed(model):
        return
    measured, context = model.measured, model.context
    left = _threads_left(model, context.num_workers)
    fastest_s, most_s = measured.fastest_step_s, context.step_threads / left * measured.fastest_step_s
    # Half the threads take between once and twice the time, depending on the sizes of the operators. The CPUs that the
    # replay misses are those that the threads waste, unless other programs have them.
    whole = max(model.machine.cpus, context.cpus - (measured.others_cpus or 0.0))
    usual = _gain(model, (fastest_s * most_s) ** 0.5, left, whole)
    worst = _gain(model, most_s, left, model.machine.cpus)
    # Threads that compute in vain also slow down the CPUs of the workers.
    best = _gain(model, fastest_s, left, context.cpus, WORTH_TOGETHER)
    text = (
        f"torch.set_num_threads({left}) in the training process: its {context.step_threads} threads and "
        f"{count(context.num_workers, 'worker')} share {context.cpus:g} CPUs, and wait for each other; a step takes "
        f"{seconds(measured.step_s)}, the fastest ones {seconds(fastest_s)}"
    )
    if usual >= LEAST_GAIN:
        yield Advice(text, {}, usual, worst, best, "replayed")


def _gain(model: Model, step_s: float, threads: int, cpus: float, fetching: float = 1.0) -> float:
    def changed(batch: BatchTimes) -> BatchTimes:
        return _with_step(batch, step_s, threads).scale("fetch", fetching)

    return model.gain(Case(model.present.setting, replace(model.machine, cpus=cpus), changed))


def _with_step(batch: BatchTimes, step_s: float, threads: int) -> BatchTimes:
    """The batch with a step that computes on so many CPUs."""
    wait_s = min(batch.step.wait_s, step_s)
    return replace(batch, step=Task(wait_s, step_s - wait_s, float(threads)))


def mention_of_step_threads(model: Model, number: int) -> str:
    """Words on steps whose threads lose their CPUs to `number` workers."""
    threads, left = model.context.step_threads, _threads_left(model, number)
    is_parallel = model.present.setting.method == INLINE and model.measured.mean("step").width > MULTITHREADED_CPUS
    if threads <= left or not (is_parallel or are_delayed(model)):
        return ""
    return (
        f"; together with torch.set_num_threads({left}) in the training process, as its {threads} threads would wait "
        "for CPUs that workers have"
    )


def without_crowd(model: Model, case: Case) -> Case:
    """A case without workers, whose steps have all CPUs for themselves."""
    if not are_delayed(model):
        return case
    change, step_s = case.change or (lambda batch: batch), model.measured.fastest_step_s
    return case._replace(change=lambda batch: _with_step(change(batch), step_s, 1))


def _threads_left(model: Model, workers: int) -> int:
    return max(1, min(model.context.step_threads, int(model.context.cpus) - workers))
